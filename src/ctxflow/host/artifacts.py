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
import platform
import re
import shutil
import stat
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ctxflow.host.installed_modules import is_installed
from ctxflow.host.library_messages import BuildContext
from ctxflow.host.library_start import interpreter, library_variables
from ctxflow.host.local_files import copy_plain, plain_files

if TYPE_CHECKING:
    from ctxflow.host.host_cache import HostCache

OWN = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")
"""Variables that name folders of compile caches: each is an artifact, unless somebody has set it."""
PACKED = "CTXFLOW_PACKED"
"""The variable with the digest of the packed environment that a worker has opened: it is the same at any path."""
MOST_BYTES = 2 * 10**9
"""How large the artifacts of one context may be."""
USER_BYTES, WORKER_BYTES = 10 * 10**9, 2 * 10**9
"""How large those may be that a user's own cache keeps, or a worker for itself."""
_VERSION = 1
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_DIGESTS, _FILES = "digests", "files"
# Variables of the worker, beside those of the context, on which it depends what compilers make.
_COMPILING = re.compile(r"(TORCH|TRITON|VLLM|CUDA_HOME|CUDA_PATH|OMP_NUM|MKL_|CC$|CXX$|C\w*FLAGS$|LD_).*")


def is_variable(target: str) -> bool:
    """Return whether an artifact is a folder that a variable names, not one that is named itself.

    >>> is_variable("TRITON_CACHE_DIR"), is_variable("engine/cache")
    (True, False)
    """
    return _VARIABLE.fullmatch(target) is not None


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


# --- whose they are


def folders_of(load: BuildContext, scratch: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the folder of each artifact of a load, by its name, and the variables that name some of them.

    :param scratch: the library process's directory.
    """
    there = library_variables(load.environment)
    named = dict(load.artifacts or {})
    own = {name: name for name in OWN if name not in there and name not in named.values()}
    places, variables = {}, {}
    for name, target in {**own, **named}.items():
        if is_variable(target):
            places[name] = variables[target] = os.path.join(scratch, "artifacts", name)
        else:
            places[name] = os.path.join(load.directory or scratch, target)
    return places, variables


def key_of(load: BuildContext) -> str:
    """Return what the artifacts of a load are kept by here."""
    return digest_of(context_facts(load), machine_facts())


def digest_of(*facts: Mapping[str, object]) -> str:
    """Return the digest of facts, which depends on each of them."""
    text = json.dumps([_VERSION, *facts], sort_keys=True, default=list)
    return f"artifacts-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def context_facts(load: BuildContext) -> dict[str, object]:
    """Return what a load's artifacts depend on of the recipe, its variables, the Python and its packages."""
    variables = library_variables(load.environment)
    python = interpreter()
    path = list(load.path) or sys.path
    if os.environ.get("CTXFLOW_PYTHON"):
        path = list(load.path)
    others = [value for name, value in sorted(variables.items()) if name.startswith("CTXFLOW_") and "PYTHON" in name]
    path = [*path, *(folder for other in others for folder in _packages_of(other))]
    return {
        "context": load.context,
        "artifacts": load.artifacts,
        "variables": {
            name: value for name, value in variables.items() if _COMPILING.fullmatch(name) or name in load.environment
        },
        "python": [os.environ.get(PACKED) or os.path.realpath(python), sys.version if python == sys.executable else ""],
        "packages": _distributions(path),
    }


def _packages_of(python: str) -> list[str]:
    """Return the folders of another Python's packages."""
    libraries = os.path.join(os.path.dirname(os.path.dirname(python)), "lib")
    found = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(libraries)):
            if name.startswith("python"):
                found.append(os.path.join(libraries, name, "site-packages"))
    return found


def _distributions(path: Sequence[str]) -> list[str]:
    """Return name and version of each installed package, as its folder says."""
    found: set[str] = set()
    for entry in path:
        if is_installed(entry):
            with contextlib.suppress(OSError):
                found.update(name for name in os.listdir(entry) if name.endswith((".dist-info", ".egg-info")))
    return sorted(found)


def machine_facts(root: str = "/") -> dict[str, object]:
    """Return what artifacts depend on of the machine: its instruction set, its GPUs and their driver."""
    models = sorted(
        {
            line.partition(":")[2].strip()
            for text in _texts(root, "proc/driver/nvidia/gpus", "information")
            for line in text.splitlines()
            if line.startswith("Model")
        }
    )
    models += sorted(
        {
            line
            for text in _texts(root, "sys/class/kfd/kfd/topology/nodes", "properties")
            for line in text.splitlines()
            if line.startswith("gfx_target_version") and not line.endswith(" 0")
        }
    )
    flags = ""
    with contextlib.suppress(OSError, ValueError), open(os.path.join(root, "proc/cpuinfo")) as file:
        for line in file:  # No further than the first processor: there may be hundreds.
            if line.partition(":")[0].strip() in ("flags", "Features", "isa"):
                flags = " ".join(sorted(line.partition(":")[2].split()))
                break
    return {
        "machine": platform.machine(),
        "flags": flags,
        "gpus": models,
        # Where GPUs differ, that which one a process has tells which it is.
        "devices": os.environ.get("CUDA_VISIBLE_DEVICES", "") if len(models) > 1 else "",
        "drivers": [
            _text(os.path.join(root, "proc/driver/nvidia/version")).partition("\n")[0],
            _text(os.path.join(root, "sys/module/amdgpu/version")),
        ],
    }


def _text(path: str) -> str:
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        return file.read()
    return ""


def _texts(root: str, folder: str, name: str) -> list[str]:
    folder = os.path.join(root, folder)
    with contextlib.suppress(OSError):
        return [_text(os.path.join(folder, each, name)) for each in sorted(os.listdir(folder))]
    return []


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
