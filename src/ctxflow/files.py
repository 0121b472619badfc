"""Files: digests of their contents, whether other users may have written them, and writing them whole or not at all.

Digests are cached, since model weights are large: for as long as a file has the same size, modification time and inode,
in this process, and for large files in `~/.cache/ctxflow/digests.jsonl` (or below `$XDG_CACHE_HOME`).
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import hashlib
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import BinaryIO

_SIZE = 16
_KEPT_BYTES = 4 << 20  # Smaller files are read sooner than looked up.
_MOST = 4096
_SETTLED_NS = 2 * 10**9  # A file that changed later than that may change again without another modification time.
_PATIENCE, _EVERY = 2.0, 1.0  # Seconds until progress is reported, and between reports.
_READERS = 4

Stamp = tuple[str, int, int, int]
"""A file's real path, size, modification time in ns and inode: while it is the same, so is the content."""

Tell = Callable[[int, int], None]
"""Called with the bytes read and the bytes to read, once a second, after two seconds."""


# Byte order marks; those that begin with another's come first.
MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def mark_of(data: bytes) -> tuple[bytes, str | None]:
    """Return the byte order mark that data begin with, and the encoding that it tells; b"" and None without one."""
    return next(((mark, encoding) for mark, encoding in MARKS if data.startswith(mark)), (b"", None))


def text_of(path: str | os.PathLike[str]) -> str:
    """Return the text of a file that a person wrote, without its byte order mark, its lines ended by newlines alone.

    It is UTF-8, or what the mark tells.

    :raises OSError: if it cannot be read.
    :raises UnicodeDecodeError: if it is in another encoding.
    """
    data = Path(path).read_bytes()
    mark, encoding = mark_of(data)
    text = data[len(mark) :].decode() if encoding in (None, "utf-8") else data.decode(str(encoding))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def digest_path(path: str | os.PathLike[str], again: bool = False) -> str:
    """Return the content digest of a file, or of a folder with the names and contents of all in it.

    :param again: whether to read it now, whatever is cached.
    :raises FileNotFoundError: if there is nothing there.
    """
    root = Path(path)
    if root.is_dir():
        hasher = hashlib.blake2b(digest_size=_SIZE)
        for file in sorted(p for p in root.rglob("*") if p.is_file()):
            hasher.update(f"{file.relative_to(root).as_posix()}\0{digest_path(file, again)}\n".encode())
        return hasher.hexdigest()
    return digest_now(root) if again else _digest(_stamp(root))


def digest_now(path: str | os.PathLike[str]) -> str:
    """Return the content digest of a file as it is read now, whatever is cached."""
    return _read(path)[0]


def digest_files(path: str | os.PathLike[str], tell: Tell | None = None) -> dict[str, str]:
    """Return the content digest of each file of a folder, by its path in there; of a file, by its own name.

    Hidden files and caches of compiled Python are left out: they change by themselves.

    :raises FileNotFoundError: if there is nothing there.
    """
    root = Path(path)
    if not root.is_dir():
        files = {root.name: root}
    else:
        found = sorted(each for each in root.rglob("*") if each.is_file())
        files = {name: each for each in found if not _left_out(name := each.relative_to(root).as_posix())}
    stamps = {name: _stamp(file) for name, file in files.items()}
    missing = {stamp for stamp in stamps.values() if _REMEMBERED.find(stamp) is None}
    if missing:
        _read_all(sorted(missing), tell)
    return {name: _digest(stamp) for name, stamp in stamps.items()}


def _left_out(name: str) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in name.split("/"))


def _stamp(file: Path) -> Stamp:
    try:
        found = file.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"{file} does not exist: give the path of a file or folder that does") from None
    return os.path.realpath(file), found.st_size, found.st_mtime_ns, found.st_ino


def _read_all(stamps: list[Stamp], tell: Tell | None) -> None:
    """Read several files side by side: a folder of weights is in several."""
    total, progress, due = sum(stamp[1] for stamp in stamps), _Progress(), time.monotonic() + _PATIENCE
    with ThreadPoolExecutor(min(_READERS, len(stamps)), "ctxflow-digest") as pool:
        try:
            running = {pool.submit(_digest, stamp, progress) for stamp in stamps}
            while running:
                done, running = wait(running, timeout=_EVERY)
                for each in done:
                    each.result()
                if running and tell is not None and time.monotonic() >= due:
                    tell(progress.read, total)
        except BaseException:
            progress.stopped = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Progress:
    """How far some files are read."""

    read, stopped = 0, False


def _digest(stamp: Stamp, progress: _Progress | None = None) -> str:
    known = _REMEMBERED.find(stamp)
    if known is not None:
        return known
    found, after = _read(stamp[0], progress)
    if (after.st_size, after.st_mtime_ns, after.st_ino) == stamp[1:]:
        _REMEMBERED.keep(stamp, found)
    return found


def _read(path: str | os.PathLike[str], progress: _Progress | None = None) -> tuple[str, os.stat_result]:
    """Return the digest of a file, and its status after that."""
    hasher = hashlib.blake2b(digest_size=_SIZE)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            hasher.update(block)
            if progress is not None:
                progress.read += len(block)
                if progress.stopped:
                    raise InterruptedError(f"{path!s} is not read to its end")
        return hasher.hexdigest(), os.fstat(file.fileno())


def _store() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "ctxflow" / "digests.jsonl"


class _Remembered:
    """Digests of files as they were: all in this process, those of large files on disk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._here: dict[Stamp, str] = {}
        self._stored: dict[str, tuple[Stamp, str]] = {}
        self._loaded: Path | None = None

    def find(self, stamp: Stamp) -> str | None:
        """Return the cached digest of a file that has not changed since, None if there is none."""
        with self._lock:
            known = self._here.get(stamp)
            if known is None and stamp[1] >= _KEPT_BYTES:
                self._load()
                stored = self._stored.get(stamp[0])
                known = stored[1] if stored is not None and stored[0] == stamp else None
            return known

    def keep(self, stamp: Stamp, digest: str) -> None:
        """Remember a digest."""
        with self._lock:
            if len(self._here) >= _MOST:
                del self._here[next(iter(self._here))]
            self._here[stamp] = digest
            if stamp[1] >= _KEPT_BYTES and time.time_ns() - stamp[2] > _SETTLED_NS:
                self._stored[stamp[0]] = stamp, digest
                with contextlib.suppress(OSError):  # Then it is read once more the next time.
                    self._append(json.dumps([*stamp, digest]) + "\n")

    def _load(self) -> None:
        path = _store()
        if self._loaded == path:
            return
        self._loaded, self._stored = path, {}
        with contextlib.suppress(OSError, UnicodeDecodeError):
            for line in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError, TypeError):
                    name, size, modified, inode, digest = json.loads(line)
                    self._stored[name] = (name, size, modified, inode), digest

    @staticmethod
    def _append(line: str) -> None:
        path = _store()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        full = path.exists() and path.stat().st_size > 1 << 20
        flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if full else os.O_APPEND)
        descriptor = os.open(path, flags, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


_REMEMBERED = _Remembered()


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
    """Refuse, with a `NotOwnError`, a file or folder that others may have written."""
    if found.st_uid != os.geteuid():
        raise NotOwnError(path, f"{path} belongs to another user, so that it is not used: have it removed")
    if stat.S_IMODE(found.st_mode) & OTHERS_WRITE:
        raise NotOwnError(path, f"others may write to {path}, so that it is not used: call chmod go-w {path}")


def check_own_folder(path: str) -> None:
    """Refuse, with a `NotOwnError`, a folder into which others may put files."""
    link = os.lstat(path)
    if stat.S_ISLNK(link.st_mode) and link.st_uid != os.geteuid():
        raise NotOwnError(path, f"{path} is another user's link, so that it is not used: remove it")
    check_own(path, os.stat(path))


def open_own(path: str, flags: int = os.O_RDONLY) -> int:
    """Return the descriptor of a file that this user alone can have written; a link is not followed.

    :raises NotOwnError: if others may have written it.
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
    """Return whether a folder is there and this user's own; warn once if others may write to it."""
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
    """Make a folder for this user alone, where there is none; one that others may write to is a `NotOwnError`."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    check_own_folder(path)


def write_private(path: str, text: str) -> None:
    """Write a file that only this user can read, whole or not at all, whatever was there before."""
    with written_whole(Path(path), sync=False, mode=0o600) as file:
        file.write(text.encode())


_ATTEMPTS = 5


_NAME_BYTES = 255  # Of a name in most filesystems.


def part_of(path: Path, tag: str = "") -> Path:
    """Return where a file is written until it is whole; of a long name only the beginning is in that."""
    ending = f"{tag}.part"
    name = os.fsencode(path.name)[: _NAME_BYTES - len(ending)].decode(errors="ignore")
    return path.with_name(name + ending)


def open_new(path: str | os.PathLike[str], mode: int = 0o666) -> BinaryIO:
    """Open a new file to be written; what had its name before, if only a link, is removed."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with contextlib.suppress(FileExistsError):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return open(os.open(path, flags, mode), "w+b")
    raise FileExistsError(errno.EEXIST, "another program makes a file of this name again and again", os.fspath(path))


@contextlib.contextmanager
def written_whole(path: Path, sync: bool = True, mode: int = 0o666, alone: bool = False) -> Iterator[BinaryIO]:
    """Open a file that gets its name when the block has ended, and leaves no trace if that raises.

    Of several that write one file each writes all of its own, and the last one's stays.

    :param sync: whether it outlives a power cut from then on, so that what is said of it later is true.
    :param mode: the file's, less the umask.
    :param alone: whether no other process writes it, as a lock ensures: then what a kill left is written over.
    """
    part = part_of(path, "" if alone else f".{os.urandom(4).hex()}")
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


@contextlib.contextmanager
def written_out(path: Path, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a file that a person names as `written_whole` does, where a link leads; pipes and devices as they are."""
    if path.exists() and not path.is_file():
        with open(path, "wb") as file:
            yield file
        return
    with written_whole(Path(os.path.realpath(path)), sync) as file:
        yield file


def sync_folder(folder: Path) -> None:
    """Have the names in a folder reach the disk, where its filesystem can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
