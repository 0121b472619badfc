"""Folders in a temporary directory that last as long as their owner, and removing those whose owner was killed.

An owner holds a lock on its folder, which the kernel lets go of with the last process that has it open: no clock and
no number of a process says who lives. What does not live here: what is kept in them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence

PREFIX = "ctxflow-"
_MARK = ".ctxflow-owned"
# What asks a whole group of processes to end is not meant for it.
_GUARD = 'trap "" HUP INT QUIT TERM; read -r line; for i in 1 2 3 4 5; do rm -rf -- "$@" && exit; sleep 1; done'
_SAYS = """\
A run of ctxflow, or a worker of one, keeps its files here, and has a lock on this folder while it lives. If nobody has,
it was killed: the next run on this machine removes the folder, and so does `ctxflow clean`.
"""


class Scratch:
    """A folder of one's own, which nobody else may enter.

    :param base: where it is made; by default the temporary directory.
    :raises OSError: if it cannot be made.

    >>> scratch = Scratch()
    >>> os.path.isdir(scratch.path), scratch.path in abandoned()
    (True, False)
    >>> scratch.close()
    >>> os.path.exists(scratch.path)
    False
    """

    def __init__(self, base: str | None = None) -> None:
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=base)
        self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # There are disks without locks; then nobody else removes it.
            fcntl.flock(self._folder, fcntl.LOCK_EX)
            # Only what is marked is ever removed, and it is marked with the lock: nobody takes a new one for abandoned.
            with open(os.path.join(self.path, _MARK), "w") as mark:
                mark.write(_SAYS)

    def close(self) -> None:
        """Remove it; again is no error."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1


class Guard:
    """Removes files and folders when it is closed, or when this process ends in any way, also if it is killed.

    :raises OSError: if it cannot be started.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        words = ["/bin/sh", "-c", _GUARD, "ctxflow-guard", *map(os.path.abspath, paths)]
        nothing = subprocess.DEVNULL
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, cwd="/", start_new_session=True
        )

    def close(self) -> None:
        """Remove them; again is no error."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def abandoned(base: str | None = None) -> list[str]:
    """Return the folders of this user in a temporary directory whose owners were killed."""
    base = base or tempfile.gettempdir()
    try:
        names = os.listdir(base)
    except OSError:
        return []
    paths = [os.path.join(base, name) for name in sorted(names) if name.startswith(PREFIX)]
    found = []
    for path in paths:
        folder = _taken(path)
        if folder is not None:
            os.close(folder)
            found.append(path)
    return found


def sweep(base: str | None = None) -> list[str]:
    """Remove those; gives the paths of what was removed."""
    return [path for path in abandoned(base) if remove_abandoned(path)]


def remove_abandoned(path: str) -> bool:
    """Remove one of them; whether it is gone."""
    folder = _taken(path)  # Held meanwhile, so that of two who remove it only one does.
    if folder is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(folder)
    return not os.path.exists(path)


def _taken(path: str) -> int | None:
    """Return an abandoned folder's descriptor, with its lock; None if it is not one."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        found = os.fstat(folder)
        if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.stat(_MARK, dir_fd=folder, follow_symlinks=False)
            return folder
    except OSError:
        pass
    os.close(folder)
    return None
