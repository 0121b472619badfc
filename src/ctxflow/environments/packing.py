"""Pack an environment: its files collected, named by what is in them, and written as one archive.

What lives here: the way through, the digest, the manifest, and the archive. What does not: which files (collecting.py,
or conda-pack), the machine's shared libraries (libraries.py), and the worker's half (opening.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import sys
import tarfile
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from ctxflow.contents import digest_path
from ctxflow.environments import libraries
from ctxflow.environments.collecting import Collection, Entry, inspect, is_conda
from ctxflow.environments.opening import MANIFEST, UnusableEnvironment, read_manifest
from ctxflow.errors import CtxflowError
from ctxflow.installing import how_to_install
from ctxflow.safe_files import sync_folder
from ctxflow.version import __version__

Report = Callable[[str, int, int], None]
_BLOCK = 4 << 20
_LEVEL = 6


@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed environment.

    :ivar path: the archive.
    :ivar manifest: what is in it.
    :ivar new: False if the same environment had been packed there before.
    """

    path: Path
    manifest: dict[str, Any]
    new: bool


def pack_environment(
    prefix: str | os.PathLike[str] | None = None,
    directory: str | os.PathLike[str] = ".",
    exclude: Sequence[str] = (),
    report: Report = lambda stage, done, total: None,
) -> Packed:
    """Pack a virtual or conda environment into `ctxflow-env-NAME-DIGEST.tar.gz`.

    The archive unpacks into any folder of a Linux machine of the same architecture whose C library is new enough,
    and runs there as `bin/python`, without activation and with nothing left behind on this machine. Equal contents
    (paths, modes, bytes) have equal names, on any day; an archive of that name that is there already is kept.

    :param prefix: the environment; by default the active one, else the one that runs this.
    :param directory: where the archive goes.
    :param exclude: shell patterns of what to leave out, such as "torch/test" or "*/include".
    :param report: told how far it is: what is being done, and bytes of how many (0 of 0 if unknown).
    :raises CtxflowError: if it cannot be packed, saying what to do.
    """
    where = Path(
        os.path.abspath(prefix or os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX") or sys.prefix)
    )
    if sys.platform != "linux":
        raise CtxflowError("only environments of Linux can be packed: pack on a machine like the workers'")
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    report("Looking at the environment", 0, 0)
    about = inspect(where)
    with tempfile.TemporaryDirectory(prefix="ctxflow-env-") as scratch:
        collection = _collect(where, about, Path(scratch), exclude)
        report("Looking for shared libraries", 0, 0)
        collection.entries.pop(MANIFEST, None)  # Of an environment that was opened, and is packed again.
        glibc = _take_libraries(collection, about)
        digest, size = _digest(collection.entries, report)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", where.parent.name if where.name in _PLAIN_NAMES else where.name)
        manifest = {
            "format": 1,
            "name": name,
            "digest": digest,
            "python": about["python"],
            "platform": f"linux-{about['machine']}",
            "glibc": "{}.{}".format(*glibc),
            "ctxflow": __version__,
            "files": len(collection.entries),
            "bytes": size,
            "packages": about["packages"],
        }
        archive = folder / f"ctxflow-env-{name}-{digest[:12]}.tar.gz"
        with contextlib.suppress(OSError, UnusableEnvironment):
            return Packed(archive, read_manifest(archive), new=False)
        _write(archive, manifest, collection.entries, report)
    return Packed(archive, manifest, new=True)


_PLAIN_NAMES = {"venv", ".venv", "env", ".env"}


def _collect(prefix: Path, about: dict[str, Any], scratch: Path, exclude: Sequence[str]) -> Collection:
    collection = Collection(scratch, exclude)
    if not is_conda(prefix):
        collection.add_python(about)
        return collection
    try:
        import conda_pack
    except ImportError:
        raise CtxflowError(
            f"packing a conda environment needs conda-pack: {how_to_install('conda-pack', extra='pack')}"
        ) from None
    copy = str(scratch / "conda")
    try:
        # Installed by conda itself or by pip: conda-pack knows both, and what names the prefix in each file.
        conda_pack.pack(prefix=str(prefix), output=copy, format="no-archive")
    except conda_pack.CondaPackException as error:
        raise CtxflowError(f"{prefix} cannot be packed: {' '.join(str(error).split())}") from None
    for stray in set(os.listdir(copy)) - set(os.listdir(prefix)):  # A file that conda-pack forgets.
        os.unlink(os.path.join(copy, stray))
    collection.add_conda(copy, about)
    return collection


def _take_libraries(collection: Collection, about: dict[str, Any]) -> tuple[int, int]:
    """Add the shared libraries that the collected files borrow; the version of the C library that all need."""
    binaries: dict[str, libraries.Binary] = {}
    for target, entry in collection.entries.items():
        if not entry.link and (entry.executable or ".so" in os.path.basename(target)):
            binary = libraries.read_binary(entry.source)
            if binary:
                binaries[target] = binary
    if not collection.site:  # conda's packages bring all that they need.
        return max(binary.glibc for binary in binaries.values())
    own = [about["prefix"]] if about["prefix"] != about["base_prefix"] else []
    roots = [*own, *about["library"], *about["path"], *about["editable"].values()]
    sources = {target: collection.entries[target].source for target in binaries}
    found = libraries.borrowed(list(sources.values()), roots)
    bundled: set[str] = set()
    for places in found.values():
        for name, place in places.items():
            bundled.add(f"{libraries.FOLDER}/{name}")
            collection.add(place, f"{libraries.FOLDER}/{name}", "")
    for target in sorted(bundled & collection.entries.keys()):
        entry = collection.entries[target]
        binary = None if entry.link else libraries.read_binary(entry.source)
        if binary:
            binaries[target] = binary
    for target, binary in binaries.items():
        needs = target in bundled or sources[target] in found
        if needs and ".so" not in os.path.basename(target):
            libraries.search_bundled(
                collection.copy(target), os.path.relpath(libraries.FOLDER, os.path.dirname(target))
            )
        elif needs and binary.runpath is not None:
            libraries.search_on(collection.copy(target), binary.runpath)
    return max(binary.glibc for binary in binaries.values())


def _digest(entries: dict[str, Entry], report: Report) -> tuple[str, int]:
    """The digest of the contents, and their size in bytes."""
    files = {target: os.path.getsize(entry.source) for target, entry in entries.items() if not entry.link}
    total, done = sum(files.values()), 0
    hasher = hashlib.blake2b(digest_size=16)
    with ThreadPoolExecutor() as pool:
        digests = {target: pool.submit(digest_path, entries[target].source) for target in sorted(files)}
        try:
            for target in sorted(entries):
                entry = entries[target]
                content = entry.source if entry.link else digests[target].result()
                kind = "link" if entry.link else "program" if entry.executable else "file"
                hasher.update(f"{target}\0{kind}\0{content}\n".encode("utf-8", "surrogateescape"))
                done += files.get(target, 0)
                report("Reading", done, total)
        finally:
            pool.shutdown(cancel_futures=True)
    return hasher.hexdigest(), total


def _write(archive: Path, manifest: dict[str, Any], entries: dict[str, Entry], report: Report) -> None:
    """Write the archive under another name, then give it its own."""
    done = 0
    with tempfile.NamedTemporaryFile(dir=archive.parent, prefix=f".{archive.name}.", delete=False) as file:
        try:
            with (
                _Gzip(file) as stream,
                tarfile.TarFile(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT, copybufsize=1 << 20) as tar,  # type: ignore[arg-type]
            ):
                text = json.dumps(manifest, indent=2).encode() + b"\n"
                tar.addfile(_member(MANIFEST, len(text)), io.BytesIO(text))
                for target in sorted(entries):
                    entry = entries[target]
                    if entry.link:
                        tar.addfile(_member(target, 0, link=entry.source))
                        continue
                    with open(entry.source, "rb") as content:
                        size = os.fstat(content.fileno()).st_size
                        tar.addfile(_member(target, size, entry.executable), content)
                    done += size
                    report("Packing", done, manifest["bytes"])
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
            os.replace(file.name, archive)
        except BaseException:
            os.unlink(file.name)
            raise
    sync_folder(archive.parent)


def _member(name: str, size: int, executable: bool = False, link: str = "") -> tarfile.TarInfo:
    """A member of the archive, which tells nothing of this machine: no owner, no time."""
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o755 if executable else 0o644, 0
    if link:
        member.type, member.linkname, member.mode = tarfile.SYMTYPE, link, 0o777
    return member


class _Gzip:
    """A file that is compressed on all cores: gzip in several members, which every gzip reads as one."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._block = bytearray()
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._waiting: deque[Future[bytes]] = deque()

    def __enter__(self) -> _Gzip:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._send(0)
        self._pool.shutdown(cancel_futures=True)

    def tell(self) -> int:
        return 0  # Asked once, before anything is written.

    def write(self, data: bytes) -> int:
        self._block += data
        if len(self._block) >= _BLOCK:
            self._send(2 * (os.cpu_count() or 1))
        return len(data)

    def _send(self, left: int) -> None:
        """Compress the block, and write what is done until so many wait."""
        self._waiting.append(self._pool.submit(_compress, bytes(self._block)))
        self._block.clear()
        while len(self._waiting) > left:
            self._file.write(self._waiting.popleft().result())


def _compress(block: bytes) -> bytes:
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, 31)  # 31: as a gzip member, without name and time
    return compressor.compress(block) + compressor.flush()
