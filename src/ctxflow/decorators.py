"""`@batch_app`, `@item_app` and `@context_app`: what makes a function an app, and every option of it.

What an app does stands in apps.py, and how its options are checked in app_options.py.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from ctxflow.app_options import Alternative, Deadline, Level, Options, check_context
from ctxflow.apps import BatchApp, ContextApp, ItemApp
from ctxflow.context import ContextFunction
from ctxflow.option_values import refusing
from ctxflow.recipe import Context

# Those of the classes have defaults, which checkers would take where nothing else fits.
_P = ParamSpec("_P")
_R = TypeVar("_R")
_V = TypeVar("_V")


def _decorated(kind: type[BatchApp] | type[ContextApp], context: Any, chosen: Options) -> Any:
    if callable(context) and not isinstance(context, ContextFunction):
        return kind(context, None, chosen)
    check_context(context)
    return lambda function: kind(function, context, chosen)


# fmt: off
@overload
def batch_app(function: Callable[_P, Iterable[_R]], /) -> BatchApp[_P, _R]: ...
@overload
def batch_app(
    context: Context[_V], /, *, priority: int | None = ..., deadline: Deadline = ..., timeout: float | None = ...,
    retries: int = ..., batch_size: int | None = ..., executor: str | None = ..., cache: bool = ...,
    max_delay: float | None = ..., max_error: float | None = ..., level: Level | None = ..., error: float = ...,
    alternatives: Sequence[Alternative] = ...,
) -> Callable[[Callable[Concatenate[_V, _P], Iterable[_R]]], BatchApp[_P, _R]]: ...
@overload
def batch_app(
    context: None = None, /, *, priority: int | None = ..., deadline: Deadline = ..., timeout: float | None = ...,
    retries: int = ..., batch_size: int | None = ..., executor: str | None = ..., cache: bool = ...,
    max_delay: float | None = ..., max_error: float | None = ..., level: Level | None = ..., error: float = ...,
    alternatives: Sequence[Alternative] = ...,
) -> Callable[[Callable[_P, Iterable[_R]]], BatchApp[_P, _R]]: ...
# fmt: on


@refusing("an app")
def batch_app(
    context: Any = None,
    /,
    *,
    priority: int | None = None,
    deadline: Deadline = None,
    timeout: float | None = None,
    retries: int = 0,
    batch_size: int | None = None,
    executor: str | None = None,
    cache: bool = False,
    max_delay: float | None = None,
    max_error: float | None = None,
    level: Level | None = None,
    error: float = 0.0,
    alternatives: Sequence[Alternative] = (),
) -> Any:
    """Make a function over a batch into an app over items.

    `@batch_app(recipe)` gives the function the live context and lists side by side; bare, or with None, only
    the lists. See `BatchApp` for what it can do: call it with one item, or `map` it over many.

    It returns its results in a list, or yields them one by one: then what it has yielded is kept, whatever becomes of
    its worker, and an eviction with notice costs nothing but the wait for the item in flight (docs/salvage.md).

    :param context: the recipe; None, or the function itself, for none.
    :param priority: higher goes first; by default its context's, which is 0 by default.
    :param deadline: when the results are wanted: a time of day, or seconds from the app's first call in a run. Among
        apps of one priority the earliest deadline goes first; nothing is dropped when it has passed.
    :param timeout: seconds that a batch may take; it is stopped then. What it has yielded before is kept.
    :param retries: how often an item that raises on its own is tried again.
    :param batch_size: items a batch, if the batching policy is to be overruled.
    :param executor: the label of the executor, where several are running.
    :param cache: whether Parsl may answer a call from its memo or a checkpoint.
    :param max_delay: seconds that an item may take, and `max_error`, the largest share of wrong answers: the placement
        policy `agh` keeps to them.
    :param max_error: see `max_delay`.
    :param level: what a worker keeps of the context from one call to the next: "pervasive" (all; the default, if the
        executor does not say otherwise), or, to measure what that saves, "partial" (the files) or "none".
    :param error: the share of the context's answers that are wrong.
    :param alternatives: other contexts that may answer items, each an `Alternative`; for batch apps.
    :raises TypeError: for an unknown option, one of a wrong type, a context that is no recipe, or a function that is
        async or lacks a parameter for what it gets.
    :raises ValueError: for an option that makes no sense, saying what to write.

    >>> from ctxflow import ContextExecutor, context
    >>> @context
    ... def table():
    ...     return {"one": 1, "two": 2}
    >>> @batch_app(table())
    ... def look_up(known, words):
    ...     return [known[word] for word in words]
    >>> with ContextExecutor(workers=1):
    ...     look_up("two").result()
    2
    >>> @batch_app(table())
    ... def look_up_one_by_one(known, words):
    ...     for word in words:
    ...         yield known[word]
    >>> with ContextExecutor(workers=1):
    ...     list(look_up_one_by_one.map(["two", "one"]))
    [2, 1]
    """
    chosen = Options(
        priority, deadline, timeout, retries, batch_size, executor, cache, max_delay, max_error, level, error,
        alternatives,
    )  # fmt: skip
    return _decorated(BatchApp, context, chosen)


# fmt: off
@overload
def item_app(function: Callable[_P, Coroutine[Any, Any, _R]], /) -> ItemApp[_P, _R]: ...
@overload
def item_app(
    context: Context[_V], /, *, priority: int | None = ..., deadline: Deadline = ..., timeout: float | None = ...,
    retries: int = ..., executor: str | None = ..., cache: bool = ..., max_delay: float | None = ...,
    max_error: float | None = ..., level: Level | None = ..., error: float = ...,
    alternatives: Sequence[Alternative] = ...,
) -> Callable[[Callable[Concatenate[_V, _P], Coroutine[Any, Any, _R]]], ItemApp[_P, _R]]: ...
@overload
def item_app(
    context: None = None, /, *, priority: int | None = ..., deadline: Deadline = ..., timeout: float | None = ...,
    retries: int = ..., executor: str | None = ..., cache: bool = ..., max_delay: float | None = ...,
    max_error: float | None = ..., level: Level | None = ..., error: float = ...,
    alternatives: Sequence[Alternative] = ...,
) -> Callable[[Callable[_P, Coroutine[Any, Any, _R]]], ItemApp[_P, _R]]: ...
# fmt: on


@refusing("an app")
def item_app(
    context: Any = None,
    /,
    *,
    priority: int | None = None,
    deadline: Deadline = None,
    timeout: float | None = None,
    retries: int = 0,
    executor: str | None = None,
    cache: bool = False,
    max_delay: float | None = None,
    max_error: float | None = None,
    level: Level | None = None,
    error: float = 0.0,
    alternatives: Sequence[Alternative] = (),
) -> Any:
    """Make an `async` function over one item an app of which a worker has many items in flight.

    For engines that batch by themselves and for servers: they never run dry, since each item is answered as it ends
    and the next one takes its place. `@item_app(recipe)` gives the function the live context and the item's values;
    bare, or with None, only the values. See `ItemApp`; an `async` context function is built on the same event loop.

    :param timeout: seconds that an item may take; it alone is stopped then.
    :param retries: how often an item that raises is tried again.
    :param priority, deadline, executor, cache, max_delay, max_error, level, error, alternatives: as of `batch_app`.
    :raises TypeError: for an unknown option, one of a wrong type, a context that is no recipe, or a function that is
        not async or lacks a parameter for what it gets.
    :raises ValueError: for an option that makes no sense, saying what to write.

    >>> import asyncio
    >>> from ctxflow import ContextExecutor, context, item_app
    >>> @context
    ... def pause():
    ...     return 0.01
    >>> @item_app(pause())
    ... async def double(pause, number):
    ...     await asyncio.sleep(pause)
    ...     return 2 * number
    >>> with ContextExecutor(workers=1):
    ...     list(double.map(range(4)))
    [0, 2, 4, 6]
    """
    chosen = Options(
        priority, deadline, timeout, retries, None, executor, cache, max_delay, max_error, level, error, alternatives
    )
    return _decorated(ItemApp, context, chosen)


# fmt: off
@overload
def context_app(function: Callable[_P, _R], /) -> ContextApp[_P, _R]: ...
@overload
def context_app(
    context: Context[_V], /, *, priority: int | None = ..., deadline: Deadline = ..., timeout: float | None = ...,
    retries: int = ..., batch_size: int | None = ..., executor: str | None = ..., cache: bool = ...,
    max_delay: float | None = ..., max_error: float | None = ..., level: Level | None = ..., error: float = ...,
    alternatives: Sequence[Alternative] = ...,
) -> Callable[[Callable[Concatenate[_V, _P], _R]], ContextApp[_P, _R]]: ...
@overload
def context_app(
    context: None = None, /, *, priority: int | None = ..., deadline: Deadline = ..., timeout: float | None = ...,
    retries: int = ..., batch_size: int | None = ..., executor: str | None = ..., cache: bool = ...,
    max_delay: float | None = ..., max_error: float | None = ..., level: Level | None = ..., error: float = ...,
    alternatives: Sequence[Alternative] = ...,
) -> Callable[[Callable[_P, _R]], ContextApp[_P, _R]]: ...
# fmt: on


@refusing("an app")
def context_app(
    context: Any = None,
    /,
    *,
    priority: int | None = None,
    deadline: Deadline = None,
    timeout: float | None = None,
    retries: int = 0,
    batch_size: int | None = None,
    executor: str | None = None,
    cache: bool = False,
    max_delay: float | None = None,
    max_error: float | None = None,
    level: Level | None = None,
    error: float = 0.0,
    alternatives: Sequence[Alternative] = (),
) -> Any:
    """Make a function an app whose calls get the live context as their first argument.

    :param context: the recipe; None, or the function itself, for none.
    :param priority: higher goes first; by default its context's, which is 0 by default.
    :param deadline: when the results are wanted: a time of day, or seconds from the app's first call in a run. Among
        apps of one priority the earliest deadline goes first; nothing is dropped when it has passed.
    :param timeout: seconds that a call may take; it is stopped then.
    :param retries: how often a call that raises on its own is tried again.
    :param batch_size: for batch apps.
    :param executor: the label of the executor, where several are running.
    :param cache: whether Parsl may answer a call from its memo or a checkpoint.
    :param max_delay: seconds that an item may take, and `max_error`, the largest share of wrong answers: the placement
        policy `agh` keeps to them.
    :param max_error: see `max_delay`.
    :param level: what a worker keeps of the context from one call to the next: "pervasive" (all; the default, if the
        executor does not say otherwise), or, to measure what that saves, "partial" (the files) or "none".
    :param error: the share of the context's answers that are wrong.
    :param alternatives: other contexts that may answer items, each an `Alternative`; for batch apps.
    :raises TypeError: for an unknown option, one of a wrong type, a context that is no recipe, or a function that is
        async or lacks a parameter for what it gets.
    :raises ValueError: for an option that makes no sense, saying what to write.

    >>> from ctxflow import ContextExecutor, context
    >>> @context
    ... def base():
    ...     return 40
    >>> @context_app(base())
    ... def add(base, number, *, twice=False):
    ...     return base + number * (2 if twice else 1)
    >>> with ContextExecutor(workers=1):
    ...     add(1, twice=True).result()
    42
    """
    chosen = Options(
        priority, deadline, timeout, retries, batch_size, executor, cache, max_delay, max_error, level, error,
        alternatives,
    )  # fmt: skip
    return _decorated(ContextApp, context, chosen)
