"""The one file that a worker runs: a zip of this very ctxflow and cloudpickle, for any Python of 3.10 or later.

`python ctxflow.pyz worker ...` starts a worker, and `vine_library` and `doorbell` are what its vine_worker starts.
It holds what workers need; all else of ctxflow is in a second file, for those few that want it (own_modules.py).
What does not live here: what runs first of it (program_main.py), and bringing it to where workers start (factory/).
"""

from __future__ import annotations

import hashlib
import io
import marshal
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib.util import MAGIC_NUMBER, find_spec, source_hash

from ctxflow.host.own_modules import MEMBER
from ctxflow.installing import DISTRIBUTION, __version__, metadata

_MAIN = "ctxflow/host/program_main.py"
_UNCHECKED = (1).to_bytes(4, "little")  # PEP 552.
_DATE = (2020, 1, 1, 0, 0, 0)  # The same content gives the same file, whenever it is made.
_COMPILE = """\
import marshal, sys
sources = marshal.load(sys.stdin.buffer)
codes = {path: marshal.dumps(compile(sources[path], path, "exec", optimize=0)) for path in sources}
with open(1, "wb") as whole:  # With PYTHONUNBUFFERED sys.stdout's may write a part.
    whole.write(marshal.dumps(codes))
"""
_LEFT_OUT = {"examples", "__pycache__"}
# What the programs import before they can serve, and so all workers: with bytecode, which doubles it.
_COMPILED = (
    "cloudpickle/",
    "ctxflow/__init__.py",
    "ctxflow/context.py",
    "ctxflow/environments/__init__.py",
    "ctxflow/environments/opening.py",
    "ctxflow/errors.py",
    "ctxflow/files.py",
    "ctxflow/host/",
    "ctxflow/installing.py",
    "ctxflow/on_worker.py",
    "ctxflow/option_values.py",
    "ctxflow/pickling.py",
    "ctxflow/recipe.py",
    "ctxflow/renamed.py",
    "ctxflow/topology/",
)


# And what users' functions import there.
_NEEDED = (*_COMPILED, "ctxflow/models/")
_ELSEWHERE = ("ctxflow/host/__main__.py", "ctxflow/host/probe.py")  # What TaskVine workers do not run.
_DIGEST_BYTES = 16  # As files.py has it.


def build_program(target: str, rest: str | None = None) -> str:
    """Write the file, and give its path.

    It holds the modules of ctxflow but its examples, those of cloudpickle, and bytecode of what each worker imports,
    for workers with the very Python that runs here: others compile it. The same packages and the same Python give the
    same bytes. It is there complete or not at all.

    :param rest: where a second file is written, with the modules that few workers need; without one they are in the
        first, which is then four times as large.
    :raises OSError: if it cannot be written.
    """
    program, others = _content(rest is not None)
    if rest is not None:
        _write(rest, others)
    return _write(target, program)


def _write(target: str, content: bytes) -> str:
    target = os.path.abspath(target)
    folder, name = os.path.split(target)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}-", delete=False) as file:
        try:
            file.write(content)
            os.chmod(file.name, 0o644)
            os.rename(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise
    return target


@cache
def _content(apart: bool) -> tuple[bytes, bytes]:
    """Return the program, and what it lacks.

    :param apart: whether it lacks what few workers need.
    """
    files = {path: data for package in ("ctxflow", "cloudpickle") for path, data in _files(package)}
    main = files.pop(_MAIN)
    few = {path: files.pop(path) for path in list(files) if apart and _is_rest(path)}
    rest = _packed(few)
    members = {"__main__.py": main, **files}
    if apart:
        members[MEMBER] = hashlib.blake2b(rest, digest_size=_DIGEST_BYTES).hexdigest().encode()
    for path, code in _bytecode(
        {path: files[path] for path in files if path.startswith(_COMPILED) and path not in _ELSEWHERE}
    ).items():
        place, data = _pyc(path, files[path], code)
        members[place] = data
    # So that a worker can tell which versions of what it lacks have to be installed. What is only found on the path
    # has none, and an empty one would break importlib.metadata in library processes.
    if about := metadata():
        headers = about.partition("\n\n")[0] + "\n"  # What follows is the README.
        members[f"{DISTRIBUTION.replace('-', '_')}-{__version__}.dist-info/METADATA"] = headers.encode()
    return _packed(members), rest


def _is_rest(path: str) -> bool:
    return path in _ELSEWHERE or not path.startswith(_NEEDED)


def _packed(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=5) as archive:
        for path, data in members.items():
            entry = zipfile.ZipInfo(path, _DATE)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return packed.getvalue()


def _bytecode(sources: dict[str, bytes]) -> dict[str, bytes]:
    """Return the code of modules as bytes, made by a Python that has done nothing else, on which they depend."""
    run = subprocess.run(
        [sys.executable, "-S", "-c", _COMPILE],
        input=marshal.dumps(sources),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        check=True,
    )
    codes: dict[str, bytes] = marshal.loads(run.stdout)
    return codes


def _pyc(path: str, source: bytes, code: bytes) -> tuple[str, bytes]:
    """Return where Python looks for a module's bytecode, and that, which says of itself that it need not be checked."""
    folder, name = os.path.split(path)
    place = f"{folder}/__pycache__/{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc"
    return place, MAGIC_NUMBER + _UNCHECKED + source_hash(source) + code


def _files(package: str) -> Iterator[tuple[str, bytes]]:
    """Yield the modules of an installed package, by their place beside it; workers do not need its data."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is imported already"
    root = os.path.dirname(spec.origin)
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        for name in sorted(name for name in names if name.endswith(".py")):
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                yield os.path.relpath(path, os.path.dirname(root)), file.read()
