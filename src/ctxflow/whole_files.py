"""Files that appear under their names whole or not at all, beside names that anybody can guess.

What is unfinished has a name of its own beside the file's. Whoever may write in that folder could have put a link
there, to any file of this user: so it is made anew, and nothing that was there is ever written to. What does not live
here: files that are added to (append_file.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

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
