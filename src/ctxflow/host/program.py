"""The one file that a worker runs: a zip of this very ctxflow and cloudpickle, for any Python of 3.10 or later.

`python ctxflow.pyz worker ...` starts a worker, and `vine_library` and `doorbell` are what its vine_worker starts.
What does not live here: bringing the file to where workers start (factory/).
"""

from __future__ import annotations

import io
import os
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec

from ctxflow.installing import DISTRIBUTION, metadata
from ctxflow.version import __version__

_MAIN = '''\
"""Starts one of the programs of this file: worker, vine_library, doorbell."""

import os
import sys

PROGRAMS = ("worker", "vine_library", "doorbell")

if len(sys.argv) < 2 or sys.argv[1] not in PROGRAMS:
    sys.exit(f"usage: python {sys.argv[0]} {{{'|'.join(PROGRAMS)}}} ...")
if sys.version_info < (3, 10):
    sys.exit(f"ctxflow needs Python 3.10 or later, and {sys.executable} is {sys.version.split()[0]}")
if sys.argv[1] != "worker":
    try:
        os.setpgid(0, 0)  # Before anything that takes time: see vine_protocol.lead_group.
    except PermissionError:
        pass

import importlib  # noqa: E402

sys.exit(importlib.import_module("ctxflow.host." + sys.argv[1]).main(sys.argv[2:]))
'''
_DATE = (2020, 1, 1, 0, 0, 0)  # The same content gives the same file, whenever it is made.
_LEFT_OUT = {"examples", "__pycache__"}


def build_program(target: str) -> str:
    """Write the file, and give its path.

    It holds the modules of ctxflow but its examples, and those of cloudpickle; the same packages give the same bytes.
    It is there complete or not at all.

    :raises OSError: if it cannot be written.
    """
    target = os.path.abspath(target)
    folder, name = os.path.split(target)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}-", delete=False) as file:
        try:
            file.write(_content())
            os.chmod(file.name, 0o644)
            os.rename(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise
    return target


def _content() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        _add(archive, "__main__.py", _MAIN.encode())
        for package in ("ctxflow", "cloudpickle"):
            for path, data in _files(package):
                _add(archive, path, data)
        # So that a worker can tell which versions of what it lacks have to be installed. What is only found on the path
        # has none, and an empty one would break importlib.metadata in library processes.
        if about := metadata():
            _add(archive, f"{DISTRIBUTION.replace('-', '_')}-{__version__}.dist-info/METADATA", about.encode())
    return packed.getvalue()


def _add(archive: zipfile.ZipFile, path: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(path, _DATE)
    entry.external_attr = 0o644 << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, data)


def _files(package: str) -> Iterator[tuple[str, bytes]]:
    """The modules of an installed package, by their place beside it; its data is for other machines than workers."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is imported already"
    root = os.path.dirname(spec.origin)
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        for name in sorted(name for name in names if name.endswith(".py")):
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                yield os.path.relpath(path, os.path.dirname(root)), file.read()
