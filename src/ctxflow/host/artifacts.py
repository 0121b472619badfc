"""What builds and first calls made, kept on a host for the next: compile caches, and any folder that a recipe names.

A library process has a folder of its own for each artifact. What is in it is kept in a host's cache (host_cache.py),
under a key of all that it depends on; the next library process with that key begins with a copy. A copy is verified by
the digest that was kept with it, each time: it is programs that are run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ctxflow.host.library_messages import BuildContext
from ctxflow.host.local_files import copy_plain, plain_files

if TYPE_CHECKING:
    from ctxflow.host.host_cache import HostCache

MOST_BYTES = 2 * 10**9
"""How large the artifacts of one context may be."""
USER_BYTES, WORKER_BYTES = 10 * 10**9, 2 * 10**9
"""How large those may be that a user's own cache keeps, or a worker for itself."""
_DIGESTS, _FILES = "digests", "files"


def user_store() -> ArtifactStore | None:
    """Return the store in the user's own folder; None if there is none."""
    folder = user_folder()
    return None if folder is None else ArtifactStore(folder, USER_BYTES)


def user_folder() -> str | None:
    """Return where artifacts are kept for the user's later runs: in its cache folder, or what CTXFLOW_ARTIFACTS names.

    None if that is empty, there is none, or others' jobs have the account too.
    """
    from ctxflow.host.cache_folder import is_shared_account

    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.environ.get("CTXFLOW_ARTIFACTS", os.path.join(base, "ctxflow", "artifacts"))
    return None if not os.path.isabs(folder) or is_shared_account() else folder


class NotKept(Exception):
    """Artifacts are not kept, or not used, and why."""


class StillChanging(NotKept):
    """The files were changed while they were kept: try again."""


class ArtifactStore:
    """A folder in which artifacts are kept, of this user alone; threads may share it.

    Guarantees: what `take` puts in a process's folders is what `keep` found in another's under the same key, by its
    digest, or nothing. Entries come and go whole.

    :param folder: of a `HostCache`; made when something is kept. :param limit: its bytes, None for no limit.
    """

    def __init__(self, folder: str, limit: int | None = None) -> None:
        self.folder, self._limit = folder, limit
        self._opened: HostCache | None = None
        self._opening = threading.Lock()

    def _cache(self, make: bool = False) -> HostCache:
        with self._opening:
            if self._opened is None:
                from ctxflow.host.host_cache import HostCache  # Here: few processes have something to keep.

                self._opened = HostCache(self.folder, self._limit, make)
            return self._opened

    def has(self, key: str) -> bool:
        """Return whether there seems to be something under a key, without opening the store."""
        return os.path.isdir(os.path.join(self.folder, str(os.geteuid()), "kept", key))

    def take(self, key: str, places: Mapping[str, str]) -> bool:
        """Copy what is kept into these folders, which are not there yet or empty; return whether there was any.

        :param places: the path of each artifact's folder.
        :raises NotKept: if it was not what was put there: it is removed, also from these folders.
        """
        try:
            cache = self._cache()
            kept = cache.get(key, None)
            if kept is None:
                return False
            try:
                digests = _digests_in(kept)
                names = [name for name in places if name in digests]
                for name in names:
                    copy_plain(os.path.join(kept, _FILES, name), places[name])
                if _digests({name: places[name] for name in names}) != {name: digests[name] for name in names}:
                    raise ValueError("it does not have its digest")
            finally:
                cache.release(key)
        except FileNotFoundError:
            _clear(places)
            return False  # Another has put something else there meanwhile.
        except (OSError, ValueError) as error:
            _clear(places)
            self.forget(key)
            raise NotKept(f"what was kept of an earlier build was spoiled, and is removed ({error})") from None
        return bool(names)

    def pack(self, key: str, path: str) -> tuple[str, int]:
        """Make a file of what is kept under a key (artifact_archives.py); return its digest and bytes.

        :raises FileNotFoundError: if nothing is. :raises NotKept: if it was not what was put there.
        """
        from ctxflow.files import digest_now  # Here: few hosts send some.
        from ctxflow.host.artifact_archives import write_archive

        cache = self._cache()
        kept = cache.get(key, None)
        if kept is None:
            raise FileNotFoundError(f"nothing is kept under {key} any more")
        try:
            files, digests = os.path.join(kept, _FILES), _digests_in(kept)
            if _digests({name: os.path.join(files, name) for name in digests}) != digests:
                raise NotKept("what was kept does not have its digest")
            write_archive(files, path)
        finally:
            cache.release(key)
        return digest_now(path), os.path.getsize(path)

    def keep(self, key: str, places: Mapping[str, str], name: str) -> bool:
        """Keep what is in these folders in place of what was kept; return whether it is something else.

        :param name: what people call it.
        :raises NotKept: if it is too large, or changes meanwhile, or there is no room.
        """
        size = sum(size for size, *_ in stamps(places).values())
        if not size:
            return False
        if size > MOST_BYTES:
            raise NotKept(f"{size / 1e9:.1f} GB are more than the {MOST_BYTES / 1e9:g} GB that are kept of one context")
        try:
            found = _digests(places)
            cache = self._cache(make=True)
            with contextlib.suppress(OSError, ValueError):
                kept = cache.get(key, None)
                if kept is not None and _digests_in(kept) == found:
                    return False
            cache.drop(key)

            def make(content: str) -> None:
                os.mkdir(content, 0o700)
                copies = {each: os.path.join(content, _FILES, each) for each in found}
                for each, copy in copies.items():
                    copy_plain(places[each], copy)
                if _digests(copies) != found:
                    raise StillChanging("its files change")
                with open(os.path.join(content, _DIGESTS), "w") as file:
                    json.dump(found, file)

            cache.put(key, make, name, size)
        except FileNotFoundError as error:
            raise StillChanging(str(error)) from None
        except (OSError, ValueError) as error:  # Less the path, which is another for each process: it is told once.
            raise NotKept(getattr(error, "strerror", None) or str(error)) from None
        finally:
            if self._opened is not None:
                self._opened.release(key)
        return True

    def forget(self, key: str) -> None:
        """Keep what is under a key no more; nothing is no error."""
        with contextlib.suppress(OSError):
            self._cache().drop(key)

    def close(self) -> None:
        """Have what was kept reach the disk."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def take_sent(archive: str, digest: str, places: Mapping[str, str]) -> bool:
    """Copy what came from another host into these folders, as `ArtifactStore.take` does what is kept.

    :raises NotKept: if it is not what was sent.
    """
    from ctxflow.host.artifact_archives import take_archive  # Here: few processes are sent some.

    try:
        return take_archive(archive, digest, places)
    except (OSError, ValueError) as error:
        _clear(places)
        raise NotKept(f"what another host's build made, and was sent here, is not used ({error})") from None


def _clear(places: Mapping[str, str]) -> None:
    for place in places.values():
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.makedirs(place, 0o700)


def stamps(places: Mapping[str, str]) -> dict[str, tuple[int, int, int]]:
    """Return size, time of change and inode of each file in these folders: while they are the same, so is all of it."""
    found = {}
    for place in places.values():
        for folder, _, names in os.walk(place):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    its = os.lstat(path)
                    if stat.S_ISREG(its.st_mode):
                        found[path] = (its.st_size, its.st_mtime_ns, its.st_ino)
    return found


def _digests(places: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of each folder in which there is something."""
    return {name: digest for name, place in places.items() if (digest := _digest(place))}


def _digest(place: str) -> str:
    """Return the digest of the plain files of a folder, with their names and whether they are programs."""
    whole, any_there = hashlib.blake2b(digest_size=16), False
    for path, its in plain_files(place):
        any_there = True
        content = hashlib.blake2b(digest_size=16)
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                content.update(block)
        head = os.fsencode(os.path.relpath(path, place)), b"x" if its.st_mode & 0o100 else b"-", content.digest()
        whole.update(b"\0".join((str(len(head[0])).encode(), *head)))
    return whole.hexdigest() if any_there else ""


def _digests_in(kept: str) -> dict[str, str]:
    with open(os.path.join(kept, _DIGESTS)) as file:
        found = json.load(file)
    if not isinstance(found, dict):
        raise ValueError("its digests cannot be read")
    return found


@dataclasses.dataclass
class LibraryArtifacts:
    """Those of one library process, as its host sees them.

    :ivar made: folders beside the process's own that were not there before it.
    :ivar offered: whether it begins with what was kept. :ivar proven: whether a call has gone well with them.
    :ivar sent: the digest of what it begins with, if that came from another host.
    :ivar looks: when to look whether there is something to keep. :ivar seen: what was there when it was kept last.
    """

    load: BuildContext
    key: str
    places: Mapping[str, str]
    made: Sequence[str]
    offered: bool
    sent: str = ""
    proven: bool = False
    looks: list[float] = dataclasses.field(default_factory=list)
    seen: Mapping[str, tuple[int, int, int]] = dataclasses.field(default_factory=dict)
