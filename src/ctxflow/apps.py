"""Apps, which people call and map: what `@batch_app` and `@context_app` make of functions, and variants of these."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, NoReturn, ParamSpec, TypeVar, overload

from ctxflow.app_options import (
    Alternative,
    ContextCall,
    Deadline,
    ItemCall,
    Level,
    MapCall,
    Options,
    Result,
    Variants,
    check_alternatives,
    check_context,
)
from ctxflow.errors import counted, header
from ctxflow.executors.bare import active_executor
from ctxflow.executors.declarations import Declaration
from ctxflow.executors.live_run import LiveRun
from ctxflow.executors.submission import KEY
from ctxflow.option_values import UNCHANGED, OptionsMethod, Unchanged, check_function, given, refusing
from ctxflow.recipe import Context, Params

if TYPE_CHECKING:
    from ctxflow.map_results import MapResult

_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
_Kind = TypeVar("_Kind", bound="_App")
_Rest = ParamSpec("_Rest")

ResumeBy = Literal["index", "content"]


class _App:
    """What both kinds of app share: a function, its context, and options."""

    def __init__(self, function: Callable[..., Any], context: Context | None, options: Options) -> None:
        check_context(context)
        self._check_function(function)
        if options.level is not None and context is None:
            raise ValueError("level= says what workers keep of an app's context: give the app one, or leave level= out")
        check_alternatives(context, options.error, options.alternatives, options.max_error)
        functools.update_wrapper(self, function)  # type: ignore[arg-type]
        self.__name__: str = getattr(function, "__name__", type(function).__name__)
        self.function = function
        self.context = context
        self.chosen = options
        self._deadline: tuple[str, float | None] = ("", None)

    def _check_function(self, function: Any) -> None:
        """Refuse what no app can be made of, with a `TypeError` that says what to write."""
        check_function("an app", function)
        if isinstance(function, _App):
            name = function.__name__
            raise TypeError(f"{name} is an app already: {name}.using(...) gives it another context or other options")

    @property
    def priority(self) -> int:
        """Return the priority: higher goes first."""
        if self.chosen.priority is not None:
            return self.chosen.priority
        return self.context.priority if self.context is not None else 0

    @refusing("an app")
    def options(
        self: _Kind,
        context: Context | None = None,
        *,
        priority: int | Unchanged | None = UNCHANGED,
        deadline: Deadline | Unchanged = UNCHANGED,
        timeout: float | Unchanged | None = UNCHANGED,
        retries: int | Unchanged = UNCHANGED,
        batch_size: int | Unchanged | None = UNCHANGED,
        executor: str | Unchanged | None = UNCHANGED,
        cache: bool | Unchanged = UNCHANGED,
        max_delay: float | Unchanged | None = UNCHANGED,
        max_error: float | Unchanged | None = UNCHANGED,
        level: Level | Unchanged | None = UNCHANGED,
        error: float | Unchanged = UNCHANGED,
        alternatives: Sequence[Alternative] | Unchanged = UNCHANGED,
    ) -> _Kind:
        """Return the same app with another context or other options; what is not given stays. `using` is the same.

        :param context: another recipe, if not None; `batch_app` describes each option.
        :raises TypeError: for an unknown option, or one of a wrong type.
        :raises ValueError: for an option that makes no sense.

        >>> from ctxflow import batch_app
        >>> @batch_app(None, priority=1)
        ... def double(numbers):
        ...     return [2 * n for n in numbers]
        >>> double.options(priority=5).priority
        5
        """
        changes = given(
            priority=priority, deadline=deadline, timeout=timeout, retries=retries, batch_size=batch_size,
            executor=executor, cache=cache, max_delay=max_delay, max_error=max_error, level=level, error=error,
            alternatives=alternatives,
        )  # fmt: skip
        changed = dataclasses.replace(self.chosen, **changes)
        return type(self)(self.function, context if context is not None else self.context, changed)

    using = options
    if not TYPE_CHECKING:
        options = OptionsMethod(options)

    def deadline_on(self, run: LiveRun) -> float | None:
        """Return the deadline on a run's clock, counted from the app's first call there."""
        if self._deadline[0] != run.id:
            self._deadline = (run.id, self.chosen.deadline_on(run))
        return self._deadline[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.function, self.context, self.chosen)

    def __ctxflow_digest__(self) -> object:
        return type(self).__name__, self.function, self.context

    def _submit(self, submission: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Submit through Parsl where it is loaded, which waits for futures among the arguments; else directly."""
        executor, kernel = active_executor(self.chosen.executor)
        if kernel is None:
            return submission.submit(executor.calls, self.function, args, kwargs)  # type: ignore[no-any-return]
        return self._submit_to_kernel(kernel, executor.label, submission, args, kwargs, self.chosen.cache)  # type: ignore[no-any-return]

    def _submit_to_kernel(
        self, kernel: Any, label: str, submission: Any, args: Any, kwargs: Any, cache: bool = False
    ) -> Any:
        return kernel.submit(
            self.function, app_args=args, executors=[label], cache=cache, ignore_for_cache=None,
            app_kwargs={**kwargs, "parsl_resource_specification": {KEY: submission}},
        )  # fmt: skip


class ContextApp(_App, Generic[Params, Result]):
    """A function that is called with the live context; each call is one call on a worker."""

    def __init__(self, function: Callable[..., Any], context: Context | None, options: Options) -> None:
        super().__init__(function, context, options)
        with contextlib.suppress(ValueError):  # Some that are written in C do not reveal their parameters.
            kinds = {each.kind for each in inspect.signature(function).parameters.values()}
            if context is not None and not kinds & {*_POSITIONAL, inspect.Parameter.VAR_POSITIONAL}:
                wanted = header(self.__name__, "context")
                raise TypeError(f"{self.__name__} has no parameter for its context, which comes first: write {wanted}")
        if options.alternatives:
            raise TypeError("alternatives= are for batch apps, whose items can be divided: leave them out")

    @overload
    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Future[Result]: ...
    @overload  # Parsl waits for futures among the arguments.
    def __call__(self, first: Future[Any], /, *args: object, **kwargs: object) -> Future[Result]: ...
    @overload
    def __call__(self, first: object, second: Future[Any], /, *args: object, **kwargs: object) -> Future[Result]: ...
    @overload
    def __call__(
        self, first: object, second: object, third: Future[Any], /, *args: object, **kwargs: object
    ) -> Future[Result]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Future[Result]:  # type: ignore[misc] # It takes any Params.
        """Call it on a worker that holds the context; any arguments, one result, in a future."""
        return self._submit(ContextCall(self), args, kwargs)


class BatchApp(_App, Generic[Params, Result]):
    """A function over batches of items that ctxflow forms; a person calls it with single items, or maps it.

    The function gets the live context (if there is one), then one list for each parameter of an item, side by
    side; it returns a list with one result per item, in their order, or yields them. Keyword-only parameters are
    constants of a call.

    To type checkers its parameters are those of the function after the context, each a list; a call takes one value for
    each of up to five lists, or a future of one, and then the constants.

    :ivar parameters: the names of an item's values, in their order; `rest`, of `*rest`, which takes further ones.
    :ivar constants: the names of the keyword-only parameters.
    """

    style = "batch"
    _gets = "lists of items"  # In messages.

    def __init__(self, function: Callable[..., Any], context: Context | None, options: Options) -> None:
        super().__init__(function, context, options)
        parameters = self._parameters_of(function)
        positional = [p for p in parameters if p.kind in _POSITIONAL]
        self.parameters = [p.name for p in positional[0 if context is None else 1 :]]
        self.constants = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        self._defaulted = {p.name for p in positional if p.default is not p.empty}
        self.rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        if not self.parameters and self.rest is None:
            self._refuse_parameters([p.name for p in positional])
        self.variants = Variants()

    def _check_function(self, function: Any) -> None:
        super()._check_function(function)
        if isinstance(function, type):
            name = function.__name__
            raise TypeError(
                f"{name} is a class, and a batch app is made of a function over lists: write "
                f"lambda items: [{name}(item) for item in items]"
            )

    def _parameters_of(self, function: Callable[..., Any]) -> list[inspect.Parameter]:
        try:
            return list(inspect.signature(function).parameters.values())
        except ValueError:  # Some that are written in C do not reveal them.
            name = self.__name__
            raise TypeError(
                f"{name} does not tell its parameters: write a function around it, such as "
                f"lambda items: [{name}(item) for item in items]"
            ) from None

    def _refuse_parameters(self, names: list[str]) -> NoReturn:
        """Say what to write for a function that gets no items; `names` are its parameters."""
        has = f"{names[0]} gets its context, and nothing its items" if names else "it has no parameter for its items"
        items = names[0] if names else "items"
        wanted = header(self.__name__, items if self.context is None else f"context, {items}")
        raise TypeError(f"{self.__name__} is called with {self._gets}, but {has}: write {wanted}")

    # fmt: off
    @overload
    def __call__(
        self: BatchApp[Concatenate[list[Any], list[Any], list[Any], list[Any], list[Any], _Rest], Result],
        a: object, b: object, c: object, d: object, e: object, /, *args: _Rest.args, **kwargs: _Rest.kwargs,
    ) -> Future[Result]: ...
    @overload
    def __call__(
        self: BatchApp[Concatenate[list[Any], list[Any], list[Any], list[Any], _Rest], Result],
        a: object, b: object, c: object, d: object, /, *args: _Rest.args, **kwargs: _Rest.kwargs,
    ) -> Future[Result]: ...
    @overload
    def __call__(
        self: BatchApp[Concatenate[list[Any], list[Any], list[Any], _Rest], Result],
        a: object, b: object, c: object, /, *args: _Rest.args, **kwargs: _Rest.kwargs,
    ) -> Future[Result]: ...
    @overload
    def __call__(
        self: BatchApp[Concatenate[list[Any], list[Any], _Rest], Result],
        a: object, b: object, /, *args: _Rest.args, **kwargs: _Rest.kwargs,
    ) -> Future[Result]: ...
    @overload
    def __call__(
        self: BatchApp[Concatenate[list[Any], _Rest], Result],
        a: object, /, *args: _Rest.args, **kwargs: _Rest.kwargs,
    ) -> Future[Result]: ...
    # fmt: on

    def __call__(self, *args: Any, **kwargs: Any) -> Future[Result]:  # type: ignore[misc] # It takes any _Rest.
        """Submit one item, and return its result in a future. Items that wait together share a batch."""
        item, constants = self._bind(args, kwargs)
        return self._submit(ItemCall(self, tuple(sorted(constants.items()))), item, {})

    # fmt: off
    @overload
    def map(
        self, *inputs: object, columns: str | Sequence[str] = ..., resume: str | os.PathLike[str] | None = ...,
        resume_by: ResumeBy = ..., on_error: Literal["raise"] = ..., order: Literal["input"] = ...,
        window: int | None = ..., progress: bool | None = ..., **constants: object,
    ) -> MapResult[Result]: ...
    @overload
    def map(
        self, *inputs: object, columns: str | Sequence[str] = ..., resume: str | os.PathLike[str] | None = ...,
        resume_by: ResumeBy = ..., on_error: Literal["raise"] = ..., order: Literal["completed"],
        window: int | None = ..., progress: bool | None = ..., **constants: object,
    ) -> MapResult[tuple[int, Result]]: ...
    @overload
    def map(
        self, *inputs: object, columns: str | Sequence[str] = ..., resume: str | os.PathLike[str] | None = ...,
        resume_by: ResumeBy = ..., on_error: Literal["return"], order: Literal["input"] = ...,
        window: int | None = ..., progress: bool | None = ..., **constants: object,
    ) -> MapResult[Result | Exception]: ...
    @overload
    def map(
        self, *inputs: object, columns: str | Sequence[str] = ..., resume: str | os.PathLike[str] | None = ...,
        resume_by: ResumeBy = ..., on_error: Literal["return"], order: Literal["completed"], window: int | None = ...,
        progress: bool | None = ..., **constants: object,
    ) -> MapResult[tuple[int, Result | Exception]]: ...
    # fmt: on

    def map(
        self,
        *inputs: object,
        columns: str | Sequence[str] = (),
        resume: str | os.PathLike[str] | None = None,
        resume_by: ResumeBy = "index",
        on_error: Literal["raise", "return"] = "raise",
        order: Literal["input", "completed"] = "input",
        window: int | None = None,
        progress: bool | None = None,
        **constants: object,
    ) -> MapResult[Any]:
        """Return the results of many items, as they come, in bounded memory.

        Work begins at once; inputs are taken from the iterables only as slots free up.

        :param inputs: an iterable for each parameter of an item, side by side as in the built-in `map`; or one table,
            whose rows are the items: the path of a Parquet, CSV or JSON Lines file or of a dataset's folder, a table or
            dataset of pyarrow, a DataFrame of pandas, a dataset of Hugging Face's. Its columns go to the parameters of
            their names; to a single one that of its name or the only one, or, if it is called `rows`, whole rows.
        :param columns: which of the table's columns the parameters get, in their order; "*" for whole rows.
        :param resume: a file that keeps the results; what is in it from an earlier run is not computed again.
        :param resume_by: "index" uses a result again for the same item at the same place; "content" for an equal item
            at any place, so that a row put in front costs one.
        :param on_error: "raise" the first error and drop the rest, or "return" each in the place of its result.
        :param order: "input" yields results in the order of the inputs, "completed" yields pairs
            (index, result) as they come.
        :param window: how many items may be on their way or waiting for their turn.
        :param progress: whether to show how far it is; by default on a terminal and in a notebook, after two seconds.
        :raises ValueError: for an option that makes no sense, a table that lacks a column, or a resume file of
            another app.

        >>> from ctxflow import ContextExecutor, batch_app
        >>> @batch_app
        ... def double(numbers):
        ...     return [2 * n for n in numbers]
        >>> with ContextExecutor(workers=1):
        ...     list(double.map(range(5)))
        [0, 2, 4, 6, 8]
        """
        from ctxflow.map_inputs import inputs_of, unknown_option
        from ctxflow.map_results import MapResult

        if unknown := sorted(set(constants) - self.constants):
            raise unknown_option(self, unknown[0])
        through = inputs_of(self, inputs, columns, by_index=resume is not None and resume_by != "content")
        executor, kernel = active_executor(self.chosen.executor)
        # Parsl's retries are for its tasks, and a map is one.
        more = kernel is not None and kernel.config.retries > self.chosen.retries
        app = self.options(retries=kernel.config.retries) if more else self
        mapped = MapResult(app, through, constants, executor, resume, on_error, order, window, progress, resume_by)
        if kernel is not None:
            # One Parsl task stands for the whole map: it ends when the stream does.
            try:
                self._submit_to_kernel(kernel, executor.label, MapCall(mapped.finished), (), {})
            except BaseException:
                mapped.close()
                raise
        return mapped

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return one item's parameters in order, and the call's constants."""
        constants = {name: kwargs.pop(name) for name in list(kwargs) if name in self.constants}
        item = list(args)
        for name in self.parameters[len(args) :]:
            if name in kwargs:
                item.append(kwargs.pop(name))
        if kwargs:
            raise TypeError(f"{self.__name__} has no parameter {next(iter(kwargs))!r}{self.constants_hint()}")
        self.check_width(len(item))
        return tuple(item), constants

    def check_width(self, width: int) -> None:
        """Refuse an item of so many values, if it may not have them, with a `TypeError`."""
        if not width and not self.parameters:
            named = header(self.__name__, "left, right")
            raise TypeError(
                f"{self.__name__} takes any number of values an item (*{self.rest}), but got none: give one or more, "
                f"of a table by columns=[...], or name its parameters, as in {named}"
            )
        if width != len(self.parameters) and (self.rest is None or width < len(self.parameters)):
            values = f"{counted(len(self.parameters), 'value')}{'' if self.rest is None else ' or more'}"
            takes = f"{self.__name__} takes {values} an item ({', '.join(self.parameters)}), but got {width}"
            if (missing := self.parameters[width:]) and self._defaulted.issuperset(missing):
                takes += (
                    f"; {missing[0]} has a default: make it a constant: def {self.__name__}(..., *, {missing[0]}=...)"
                )
            raise TypeError(takes)

    def constants_hint(self) -> str:
        """Return which constants a call may have, for a message."""
        return f": its keyword-only parameters are {', '.join(sorted(self.constants)) or 'none'}"

    def declare(self, run: LiveRun, constants: Mapping[str, Any], look_inside: bool = False) -> Declaration:
        """Declare this app with these constants to a run; see `Variants.declare`."""
        return self.variants.declare(self, run, constants, look_inside)


class ItemApp(BatchApp[Params, Result]):
    """An `async` function over one item, of which a worker has many in flight at a time; called and mapped as others.

    The function gets the live context (if there is one), then the item's values; keyword-only parameters are constants.
    Its calls share the library process's event loop, and each is answered as it ends, in any order. How many of them
    overlap is the batching policy's window, or the context's `concurrency` where that is less (docs/batching.md).

    An item that raises, or takes longer than the app's `timeout`, fails alone. A worker that is lost costs those in
    flight their time, and nothing else. `ctxflow.errors.ItemRefused` says that no other try could do better, and
    `ctxflow.errors.ContextLost` that the context has to be built anew.
    """

    style = "item"
    _gets = "an item's values"

    def __init__(self, function: Callable[..., Any], context: Context | None, options: Options) -> None:
        if options.batch_size is not None:
            raise TypeError("batch_size= is for batch apps: an app of items gets one at a time")
        super().__init__(function, context, options)

    def _check_function(self, function: Any) -> None:
        if not callable(function) or isinstance(function, (_App, type)):
            super()._check_function(function)
        if not inspect.iscoroutinefunction(function):
            name = getattr(function, "__name__", "the function")
            raise TypeError(
                f"{name} is not async, and an app of items awaits what it does: write async "
                f"{header(name, 'context, item')}, or make it a batch_app over lists"
            )

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Future[Result]:  # type: ignore[override]
        """Submit one item, and return its result in a future."""
        item, constants = self._bind(args, dict(kwargs))
        return self._submit(ItemCall(self, tuple(sorted(constants.items()))), item, {})
