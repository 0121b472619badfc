"""What the names in a function mean, kept to notice that one of them means something else now.

A program may change what its functions use between two calls: `K = 3` in a notebook's cell, a helper defined anew, a
module that was reloaded. What was sent to workers is then out of date. To look is cheap enough for every call: names
are looked up again and objects compared by identity. What changes inside an object (a list that grows) is not seen
this way, but by a digest (digest.py), which takes a thousand times as long.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ctxflow.digest import code_names, is_library_module

_ABSENT = object()


class Referents:
    """The objects that the code of some functions refers to at this moment, also through the user's own helpers.

    :param functions: any callables; of those that are no Python functions of the user's nothing is known.

    >>> program = {"__name__": "__main__", "K": 2}
    >>> exec("def times(x): return x * K", program)
    >>> before = Referents(program["times"])
    >>> before.changed()
    False
    >>> program["K"] = 3
    >>> before.changed()
    True
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
        for function in _functions(value):
            if id(function) in self._met or is_library_module(function.__module__):
                continue
            self._met.add(id(function))
            kept = weakref.ref(function), function.__code__, function.__defaults__, function.__kwdefaults__
            self._codes.append(kept)
            names = code_names(function.__code__)
            self._add_names(function.__globals__, names)
            for cell in function.__closure__ or ():
                value = _content(cell)
                if type(value) is types.FunctionType:
                    self._closed.append((cell, weakref.ref(value)))
                else:
                    self._cells.append((cell, value))
                self._add(value)

    def _add_names(self, namespace: Mapping[str, Any], names: list[str]) -> None:
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
    for each in cls.__mro__:
        if not is_library_module(each.__module__):
            yield from (member for member in vars(each).values() if not isinstance(member, type))


# What runs functions when it is called, and which.
_HOLD: tuple[tuple[type, Callable[[Any], Iterable[Any]]], ...] = (
    (types.MethodType, lambda method: [method.__func__]),
    (functools.partial, lambda partial: [partial.func]),
    (staticmethod, lambda method: [method.__func__]),
    (classmethod, lambda method: [method.__func__]),
    (property, lambda made: [made.fget, made.fset, made.fdel]),
    (functools.cached_property, lambda made: [made.func]),
    (type, _members),
)


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """Yield the Python functions that calling something runs, as far as can be told."""
    if isinstance(value, types.FunctionType):
        yield value
    for kind, held in _HOLD:
        if isinstance(value, kind):
            for part in held(value):
                yield from _functions(part)
            return
    wrapped = getattr(value, "__wrapped__", None)  # Of a decorated function, an app, what functools.cache makes.
    if isinstance(wrapped, types.FunctionType):
        yield from _functions(wrapped)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT
