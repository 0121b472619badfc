"""Identity of Python code and values by content: the same in any process and on any day.

`digest` walks functions (their bytecode, constants, closures, and the helpers they name), classes and plain data.
"""

from __future__ import annotations

import contextlib
import copyreg
import dis
import functools
import hashlib
import importlib.util
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

from ctxflow.files import digest_path

_SIZE = 16
_LIBRARY_PATHS = tuple(
    {os.path.realpath(p) + os.sep for p in (sysconfig.get_paths().get(k) for k in ("stdlib", "platstdlib")) if p}
)

# Kinds of objects that are digested by their parts.
_MADE_OF: tuple[tuple[Any, Callable[[Any], object]], ...] = (
    (types.MethodType, lambda method: (method.__func__, method.__self__)),
    (functools.partial, lambda partial: (partial.func, partial.args, partial.keywords)),
    ((staticmethod, classmethod), lambda method: method.__func__),
    (property, lambda made: (made.fget, made.fset, made.fdel)),
    (functools.cached_property, lambda made: made.func),
    (PurePath, str),
    ((weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet), lambda cache: None),
)
# What Python and the standard library add to classes, which says nothing that their members do not.
_MADE = {
    "__dict__", "__weakref__", "__module__", "__doc__", "__abstractmethods__", "_abc_impl", "__firstlineno__",
    "__static_attributes__", "__annotate_func__", "__annotations_cache__", "__classdictcell__", "__signature__",
    "__slotnames__",
}  # fmt: skip


def is_library_module(name: str | None) -> bool:
    """Return whether a module belongs to the installation (standard library, site-packages, ctxflow), not to the user.

    Library code is identified by name; a user's code by its content.
    """
    if not name or name == "__main__":
        return False
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top == "ctxflow":
        return True
    module = sys.modules.get(name) or sys.modules.get(top)
    origin = getattr(module, "__file__", None) if module else _origin(name)
    if origin is None:
        return False
    path = os.path.realpath(origin)
    return "site-packages" in path or "dist-packages" in path or path.startswith(_LIBRARY_PATHS)


def _origin(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    return spec.origin if spec else None


def digest(value: object) -> str:
    """Return the content digest (32 hex digits) of a Python value.

    Equal code and equal inputs give equal digests in every process of one Python minor version, whatever the
    hash seed, the file's place or the line numbers; a changed helper function of the user's gives another.

    :param value: plain data, arrays, functions, classes, dataclasses, or anything that pickles by parts.
    :raises TypeError: for an object with no content to digest (a lock, an open file), naming where it is.

    >>> digest({"a": 1, "b": {2, 3}}) == digest({"b": {3, 2}, "a": 1})
    True
    >>> digest(lambda x: x + 1) == digest(lambda x: x + 2)
    False
    """
    return _Walker().hex(value)


class _Walker:
    """One walk over a value: it remembers what it is inside of, so that cycles end.

    The user's functions and classes are walked once, and known by their number from then on, so that a walk takes time
    in proportion to the code.
    """

    def __init__(self, outer: _Walker | None = None) -> None:
        self.inside: dict[int, int] = dict(outer.inside) if outer else {}
        self.met: dict[int, tuple[int, object]] = dict(outer.met) if outer else {}
        self.trail: list[str] = list(outer.trail) if outer else []
        self.reduced_types: set[type] = set(outer.reduced_types) if outer else set()

    def again(self, value: object) -> bytes | None:
        """Return the name of a function or class that this walk met before; else note it."""
        known = self.met.get(id(value))
        if known is not None:
            return f"met-{known[0]}".encode()
        self.met[id(value)] = (len(self.met), value)
        return None

    def hex(self, value: object, step: str = "") -> str:
        seen = self.inside.get(id(value))
        if seen is not None:
            return f"cycle-{len(self.inside) - seen}"
        self.inside[id(value)] = len(self.inside)
        self.trail.append(step)
        hasher = hashlib.blake2b(digest_size=_SIZE)
        for part in self.parts(value):
            hasher.update(len(part).to_bytes(8, "big"))
            hasher.update(part)
        self.trail.pop()
        del self.inside[id(value)]
        return hasher.hexdigest()

    def parts(self, value: object) -> Iterator[bytes]:
        own = getattr(value, "__ctxflow_digest__", None)
        if own is not None and not isinstance(value, type):
            yield b"own"
            yield self.hex(own()).encode()
        elif value is None or (
            isinstance(value, (bool, int, float, complex, str)) and type(value).__module__ == "builtins"
        ):
            yield type(value).__name__.encode()
            yield repr(value).encode("utf-8", "surrogatepass")
        elif isinstance(value, (bytes, bytearray, memoryview)):
            yield b"bytes"
            yield bytes(value)
        elif isinstance(value, types.ModuleType):
            yield f"module {value.__name__}".encode()
        elif isinstance(value, types.CodeType):
            yield from self.code(value)
        elif isinstance(value, types.FunctionType):
            yield from self.function(value)
        elif isinstance(value, type):
            yield from self.class_(value)
        else:
            yield from self.data(value)

    def data(self, value: Any) -> Iterator[bytes]:
        for kind, parts in _MADE_OF:
            if isinstance(value, kind):
                yield type(value).__name__.encode()
                yield self.hex(parts(value)).encode()
                return
        if type(value) in (list, tuple):
            yield type(value).__name__.encode()
            for n, item in enumerate(value):
                yield self.hex(item, f"[{n}]").encode()
        elif type(value) in (dict, types.MappingProxyType):
            yield b"dict"
            keys = {self.hex(name): name for name in value}
            for key in sorted(keys):
                yield (key + self.hex(value[keys[key]], f"[{keys[key]!r}]")).encode()
        elif type(value) in (set, frozenset):
            yield type(value).__name__.encode()
            # Each item by a walk of its own, since the order of a set is not the same in every process.
            yield from (h.encode() for h in sorted(_Walker(self).hex(item) for item in value))
        elif isinstance(value, (types.BuiltinFunctionType, types.BuiltinMethodType)) and (
            value.__self__ is None or isinstance(value.__self__, types.ModuleType)
        ):
            yield f"builtin {value.__module__}.{value.__qualname__}".encode()
        elif hasattr(value, "dtype") and hasattr(value, "tobytes") and hasattr(value, "shape"):
            yield f"array {value.dtype} {tuple(value.shape)}".encode()
            if getattr(value.dtype, "hasobject", False):  # Its bytes are addresses.
                yield self.hex(value.tolist()).encode()
            else:
                yield value.tobytes()
        else:
            yield from self.reduced(value)

    def reduced(self, value: Any) -> Iterator[bytes]:
        """Yield the parts of any other object that pickle would take."""
        reducer = copyreg.dispatch_table.get(type(value))
        try:
            reduced = reducer(value) if reducer else value.__reduce_ex__(4)
        except Exception as error:
            raise TypeError(
                f"cannot identify {_place(self.trail)}: a {type(value).__module__}.{type(value).__qualname__} has no "
                f"content to compare ({error}); create it inside the function instead of passing or capturing it"
            ) from None
        if isinstance(reduced, str):
            yield f"global {type(value).__module__}.{reduced}".encode()
            if hasattr(value, "__wrapped__"):  # Such as what functools.cache makes of a function.
                yield self.hex(value.__wrapped__).encode()
            return
        yield b"object"
        self.reduced_types.add(type(value))
        for n, part in enumerate(reduced[:3]):
            yield self.hex(part, "" if n == 0 else ".state").encode()
        for iterator in reduced[3:5]:
            yield self.hex(list(iterator) if iterator is not None else None).encode()

    def function(self, function: types.FunctionType) -> Iterator[bytes]:
        if is_library_module(function.__module__) and "<" not in function.__qualname__:
            yield f"library {function.__module__}.{function.__qualname__}".encode()
            return
        if again := self.again(function):
            yield again
            return
        name = function.__name__
        yield f"function {name}".encode()
        yield self.hex(function.__code__, f"{name}()").encode()
        yield self.hex((function.__defaults__, function.__kwdefaults__), f"{name}() defaults").encode()
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # Nothing is in it yet.
                continue
            yield self.hex(content, f"{name}() closure variable {variable}").encode()
        yield from self.globals_of(function.__code__, function.__globals__, name)

    def globals_of(self, code: types.CodeType, namespace: dict[str, Any], function: str) -> Iterator[bytes]:
        """Yield what the code's global names mean: the user's helpers by content, libraries by name."""
        names = sorted(code_names(code))
        for name in names:
            value = namespace.get(name, namespace)
            if value is not namespace:
                yield name.encode()
                yield self.hex(value, f"{function}() global {name}").encode()
                if isinstance(value, types.ModuleType):
                    yield from self.attributes(value, names, name, set())
        for module in sorted(_imports(code, namespace.get("__package__"))):
            origin = None if is_library_module(module) else _origin(module)
            if origin and origin.endswith(".py"):
                # A module of the user's that the function imports when it runs: its whole text counts.
                yield f"import {module} {digest_path(origin)}".encode()

    def attributes(
        self, module: types.ModuleType, names: list[str], path: str, seen: set[types.ModuleType]
    ) -> Iterator[bytes]:
        """Yield what code that has a module of the user's may take from it, also through modules inside it."""
        if is_library_module(module.__name__) or module in seen:
            return
        seen.add(module)
        for name in names:
            if name in vars(module):
                value = vars(module)[name]
                yield f"{path}.{name}".encode()
                yield self.hex(value, f"{path}.{name}").encode()
                if isinstance(value, types.ModuleType):
                    yield from self.attributes(value, names, f"{path}.{name}", seen)

    def code(self, code: types.CodeType) -> Iterator[bytes]:
        yield code.co_code
        yield repr((code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags)).encode()
        yield repr((code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)).encode()
        for constant in code.co_consts:
            # The body of a class holds its line number, since Python 3.13.
            if not ("__firstlineno__" in code.co_names and constant == code.co_firstlineno):
                yield self.hex(constant).encode()

    def class_(self, cls: type) -> Iterator[bytes]:
        yield f"class {cls.__qualname__}".encode()
        if is_library_module(cls.__module__):
            yield cls.__module__.encode()
            return
        if again := self.again(cls):
            yield again
            return
        for base in cls.__bases__:
            yield self.hex(base).encode()
        # Reducing an object writes __slotnames__ into its class: the digests in files have it of objects alone.
        written = {"__slotnames__"} if cls in self.reduced_types else set[str]()
        for name in sorted(set(vars(cls)) - (_MADE - written)):
            member = vars(cls)[name]
            made = isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType))
            made = made or (name == "__annotations__" and not member)  # Python makes it where it is asked for.
            if not made and (name == "__pydantic_fields__" or not name.startswith("__pydantic_")):
                yield name.encode()
                yield self.hex(member, f"{cls.__name__}.{name}").encode()


def all_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from all_code(constant)


def code_names(code: types.CodeType) -> list[str]:
    """Return the names that the code and the functions inside it use."""
    return list(dict.fromkeys(name for each in all_code(code) for name in each.co_names))


def _imports(code: types.CodeType, package: str | None) -> set[str]:
    """Return the modules that the code imports when it runs, and what may be modules among the names from them."""
    found: set[str] = set()
    level: Any = None
    names: Any = None
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            module = "." * (level or 0) + step.argval
            with contextlib.suppress(ImportError):  # A relative import outside a package.
                module = importlib.util.resolve_name(module, package)
                found |= {module, *(f"{module}.{name}" for name in names or ())}
        elif step.opname not in ("EXTENDED_ARG", "CACHE"):
            level, names = names, step.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _imports(constant, package)
    return found


def _place(trail: list[str]) -> str:
    """Return where a walk is, in words."""
    place = ""
    for step in filter(None, trail):
        place += step if step[0] in "[." or not place else f", {step}"
    return place or "the value itself"
