"""The recipe of reusable state: its identity, what recipes among its inputs add to it, and building it.

A worker imports this module: it needs the standard library and cloudpickle alone.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from ctxflow.errors import article
from ctxflow.pickling import Referents, dumps

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from typing_extensions import ParamSpec as DefaultParamSpec
    from typing_extensions import TypeVar as DefaultTypeVar

    Params = DefaultParamSpec("Params", default=...)
    Value = DefaultTypeVar("Value", default=Any)
    Built_co = DefaultTypeVar("Built_co", default=Any, covariant=True)
else:
    Params = ParamSpec("Params")
    Value = TypeVar("Value")
    Built_co = TypeVar("Built_co", covariant=True)

AFFINITIES = ("guaranteed", "best-effort")
"""How close together a context's GPUs have to be: as close as a machine allows, or the closer the better."""
_ON_LOOP = b"on a loop"  # What follows the pickle of a recipe that is async: no pickle ends so.


@dataclasses.dataclass(frozen=True, eq=False)
class Context(Generic[Built_co]):
    """A recipe of reusable state: a function, its inputs, and what it needs to run.

    Nothing is built by making one. Two recipes with the same code, inputs, files and environment have the same
    `id`, compare equal and share one library process on each worker.

    :ivar name: what people see, the function's name.
    :ivar function: builds the state; runs once per worker, in the library process, on its event loop if async.
    :ivar files: parameter name -> path; staged to the worker, where the function gets the local path.
    :ivar env: environment variables of the library process.
    :ivar gpus: GPUs that the state occupies.
    :ivar memory: host memory in bytes, None if unknown until it is measured.
    :ivar gpu_memory: memory in bytes on each GPU, None if unknown.
    :ivar load_timeout: seconds that building may take, None for no limit.
    :ivar affinity: how close together its GPUs have to be, one of `AFFINITIES`; None if that does not matter.
    :ivar priority: that of its apps, where they do not say: higher goes first.
    :ivar concurrency: the most calls that its library process runs at a time; None if nobody said.
    :ivar preload: installed modules that building it imports, beside those that are seen to be; None if its library
        process is to be spawned, and to import them itself.
    :ivar park: whether it may be parked where it gives way to another.
    :ivar artifacts: what building it makes that is kept for the next build: name -> the variable, or the folder; None
        to keep nothing.
    """

    name: str
    function: Callable[..., Built_co]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gpus: int = 0
    memory: int | None = None
    gpu_memory: int | None = None
    load_timeout: float | None = None
    affinity: str | None = None
    priority: int = 0
    concurrency: int | None = None
    preload: tuple[str, ...] | None = ()
    park: bool = True
    artifacts: Mapping[str, str] | None = dataclasses.field(default_factory=dict)

    @property
    def is_async(self) -> bool:
        """Whether its function, or that of a recipe among its inputs, is async: then it is built by `build_async`."""
        from ctxflow.option_values import is_async  # Here, as below: few library processes need it.

        return any(is_async(each.function) for each in (self, *inner_recipes(self)))

    @property
    def id(self) -> str:
        """Return the digest of the code, inputs, files and variables: 32 hex digits.

        It is computed anew where a name in the code means another object than before.

        :raises TypeError: if a captured object has no content to compare, naming it.
        :raises FileNotFoundError: if one of the files is not there.
        """
        known: tuple[str, Referents] | None = self.__dict__.get("_known")
        if known is None or known[1].changed():
            from ctxflow.digest import digest

            known = digest(self), Referents(self.function, *(each.function for each in inner_recipes(self)))
            self.__dict__["_known"] = known
        return known[0]

    @property
    def environment(self) -> Mapping[str, str]:
        """Return `env`, by its old name."""
        from ctxflow.renamed import tell

        tell("Context.environment", "a context's environment is now called env")
        return self.env

    def look_again(self) -> None:
        """Have the `id` computed anew when it is wanted next: what the code refers to may have changed inside."""
        self.__dict__.pop("_known", None)

    def __ctxflow_digest__(self) -> object:
        """Return what makes it the recipe that it is."""
        from ctxflow.files import digest_path

        files = {name: digest_path(path) for name, path in self.files.items()}
        return "context", self.function, self.args, dict(self.kwargs), files, dict(self.env)

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what this process has cached of it."""
        return {name: value for name, value in self.__dict__.items() if name != "_known"}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def build(self, paths: Mapping[str, str] | None = None) -> Built_co:
        """Build the state in this process and return what the function returns.

        Recipes among the inputs, also in plain lists, tuples and dicts, are built first and take their places, so
        contexts compose.

        :param paths: parameter name -> local path of each of `files`; by default the files where they are.
        :raises TypeError: if it is async: await `build_async`.

        >>> from ctxflow import context
        >>> @context
        ... def table(base):
        ...     return {"value": base + 1}
        >>> table(41).build()
        {'value': 42}
        """
        state: Built_co = self._call([recipe.build(theirs) for recipe, theirs in self._inputs(paths)], paths)
        if inspect.iscoroutine(state) or inspect.isasyncgen(state):
            if inspect.iscoroutine(state):
                state.close()
            raise TypeError(f"{self.name} is async: await build_async(), on the event loop that it is to live on")
        return state

    async def build_async(self, closing: AsyncExitStack, paths: Mapping[str, str] | None = None) -> Built_co:
        """Build the state on the running event loop, where the recipe, or one among its inputs, is async.

        An `async def` function is awaited, and an async generator function runs to its `yield`, which gives the state.

        :param closing: what to do at the end is put there: an async generator goes on after its `yield`, and what an
            `async def` function returned is closed by its `aclose()`, or else `close()`, if it has one.
        :param paths: as of `build`.

        >>> import asyncio, contextlib
        >>> from ctxflow import context
        >>> @context
        ... async def greeting(name):
        ...     yield f"hello {name}"
        ...     print("closed")
        >>> async def main():
        ...     async with contextlib.AsyncExitStack() as closing:
        ...         print(await greeting("Ann").build_async(closing))
        >>> asyncio.run(main())
        hello Ann
        closed
        """
        from ctxflow.option_values import is_async

        built = [await recipe.build_async(closing, theirs) for recipe, theirs in self._inputs(paths)]
        state: Any = self._call(built, paths)
        if inspect.isasyncgen(state) and is_async(self.function):
            state = await _first(state, closing, self.name)
        elif is_async(self.function):
            state = await state
            close = getattr(state, "aclose", None) or getattr(state, "close", None)
            if callable(close):
                closing.push_async_callback(_close, close)
        found: Built_co = state
        return found

    def _inputs(self, paths: Mapping[str, str] | None) -> Iterator[tuple[Context, Mapping[str, str]]]:
        """Yield the recipes among the inputs, each with the paths of its files, in order."""
        given = self.files if paths is None else paths
        for number, recipe in enumerate(found for value in self._given() for found in _recipes(value)):
            prefix = f"{number}{_INNER}"
            theirs = {name[len(prefix) :]: path for name, path in given.items() if name.startswith(prefix)}
            yield recipe, {**recipe.files, **theirs}

    def _given(self) -> list[Any]:
        return [*self.args, *self.kwargs.values()]

    def _call(self, built: list[Any], paths: Mapping[str, str] | None) -> Any:
        """Call the function with what the recipes among its inputs have built."""
        values = iter(built)

        def take(recipe: Context) -> Any:
            return next(values)

        given = self.files if paths is None else paths
        own = {name: path for name, path in given.items() if _INNER not in name}
        args = [_replaced(value, take) for value in self.args]
        kwargs = {name: _replaced(value, take) for name, value in self.kwargs.items()}
        return self.function(*args, **kwargs, **own)

    def dumps(self) -> bytes:
        """Return the recipe as bytes, which a worker reads with `pickle.loads`.

        :raises TypeError: if something in it cannot be pickled, saying which object is to blame.
        """
        pickled = dumps((self.function, self.args, dict(self.kwargs)), f"context {self.name}")
        return pickled + _ON_LOOP if self.is_async else pickled

    def __repr__(self) -> str:
        shown = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"<context {self.name}({', '.join(shown)})>"


async def _first(states: AsyncGenerator[Any, Any], closing: AsyncExitStack, name: str) -> Any:
    """Return what an async generator yields; it goes on when `closing` ends."""
    closing.push_async_callback(_end, states)
    try:
        return await states.__anext__()
    except StopAsyncIteration:
        raise ValueError(f"{name} yielded nothing: an async generator yields what it has built") from None


async def _end(states: AsyncGenerator[Any, Any]) -> None:
    """Have an async generator go on after its `yield`, to its end."""
    async for _ in states:  # A second yield is none.
        break
    await states.aclose()


async def _close(close: Callable[[], Awaitable[None] | None]) -> None:
    closed = close()
    if inspect.isawaitable(closed):
        await closed


def needs_loop(recipe: bytes) -> bool:
    """Return whether a recipe as bytes is async; nothing of it is opened."""
    return recipe.endswith(_ON_LOOP)


# In the names of files: "1:weights" is the file `weights` of the second recipe among the inputs.
_INNER = ":"


def _recipes(value: Any, inside: tuple[int, ...] = ()) -> Iterator[Context]:
    """Yield the recipes in an input, in order; one that could not be replaced by what it builds is a `ValueError`."""
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
    """Yield the recipes among a recipe's inputs, those among theirs, and so on."""
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
    """Return an input with its recipes replaced by what they build; one without any is left as it is."""
    if isinstance(value, Context):
        return built(value)
    if next(_recipes(value), None) is None:
        return value
    if type(value) is dict:
        return {key: _replaced(part, built) for key, part in value.items()}
    return type(value)(_replaced(part, built) for part in value)


def composed(recipe: Context) -> Context:
    """Return a recipe that needs, beside its own, what the recipes among its inputs need, in one process.

    It takes the sum of their `memory` and `gpu_memory`, since each begins at the first GPU that the process sees;
    hence the largest of their numbers of `gpus`, not the sum, and the strictest of their affinities.

    :raises ValueError: if two want different values of one environment variable.
    """
    inner = [found for value in (*recipe.args, *recipe.kwargs.values()) for found in _recipes(value)]
    if not inner:
        return recipe
    files, environment = dict(recipe.files), dict(recipe.env)
    for number, one in enumerate(inner):
        files.update({f"{number}{_INNER}{name}": path for name, path in one.files.items()})
        for name, value in one.env.items():
            if environment.setdefault(name, value) != value:
                raise ValueError(
                    f"{one!r} inside {recipe.name} wants {name}={value!r} in the environment, where another recipe "
                    f"wants {environment[name]!r}: they share one process, so give both the same value"
                )
    every = [recipe, *inner]
    return dataclasses.replace(
        recipe,
        files=files,
        env=environment,
        gpus=max(one.gpus for one in every),
        memory=_sum_of_known(one.memory for one in every),
        gpu_memory=_sum_of_known(one.gpu_memory for one in every),
        affinity=next((each for each in AFFINITIES if any(one.affinity == each for one in every)), None),
        preload=None if any(one.preload is None for one in every) else _together(one.preload or () for one in every),
        concurrency=recipe.concurrency or min((one.concurrency for one in inner if one.concurrency), default=None),
        park=all(one.park for one in (recipe, *inner)),
        artifacts=_artifacts(every),
    )


def _artifacts(every: Iterable[Context]) -> Mapping[str, str] | None:
    together: dict[str, str] = {}
    for one in every:
        if one.artifacts is None:
            return None
        for name, target in one.artifacts.items():
            if together.setdefault(name, target) != target:
                raise ValueError(
                    f"{one!r} has its artifact {name!r} in {target}, where another recipe has it in {together[name]}: "
                    "they share one process, so give both the same place, or other names"
                )
    return together


def _together(modules: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for names in modules for name in names))


def _sum_of_known(sizes: Iterable[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None
