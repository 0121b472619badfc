"""How the processes of a worker find this very ctxflow: on PYTHONPATH, and what a worker's program lacks of it.

The program that travels with each job holds what all workers run (worker_program.py). All else is a second file of the
very same ctxflow, which a worker gets once, from its driver or a peer: the first time that any process which the
program started, or one that inherited its environment, imports a module that is in there. The import waits meanwhile.
What does not live here: bringing it (vine_library.py, and executors/taskvine/stagings.py).
"""

from __future__ import annotations

import contextlib
import os
import site
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "ctxflow-rest.zip"
MEMBER = "ctxflow/host/rest.digest"
"""What a program that lacks something has its digest in."""
VARIABLE = "CTXFLOW_REST"
"""Where the cache is in which it will be."""
_BELL = "rest.wanted"
_RING_SECONDS, _LIMIT_SECONDS = 10.0, 120.0


def digest() -> str:
    """Return the digest of what the program lacks that this module is in, "" if it lacks nothing."""
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
    :raises OSError: if the cache cannot be written.
    """
    if not digest():
        return None
    os.makedirs(cache, exist_ok=True)
    bell = os.path.join(cache, _BELL)
    with contextlib.suppress(FileExistsError):  # Of a host before this one.
        os.mkfifo(bell, 0o600)
    os.environ[VARIABLE] = cache
    return os.open(bell, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)


class Finder:
    """Finds what the program lacks."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is, which is not in the program."""
        package, _, _ = fullname.rpartition(".")
        if package.partition(".")[0] != "ctxflow":
            return None
        return PathFinder.find_spec(fullname, [os.path.join(_brought(fullname), *package.split("."))])


def install() -> None:
    """Have imports wait for what the program lacks."""
    if VARIABLE in os.environ and digest():
        sys.meta_path.append(Finder)


def _brought(module: str) -> str:
    """Return the path of the second file, when it is there.

    :raises ImportError: if it does not come.
    """
    from ctxflow.host.file_cache import cached

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


_ORIGINAL_PATH = "CTXFLOW_ORIGINAL_PYTHONPATH"


def package_root() -> str:
    """Return where this very ctxflow is found: a directory, or the zip file that it is in (worker_program.py)."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def python_path(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables with which a process, wherever it starts, finds this very ctxflow; none if it is installed.

    What PYTHONPATH was is passed along, and `restore_python_path` gives it back to the user's code.

    :param environment: variables of the process's own, which may have a PYTHONPATH.
    """
    own = package_root()
    if os.path.realpath(own) in map(os.path.realpath, _site_directories()):
        return {}
    inherited = os.environ.get(_ORIGINAL_PATH, os.environ.get("PYTHONPATH", ""))
    original = (environment or {}).get("PYTHONPATH", inherited)
    given = [os.path.abspath(path) for path in original.split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join([*given, own]), _ORIGINAL_PATH: original}


def restore_python_path() -> None:
    """Give PYTHONPATH the value that it had before `python_path`, for the user's code and what that starts."""
    original = os.environ.pop(_ORIGINAL_PATH, None)
    if original:
        os.environ["PYTHONPATH"] = original
    elif original is not None:
        os.environ.pop("PYTHONPATH", None)


def _site_directories() -> list[str]:
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
