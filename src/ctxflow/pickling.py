"""Pickling for another process, and which part of a value is to blame where that cannot be done.

Functions that Parsl has wrapped are unwrapped first, so that workers need not import Parsl, which takes half a second.
"""

from __future__ import annotations

import functools
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any


def dumps(
    value: Any, what: str, advice: str = "create it inside the function instead of passing or capturing it"
) -> bytes:
    """Pickle a value for another process.

    :param what: what the value is to the user, for the error message.
    :param advice: what to do where it cannot be pickled.
    :raises TypeError: if it cannot be pickled, naming the part that is to blame.
    """
    if _is_plain(value):
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    import cloudpickle  # The host imports this module, and never pickles.

    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        blamed, part = blame(value)
        place = f" at {blamed}" if blamed else ""
        raise TypeError(
            f"{what} cannot be sent: the {type(part).__module__}.{type(part).__qualname__} object"
            f"{place} cannot be pickled ({type(error).__name__}: {error}); {advice}"
        ) from None
    return data


_SCALARS = frozenset({type(None), bool, int, float, str, bytes})


def _is_plain(value: Any, depth: int = 3) -> bool:
    """Return whether a value is nothing but plain data, for which plain pickle, several times faster, will do."""
    kind = type(value)
    if kind in _SCALARS or (kind is dict and not value):
        return True
    if kind is not tuple and kind is not list:
        return False
    if _SCALARS.issuperset(map(type, value)):
        return True
    return depth > 0 and all(_is_plain(part, depth - 1) for part in value)


def blame(value: Any) -> tuple[str, Any]:
    """Return where the smallest part of a value is that cannot be pickled, and that part.

    >>> import threading
    >>> blame({"rate": 3, "guard": [threading.Lock()]})[0]
    "['guard'][0]"
    """
    import cloudpickle

    place, seen = "", {id(value)}
    while True:
        for step, part in _parts(value):
            if id(part) in seen:  # A recursive function or structure.
                continue
            try:
                cloudpickle.dumps(part)
            except Exception:
                seen.add(id(part))
                place, value = place + step, part
                break
        else:
            return place, value


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"[{n}]", item) for n, item in enumerate(value)]
    if isinstance(value, functools.partial):
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if isinstance(value, types.MethodType):
        return [(".__self__", value.__self__), (".__func__", value.__func__)]
    if isinstance(value, types.FunctionType):
        from ctxflow.digest import code_names

        parts = [
            (f" {value.__name__}() closure variable {name}", cell.cell_contents)
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            if cell != types.CellType()
        ]
        names = [n for n in code_names(value.__code__) if n in value.__globals__]
        parts += [(f" {value.__name__}() global {name}", value.__globals__[name]) for name in names]
        return [*parts, (f" {value.__name__}() defaults", (value.__defaults__, value.__kwdefaults__))]
    if isinstance(value, type):
        return [(f".{name}", item) for name, item in vars(value).items() if not name.startswith("__")]
    if hasattr(value, "__dict__"):
        return [(f".{name}", item) for name, item in vars(value).items()] + [(" class", type(value))]
    return []


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
    """Return the same function; where Parsl has wrapped it for its errors, wrapped by `ReturnsErrors`."""
    wrapped = getattr(function, "__globals__", {}).get("__name__") == "parsl.app.errors"
    return ReturnsErrors(function.__wrapped__) if wrapped and hasattr(function, "__wrapped__") else function
