"""Context: the recipe of reusable state, its identity, and the `@context` decorator.

What lives here: what a worker needs to know to build a context, and nothing that it does not (a worker imports
this module). What does not: when and where a context is built (scheduler/), or how (host/).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import re
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, overload

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(size: int | str | None) -> int | None:
    """Bytes from a number or from text such as "10 GB" or "512MiB".

    :raises ValueError: for text that is no size, or a negative one.

    >>> parse_size("10 GB"), parse_size("2KiB"), parse_size(7), parse_size(None)
    (10000000000, 2048, 7, None)
    """
    if size is None or (isinstance(size, int) and size >= 0):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(size), re.IGNORECASE)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(f"{size!r} is no size: write a number of bytes, or text such as '10 GB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclasses.dataclass(frozen=True, eq=False)
class Context:
    """A recipe of reusable state: a function, its inputs, and what it needs to run.

    Nothing is built by making one. Two recipes with the same code, inputs, files and environment have the same
    `id`, compare equal and share one library process on each worker.

    :ivar name: what people see, the function's name.
    :ivar function: builds the state; runs once per worker, in the library process.
    :ivar files: parameter name -> path; staged to the worker, where the function gets the local path.
    :ivar environment: environment variables of the library process.
    :ivar gpus: GPUs that the state occupies.
    :ivar memory: host memory in bytes, None if unknown until it is measured.
    :ivar gpu_memory: memory in bytes on each GPU, None if unknown.
    :ivar load_timeout: seconds that building may take, None for no limit.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gpus: int = 0
    memory: int | None = None
    gpu_memory: int | None = None
    load_timeout: float | None = None

    @functools.cached_property
    def id(self) -> str:
        """The digest of the code, inputs, files and environment: 32 hex digits.

        :raises TypeError: if a captured object has no content to compare, naming it.
        :raises FileNotFoundError: if one of the files is not there.
        """
        from ctxflow.digest import digest

        return digest(self)

    def __ctxflow_digest__(self) -> object:
        """What makes it the recipe that it is."""
        from ctxflow.digest import digest_path

        files = {name: digest_path(path) for name, path in self.files.items()}
        return "context", self.function, self.args, dict(self.kwargs), files, dict(self.environment)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def build(self, paths: Mapping[str, str] | None = None) -> Any:
        """Build the state in this process and return what the function returns.

        Recipes among the inputs are built first and take their places, so contexts compose.

        :param paths: parameter name -> local path of each of `files`; by default the files where they are.

        >>> @context
        ... def table(base):
        ...     return {"value": base + 1}
        >>> table(41).build()
        {'value': 42}
        """
        args = [_built(value) for value in self.args]
        kwargs = {name: _built(value) for name, value in self.kwargs.items()}
        return self.function(*args, **kwargs, **(self.files if paths is None else paths))

    def dumps(self) -> bytes:
        """The recipe as bytes, which `loads` reads back on a worker.

        :raises TypeError: if something in it cannot be pickled, saying which object is to blame.
        """
        return dumps((self.function, self.args, dict(self.kwargs)), f"context {self.name}")

    def __repr__(self) -> str:
        shown = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"<context {self.name}({', '.join(shown)})>"


def _built(value: Any) -> Any:
    return value.build() if isinstance(value, Context) else value


class ContextFunction:
    """What `@context` makes of a function: call it for a recipe, `options` for a variant of it."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self._options = dict(options)

    def __call__(self, *args: Any, **kwargs: Any) -> Context:
        """The recipe of this function with these inputs; nothing is built."""
        return Context(name=self.function.__name__, function=self.function, args=args, kwargs=kwargs, **self._options)

    def options(self, **changes: Any) -> ContextFunction:
        """The same function with other files, environment or resources.

        >>> @context
        ... def nothing():
        ...     return None
        >>> nothing.options(gpus=2)().gpus
        2
        """
        return ContextFunction(self.function, {**self._options, **_checked(changes)})

    def __reduce__(self) -> tuple[Any, ...]:
        return ContextFunction, (self.function, self._options)

    def __ctxflow_digest__(self) -> object:
        return "context function", self.function, self._options


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    known = {"files", "environment", "gpus", "memory", "gpu_memory", "load_timeout"}
    if unknown := sorted(set(options) - known):
        raise TypeError(f"@context has no option {unknown[0]!r}: it takes {', '.join(sorted(known))}")
    checked = dict(options)
    for size in ("memory", "gpu_memory"):
        if size in checked:
            checked[size] = parse_size(checked[size])
    if "files" in checked:
        checked["files"] = {name: os.path.abspath(Path(path).expanduser()) for name, path in checked["files"].items()}
    if "environment" in checked:
        checked["environment"] = {name: str(value) for name, value in checked["environment"].items()}
    if checked.get("gpus", 0) < 0:
        raise ValueError("gpus= is the number of GPUs a context occupies: give 0 or more")
    return checked


@overload
def context(function: Callable[..., Any], /) -> ContextFunction: ...
@overload
def context(**options: Any) -> Callable[[Callable[..., Any]], ContextFunction]: ...


def context(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a function that builds reusable state into one that gives its recipe.

    Use it bare or with options: `files={"weights": path}` (staged to workers; the function gets local paths
    under these parameter names), `environment={"NAME": "value"}`, `gpus=1`, `memory="8 GB"`,
    `gpu_memory="6 GB"`, `load_timeout=600` (seconds).

    :raises TypeError: for an unknown option.
    :raises ValueError: for a size or number that makes no sense.

    >>> @context(gpus=1, memory="8 GB")
    ... def model(name):
    ...     return f"the model {name}"
    >>> recipe = model("tiny")
    >>> recipe
    <context model('tiny')>
    >>> recipe == model("tiny"), recipe == model("large")
    (True, False)
    """
    if function is not None:
        return ContextFunction(function, {})
    checked = _checked(options)
    return lambda decorated: ContextFunction(decorated, checked)


_loaded: Any = None


def _set_loaded(value: Any) -> None:
    """Remember what this library process built; host/library.py calls it."""
    global _loaded  # noqa: PLW0603 - one library process holds one built context: it is the process's state
    _loaded = value


def load_variable_from_context(name: str) -> Any:
    """A variable that the context function returned in its dict, read inside a call (the paper's Figure 3).

    :raises LookupError: outside a call with a context, or if the context has no such variable.
    """
    if not isinstance(_loaded, Mapping):
        raise LookupError(
            f"there is no variable {name!r} here: call this inside an app whose context function returns a dict"
        )
    if name not in _loaded:
        raise LookupError(f"the context has no variable {name!r}: it holds {', '.join(map(repr, _loaded)) or 'none'}")
    return _loaded[name]


load_variable_in_serverless = load_variable_from_context
"""The same, under the name that Parsl's proposal #3724 gives it."""


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
    """Whether a value is of nothing but plain data, which plain pickle, several times faster, sends as well."""
    kind = type(value)
    if kind in _SCALARS or (kind is dict and not value):
        return True
    if kind is not tuple and kind is not list:
        return False
    if _SCALARS.issuperset(map(type, value)):
        return True
    return depth > 0 and all(_is_plain(part, depth - 1) for part in value)


def blame(value: Any) -> tuple[str, Any]:
    """Where the smallest part of a value is that cannot be pickled, and that part.

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
        parts = [
            (f" {value.__name__}() closure variable {name}", cell.cell_contents)
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            if cell != types.CellType()
        ]
        names = [n for n in _names(value.__code__) if n in value.__globals__]
        parts += [(f" {value.__name__}() global {name}", value.__globals__[name]) for name in names]
        return [*parts, (f" {value.__name__}() defaults", (value.__defaults__, value.__kwdefaults__))]
    if isinstance(value, type):
        return [(f".{name}", item) for name, item in vars(value).items() if not name.startswith("__")]
    if hasattr(value, "__dict__"):
        return [(f".{name}", item) for name, item in vars(value).items()] + [(" class", type(value))]
    return []


def _names(code: types.CodeType) -> list[str]:
    """The names that the code and the functions inside it use."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for other in inner for name in _names(other))]))
