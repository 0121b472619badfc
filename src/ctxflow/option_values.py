"""Check options and functions where they are written.

A wrong type is a `TypeError`, a value out of bounds a `ValueError`; both say what to write.
"""

from __future__ import annotations

import enum
import functools
import inspect
import math
import numbers
import operator
from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

from ctxflow.errors import article, closest, header, name_of, short

_Called = TypeVar("_Called", bound=Callable[..., Any])


def refuse(name: str, value: Any, wanted: str, error: type[Exception]) -> Exception:
    """Return the error for an option that cannot be what it is."""
    return error(f"{name}={short(value)} makes no sense: give {wanted}")


def whole(name: str, value: Any, wanted: str, least: int | None = None) -> int:
    """Return an option that is a whole number, as an `int`; True and False are none.

    :param wanted: what to give, for the error.
    """
    # A boolean of numpy has an index before numpy 2.3.
    boolean = isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", "") == "b"
    if boolean or not hasattr(type(value), "__index__"):
        raise refuse(name, value, wanted, TypeError)
    try:
        number = operator.index(value)
    except TypeError:  # An array has an index in name only.
        raise refuse(name, value, wanted, TypeError) from None
    if least is not None and number < least:
        raise refuse(name, value, wanted, ValueError)
    return number


def number(name: str, value: Any, wanted: str, least: float = 0.0, most: float = math.inf, above: bool = False) -> Any:
    """Return an option that is a finite number, as an `int` or a `float`; True and False are none.

    :param above: whether it has to be more than the least.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise refuse(name, value, wanted, TypeError)
    found: int | float = int(value) if isinstance(value, numbers.Integral) else float(value)
    if not math.isfinite(found) or not least <= found <= most or (above and found == least):
        raise refuse(name, value, wanted, ValueError)
    return found


def flag(name: str, value: Any) -> bool:
    """Return an option that is True or False."""
    if not isinstance(value, bool):
        raise refuse(name, value, "True or False", TypeError)
    return value


def text(name: str, value: Any, wanted: str) -> str:
    """Return an option that is text, and not empty."""
    if not isinstance(value, str) or not value:
        raise refuse(name, value, wanted, ValueError if isinstance(value, str) else TypeError)
    return value


def choice(name: str, value: Any, among: Collection[str]) -> str:
    """Return an option that is one of some words."""
    if not isinstance(value, str) or value not in among:
        *others, last = map(repr, among)
        known = f"{', '.join(others)} or {last}" if others else last
        raise (ValueError if isinstance(value, str) else TypeError)(
            f"{name}={short(value)} is not known: write {known}"
        )
    return value


def refusing(what: str) -> Callable[[_Called], _Called]:
    """Make a function that takes options by name refuse others in a sentence that says which there are.

    :param what: who has them, such as "an app".

    >>> @refusing("a lamp")
    ... def lamp(*, colour="white"):
    ...     return colour
    >>> lamp(color="red")
    Traceback (most recent call last):
    TypeError: a lamp has no option 'color': it takes colour; did you mean 'colour'?
    """

    def decorate(function: _Called) -> _Called:
        parameters = inspect.signature(function).parameters.values()
        takes = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        named = {each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY}

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            for name in options:
                if name not in named:
                    meant = closest(name, takes)
                    hint = f"; did you mean {meant!r}?" if meant else ""
                    raise TypeError(f"{what} has no option {name!r}: it takes {', '.join(takes)}{hint}")
            return function(*args, **options)

        return cast(_Called, call)

    return decorate


class Unchanged(enum.Enum):
    """Stands for an option that `using` leaves as it is: None is a value that several may have."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return self.value


UNCHANGED = Unchanged.UNCHANGED


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given: those that are not `UNCHANGED`."""
    return {name: value for name, value in options.items() if value is not UNCHANGED}


def check_function(what: str, function: Any) -> None:
    """Refuse, with a `TypeError`, what cannot be called, or is async.

    :param what: what is to be made of it, such as "an app".
    """
    if not callable(function):
        kind = "None" if function is None else article(type(function).__name__)
        raise TypeError(f"{what} is made of a function, not of {kind}")
    refuse_async(function)


def is_async(function: Any) -> bool:
    """Return whether a function is async: its call gives a coroutine, or an async generator, not the result.

    >>> is_async(len)
    False
    """
    both = (function, getattr(type(function), "__call__", None))  # noqa: B004 - of an object that is called
    return any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in both)


def refuse_async(function: Any) -> None:
    """Refuse, with a `TypeError`, a function that is async: its call gives a coroutine, not the result."""
    if is_async(function):
        name = name_of(function)
        raise TypeError(
            f"{name} is async, which workers do not await: write {header(name)}, with asyncio.run(...) in it, or make "
            "it an @item_app, whose calls are awaited"
        )


class OptionsMethod:
    """A method `options(...)`, which gives a variant, and whose attributes are the options that its owner has `chosen`.

    So `app.options(priority=5)` is another app, and `app.options.priority` says which this one has.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method
        self.__doc__ = method.__doc__

    def __get__(self, owner: Any, kind: type) -> Any:
        return self.method if owner is None else _BoundOptions(self.method.__get__(owner), owner.chosen)


class _BoundOptions:
    def __init__(self, method: Callable[..., Any], chosen: Any) -> None:
        self.__wrapped__ = method
        self.__doc__ = method.__doc__
        self._chosen = chosen

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__wrapped__(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._chosen, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._chosen == (other._chosen if isinstance(other, _BoundOptions) else other))

    def __repr__(self) -> str:
        return f"<method options of {self._chosen!r}>"
