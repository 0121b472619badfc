# ruff: noqa: D103 - the functions say what they do
"""The functions that the engines' contract suite has workers run; workers import them from here."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def shifted(items: Sequence[int], *, by: int) -> list[int]:
    return [item + by for item in items]


def kept(items: Sequence[Any]) -> list[list[str]]:
    """Return the functions and constants that this library process keeps."""
    [library] = [each for each in gc.get_objects() if type(each).__qualname__ == "_Library"]
    return [sorted(library._functions) for _ in items]


def read(weights: str) -> str:
    return Path(weights).read_text()


def read_model(weights: str) -> tuple[str, str, int]:
    path = Path(weights) / "model.bin"
    return str(path), path.read_text(), path.stat().st_nlink


def leave(name: str) -> None:
    Path(name).write_text("left behind")


def there(context: Any, items: Sequence[Any]) -> list[Any]:
    return [context for _ in items]


def broken() -> None:
    print("printed first")  # noqa: T201 - it is what the test looks for
    raise ZeroDivisionError


def with_context(context: Any, items: Sequence[Any]) -> list[Any]:
    return [(context, item) for item in items]


def sleep_with_context(context: Any, seconds: Sequence[float]) -> Sequence[float]:
    return sleep(seconds)


def ignore(context: Any, seconds: Sequence[float]) -> Sequence[float]:
    """Run on, whatever is raised in it."""
    until = time.monotonic() + sum(seconds)
    while time.monotonic() < until:
        with contextlib.suppress(BaseException):
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


def yield_slowly(seconds: Sequence[float]) -> Iterator[float]:
    for each in seconds:
        time.sleep(each)
        yield each


def yield_noticed(items: Sequence[int], there: Sequence[str], go: Sequence[str]) -> Iterator[int]:
    """Stop at the 60th item until it may go on; then continue slowly."""
    for item in items:
        if item == 59:
            Path(there[0]).touch()
            while not Path(go[0]).exists():
                time.sleep(0.01)
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
