"""Context: the recipe of reusable state, its identity, and the `@context` decorator.

What lives here: what a worker needs to know to build a context, and nothing that it does not (a worker imports
this module). What does not: when and where a context is built (scheduler/), or how (host/), and pickling (pickling.py).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, overload

from ctxflow.context_options import AFFINITIES, NO_OPTIONS, checked
from ctxflow.functions import refuse_async
from ctxflow.option_values import UNCHANGED, Unchanged, given, refusing, short
from ctxflow.pickling import dumps
from ctxflow.wording import article

if TYPE_CHECKING:
    from ctxflow.referents import Referents


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
    :ivar affinity: how close together its GPUs have to be, one of `AFFINITIES`; None if that does not matter.
    :ivar priority: that of its apps, where they do not say: higher goes first.
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
    affinity: str | None = None
    priority: int = 0

    @property
    def id(self) -> str:
        """The digest of the code, inputs, files and environment: 32 hex digits.

        It is computed anew where a name in the code means another object than before.

        :raises TypeError: if a captured object has no content to compare, naming it.
        :raises FileNotFoundError: if one of the files is not there.
        """
        known: tuple[str, Referents] | None = self.__dict__.get("_known")
        if known is None or known[1].changed():
            from ctxflow.digest import digest
            from ctxflow.referents import Referents

            known = digest(self), Referents(self.function, *(each.function for each in inner_recipes(self)))
            self.__dict__["_known"] = known
        return known[0]

    def look_again(self) -> None:
        """Have the `id` computed anew when it is wanted next: what the code refers to may have changed inside."""
        self.__dict__.pop("_known", None)

    def __ctxflow_digest__(self) -> object:
        """What makes it the recipe that it is."""
        from ctxflow.contents import digest_path

        files = {name: digest_path(path) for name, path in self.files.items()}
        return "context", self.function, self.args, dict(self.kwargs), files, dict(self.environment)

    def __getstate__(self) -> dict[str, Any]:
        """All but what is known of it in this process."""
        return {name: value for name, value in self.__dict__.items() if name != "_known"}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def build(self, paths: Mapping[str, str] | None = None) -> Any:
        """Build the state in this process and return what the function returns.

        Recipes among the inputs, also in plain lists, tuples and dicts, are built first and take their places, so
        contexts compose.

        :param paths: parameter name -> local path of each of `files`; by default the files where they are.

        >>> @context
        ... def table(base):
        ...     return {"value": base + 1}
        >>> table(41).build()
        {'value': 42}
        """
        given = self.files if paths is None else paths
        own = {name: path for name, path in given.items() if _INNER not in name}
        numbers = itertools.count()

        def built(recipe: Context) -> Any:
            prefix = f"{next(numbers)}{_INNER}"
            theirs = {name[len(prefix) :]: path for name, path in given.items() if name.startswith(prefix)}
            return recipe.build({**recipe.files, **theirs})

        args = [_replaced(value, built) for value in self.args]
        kwargs = {name: _replaced(value, built) for name, value in self.kwargs.items()}
        return self.function(*args, **kwargs, **own)

    def dumps(self) -> bytes:
        """The recipe as bytes, which `loads` reads back on a worker.

        :raises TypeError: if something in it cannot be pickled, saying which object is to blame.
        """
        return dumps((self.function, self.args, dict(self.kwargs)), f"context {self.name}")

    def __repr__(self) -> str:
        shown = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"<context {self.name}({', '.join(shown)})>"


# In the names of files: "1:weights" is the file `weights` of the second recipe among the inputs.
_INNER = ":"


def _recipes(value: Any, inside: tuple[int, ...] = ()) -> Iterator[Context]:
    """The recipes in an input, in order.

    :raises ValueError: for one where it could not be replaced by what it builds.
    """
    if isinstance(value, Context):
        yield value
    elif isinstance(value, (list, tuple, dict, set, frozenset)) and id(value) not in inside:
        plain = type(value) in (list, tuple, dict)
        parts = value.values() if type(value) is dict else value
        if not plain or type(value) is dict:
            _check_no_recipe(value)
        for part in parts if plain else ():
            if isinstance(part, (Context, list, tuple, dict, set, frozenset)):
                yield from _recipes(part, (*inside, id(value)))


def inner_recipes(recipe: Context) -> Iterator[Context]:
    """The recipes among a recipe's inputs, those among theirs, and so on.

    >>> @context
    ... def part(inner=None):
    ...     return inner
    >>> [each.args for each in inner_recipes(part(part([part()])))]
    [([<context part()>],), ()]
    """
    for value in (*recipe.args, *recipe.kwargs.values()):
        for found in _recipes(value):
            yield found
            yield from inner_recipes(found)


def _check_no_recipe(container: Iterable[Any]) -> None:
    values = container.values() if isinstance(container, dict) and type(container) is not dict else ()
    for part in (*container, *values):
        if isinstance(part, Context):
            kind = "the keys of a dict" if type(container) is dict else article(type(container).__name__)
            raise ValueError(f"{part!r} is in {kind}: put recipes in plain lists, tuples, or the values of dicts")


def _replaced(value: Any, built: Callable[[Context], Any]) -> Any:
    """An input with its recipes replaced by what they build; one without any is left as it is."""
    if isinstance(value, Context):
        return built(value)
    if next(_recipes(value), None) is None:
        return value
    if type(value) is dict:
        return {key: _replaced(part, built) for key, part in value.items()}
    return type(value)(_replaced(part, built) for part in value)


def _composed(recipe: Context) -> Context:
    """A recipe that needs, beside its own, what the recipes among its inputs need.

    They live in one process. It takes the sum of their `memory` and `gpu_memory` (of those that are known), since
    each recipe begins at the first of the GPUs that the process sees; hence it needs the largest of their numbers
    of `gpus`, not the sum, and the strictest of their affinities. Environments and files are united.

    :raises ValueError: if two want different values of one environment variable.
    """
    inner = [found for value in (*recipe.args, *recipe.kwargs.values()) for found in _recipes(value)]
    if not inner:
        return recipe
    files, environment = dict(recipe.files), dict(recipe.environment)
    for number, one in enumerate(inner):
        files.update({f"{number}{_INNER}{name}": path for name, path in one.files.items()})
        for name, value in one.environment.items():
            if environment.setdefault(name, value) != value:
                raise ValueError(
                    f"{one!r} inside {recipe.name} wants {name}={value!r} in the environment, where another recipe "
                    f"wants {environment[name]!r}: they share one process, so give both the same value"
                )
    every = [recipe, *inner]
    return dataclasses.replace(
        recipe,
        files=files,
        environment=environment,
        gpus=max(one.gpus for one in every),
        memory=_sum_of_known(one.memory for one in every),
        gpu_memory=_sum_of_known(one.gpu_memory for one in every),
        affinity=next((each for each in AFFINITIES if any(one.affinity == each for one in every)), None),
    )


def _sum_of_known(sizes: Iterable[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def _bound(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], files: Collection[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inputs of a call in one form, whether they were given by place or by name.

    :param files: parameters that get their values when the context is built, by name.
    :raises TypeError: if the function cannot be called so.
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
    """Inputs by place up to the first parameter that has none, by name from there on."""
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


class ContextFunction:
    """What `@context` makes of a function: call it for a recipe, `options` for a variant of it."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self._options = dict(options)

    def __call__(self, *args: Any, **kwargs: Any) -> Context:
        """The recipe of this function with these inputs; nothing is built.

        It needs what the recipes among its inputs need too: the sum of their `memory` and `gpu_memory`, the largest
        of their `gpus`, all their files and environment variables. Its `load_timeout` is for all of them.

        :raises TypeError: if the function cannot be called with them.
        :raises ValueError: if a recipe is where it cannot be replaced (in a set, for one), or recipes want
            different values of one environment variable.
        """
        args, kwargs = _bound(self.function, args, kwargs, self._options.get("files", ()))
        return _composed(Context(self.function.__name__, self.function, args, kwargs, **self._options))

    @refusing("@context")
    def options(
        self,
        *,
        files: Mapping[str, str | os.PathLike[str]] | Unchanged = UNCHANGED,
        environment: Mapping[str, str] | Unchanged = UNCHANGED,
        gpus: int | Unchanged = UNCHANGED,
        memory: int | str | Unchanged | None = UNCHANGED,
        gpu_memory: int | str | Unchanged | None = UNCHANGED,
        load_timeout: float | Unchanged | None = UNCHANGED,
        affinity: str | Unchanged | None = UNCHANGED,
        priority: int | Unchanged = UNCHANGED,
    ) -> ContextFunction:
        """The same function with other files, environment or resources; see `context` for the options.

        >>> @context
        ... def nothing():
        ...     return None
        >>> nothing.options(gpus=2)().gpus
        2
        """
        changes = given(
            files=files, environment=environment, gpus=gpus, memory=memory, gpu_memory=gpu_memory,
            load_timeout=load_timeout, affinity=affinity, priority=priority,
        )  # fmt: skip
        return ContextFunction(self.function, {**self._options, **checked(changes)})

    def __reduce__(self) -> tuple[Any, ...]:
        return ContextFunction, (self.function, self._options)

    def __ctxflow_digest__(self) -> object:
        return "context function", self.function, self._options


@overload
def context(function: Callable[..., Any], /) -> ContextFunction: ...
@overload
def context(
    *,
    files: Mapping[str, str | os.PathLike[str]] = ...,
    environment: Mapping[str, str] = ...,
    gpus: int = ...,
    memory: int | str | None = ...,
    gpu_memory: int | str | None = ...,
    load_timeout: float | None = ...,
    affinity: str | None = ...,
    priority: int = ...,
) -> Callable[[Callable[..., Any]], ContextFunction]: ...


@refusing("@context")
def context(
    function: Callable[..., Any] | None = None,
    /,
    *,
    files: Mapping[str, str | os.PathLike[str]] = NO_OPTIONS,
    environment: Mapping[str, str] = NO_OPTIONS,
    gpus: int = 0,
    memory: int | str | None = None,
    gpu_memory: int | str | None = None,
    load_timeout: float | None = None,
    affinity: str | None = None,
    priority: int = 0,
) -> Any:
    """Make a function that builds reusable state into one that gives its recipe. Use it bare, or with options.

    :param files: what is staged to workers, by parameter: `{"weights": "model/"}`; the function gets local paths.
    :param environment: environment variables of its process: `{"NAME": "value"}`.
    :param gpus: how many GPUs it occupies.
    :param memory: host memory that it takes, as text such as "8 GB" or in bytes; measured where it is not said.
    :param gpu_memory: memory that it takes on each GPU, likewise.
    :param load_timeout: seconds that building it may take; None for no limit.
    :param affinity: how close together several GPUs have to be: "guaranteed" or "best-effort" (see docs/preemption.md).
    :param priority: that of its apps, where they do not say: higher goes first.
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
        "files": files, "environment": environment, "gpus": gpus, "memory": memory, "gpu_memory": gpu_memory,
        "load_timeout": load_timeout, "affinity": affinity, "priority": priority,
    }  # fmt: skip
    options = checked(said)
    if function is not None:
        return _made(function, options)
    return lambda decorated: _made(decorated, options)


def _made(function: Any, options: Mapping[str, Any]) -> ContextFunction:
    if not callable(function):
        raise TypeError(f"@context is put above a function that builds something, not on {short(function)}")
    refuse_async(function)
    return ContextFunction(function, options)


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
