"""The folder of one user's cache on a host: whose it is, its locks, and whether it was closed cleanly.

`lock` guards the moments in which entries are taken, come and go: nobody has it for long, and who cannot get it does
without the cache. `writing` stands while anybody writes: where it stands and nobody does, a writer was killed or the
power went, and another epoch begins. The kernel releases locks with the process that has them, however that ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator

_TRY_SECONDS = 0.01
_MARK = ".ctxflow-cache"
_SAYS = "A cache of ctxflow, which removes what is in it as it needs room: keep nothing of your own here.\n"
_NAMES = {"kept", "work", "lock", "epoch", "writing"}
_OF_ENTRY = {"content", "index", "held"}
_SHARED = re.compile(r"nobody|nfsnobody|(slot|cndrusr)\d+(_\d+)*|condor|condor_pool_\w+")


class CacheFolder:
    """A folder of this user alone, by its number below one that may serve several users.

    It is marked when it is made; one that holds something and has no mark is not used: what is in it is removed.

    :param lock_seconds: how long its lock is waited for.
    :ivar path: where it is. :ivar in_place: whether nobody but this user and root can put another in its place.
    :raises OSError: in a sentence, if it cannot be used: it is another user's, say, or its disk has no locks.
    """

    def __init__(self, base: str, make: bool, lock_seconds: float = 10.0) -> None:
        self._lock_seconds = lock_seconds
        self.path = os.path.join(os.path.abspath(base), str(os.geteuid()))
        self._descriptor = _opened(self.path, make)
        self.in_place = _is_trusted(os.path.dirname(self.path))
        try:
            for name in ("kept", "work"):
                os.makedirs(self.at(name), mode=0o700, exist_ok=True)
            with self.locked(fcntl.LOCK_SH):
                pass
        except OSError as error:
            self.close()
            words = f"the host's cache {self.path} cannot be used: {error.strerror or error}"
            raise OSError(error.errno, f"{words}; see that it is on a local disk with room") from None

    def at(self, *names: str) -> str:
        """Return the path of something in it: by its descriptor, so that it is this folder whatever its path names."""
        return os.path.join(f"/proc/{os.getpid()}/fd/{self._descriptor}", *names)

    def free(self) -> int:
        """Return the bytes that its disk has free."""
        found = os.fstatvfs(self._descriptor)
        return found.f_bavail * found.f_frsize

    @contextlib.contextmanager
    def locked(self, how: int) -> Iterator[None]:
        """Have the lock under which entries are taken (shared), come and go (exclusive), for a moment."""
        descriptor = open_file(self.at("lock"), os.O_CREAT)
        try:
            deadline = time.monotonic() + self._lock_seconds
            while not try_lock(descriptor, how):
                if time.monotonic() > deadline:  # Who has it is stopped, perhaps.
                    raise OSError(errno.EBUSY, f"another worker has had its lock for {self._lock_seconds:.0f} s")
                time.sleep(_TRY_SECONDS)
            yield
        finally:
            os.close(descriptor)

    def epoch(self) -> str:
        """Return what stands for the time since the last unclean end."""
        with contextlib.suppress(OSError), open(self.at("epoch")) as file:
            return file.read()
        return ""

    def heed_mark(self) -> None:
        """Begin another epoch if a writer did not end orderly."""
        if not os.path.exists(self.at("writing")):
            return
        with self.locked(fcntl.LOCK_EX), contextlib.suppress(FileNotFoundError):
            mark = open_file(self.at("writing"))
            try:
                if try_lock(mark, fcntl.LOCK_EX):
                    if self.epoch():  # Else no entry is trusted as it is.
                        self._begin_epoch()
                    os.unlink(self.at("writing"))
            finally:
                os.close(mark)

    def _begin_epoch(self) -> None:
        """Write another epoch where the last one is: on a full disk, too. It is on the disk when this returns."""
        epoch = open_file(self.at("epoch"), os.O_RDWR | os.O_CREAT)
        try:
            os.pwrite(epoch, secrets.token_hex(8).encode(), 0)
            os.fsync(epoch)
        finally:
            os.close(epoch)

    def begin_writing(self) -> int:
        """Set the mark, under the lock; return what `end_writing` takes."""
        if not self.epoch():
            self._begin_epoch()
        return open_held(self.at("writing"))

    def end_writing(self, mark: int) -> None:
        """Remove the mark, if nobody else writes."""
        try:
            with self.locked(fcntl.LOCK_EX):
                if try_lock(mark, fcntl.LOCK_EX):
                    os.unlink(self.at("writing"))
        except OSError:
            pass
        finally:
            os.close(mark)

    def close(self) -> None:
        """Use it no more; again is no error."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _opened(path: str, make: bool) -> int:
    """Return the descriptor of a user's own folder; an OSError in a sentence if it is not, or others may enter it."""
    base = os.path.dirname(path)
    try:
        if make:
            _make_base(base)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and os.path.lexists(path):
            text = f"{path} is a link or no folder, so that it is not used as the host's cache: have it removed"
            raise OSError(error.errno, text) from None
        if not make and isinstance(error, FileNotFoundError):
            raise
        text = f"the host's cache {path} cannot be made: {error.strerror}; see that this user may write to {base}"
        raise OSError(error.errno, text) from None
    found = os.fstat(descriptor)
    if (foreign := found.st_uid != os.geteuid()) or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(descriptor)
        wrong, cure = "can be entered by others", f"call chmod 700 {path}"
        if foreign:
            wrong, cure = "belongs to another user", "have it removed"
        raise OSError(errno.EPERM, f"{path} {wrong}, so that it is not used as the host's cache: {cure}")
    try:
        _mark(path, descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _mark(path: str, descriptor: int) -> None:
    """Mark a folder that is empty, or an earlier version's cache; an OSError in a sentence for anything else."""
    if _MARK in (names := os.listdir(descriptor)):
        with contextlib.suppress(OSError):  # So that whoever removes old files from a scratch disk leaves it.
            os.utime(_MARK, dir_fd=descriptor)
        return
    if names and not _is_unmarked_cache(f"/proc/self/fd/{descriptor}", names):
        text = f"{path} holds what is no cache of ctxflow, so that it is not used as one: name another folder"
        raise OSError(errno.EEXIST, text)
    try:
        mark = os.open(_MARK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=descriptor)
    except OSError as error:
        if names:  # What is there serves on a full disk, too.
            return
        text = f"the host's cache {path} cannot be used: {error.strerror}; see that it is on a local disk with room"
        raise OSError(error.errno, text) from None
    with contextlib.suppress(OSError), open(mark, "w") as file:  # On a full disk its name says enough.
        file.write(_SAYS)


def _is_unmarked_cache(path: str, names: list[str]) -> bool:
    """Return whether a folder is the cache of a version that made no mark: what it has, perhaps less, and no more."""

    def listed(*below: str) -> list[str]:
        return os.listdir(os.path.join(path, *below))

    try:
        return (
            {"kept", "work", "lock"} <= set(names) <= _NAMES
            and all(name.startswith(("new-", "gone-")) for name in listed("work"))
            and all(name.partition(".")[0] in _OF_ENTRY for key in listed("kept") for name in listed("kept", key))
        )
    except OSError:
        return False


def _make_base(base: str) -> None:
    """Make the folder that holds those of users: for all of them where its own parent is."""
    if os.path.isdir(base):
        return
    parent = os.path.dirname(base)
    os.makedirs(parent, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(base, 0o700)
        os.chmod(base, 0o1777 if os.stat(parent).st_mode & stat.S_IWOTH else 0o755)


def _is_trusted(path: str) -> bool:
    """Return whether nobody but this user and root can put something else in the place of what is in a folder."""
    path = os.path.realpath(path)
    while True:
        found = os.lstat(path)
        open_to_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, os.geteuid()) or open_to_others:
            return False
        if path == "/":
            return True
        path = os.path.dirname(path)


def is_shared_account() -> bool:
    """Return whether jobs of several people may run under this process's account: nobody's, or one of a slot."""
    import pwd

    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return True
    if _SHARED.fullmatch(name):
        return True
    with contextlib.suppress(OSError, KeyError), open(os.environ["_CONDOR_JOB_AD"]) as file:
        for line in file:  # HTCondor says whose the job is.
            attribute, _, value = line.partition("=")
            if attribute.strip().lower() == "owner":
                return value.strip().strip('"') != name
    return False


def open_file(path: str, flags: int = 0) -> int:
    """Return the descriptor of a file of the folder; a link is not followed."""
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)


def open_held(path: str) -> int:
    """Return the descriptor of a lock file, made if need be, with a shared lock."""
    descriptor = open_file(path, os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def try_lock(descriptor: int, how: int) -> bool:
    """Return whether a lock is had now; other failures than that another has it are raised."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def replace_file(path: str, text: str) -> None:
    """Write a file anew, at once or not at all."""
    part = f"{path}.{secrets.token_hex(4)}"
    try:
        with open(open_file(part, os.O_CREAT | os.O_EXCL), "w") as file:
            file.write(text)
        os.rename(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def lock_owners() -> dict[int, list[int]]:
    """Return the processes that have locks on files, by inode, as far as this process sees them."""
    found: dict[int, list[int]] = {}
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/locks") as file:
        for line in file:
            words = line.split()
            if words[1] == "FLOCK" and (pid := int(words[4])) > 0:
                found.setdefault(int(words[5].rpartition(":")[2]), []).append(pid)
    return found
