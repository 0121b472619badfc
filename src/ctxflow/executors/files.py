"""Parsl `File` inputs and outputs: linked into the call's own directory, and moved out of it when it is done.

A call that is lost half way leaves no half-written output. What does not live here: a context's files
(host/staging.py).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

from parsl.data_provider.data_manager import DataManager
from parsl.data_provider.files import File
from parsl.data_provider.staging import Staging


class CallDirectoryStaging(Staging):
    """Stages `file:` inputs and outputs through the directory of the call, on workers that share this disk."""

    def can_stage_in(self, file: File) -> bool:
        """Whether it is a local path."""
        return bool(file.scheme == "file")

    def can_stage_out(self, file: File) -> bool:
        """Whether it is a local path."""
        return bool(file.scheme == "file")

    def stage_in(self, dm: DataManager, executor: str, file: File, parent_fut: Any) -> None:
        """Nothing happens before the call; until then the path means what it means here."""
        file.local_path = os.path.abspath(file.path)

    def stage_out(self, dm: DataManager, executor: str, file: File, app_fu: Any) -> None:
        """Nothing happens after the call: its future is the output's."""
        file.local_path = os.path.abspath(file.path)

    def replace_task(
        self, dm: DataManager, executor: str, file: File, func: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The function that first links the input."""
        return _Input(func, file, os.path.abspath(file.path))

    def replace_task_stage_out(
        self, dm: DataManager, executor: str, file: File, func: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The function that afterwards moves the output to its place."""
        return _Output(func, file, os.path.abspath(file.path))


class _Wrapper:
    """A function that is pickled together with the `File` among its arguments, so that both are one object."""

    def __init__(self, function: Callable[..., Any], file: File, place: str) -> None:
        self.function = function
        self.file = file
        self.place = place
        self.__name__ = getattr(function, "__name__", "call")

    def own_path(self) -> str:
        folder = tempfile.mkdtemp(prefix="file-", dir=os.getcwd())
        return os.path.join(folder, os.path.basename(self.place))


class _Input(_Wrapper):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        path = self.own_path()
        if os.path.isdir(self.place):
            os.symlink(self.place, path)
        elif os.path.exists(self.place):
            try:
                os.link(self.place, path)
            except OSError:  # Another disk.
                shutil.copyfile(self.place, path)
        self.file.local_path = path
        return self.function(*args, **kwargs)


class _Output(_Wrapper):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        path = self.own_path()
        self.file.local_path = path
        result = self.function(*args, **kwargs)
        if os.path.exists(path):
            os.makedirs(os.path.dirname(self.place), exist_ok=True)
            part = f"{self.place}.part-{os.getpid()}"
            shutil.move(path, part)
            os.replace(part, self.place)
        return result
