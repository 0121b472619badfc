"""What values and functions refer to: pickled for another process, and watched for changes.

Functions that Parsl has wrapped are unwrapped first, so that workers need not import Parsl, which takes half a second.
"""

from __future__ import annotations

import functools
import logging
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
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
        if (by_name := _by_name(value, what)) is not None:
            return by_name
        blamed, part = blame(value)
        place = f" at {blamed}" if blamed else ""
        if _is_future(part):
            advice = "a future is waited for where it is an item or in a tuple that is one: else give its result()"
        raise TypeError(
            f"{what} cannot be sent: the {type(part).__module__}.{type(part).__qualname__} object"
            f"{place} cannot be pickled ({type(error).__name__}: {error}); {advice}"
        ) from None
    return data


CARRIED: dict[str, types.ModuleType] = {}
"""The user's modules that functions travel with, since they have changed in this program while workers ran."""


def _by_name(value: Any, what: str) -> bytes | None:
    """Pickle a value whose modules cannot travel with it, for workers that import them; None if that is not why."""
    import cloudpickle

    carried = list(CARRIED.values())
    if not carried:
        return None
    for module in carried:
        cloudpickle.unregister_pickle_by_value(module)
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception:
        return None
    finally:
        for module in carried:
            cloudpickle.register_pickle_by_value(module)
    logging.getLogger("ctxflow").warning(
        "%s: what has changed in your modules does not reach workers that run, for they hold what cannot be sent: "
        "start the executor again",
        what,
    )
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
    """Return where the smallest part of a value is that cannot be pickled, and that part."""
    import cloudpickle

    place, seen = "", {id(value)}
    while not _is_future(value):
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
            break
    return place, value


def _is_future(value: Any) -> bool:
    return callable(getattr(value, "add_done_callback", None)) and not isinstance(value, type)


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


_ABSENT = object()


class Referents:
    """The objects that the code of some functions refers to at this moment, also through the user's own helpers.

    Names are looked up again and objects compared by identity, which is cheap enough for every call. What changes
    inside an object (a list that grows) is seen by a digest alone.

    :param functions: any callables; nothing is known of those that are no Python functions of the user's.
    """

    def __init__(self, *functions: Any) -> None:
        self._names: list[tuple[Mapping[str, Any], str, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        # Functions are not held: what is kept of one by its own referents would never go.
        self._named: list[tuple[Mapping[str, Any], str, weakref.ref[types.FunctionType]]] = []
        self._closed: list[tuple[types.CellType, weakref.ref[types.FunctionType]]] = []
        self._codes: list[tuple[weakref.ref[types.FunctionType], types.CodeType, Any, Any]] = []
        self._met: set[int] = set()
        for function in functions:
            self._add(function)

    def changed(self) -> bool:
        """Return whether a name means another object, or a function has other code, than when this was made."""
        for namespace, name, value in self._names:
            if namespace.get(name, _ABSENT) is not value:
                return True
        for cell, value in self._cells:
            if _content(cell) is not value:
                return True
        for namespace, name, known in self._named:
            if namespace.get(name, _ABSENT) is not known():
                return True
        for cell, known in self._closed:
            if _content(cell) is not known():
                return True
        for known, code, defaults, keyword_defaults in self._codes:
            function = known()
            if function is None or function.__code__ is not code or function.__defaults__ is not defaults:
                return True
            if function.__kwdefaults__ is not keyword_defaults:
                return True
        return False

    def _add(self, value: Any) -> None:
        from ctxflow.digest import code_names, is_library_module  # Workers import this module, and never do this.

        for function in functions_in(value):
            if id(function) in self._met or is_library_module(function.__module__):
                continue
            self._met.add(id(function))
            defaults = function.__defaults__, function.__kwdefaults__
            self._codes.append((weakref.ref(function), function.__code__, *defaults))
            self._add_names(function.__globals__, code_names(function.__code__))
            for cell in function.__closure__ or ():
                value = _content(cell)
                if type(value) is types.FunctionType:
                    self._closed.append((cell, weakref.ref(value)))
                else:
                    self._cells.append((cell, value))
                self._add(value)

    def _add_names(self, namespace: Mapping[str, Any], names: list[str]) -> None:
        from ctxflow.digest import is_library_module

        for name in names:
            value = namespace.get(name, _ABSENT)
            if type(value) is types.FunctionType:
                self._named.append((namespace, name, weakref.ref(value)))
            else:
                self._names.append((namespace, name, value))
            if isinstance(value, types.ModuleType):
                if id(value) not in self._met and not is_library_module(value.__name__):
                    self._met.add(id(value))
                    self._add_names(vars(value), names)
            else:
                self._add(value)


def _members(cls: type) -> Iterator[Any]:
    from ctxflow.digest import is_library_module

    for each in cls.__mro__:
        if not is_library_module(each.__module__):
            yield from (member for member in vars(each).values() if not isinstance(member, type))


# What runs functions when it is called, and which.
_HOLD: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    ((types.MethodType, staticmethod, classmethod), lambda method: [method.__func__]),
    (functools.partial, lambda partial: [partial.func]),
    (property, lambda made: [made.fget, made.fset, made.fdel]),
    (functools.cached_property, lambda made: [made.func]),
    (type, _members),
)


def functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yield the Python functions that calling something runs, as far as is known."""
    if isinstance(value, types.FunctionType):
        yield value
    for kind, held in _HOLD:
        if isinstance(value, kind):
            for part in held(value):
                yield from functions_in(part)
            return
    wrapped = getattr(value, "__wrapped__", None)  # Of a decorated function, an app, what functools.cache makes.
    if isinstance(wrapped, types.FunctionType):
        yield from functions_in(wrapped)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT
