"""Slow workers: calls made to take longer than they do.

A library process whose environment has `CTXFLOW_AROUND_CALLS=ctxflow.testing.slow_calls:slowed` calls what `slowed`
makes of an app's function. The option `slowdowns` of the embedded engine sets it.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Generator, Mapping
from types import GeneratorType
from typing import Any

_FASTEST_CARD = 5.58  # The testbed's H100, beside an A10.


def slowdown(environment: Mapping[str, str]) -> float:
    """Return how many times longer calls are to take in a process with this environment.

    It is `CTXFLOW_SLOWDOWN`. The testbed's cards are advertised, not real: with `CTXFLOW_TESTBED_SLOW=1` each is as
    slow beside the fastest as the real one.

    >>> slowdown({"CTXFLOW_TESTBED_SLOW": "1", "CTXFLOW_TESTBED_SPEED": "1.00"})
    5.58
    """
    if environment.get("CTXFLOW_TESTBED_SLOW") == "1" and environment.get("CTXFLOW_TESTBED_SPEED"):
        return _FASTEST_CARD / float(environment["CTXFLOW_TESTBED_SPEED"])
    return float(environment.get("CTXFLOW_SLOWDOWN", "1"))


def slowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same and takes as much longer as this process's environment says."""
    factor = slowdown(os.environ)
    if factor <= 1:
        return function

    @functools.wraps(function)
    def slower(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        result = function(*args, **kwargs)
        if type(result) is GeneratorType:
            return slower_items(result, factor)
        time.sleep((time.monotonic() - began) * (factor - 1))
        return result

    return slower


def slower_items(results: Generator[Any, Any, Any], factor: float) -> Generator[Any, Any, None]:
    """Yield the same, each so many times later."""
    try:
        while True:
            began = time.monotonic()
            try:
                result = next(results)
            except StopIteration:
                return
            time.sleep((time.monotonic() - began) * (factor - 1))
            yield result
    finally:
        results.close()
