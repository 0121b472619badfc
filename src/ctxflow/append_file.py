"""A file that one driver alone adds to: what was added whole counts, what a kill or a full disk left half does not.

Results are kept in such files, those of a batch job (batch/ledger.py) and those of a map (resume.py). What does not
live here: what is in them, and how much of it counts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from ctxflow.errors import BusyError
from ctxflow.process_identity import belongs_here, lead_nowhere
from ctxflow.safe_files import OTHERS_WRITE


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have errors of the system say which file they are about, where they do not.

    >>> with naming(Path("results.jsonl")):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    ...
    OSError: [Errno 28] No space left on device: 'results.jsonl'
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None


class AppendFile:
    """A file opened to be read, and written at its end; made where it is missing.

    :param path: not followed where it is a link, which somebody else may have put there.
    :param private: whether it is this user's alone to write, made so and refused otherwise: for what runs code when it
        is read.
    :ivar size: how many bytes count, 0 until `cut` says more. What is added comes behind them, over what else is there.
    :raises ValueError: if it cannot be opened, or is another user's, saying what to do.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = AppendFile(Path(folder) / "lines")
    ...     file.append(b"one" + bytes([10]))
    ...     file.size, file.cut(4), file.close()
    (4, True, None)
    """

    def __init__(self, path: Path, private: bool = False) -> None:
        self.path = path
        self.size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o600 if private else 0o666)
            self._file = cast(BinaryIO, open(descriptor, "r+b", buffering=0))  # noqa: SIM115 - closed in `close`
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ValueError(
                    f"{path} is a link, which is not followed: remove it, or name another output"
                ) from None
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None
        if private:
            self._check_private(os.fstat(descriptor))
        belongs_here(self)

    def _check_private(self, found: os.stat_result) -> None:
        trouble = ""
        if found.st_uid != os.geteuid():
            trouble = f"{self.path} belongs to another user, and reading its results could run that user's code: "
            trouble += "name another file, or copy it if you trust it"
        elif found.st_mode & OTHERS_WRITE:
            trouble = f"others may write to {self.path}, and reading its results could run their code: name another "
            trouble += f"file, or call chmod go-w {self.path} if you trust what it holds"
        if trouble:
            self.close()
            raise ValueError(trouble)

    def lock(self, output: Path) -> None:
        """Keep other drivers out, until the file is closed or this process ends.

        :param output: the file of results that the lock is for.
        :raises BusyError: if another driver has the lock.
        :raises ValueError: if there can be none.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"{output} is being written by another driver: wait for it, or name another file") from None
        except OSError as error:
            raise ValueError(
                f"{self.path} cannot be locked ({error.strerror}): put the output on a filesystem that has locks"
            ) from None

    def actual_size(self) -> int:
        """Return how many bytes the file has, whether they count or not."""
        return os.fstat(self._file.fileno()).st_size

    def append(self, data: bytes) -> None:
        """Add all of the data.

        :raises OSError: if there is no room, with the file's name; then nothing of it counts.
        """
        view, offset = memoryview(data), self.size
        with naming(self.path):
            while view:
                written = os.pwrite(self._file.fileno(), view, offset)
                view, offset = view[written:], offset + written
        self.size = offset

    def change(self, offset: int, data: bytes) -> None:
        """Overwrite bytes with as many others."""
        os.pwrite(self._file.fileno(), data, offset)

    def cut(self, size: int) -> bool:
        """Let so many bytes count, and cut off the rest; whether they are whole lines."""
        with naming(self.path):
            self._file.truncate(size)
        self.size = size
        return self.last_line(size).endswith(b"\n") if size else True

    def last_line(self, size: int) -> bytes:
        """Return the last line of the first bytes of the file."""
        block = 1 << 16
        while True:
            start = max(0, size - block)
            data = os.pread(self._file.fileno(), size - start, start)
            begin = data.rfind(b"\n", 0, -1) + 1
            if begin or not start:
                return data[begin:]
            block *= 4

    def reader(self) -> BinaryIO:
        """Open the same file for buffered reading, whatever has its path now; the caller closes it."""
        return open(f"/proc/self/fd/{self._file.fileno()}", "rb")

    def lines(self, offset: int) -> Iterator[tuple[int, bytes]]:
        """Yield whole lines from an offset on, each with its own offset."""
        with self.reader() as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield offset, line
                offset += len(line)

    def sync(self) -> None:
        """Have all that was added reach the disk."""
        with naming(self.path):
            os.fsync(self._file.fileno())

    def forked(self) -> None:
        """Leave the file and its lock to the process that opened it."""
        if not self._file.closed:
            lead_nowhere(self._file.fileno())

    def close(self) -> None:
        """Close it, which lets another driver write."""
        self._file.close()
