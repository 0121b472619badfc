"""A host's cache: files and folders by content, which outlive workers and runs, shared by one user's workers there.

Below the folder that a site names, each user has one of mode 0700, named by the user's number. In it `kept/KEY` is an
entry: its `content`, an `index` (its files with size, time of change and inode), and `held`, on which whoever uses it
has a shared lock, and whose time of change is that of its last use. `work` has what is being made (`new-BYTES-...`,
for which so many bytes are reserved), and what is on its way out (`gone-...`): entries come and go by renaming. Nothing
else there is touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ctxflow.host.cache_folder import (
    CacheFolder,
    is_shared_account,
    lock_owners,
    open_file,
    open_held,
    replace_file,
    try_lock,
)

_CLOSE_SECONDS = 2.0  # How long what was written has at the end to reach the disk; else it is verified the next time.
_KEY = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,200}")
_RESERVED = re.compile(r"new-(\d+)-")
_VERSION = 1
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SpoiledEntry(ValueError):
    """What the cache had was not what it should be: it is removed, and is to be had from elsewhere."""


@dataclass(frozen=True)
class CacheEntry:
    """What a host's cache has of one content.

    :ivar key: the digest of its content, or what else it was kept by.
    :ivar name: what people call it.
    :ivar used: when it was last used, in Unix time.
    :ivar held: whether any worker uses it; `users`: the processes of those, as far as they can be seen from here.
    """

    key: str
    name: str
    bytes: int
    used: float
    held: bool
    users: tuple[int, ...] = ()


class _NoRoom(OSError):
    """More than the cache may hold, with what is in use: no room that could be made is enough."""


class HostCache:
    """The cache of this user on this host; threads may share one.

    Guarantees: what `get` and `put` return is complete, and is what was put under that key: its files have the sizes,
    times and inodes that they had then, and after an unclean end, or where jobs of several people have one account,
    also the digest (once for each entry and process). It stays until `release`, `close`, or the end of this process;
    its files are read-only. No other user's file is ever used. The entries never exceed the limit, however many workers
    put some at the same time; where sizes are known before, neither does what they take on the disk.

    :param folder: what the site names; it may serve several users.
    :param limit: bytes of all entries together; None for no limit.
    :param make: whether to make the folder where it is not.
    :param strict: whether this process verifies each entry once in any case; by default, in jobs under accounts that
        others' jobs have too.
    :param lock_seconds: how long to wait for the lock of its folder, which another worker may have.
    :ivar path: this user's folder.
    :ivar in_place: whether its paths can be relied on: nobody but this user and root can put others in their place.
        Else those that `get` and `put` return are good for this process and those of this user, while it lives.
    :raises OSError: in a sentence, if it cannot be used: it is another user's, say, or its disk has no locks.

    >>> folder = tempfile.mkdtemp()
    >>> cache = HostCache(folder)
    >>> cache.get("ab12") is None
    True
    >>> with open(cache.put("ab12", lambda path: shutil.copyfile("/proc/version", path), name="version")) as file:
    ...     file.readline()[:5]
    'Linux'
    >>> [(entry.key, entry.name, entry.held) for entry in cache.entries()]
    [('ab12', 'version', True)]
    >>> cache.close()
    >>> shutil.rmtree(folder)
    """

    def __init__(
        self,
        folder: str,
        limit: int | None = None,
        make: bool = True,
        strict: bool | None = None,
        *,
        lock_seconds: float = 10.0,
    ) -> None:
        self._folder = CacheFolder(folder, make, lock_seconds)
        self.path, self.in_place, self.limit = self._folder.path, self._folder.in_place, limit
        self._strict = is_shared_account() if strict is None else strict
        self._held: dict[str, int] = {}  # Key -> descriptor with the lock.
        self._verified: set[str] = set()
        self._own = threading.RLock()
        self._syncing: list[threading.Thread] = []

    # --- what its users call

    def get(self, key: str, content: str | None = "") -> str | None:
        """Return the path of an entry, None if there is none; hold it from now on.

        :param content: the digest that its content must have; by default its key. None if the caller verifies it.
        :raises SpoiledEntry: if it was not what it should be.
        :raises OSError: if the cache cannot be used now.
        """
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is no key of a cache: give letters, digits, dots, _ and -")
        self._folder.heed_mark()
        with self._folder.locked(fcntl.LOCK_SH):
            if not os.path.lexists(self._entry(key)):
                return None
            try:
                lock = open_file(self._entry(key, "held"))
            except OSError:
                lock = -1
            else:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # Nobody has another but under the folder's lock.
        if lock < 0:
            self._drop(key)
            raise SpoiledEntry(f"the host's cache {self.path} had {key} without its lock: it is removed")
        with contextlib.ExitStack() as last:
            last.callback(os.close, lock)
            try:
                self._check(key, key if content == "" else content)
            except SpoiledEntry:
                if self._drop(key, lock):
                    raise
                return None  # Another has dropped it meanwhile.
            os.utime(lock)
            last.pop_all()
        self._hold(key, lock)
        return self._shown(key)

    def put(self, key: str, make: Callable[[str], object], name: str = "", size: int = 0) -> str:
        """Make an entry, unless it is there, and return its path; hold it from now on.

        Others see it when it is complete. What is least recently used, and held by nobody, makes room for it.

        :param make: called with the path at which to make a file or a folder; again, after a full disk.
        :param name: what people call it.
        :param size: its bytes, as far as they are known before.
        :raises OSError: if there is no room for it, also because `limit` is less.
        """
        with contextlib.suppress(SpoiledEntry):
            if (there := self.get(key)) is not None:
                return there
        try:
            return self._made(key, make, name or key, size)
        except OSError as error:
            if not _is_full(error):
                raise
        self.trim(free=size or 1 << 62)  # What it takes is not known: all that can be had.
        return self._made(key, make, name or key, size)

    def _made(self, key: str, make: Callable[[str], object], name: str, size: int) -> str:
        """Make an entry aside and have it be the entry, unless another is sooner; return the path of what is there."""
        with contextlib.ExitStack() as undo:
            with self._folder.locked(fcntl.LOCK_EX):
                _, gone = self._make_room(size)
                mark = self._folder.begin_writing()
                undo.callback(self._folder.end_writing, mark)
                work = tempfile.mkdtemp(prefix=f"new-{size}-", dir=self._folder.at("work"))
                undo.callback(shutil.rmtree, work, ignore_errors=True)
                lock = open_held(os.path.join(work, "held"))
                undo.callback(os.close, lock)
            _destroy(gone)
            content = os.path.join(work, "content")
            make(content)
            total = _seal(content)
            self._write_index(work, name, total, self._folder.epoch())
            if (there := self._placed(work, key, total if total > size else 0)) is not None:
                return there
            undo.pop_all()
        self._verified.add(key)
        self._hold(key, lock)
        thread = threading.Thread(target=self._sync, args=(key, mark), name="ctxflow-cache-sync", daemon=True)
        self._syncing = [*(each for each in self._syncing if each.is_alive()), thread]
        thread.start()
        return self._shown(key)

    def _placed(self, work: str, key: str, more: int) -> str | None:
        """Have what was made be the entry; if another was sooner, return the path of its own.

        :param more: its bytes, if they are more than were reserved for it.
        """
        while True:
            try:
                with self._folder.locked(fcntl.LOCK_EX):
                    _, gone = self._make_room(more, os.path.basename(work)) if more else ([], [])
                    os.rename(work, self._entry(key))
                _destroy(gone)
                return None
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            with contextlib.suppress(SpoiledEntry):
                if (there := self.get(key)) is not None:
                    return there  # Else it is gone again.

    def release(self, key: str) -> None:
        """Hold an entry no more; one that is not held is no error."""
        with self._own:
            if (lock := self._held.pop(key, None)) is not None:
                os.close(lock)

    def drop(self, key: str) -> None:
        """Remove an entry, whoever holds it; who has its files open is not disturbed."""
        self._drop(key)

    def trim(self, free: int = 0) -> list[CacheEntry]:
        """Remove what is least recently used and held by nobody, as far as need be; return what is gone.

        :param free: bytes that are to be free on the disk.
        """
        with self._folder.locked(fcntl.LOCK_EX):
            evicted, gone = self._make_room(0, free=free)
        _destroy(gone)
        return evicted

    def _make_room(self, need: int, own: str = "", free: int = 0) -> tuple[list[CacheEntry], list[str]]:
        """Take out entries until so many bytes are left below the limit, under the folder's lock.

        :param own: the name of what is being made, whose reservation does not count beside the need.
        :returns: the entries, and the paths that are to be removed after that, with what killed makers left.
        :raises _NoRoom: if what is in use, or being made, leaves no such room: then nothing is taken out.
        """
        gone, evicted = self._abandoned(), []
        entries = sorted(self._entries(), key=lambda entry: entry.used)
        there, space = sum(entry.bytes for entry in entries) + self._reserved(gone, own), self._folder.free()
        kept = there - sum(entry.bytes for entry in entries if not entry.held)
        if need and self.limit is not None and kept + need > self.limit:
            _destroy(gone)
            beside = f" beside {kept / 1e9:.3g} GB in use or being kept" if need <= self.limit else ""
            text = f"{need / 1e9:.3g} GB{beside} are more than the host's cache may hold"
            raise _NoRoom(f"{text}, cache_gb = {self.limit / 1e9:g}")
        for entry in entries:
            if (self.limit is None or there + need <= self.limit) and space >= free:
                break
            if not entry.held:
                gone += self._away(entry.key)
                evicted.append(entry)
                there, space = there - entry.bytes, space + entry.bytes
        return evicted, gone

    def _reserved(self, gone: Sequence[str], own: str) -> int:
        """Return the bytes of what is being made, under the folder's lock."""
        total = 0
        for name in os.listdir(self._folder.at("work")):
            path = self._folder.at("work", name)
            if name.startswith("new-") and name != own and path not in gone:
                told = _RESERVED.match(name)
                total += int(told[1]) if told else 0  # Else it is of an earlier version.
        return total

    def empty(self) -> list[CacheEntry]:
        """Remove all that nobody holds, and return it."""
        with self._folder.locked(fcntl.LOCK_EX):
            evicted = [entry for entry in self._entries() if not entry.held]
            gone = self._abandoned() + [path for entry in evicted for path in self._away(entry.key)]
        _destroy(gone)
        return evicted

    def entries(self) -> list[CacheEntry]:
        """Return all entries, the last used first."""
        with self._folder.locked(fcntl.LOCK_EX):
            return sorted(self._entries(), key=lambda entry: -entry.used)

    def close(self) -> None:
        """Hold nothing any more; again is no error."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._syncing:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._own:
            for key in list(self._held):
                self.release(key)
        if not any(thread.is_alive() for thread in self._syncing):
            self._folder.close()

    # --- entries

    def _entry(self, key: str, *names: str) -> str:
        return self._folder.at("kept", key, *names)

    def _shown(self, key: str) -> str:
        return os.path.join(self.path, "kept", key, "content") if self.in_place else self._entry(key, "content")

    def _hold(self, key: str, lock: int) -> None:
        with self._own:
            earlier, self._held[key] = self._held.get(key), lock
            if earlier is not None:
                os.close(earlier)

    @staticmethod
    def _write_index(place: str, name: str, size: int, epoch: str) -> None:
        stamps = _stamps(os.path.join(place, "content"))
        index = {"version": _VERSION, "name": name, "bytes": size, "epoch": epoch, "files": stamps}
        replace_file(os.path.join(place, "index"), json.dumps(index))

    def _index(self, key: str) -> dict[str, Any]:
        """Return an entry's index; raise OSError or ValueError if there is none."""
        with open(open_file(self._entry(key, "index"))) as file:
            index = json.load(file)
        if not isinstance(index, dict) or index.get("version") != _VERSION:
            raise ValueError("it was written by another version")
        return index

    def _check(self, key: str, content: str | None) -> None:
        from ctxflow.files import digest_path  # Here: not every worker is sent files.

        place, epoch = self._entry(key), self._folder.epoch()
        try:
            index = self._index(key)
            if index["files"] != _stamps(os.path.join(place, "content")):
                raise ValueError("files of it were changed, added or removed")
            if key in self._verified or (index["epoch"] == epoch and not self._strict):
                return
            if content is not None and digest_path(os.path.join(place, "content"), again=True) != content:
                raise ValueError("it does not have its digest")
            if content is not None and index["epoch"] != epoch:
                with contextlib.suppress(OSError):  # The disk is full, say: the next process verifies it again.
                    self._write_index(place, index["name"], index["bytes"], epoch)
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            text = f"the host's cache {self.path} had {key}, and not as it was put there ({why}): it is removed"
            raise SpoiledEntry(text) from None
        if content is not None:
            self._verified.add(key)

    def _sync(self, key: str, mark: int) -> None:
        """Have an entry reach the disk, and end its writing."""
        place = self._entry(key)
        try:
            around = [os.path.join(place, name) for name in ("index", ".", "..")]
            for path in [*_walk(os.path.join(place, "content")), *around]:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        except OSError:
            os.close(mark)  # It stands, and what is there is verified.
        else:
            self._folder.end_writing(mark)

    def _entries(self) -> Iterator[CacheEntry]:
        """Yield the entries, whole or not; the folder's lock is had."""
        users = lock_owners()
        for key in os.listdir(self._folder.at("kept")):
            if not any(os.path.lexists(self._entry(key, name)) for name in ("index", "held")):
                continue  # It was not put there by this tool.
            name, used, held = "?", 0.0, False
            pids: tuple[int, ...] = ()
            try:
                index = self._index(key)
                name, size = str(index["name"]), int(index["bytes"])
            except (OSError, ValueError, KeyError, TypeError):
                size = _bytes_of(self._entry(key, "content"))
            with contextlib.suppress(OSError):
                lock = open_file(self._entry(key, "held"))
                try:
                    found = os.fstat(lock)
                    used, held = found.st_mtime, not try_lock(lock, fcntl.LOCK_EX)
                    pids = tuple(users.get(found.st_ino, ()))
                finally:
                    os.close(lock)
            yield CacheEntry(key, name, size, used, held, pids if held else ())

    def _drop(self, key: str, lock: int | None = None) -> bool:
        """Remove an entry, if it is the one that a lock is of; return whether it was."""
        with self._folder.locked(fcntl.LOCK_EX):
            try:
                its = lock is None or os.path.samestat(os.fstat(lock), os.lstat(self._entry(key, "held")))
            except OSError:
                its = False
            gone = self._away(key) if its else []
        if its:
            self.release(key)
            self._verified.discard(key)
        _destroy(gone)
        return its

    def _away(self, key: str) -> list[str]:
        """Take an entry out, under the folder's lock; return what is to be removed after that."""
        gone = self._folder.at("work", f"gone-{secrets.token_hex(8)}")
        try:
            os.rename(self._entry(key), gone)
        except FileNotFoundError:
            return []
        return [gone]

    def _abandoned(self) -> list[str]:
        """Return what makers left that were killed, under the folder's lock: nobody begins meanwhile."""
        found = []
        for name in os.listdir(self._folder.at("work")):
            if not name.startswith(("new-", "gone-")):
                continue
            path = self._folder.at("work", name)
            try:
                lock = open_file(os.path.join(path, "held"))
            except OSError:
                found.append(path)
                continue
            if name.startswith("gone-") or try_lock(lock, fcntl.LOCK_EX):
                found.append(path)
            os.close(lock)
        return found


def _destroy(paths: Sequence[str]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def _walk(content: str) -> Iterator[str]:
    """Yield the files of an entry's content."""
    if not os.path.isdir(content):
        yield content
        return
    for folder, folders, names in os.walk(content):
        folders.sort()
        yield from (os.path.join(folder, name) for name in sorted(names))


def _bytes_of(content: str) -> int:
    """Return the bytes of an entry's files, as far as they can be seen."""
    total = 0
    for path in _walk(content):
        with contextlib.suppress(OSError):
            total += os.lstat(path).st_size
    return total


def _stamps(content: str) -> dict[str, list[int]]:
    """Return size, time of change and inode of each file: while they are the same, so is the content."""
    found = {}
    for path in _walk(content):
        its = os.lstat(path)
        found[os.path.relpath(path, content)] = [its.st_size, its.st_mtime_ns, its.st_ino]
    return found


def _seal(content: str) -> int:
    """Have nobody write to an entry's files by accident; return their bytes."""
    total = 0
    for path in _walk(content):
        its = os.lstat(path)
        if stat.S_ISREG(its.st_mode):
            os.chmod(path, 0o500 if its.st_mode & 0o100 else 0o400)
        total += its.st_size
    for folder, _, _ in os.walk(content):
        os.chmod(folder, 0o700)
    return total


def _is_full(error: OSError) -> bool:
    """Return whether there was no room; `shutil.copytree` tells of each file in words."""
    return error.errno in _FULL or (isinstance(error, shutil.Error) and os.strerror(errno.ENOSPC) in str(error))
