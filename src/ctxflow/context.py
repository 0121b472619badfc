"""`@context`: what makes a function a recipe of reusable state, and every option of it.

A worker imports this module: it needs the standard library and cloudpickle alone.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar, overload

from ctxflow.errors import short
from ctxflow.option_values import (
    UNCHANGED,
    Unchanged,
    choice,
    given,
    number,
    refuse,
    refusing,
    whole,
)
from ctxflow.recipe import AFFINITIES, Context, Params, Value, composed
from ctxflow.renamed import options_renamed


def _bound(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], files: Collection[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a call in one form, whether they were given by position or by name.

    :param files: parameters that get their values when the context is built, by name.
    """
    try:
        # What a decorator has wrapped may take other inputs than what is called.
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # Some functions of compiled modules have none.
        return args, kwargs
    name = getattr(function, "__name__", type(function).__name__)
    if twice := sorted(set(files) & set(kwargs)):
        raise TypeError(f"{name} gets {twice[0]!r} from files=: leave it out of the call")
    parameters = signature.parameters
    for file in files:
        kind = parameters[file].kind if file in parameters else None
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY) and not takes_any:
            raise TypeError(f"{name} has no parameter {file!r} that files= could give by name: it takes {signature}")
    try:
        free = signature.replace(parameters=[p for p in parameters.values() if p.name not in files])
        given = free.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{name} cannot be called with these inputs: {error}; it takes {signature}") from None
    return _by_place(name, parameters, given)


def _by_place(
    name: str, parameters: Mapping[str, inspect.Parameter], given: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs by position up to the first parameter that has none, by name from there on."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    gap = False
    for parameter in parameters.values():
        if parameter.name not in given:
            gap = gap or parameter.kind is not parameter.VAR_POSITIONAL
        elif parameter.kind is parameter.VAR_POSITIONAL:
            if gap:
                raise TypeError(f"{name} gets a parameter before *{parameter.name} from files=: put it after that")
            args += given[parameter.name]
        elif parameter.kind is parameter.VAR_KEYWORD:
            kwargs.update(given[parameter.name])
        elif gap or parameter.kind is parameter.KEYWORD_ONLY:
            kwargs[parameter.name] = given[parameter.name]
        else:
            args.append(given[parameter.name])
    return tuple(args), kwargs


_P = ParamSpec("_P")
_V = TypeVar("_V")
Paths = Mapping[str, str | os.PathLike[str]]
Variables = Mapping[str, str | int | float | os.PathLike[str]]
Affinity = Literal["guaranteed", "best-effort"]
Preload = Sequence[str] | Literal[False]
Artifacts = Mapping[str, str] | Literal[False]

NO_OPTIONS: Mapping[str, Any] = {}
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_size(size: int | str | None) -> int | None:
    """Return bytes from a number or from text such as "10 GB" or "512MiB"."""
    if size is None or (isinstance(size, int) and size >= 0):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(size), re.IGNORECASE)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(f"{size!r} is no size: write a number of bytes, or text such as '10 GB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as a recipe keeps them; refuse wrong ones, saying what to write."""
    return {name: _OPTIONS[name](value) for name, value in options.items()}


def _memory(value: Any) -> int | None:
    size = _size("memory")(value)
    if size == 0:
        wanted = "the bytes that it takes with its calls, or text such as '10 GB', or leave it out to have no limit"
        raise refuse("memory", value, wanted, ValueError)
    return size


def _size(name: str) -> Callable[[Any], int | None]:
    def check(value: Any) -> int | None:
        if value is not None and not isinstance(value, str):
            return whole(name, value, "a number of bytes, or text such as '10 GB'", 0)
        try:
            return parse_size(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    return check


def _check_dict(name: str, value: Any, wanted: str, kinds: tuple[type, ...]) -> None:
    named = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if not named or not all(isinstance(each, kinds) for each in value.values()):
        raise refuse(name, value, wanted, TypeError)


def _files(value: Any) -> dict[str, str]:
    wanted = 'a dict of paths by parameter name, such as files={"weights": "model/"}'
    _check_dict("files", value, wanted, (str, os.PathLike))
    return {name: os.path.abspath(os.path.expanduser(path)) for name, path in value.items()}


def _env(value: Any) -> dict[str, str]:
    wanted = 'a dict of text by name, such as env={"OMP_NUM_THREADS": "4"}'
    _check_dict("env", value, wanted, (str, int, float, os.PathLike))
    return {name: str(each) for name, each in value.items()}


def _load_timeout(value: Any) -> Any:
    wanted = "seconds that building may take, more than 0, or None for no limit"
    return None if value is None else number("load_timeout", value, wanted, above=True)


def _concurrency(value: Any) -> int | None:
    wanted = "the most calls that its library process may run at a time, 1 or more, or None if that does not matter"
    return None if value is None else whole("concurrency", value, wanted, 1)


def _preload(value: Any) -> tuple[str, ...] | None:
    if value is False or value is None:  # None is what is kept of False.
        return None
    wanted = 'a list of modules, such as preload=["torch"], or False to have its process import everything itself'
    listed = isinstance(value, Collection) and not isinstance(value, str)
    if not listed or not all(isinstance(name, str) for name in value):
        raise refuse("preload", value, wanted, TypeError)
    if wrong := [name for name in value if not all(part.isidentifier() for part in name.split("."))]:
        raise refuse("preload", wrong[0], 'names of modules, such as "transformers.models.bert"', ValueError)
    return tuple(value)


def _artifacts(value: Any) -> dict[str, str] | None:
    if value is False or value is None:  # None is what is kept of False.
        return None
    wanted = 'variables or folders by name, such as artifacts={"engine": "MY_ENGINE_CACHE"}, or False to keep nothing'
    _check_dict("artifacts", value, wanted, (str,))
    for name, target in value.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,100}", name):
            raise refuse("artifacts", name, "names of letters, digits, dots, _ and -", ValueError)
        if not target or os.path.isabs(target) or ".." in target.split("/") or os.path.normpath(target) == ".":
            wanted = (
                "the name of a variable, as MY_CACHE, or of a folder below that in which it is built, as engine/cache"
            )
            raise refuse("artifacts", target, wanted, ValueError)
    return {name: target if "/" not in target else os.path.normpath(target) for name, target in value.items()}


def _park(value: Any) -> bool:
    if not isinstance(value, bool):
        raise refuse("park", value, "False where it is to be unloaded, and never parked, else True", TypeError)
    return value


_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "files": _files,
    "env": _env,
    "gpus": lambda value: whole("gpus", value, "the number of GPUs that a context occupies, 0 or more", 0),
    "memory": _memory,
    "gpu_memory": _size("gpu_memory"),
    "load_timeout": _load_timeout,
    "affinity": lambda value: None if value is None else choice("affinity", value, AFFINITIES),
    "priority": lambda value: whole("priority", value, "a whole number, such as 10: higher goes first"),
    "concurrency": _concurrency,
    "preload": _preload,
    "park": _park,
    "artifacts": _artifacts,
}


class ContextFunction(Generic[Params, Value]):
    """What `@context` makes of a function: call it for a recipe, `options` for a variant of it."""

    def __init__(self, function: Callable[Params, Value], options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self._options = dict(options)

    @overload
    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Context[Value]: ...
    @overload  # With recipes in the places of what they build, and without what `files` gives.
    def __call__(self, *args: object, **kwargs: object) -> Context[Value]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Context[Value]:
        """Return the recipe of this function with these inputs; nothing is built.

        An input may be a recipe: the function gets what that builds. The recipe needs what those among its inputs need
        too: the sum of their `memory` and `gpu_memory`, the largest of their `gpus`, all their files and environment
        variables. Its `load_timeout` is for all of them.

        :raises TypeError: if the function cannot be called with them.
        :raises ValueError: if a recipe is where it cannot be replaced (in a set, for one), or recipes want
            different values of one environment variable.
        """
        args, kwargs = _bound(self.function, args, kwargs, self._options.get("files", ()))
        return composed(Context(self.function.__name__, self.function, args, kwargs, **self._options))

    @options_renamed(environment="env")
    @refusing("@context")
    def options(
        self,
        *,
        files: Paths | Unchanged = UNCHANGED,
        env: Variables | Unchanged = UNCHANGED,
        gpus: int | Unchanged = UNCHANGED,
        memory: int | str | Unchanged | None = UNCHANGED,
        gpu_memory: int | str | Unchanged | None = UNCHANGED,
        load_timeout: float | Unchanged | None = UNCHANGED,
        affinity: Affinity | Unchanged | None = UNCHANGED,
        priority: int | Unchanged = UNCHANGED,
        concurrency: int | Unchanged | None = UNCHANGED,
        preload: Preload | Unchanged = UNCHANGED,
        park: bool | Unchanged = UNCHANGED,
        artifacts: Artifacts | Unchanged = UNCHANGED,
    ) -> ContextFunction[Params, Value]:
        """Return the same function with other files, variables or resources; see `context` for the options.

        >>> @context
        ... def nothing():
        ...     return None
        >>> nothing.options(gpus=2)().gpus
        2
        """
        changes = given(
            files=files, env=env, gpus=gpus, memory=memory, gpu_memory=gpu_memory,
            load_timeout=load_timeout, affinity=affinity, priority=priority, concurrency=concurrency,
            preload=preload,
            park=park,
            artifacts=artifacts,
        )  # fmt: skip
        return ContextFunction(self.function, {**self._options, **checked(changes)})

    def __reduce__(self) -> tuple[Any, ...]:
        return ContextFunction, (self.function, self._options)

    def __ctxflow_digest__(self) -> object:
        options = {name: value for name, value in self._options.items() if name not in ("preload", "artifacts")}
        return "context function", self.function, options


class _Decorator(Protocol):
    """What `@context` with options is: as without them, it gives what an async function awaits or yields its type."""

    @overload
    def __call__(self, function: Callable[_P, Coroutine[Any, Any, _V]], /) -> ContextFunction[_P, _V]: ...
    @overload
    def __call__(self, function: Callable[_P, AsyncIterator[_V]], /) -> ContextFunction[_P, _V]: ...
    @overload
    def __call__(self, function: Callable[_P, _V], /) -> ContextFunction[_P, _V]: ...


# fmt: off
@overload
def context(function: Callable[_P, Coroutine[Any, Any, _V]], /) -> ContextFunction[_P, _V]: ...
@overload
def context(function: Callable[_P, AsyncIterator[_V]], /) -> ContextFunction[_P, _V]: ...
@overload
def context(function: Callable[_P, _V], /) -> ContextFunction[_P, _V]: ...
@overload
def context(
    *, files: Paths = ..., env: Variables = ..., gpus: int = ..., memory: int | str | None = ...,
    gpu_memory: int | str | None = ..., load_timeout: float | None = ..., affinity: Affinity | None = ...,
    priority: int = ..., concurrency: int | None = ..., preload: Preload = ..., park: bool = ...,
    artifacts: Artifacts = ...,
) -> _Decorator: ...
# fmt: on


@options_renamed(environment="env")
@refusing("@context")
def context(
    function: Callable[..., Any] | None = None,
    /,
    *,
    files: Paths = NO_OPTIONS,
    env: Variables = NO_OPTIONS,
    gpus: int = 0,
    memory: int | str | None = None,
    gpu_memory: int | str | None = None,
    load_timeout: float | None = None,
    affinity: Affinity | None = None,
    priority: int = 0,
    concurrency: int | None = None,
    preload: Preload = (),
    park: bool = True,
    artifacts: Artifacts = NO_OPTIONS,
) -> Any:
    """Make a function that builds reusable state into one that gives its recipe. Use it bare, or with options.

    The function may be `async`: it is then built on the event loop of its library process, on which the calls of item
    apps run too, and what it returns is closed there in the end by its `aclose()` or `close()`; an async generator
    yields the state once, and cleans up after that. Two seconds are given to it, then the process is killed.

    :param files: what is staged to workers, by parameter: `{"weights": "model/"}`; the function gets local paths.
    :param env: environment variables of its process: `{"NAME": "value"}`.
    :param gpus: how many GPUs it occupies.
    :param memory: host memory that it takes with its calls, as text such as "8 GB" or in bytes, more than 0. The larger
        of this and what was measured once it was built counts, so that it may be left out; then it has no limit.
    :param gpu_memory: memory that it takes on each GPU, likewise, but without a limit.
    :param load_timeout: seconds that building it may take; None for no limit.
    :param affinity: how close together several GPUs have to be: "guaranteed" or "best-effort" (see docs/preemption.md).
    :param priority: that of its apps, where they do not say: higher goes first.
    :param concurrency: the most calls that its library process runs at a time, where its apps' calls overlap.
    :param preload: modules of installed packages that building it imports, `["torch", "transformers.models.bert"]`: a
        worker's library processes are forked from one that has them. What the function imports first, and what was seen
        to be imported, need not be named. False to have each process start, and import, by itself (docs/loading.md).
    :param park: whether a worker may park it where it gives way to another, in place of unloading it (docs/parking.md).
    :param artifacts: what building it, and its first call, make beside the compile caches of PyTorch, Triton and vLLM,
        and what is kept for the next build: `{"name": "VARIABLE"}`, or a folder below that in which it is built. False
        to keep nothing (docs/loading.md).
    :raises TypeError: for an unknown option, or one of a wrong type.
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
    said = {
        "files": files, "env": env, "gpus": gpus, "memory": memory, "gpu_memory": gpu_memory,
        "load_timeout": load_timeout, "affinity": affinity, "priority": priority, "concurrency": concurrency,
        "preload": preload,
        "park": park,
        "artifacts": artifacts,
    }  # fmt: skip
    options = checked(said)
    if function is not None:
        return _made(function, options)
    return lambda decorated: _made(decorated, options)


def _made(function: Any, options: Mapping[str, Any]) -> ContextFunction[..., Any]:
    if not callable(function):
        raise TypeError(f"@context is put above a function that builds something, not on {short(function)}")
    return ContextFunction(function, options)
