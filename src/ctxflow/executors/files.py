"""How Parsl's staging leaves `File` inputs and outputs to ctxflow: on workers that see this machine's disk, and others.

Calls on this machine run where the executor was started, and paths mean what they mean in the driver when the call is
made, which may be elsewhere by then: so they are made absolute here; nothing is copied. What does not live here: the
files of calls that travel (call_files.py), and a context's (host/staging.py).
"""

from __future__ import annotations

import os
from typing import Any

from parsl.data_provider.data_manager import DataManager
from parsl.data_provider.files import File
from parsl.data_provider.staging import Staging

from ctxflow.executors.call_files import TAKEN, locate


class SharedDiskStaging(Staging):  # type: ignore[misc]
    """Leaves `file:` inputs and outputs where they are, under absolute paths."""

    def can_stage_in(self, file: File) -> bool:
        """Whether it is a local path."""
        return bool(file.scheme == "file")

    def can_stage_out(self, file: File) -> bool:
        """Whether it is a local path."""
        return bool(file.scheme == "file")

    def stage_in(self, dm: DataManager, executor: str, file: File, parent_fut: Any) -> None:
        """Make the path absolute."""
        file.local_path = os.path.abspath(file.path)

    def stage_out(self, dm: DataManager, executor: str, file: File, app_fu: Any) -> None:
        """Make the path absolute."""
        file.local_path = os.path.abspath(file.path)


class WorkerStaging(Staging):  # type: ignore[misc]
    """Has `file:` inputs and outputs travel with the calls, and inputs of the web fetched by the workers.

    It only says where each will be in the call's folder, and where it is here, which is meant relative to the driver's
    current directory of now: the calls find it in their arguments.
    """

    def can_stage_in(self, file: File) -> bool:
        """Whether it is a local path or a web address."""
        return file.scheme in TAKEN

    def can_stage_out(self, file: File) -> bool:
        """Whether it is a local path."""
        return bool(file.scheme == "file")

    def stage_in(self, dm: DataManager, executor: str, file: File, parent_fut: Any) -> None:
        """Say where it is, here and there."""
        locate(file)

    def stage_out(self, dm: DataManager, executor: str, file: File, app_fu: Any) -> None:
        """Say where it is, here and there."""
        locate(file)
