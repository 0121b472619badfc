"""What apps and contexts may be made of, told where they are declared. Pure.

What does not live here: which parameters an app's function needs (apps.py).
"""

from __future__ import annotations

import inspect
from typing import Any

from ctxflow.wording import article


def check_function(what: str, function: Any) -> None:
    """See that something can be called, and gives what it gives when it is.

    :param what: what is to be made of it, such as "an app".
    :raises TypeError: if it cannot be called, or is async.

    >>> check_function("an app", None)
    Traceback (most recent call last):
    TypeError: an app is made of a function, not of None
    """
    if not callable(function):
        kind = "None" if function is None else article(type(function).__name__)
        raise TypeError(f"{what} is made of a function, not of {kind}")
    refuse_async(function)


def refuse_async(function: Any) -> None:
    """See that a call of a function gives its result, not a coroutine.

    :raises TypeError: if it is async.

    >>> async def fetch(urls): ...
    >>> refuse_async(fetch)
    Traceback (most recent call last):
    TypeError: fetch is async, which workers do not await: write def fetch(...), with asyncio.run(...) in it
    """
    for each in (function, getattr(type(function), "__call__", None)):  # noqa: B004 - of an object that is called
        if inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each):
            name = name_of(function)
            raise TypeError(
                f"{name} is async, which workers do not await: write {header(name)}, with asyncio.run(...) in it"
            )


def header(name: str, parameters: str = "...") -> str:
    """Return how the definition of a function begins.

    >>> header("upper", "texts"), header("<lambda>")
    ('def upper(texts)', 'def f(...)')
    """
    return f"def {name if name.isidentifier() else 'f'}({parameters})"


def name_of(function: Any) -> str:
    """Return what its user calls a function."""
    return str(getattr(getattr(function, "func", function), "__name__", type(function).__name__))
