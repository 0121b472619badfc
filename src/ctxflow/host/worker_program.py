"""The one file that a worker runs, a zip of this very ctxflow and cloudpickle: building it, and finding what it lacks.

`python ctxflow.pyz worker ...` starts a worker, and `vine_library` and `doorbell` are what its vine_worker starts. It
holds what all workers run. All else is a second file, which a worker gets once, from its driver or a peer: the first
time that a process which the program started imports a module that is in there. The import waits meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

NAME = "ctxflow-rest.zip"
MEMBER = "ctxflow/host/rest.digest"  # What a program that lacks something has its digest in.
VARIABLE = "CTXFLOW_REST"  # Where the cache is in which it will be.
_BELL = "rest.wanted"
_RING_SECONDS, _LIMIT_SECONDS = 10.0, 120.0
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
_ELSEWHERE = ("ctxflow/host/__main__.py",)  # What TaskVine workers do not run.
# What only workers with a cache import, or those of contexts that compile something.
_SELDOM = tuple(f"ctxflow/host/{name}.py" for name in ("artifact_archives", "cache_folder", "host_cache"))
_DIGEST_BYTES = 16  # As files.py has it.


def build_program(target: str, rest: str | None = None) -> str:
    """Write the file, complete or not at all, and return its path.

    It holds the modules of ctxflow but its examples, those of cloudpickle, and bytecode of what each worker imports,
    for workers with the very Python that runs here: others compile it. The same packages give the same bytes.

    :param rest: where a second file is written, with the modules that few workers need; without one they are in the
        first, which is then four times as large.
    """
    program, others = _content(rest is not None)
    if rest is not None:
        _write(rest, others)
    return _write(target, program)


def _write(target: str, content: bytes) -> str:
    import tempfile

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
    """Return the program, and what it lacks: with `apart`, what few workers need."""
    import hashlib  # Here, as below: whoever only looks for modules needs none of them.

    from ctxflow.installing import DISTRIBUTION, __version__, metadata

    files = {path: data for package in ("ctxflow", "cloudpickle") for path, data in _files(package)}
    main = files.pop(_MAIN)
    few = {path: files.pop(path) for path in list(files) if apart and _is_rest(path)}
    rest = _packed(few)
    members = {"__main__.py": main, **files}
    if apart:
        members[MEMBER] = hashlib.blake2b(rest, digest_size=_DIGEST_BYTES).hexdigest().encode()
    compiled = {path: files[path] for path in files if path.startswith(_COMPILED) and path not in _ELSEWHERE + _SELDOM}
    members |= {_pyc(path): data for path, data in _bytecode(compiled).items()}
    # So that a worker can tell which versions of what it lacks have to be installed. What is only found on the path
    # has none, and an empty one would break importlib.metadata in library processes.
    if about := metadata():
        headers = about.partition("\n\n")[0] + "\n"  # What follows is the README.
        members[f"{DISTRIBUTION.replace('-', '_')}-{__version__}.dist-info/METADATA"] = headers.encode()
    return _packed(members), rest


def _is_rest(path: str) -> bool:
    return path in _ELSEWHERE or not path.startswith(_NEEDED)


def _packed(members: dict[str, bytes]) -> bytes:
    import io
    import zipfile

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in members.items():
            entry = zipfile.ZipInfo(path, _DATE)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data, compresslevel=9)
    return packed.getvalue()


def _bytecode(sources: dict[str, bytes]) -> dict[str, bytes]:
    """Return what modules' files of bytecode hold, compiled by a Python that has done nothing else: it depends on that.

    Each says of itself that it need not be checked against its source (PEP 552).
    """
    import marshal
    import subprocess
    from importlib.util import MAGIC_NUMBER, source_hash

    command, environment = [sys.executable, "-S", "-c", _COMPILE], {**os.environ, "PYTHONHASHSEED": "0"}
    given = marshal.dumps(sources)
    run = subprocess.run(command, input=given, stdout=subprocess.PIPE, env=environment, check=True)
    codes: dict[str, bytes] = marshal.loads(run.stdout)
    return {path: MAGIC_NUMBER + _UNCHECKED + source_hash(sources[path]) + code for path, code in codes.items()}


def _pyc(path: str) -> str:
    """Return where Python looks for a module's bytecode."""
    folder, name = os.path.split(path)
    return f"{folder}/__pycache__/{name.removesuffix('.py')}.{sys.implementation.cache_tag}.pyc"


def _files(package: str) -> Iterator[tuple[str, bytes]]:
    """Yield the modules of an installed package, by their place beside it; workers do not need its data."""
    from importlib.util import find_spec

    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is imported already"
    root = os.path.dirname(spec.origin)
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        for name in sorted(name for name in names if name.endswith(".py")):
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                yield os.path.relpath(path, os.path.dirname(root)), file.read()


def digest() -> str:
    """Return the digest of what this program lacks, "" if it lacks nothing."""
    loader: Any = __spec__.loader
    if not hasattr(loader, "archive"):
        return ""
    try:
        return str(loader.get_data(os.path.join(loader.archive, MEMBER)), "ascii")
    except OSError:
        return ""


def hang_bell(cache: str) -> int | None:
    """Have this worker's processes ask for what the program lacks; None if it lacks nothing.

    :param cache: the worker's.
    :returns: a descriptor that becomes readable when one of them asks.
    """
    if not digest():
        return None
    os.makedirs(cache, exist_ok=True)
    bell = os.path.join(cache, _BELL)
    with contextlib.suppress(FileExistsError):  # Of a host before this one.
        os.mkfifo(bell, 0o600)
    os.environ[VARIABLE] = cache
    return os.open(bell, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


def install() -> None:
    """Have imports wait for what the program lacks."""
    if VARIABLE in os.environ and digest():
        sys.meta_path.append(Finder)


class Finder:
    """Finds what the program lacks."""

    @staticmethod
    def find_spec(fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """Return where a module is, which is not in the program."""
        package, _, _ = fullname.rpartition(".")
        if package.partition(".")[0] != "ctxflow":
            return None
        return PathFinder.find_spec(fullname, [os.path.join(_brought(fullname), *package.split("."))])


def _brought(module: str) -> str:
    """Wait for the second file, and return its path; raise `ImportError` if it does not come."""
    from ctxflow.host.local_files import cached

    cache = os.environ[VARIABLE]
    place = cached(digest(), NAME, cache)
    deadline, rung = time.monotonic() + _LIMIT_SECONDS, float("-inf")
    while not os.path.exists(place):
        if time.monotonic() > deadline:
            raise ImportError(
                f"{module} did not come from the driver within {_LIMIT_SECONDS:.0f} s; what the driver prints says why",
                name=module,
            )
        if time.monotonic() > rung + _RING_SECONDS:  # Again and again: what was asked for may have failed.
            rung = time.monotonic()
            _ring(os.path.join(cache, _BELL), module)
        time.sleep(0.005)
    return place


def _ring(bell: str, module: str) -> None:
    try:
        descriptor = os.open(bell, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ImportError(f"{module} cannot be had: the worker is ending ({error.strerror})", name=module) from None
    try:
        with contextlib.suppress(BlockingIOError):  # Enough have asked.
            os.write(descriptor, b".")
    finally:
        os.close(descriptor)
