"""Parsl `File` inputs and outputs, and redirected output, on workers that share this machine's disk.

Calls run where the executor was started, and paths mean what they mean in the driver when the call is made, which may
be elsewhere by then: so they are made absolute here; nothing is copied. What does not live here: a context's files
(host/staging.py).
"""

from __future__ import annotations

import os
from typing import Any

from parsl.data_provider.data_manager import DataManager
from parsl.data_provider.files import File
from parsl.data_provider.staging import Staging

from ctxflow.errors import CtxflowError


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


def current_directory() -> str:
    """The directory where calls on this machine are to run.

    :raises CtxflowError: if it was removed.
    """
    try:
        return os.getcwd()
    except OSError as error:
        raise CtxflowError(
            f"calls run in the directory where the executor is started, which is not there any more ({error}): "
            "change to one that is"
        ) from error


def absolute_redirects(kwargs: dict[str, Any]) -> None:
    """Make the paths of Parsl's `stdout` and `stderr` keywords absolute: they are meant to be relative to here."""
    for name in ("stdout", "stderr"):
        given = kwargs.get(name)
        if isinstance(given, (str, os.PathLike)):
            kwargs[name] = os.path.abspath(given)
        elif isinstance(given, tuple) and given and isinstance(given[0], (str, os.PathLike)):
            kwargs[name] = (os.path.abspath(given[0]), *given[1:])
