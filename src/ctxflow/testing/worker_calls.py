# ruff: noqa: D103 - the functions say what they do
"""What workers run in tests: calls made to take longer than they do, and the functions of the contract suites.

A library process whose environment has `CTXFLOW_AROUND_CALLS=ctxflow.testing.worker_calls:slowed` calls what `slowed`
makes of an app's function. The option `slowdowns` of the embedded engine sets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import CoroutineType, GeneratorType
from typing import Any

_FASTEST_CARD = 5.58  # The testbed's H100, beside an A10.


def slowdown(environment: Mapping[str, str]) -> float:
    """Return how many times longer calls are to take in a process with this environment: `CTXFLOW_SLOWDOWN`.

    With `CTXFLOW_TESTBED_SLOW=1` each of the testbed's advertised cards is as slow beside the fastest as a real one.

    >>> slowdown({"CTXFLOW_TESTBED_SLOW": "1", "CTXFLOW_TESTBED_SPEED": "1.00"})
    5.58
    """
    if environment.get("CTXFLOW_TESTBED_SLOW") == "1" and environment.get("CTXFLOW_TESTBED_SPEED"):
        return _FASTEST_CARD / float(environment["CTXFLOW_TESTBED_SPEED"])
    return float(environment.get("CTXFLOW_SLOWDOWN", "1"))


def slowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, slowed down as this process's environment says."""
    factor = slowdown(os.environ)
    if factor <= 1:
        return function

    @functools.wraps(function)
    def slower(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        result = function(*args, **kwargs)
        if type(result) is GeneratorType:
            return slower_items(result, factor)
        if type(result) is CoroutineType:
            return slower_item(result, factor)
        time.sleep((time.monotonic() - began) * (factor - 1))
        return result

    return slower


async def slower_item(result: Coroutine[Any, Any, Any], factor: float) -> Any:
    """Return the same of an item in flight, so many times later."""
    began = time.monotonic()
    returned = await result
    await asyncio.sleep((time.monotonic() - began) * (factor - 1))
    return returned


def slower_items(results: Generator[Any, Any, Any], factor: float) -> Generator[Any, Any, None]:
    """Yield the same, each so many times later."""
    with contextlib.closing(results):
        began = time.monotonic()
        for result in results:
            time.sleep((time.monotonic() - began) * (factor - 1))
            yield result
            began = time.monotonic()


def slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def shifted(items: Sequence[int], *, by: int) -> list[int]:
    return [item + by for item in items]


def kept(items: Sequence[Any]) -> list[list[str]]:
    """Return the functions and constants that this library process keeps."""
    [library] = [each for each in gc.get_objects() if type(each).__qualname__ == "LibraryCalls"]
    return [sorted(library._functions) for _ in items]


def read(weights: str) -> str:
    return Path(weights).read_text().split()[0]


def read_model(weights: str) -> tuple[str, str, int]:
    path = Path(weights) / "model.bin"
    return str(path), read(str(path)), path.stat().st_nlink


def leave(name: str) -> None:
    Path(name).write_text("left behind")


def pid_of(context: Any, items: Sequence[Any]) -> list[int]:
    return [os.getpid() for _ in items]


def there(context: Any, items: Sequence[Any]) -> list[Any]:
    return [context for _ in items]


def broken() -> None:
    print("printed first")  # noqa: T201 - it is what the test looks for
    raise ZeroDivisionError


def with_context(context: Any, items: Sequence[Any]) -> list[Any]:
    return [(context, item) for item in items]


def sleep_with_context(context: Any, seconds: Sequence[float], begun: Sequence[str] = ()) -> Sequence[float]:
    """Sleep; `begun` names a file to make first."""
    for path in begun:
        Path(path).touch()
    return sleep(seconds)


def ignore(context: Any, seconds: Sequence[float], begun: Sequence[str] = ()) -> Sequence[float]:
    """Run on, whatever is raised in it; `begun` names a file to make once that is so."""
    until = time.monotonic() + sum(seconds)
    while time.monotonic() < until:
        with contextlib.suppress(BaseException):
            for path in begun:
                Path(path).touch()
            time.sleep(until - time.monotonic())
    return seconds


def count_slowly(context: Any, items: Sequence[int], log: Sequence[str]) -> Iterator[int]:
    """Yields one item after another, for a minute; what is left of it when it is closed says so."""
    try:
        for item in items:
            time.sleep(0.05)
            yield item
        time.sleep(60)
    finally:
        Path(log[0]).write_text("closed")


def add(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)]


def same(items: Sequence[Any]) -> Sequence[Any]:
    return items


def as_one(items: Sequence[Any]) -> str:
    return "x" * len(items)


def yield_slowly(seconds: Sequence[float], go: Sequence[str] = ()) -> Iterator[float]:
    """Sleep for each item, then yield it; if `go` names a file, wait for it before the last."""
    for number, each in enumerate(seconds, 1):
        time.sleep(each)
        if number == len(go):
            wait_for(go[0])
        yield each


def wait_for(path: str) -> None:
    """Wait until a file exists, which is how a test tells a call in another process to go on."""
    while not Path(path).exists():
        time.sleep(0.01)


def yield_noticed(items: Sequence[int], there: Sequence[str], go: Sequence[str]) -> Iterator[int]:
    """Stop at the 60th item until it may go on; then continue slowly."""
    for item in items:
        if item == 59:
            Path(there[0]).touch()
            wait_for(go[0])
        yield -item


def yield_badly(items: Sequence[Any]) -> Iterator[Any]:
    for item in items:
        if item == "raise":
            raise ValueError("this one")
        if item == "stop":
            return
        yield threading.Lock() if item == "odd" else item
        if item == "twice":
            yield item
    if "raise after" in items:
        raise KeyError("too late")


def sleep(seconds: Sequence[float]) -> Sequence[float]:
    time.sleep(sum(seconds))
    return seconds


def complain(keys: Sequence[str]) -> list[str]:
    print("about to raise")  # noqa: T201 - it is what the test looks for
    empty: dict[str, str] = {}
    return [empty[key] for key in keys]


def lose_device(items: Sequence[Any] = ()) -> None:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def crash(context: Any, items: Sequence[Any]) -> None:
    ctypes.string_at(0)
