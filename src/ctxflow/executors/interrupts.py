"""Ctrl-C must not fall in the middle of a change: a person in a notebook interrupts a cell and goes on.

What does not live here: what an interrupt means to a map or a program (it ends them as it ends any loop).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # `signal.signal` takes five times as long: it makes enumerations.
import functools
import threading
import time
from collections.abc import Callable
from signal import SIGINT
from typing import Any, ParamSpec, TypeVar

from ctxflow.process_identity import Process

P = ParamSpec("P")
R = TypeVar("R")
_PATIENCE = 2.0


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Have a short function finish before an interrupt is raised.

    Should it not be short, an interrupt that comes seconds after the first is raised at once.
    """

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        if threading.get_ident() != Process.main_thread:
            return function(*args, **kwargs)  # Interrupts come to the main thread.
        caught: list[float] = []

        def note(number: int, frame: Any) -> None:
            caught.append(time.monotonic())
            if caught[-1] - caught[0] > _PATIENCE and callable(handler):
                handler(number, frame)

        handler = _signal.signal(SIGINT, note)
        if not callable(handler):
            _signal.signal(SIGINT, handler if handler is not None else _signal.SIG_DFL)
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            _signal.signal(SIGINT, handler)
            if caught:
                handler(SIGINT, None)

    return guarded
