"""What Parsl makes of an app's function, for workers that need not import Parsl: that takes half a second of a core.

What does not live here: how a call is submitted (executors/submission.py), and run (host/library.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class ReturnsErrors:
    """A function that gives what it raises, wrapped as Parsl wants it: `parsl.app.errors.wrap_error`.

    Parsl is imported by a call that raises, as it would be by any.
    """

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        try:
            return self.func(*args, **kwargs)
        except Exception:
            from parsl.app.errors import RemoteExceptionWrapper

            return RemoteExceptionWrapper(*sys.exc_info())


def without_parsl(function: Any) -> Any:
    """The same function; where Parsl has wrapped it for its errors, wrapped by us."""
    wrapped = getattr(function, "__globals__", {}).get("__name__") == "parsl.app.errors"
    return ReturnsErrors(function.__wrapped__) if wrapped and hasattr(function, "__wrapped__") else function
