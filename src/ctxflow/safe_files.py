"""Files and folders that other users may have tampered with, or may guess the names of.

A file that is acted on as if this user had said it is read only where no other user can have written it. A file
appears under its name whole or not at all: what is unfinished has a name of its own beside it, and is made anew, for
whoever may write in that folder could have put a link there to any file of this user.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_LOG = logging.getLogger("ctxflow")
OTHERS_WRITE = 0o022
_told: set[str] = set()


class NotOwnError(PermissionError):
    """Another user owns a file or folder, or may write to it; the sentence says what to do."""

    def __init__(self, path: str, trouble: str) -> None:
        super().__init__(13, trouble, path)
        self.trouble = trouble

    def __str__(self) -> str:
        return self.trouble


def check_own(path: str, found: os.stat_result) -> None:
    """See that only this user can have written a file, or in a folder.

    :raises NotOwnError: if others may.

    >>> check_own("/etc/shadow", os.stat_result((0o100666, 1, 1, 1, os.geteuid(), 0, 0, 0, 0, 0)))
    Traceback (most recent call last):
    ctxflow.safe_files.NotOwnError: others may write to /etc/shadow, so that it is not used: call chmod go-w /etc/shadow
    """
    if found.st_uid != os.geteuid():
        raise NotOwnError(path, f"{path} belongs to another user, so that it is not used: have it removed")
    if stat.S_IMODE(found.st_mode) & OTHERS_WRITE:
        raise NotOwnError(path, f"others may write to {path}, so that it is not used: call chmod go-w {path}")


def check_own_folder(path: str) -> None:
    """See that only this user can put files into a folder.

    :raises NotOwnError: if others may.
    :raises OSError: if it is not there.
    """
    link = os.lstat(path)
    if stat.S_ISLNK(link.st_mode) and link.st_uid != os.geteuid():
        raise NotOwnError(path, f"{path} is another user's link, so that it is not used: remove it")
    check_own(path, os.stat(path))


def open_own(path: str, flags: int = os.O_RDONLY) -> int:
    """Open a file of this user's own, and give its descriptor; a link is not followed.

    :raises NotOwnError: if others may have written it.
    :raises OSError: if it cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        found = os.fstat(descriptor)
        check_own(path, found)
        if not stat.S_ISREG(found.st_mode):
            raise NotOwnError(path, f"{path} is no file, so that it is not used: remove it")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_own(path: str, offset: int = 0) -> bytes:
    """Return what a file of this user's own holds from an offset on; as `open_own` opens it."""
    with open(open_own(path), "rb") as file:
        file.seek(offset)
        return file.read()


def own_folder(path: str) -> bool:
    """Return whether a folder is there and this user's own; who else may write to it is told once."""
    try:
        check_own_folder(path)
    except NotOwnError as error:
        tell_once(error)
        return False
    except OSError:
        return False
    return True


def tell_once(error: NotOwnError) -> None:
    """Warn of a file or folder that is not used; once, for such files are looked at again and again."""
    if error.trouble not in _told:
        _told.add(error.trouble)
        _LOG.warning("%s", error.trouble)


def make_own_folder(path: str) -> None:
    """Make a folder for this user alone, where there is none.

    :raises NotOwnError: if there is one that others may write to.
    :raises OSError: if it cannot be made.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    check_own_folder(path)


def write_private(path: str, text: str) -> None:
    """Write a file that nobody but this user can read, whatever was there before."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)


_ATTEMPTS = 5


def part_of(path: Path) -> Path:
    """Return where a file is written until it is whole.

    >>> part_of(Path("results.csv")).name
    'results.csv.part'
    """
    return path.with_name(path.name + ".part")


def open_new(path: str | os.PathLike[str], mode: int = 0o666) -> BinaryIO:
    """Open a new file to be written; what had its name before, if only a link, is removed.

    :raises OSError: if it cannot be made.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with contextlib.suppress(FileExistsError):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return open(os.open(path, flags, mode), "w+b")
    raise FileExistsError(errno.EEXIST, "another program makes a file of this name again and again", os.fspath(path))


@contextlib.contextmanager
def written_whole(path: Path, sync: bool = True, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file that gets its name when the block has ended, and leaves no trace if that raises.

    :param sync: whether it outlives a power cut from then on, so that what is said of it later is true.
    :param mode: the file's, less the umask.
    :raises OSError: if it cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "page.html"
    ...     with written_whole(path) as file:
    ...         _ = file.write(b"text")
    ...         print(path.exists())
    ...     path.read_bytes()
    False
    b'text'
    """
    part = part_of(path)
    file = open_new(part, mode)
    try:
        with file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    if sync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder reach the disk, where its filesystem can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
