"""How single calls get to a run, from Parsl's `submit` or through a `concurrent.futures.Executor`.

What a resource specification may say, and pickling. ctxflow's own apps bring a `Submission` along (apps.py).
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import inspect
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, wait
from types import TracebackType
from typing import Any, Protocol, TypeVar

from ctxflow.errors import RunEnded, closest, name_of
from ctxflow.executors.call_files import call_files
from ctxflow.executors.contract import Pickled
from ctxflow.executors.declarations import ApplyCall, Declaration, DeclaredApp
from ctxflow.executors.live_run import LiveRun
from ctxflow.option_values import choice, number, refuse, refuse_async, whole
from ctxflow.pickling import Referents, dumps, without_parsl
from ctxflow.recipe import Context
from ctxflow.scheduler import events as ev

KEY = "ctxflow"
"""The key of a resource specification under which ctxflow's own apps say what they are."""

_SUPPORTED = ("context", "priority", "timeout", "level", "gpus")
_KNOWN = {KEY, *_SUPPORTED, "function_context", "function_context_args", "function_context_kwargs"}
# What Parsl's other executors take for a call: here the site says what a worker has, and the context what it takes.
_OF_OTHERS = {"cores", "memory", "disk", "category", "running_time_min", "num_nodes", "num_ranks", "ranks_per_node"}
_CHECKS: dict[str, Callable[[Any], Any]] = {
    "priority": lambda value: whole("priority", value, "a whole number, such as 10: higher goes first"),
    "timeout": lambda value: number("timeout", value, "seconds that the call may take, more than 0", above=True),
    "gpus": lambda value: whole("gpus", value, "the number of GPUs that the context occupies, 0 or more", 0),
    "level": lambda value: choice("level", value, ev.LEVELS),
}


class Submission(Protocol):
    """What an app of ctxflow's own puts into its resource specification."""

    def submit(self, calls: Calls, function: Callable[..., Any], args: Any, kwargs: Any) -> Future[Any]:
        """Make the call."""


class Memoized(abc.ABC):
    """A submission that Parsl's memoization tells from others."""

    @abc.abstractmethod
    def memo_id(self) -> bytes:
        """Return what is the same where a result may be used again."""


@dataclasses.dataclass(frozen=True)
class CallOptions:
    """How a single call is made."""

    context: Context | None = None
    insert: bool = False
    priority: int = 0
    deadline: float | None = None
    timeout: float | None = None
    retries: int = 0
    level: str | None = None


class Calls:
    """Single calls of arbitrary functions on a run.

    A function that is called a second time is from then on pickled once and sent to each library process once.
    """

    def __init__(self, run: LiveRun) -> None:
        self.run = run
        self._declaring = threading.Lock()  # Parsl submits from several threads.
        self._names = itertools.count(1)  # An address is no name: it is given again.
        self._apps: weakref.WeakValueDictionary[Any, Declaration] = weakref.WeakValueDictionary()  # The run holds them.
        self._functions: weakref.WeakKeyDictionary[Any, tuple[Pickled, Referents] | None] = weakref.WeakKeyDictionary()
        self._wants_specification: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def submit(
        self, function: Callable[..., Any], specification: Mapping[str, Any], args: Any, kwargs: dict[str, Any]
    ) -> Future[Any]:
        """Do what `ParslExecutor.submit` does."""
        if kwargs and not self.run.files_travel:
            absolute_redirects(kwargs)
        if not specification:
            return self.call(function, args, kwargs, _DEFAULT)
        if not isinstance(specification, Mapping):
            wanted = 'a dict, such as {"priority": 10}, or call executor.pool().submit(...), as in concurrent.futures'
            raise refuse("parsl_resource_specification", specification, wanted, TypeError)
        own: Submission | None = specification.get(KEY)
        if own is not None:
            kwargs.pop("parsl_resource_specification", None)
            return own.submit(self, function, args, kwargs)
        _check_keys(specification)
        if "parsl_resource_specification" in kwargs and not self._wants(function):
            del kwargs["parsl_resource_specification"]
        context = _context_of(specification)
        options = CallOptions(
            context=context,
            priority=_option(specification, "priority", context.priority if context is not None else 0),
            timeout=_option(specification, "timeout", None),
            level=_option(specification, "level", None),
        )
        return self.call(function, args, kwargs, options)

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any, options: CallOptions) -> Future[Any]:
        """Submit one call of any function.

        :raises TypeError: if the function or an argument cannot be pickled, naming it.
        :raises ValueError: for an output that is no file here.
        """
        files = None
        if self.run.files_travel:
            args, files = call_files(args, kwargs)
        known = self._pickled(function)
        if known is None:
            self.run.prepare_pickling()
        given: Any = (without_parsl(function), args, kwargs) if known is None else (args, kwargs)
        what = f"a call of {name_of(function)}"
        return self.run.submit_call(self._app(options), ApplyCall(known, dumps(given, what), files))

    def item(self, app: Declaration, values: tuple[Any, ...]) -> Future[Any]:
        """Submit one item of a batch app."""
        [values] = self.run.placed(app, [values])
        return self.run.submit_call(app, values)

    def _app(self, options: CallOptions) -> Declaration:
        # Not the context itself in the key: its equality compares digests.
        context_id = options.context.id if options.context is not None else None
        key = (
            context_id, options.insert, options.priority, options.deadline, options.timeout, options.retries,
            options.level,
        )  # fmt: skip
        app = self._apps.get(key)
        if app is not None:
            return app
        context = self.run.declare_context(options.context, options.level)
        with self._declaring:
            app = self._apps.get(key)
            if app is None:
                spec = ev.AppSpec(
                    f"calls-{next(self._names)}",
                    options.context.name if options.context is not None else "calls",
                    context=context.spec.id,
                    batch=False,
                    priority=options.priority,
                    deadline=options.deadline,
                    retries=options.retries,
                )
                made = DeclaredApp(spec, "apply", insert=options.insert, timeout=options.timeout)
                app = self._apps[key] = Declaration((made,), (context,))
            return app

    def _pickled(self, function: Callable[..., Any]) -> Pickled | None:
        """Return a function as it is now, pickled for all its calls; None at its first call."""
        try:
            known = function in self._functions
        except TypeError:  # It has no hash.
            known = False
        if not known:
            refuse_async(_written(function))
            with contextlib.suppress(TypeError):  # It cannot be referred to weakly: it travels with each call.
                self._functions[function] = None
            return None
        pickled = self._functions[function]
        if pickled is not None and not pickled[1].changed():
            return pickled[0]
        with self._declaring:
            referents = Referents(function)
            self.run.prepare_pickling()
            made = self.run.pickled(dumps(without_parsl(function), f"the function {name_of(function)}"))
            self._functions[function] = made, referents
        return made

    def _wants(self, function: Callable[..., Any]) -> bool:
        """Return whether a function takes the resource specification itself."""
        try:
            wants = self._wants_specification.get(function)
            if wants is None:
                parameters = inspect.signature(function).parameters
                wants = "parsl_resource_specification" in parameters or any(
                    p.kind is p.VAR_KEYWORD for p in parameters.values()
                )
                self._wants_specification[function] = wants
        except (TypeError, ValueError):  # It has no hash, or tells no signature.
            return False
        return wants


def _written(function: Any) -> Any:
    """Return what its user wrote of a function that Parsl wraps."""
    while getattr(function, "__globals__", {}).get("__name__", "").startswith("parsl.app."):
        within = getattr(function, "__wrapped__", None)
        if isinstance(within, functools.partial):  # What runs the command lines of bash apps.
            within = within.args[0]
        if within is None:
            break
        function = within
    return function


_DEFAULT = CallOptions()


def _check_keys(specification: Mapping[str, Any]) -> None:
    """Raise TypeError for what a resource specification says that would not be heeded, with what is supported."""
    for name in specification:
        if name not in _KNOWN:
            supported = f"ctxflow supports {', '.join(_SUPPORTED[:-1])} and {_SUPPORTED[-1]}"
            if name in _OF_OTHERS:
                what = "what a worker has stands in the site's tiers, and what a context takes at its @context"
                raise TypeError(f"a resource specification has no key {name!r} here: {supported}; {what}")
            meant = closest(str(name), _KNOWN - {KEY})
            hint = f"did you mean {meant!r}? {supported}" if meant else supported
            raise TypeError(f"a resource specification has no key {name!r}: {hint}")


def _option(specification: Mapping[str, Any], name: str, default: Any) -> Any:
    value = specification.get(name)
    return default if value is None else _CHECKS[name](value)


def _context_of(specification: Mapping[str, Any]) -> Context | None:
    """Return the context that a resource specification names, in the paper's form or that of Parsl's proposal #3724."""
    given = specification.get("context")
    if isinstance(given, Context):
        return given
    if given is not None:
        if not isinstance(given, (list, tuple)) or not 1 <= len(given) <= 3:
            raise refuse("context", given, _CONTEXT, TypeError)
        defaults: list[Any] = [[], {}]
        function, args, kwargs = [*list(given), *defaults[len(given) - 1 :]]
    elif "function_context" in specification:
        function = specification["function_context"]
        args = specification.get("function_context_args", [])
        kwargs = specification.get("function_context_kwargs", {})
    else:
        return None
    if not callable(function) or not isinstance(args, (list, tuple)) or not isinstance(kwargs, Mapping):
        raise refuse("context", [function, args, kwargs], _CONTEXT, TypeError)
    refuse_async(function)
    gpus = _option(specification, "gpus", 0)
    return Context(name_of(function), function, tuple(args), dict(kwargs), gpus=gpus)


_CONTEXT = "a recipe made by a @context function, or [function, [arguments], {named arguments}]"


Result = TypeVar("Result")


def absolute_redirects(kwargs: dict[str, Any]) -> None:
    """Make the paths of Parsl's `stdout` and `stderr` keywords absolute: they are meant to be relative to here."""
    for name in ("stdout", "stderr"):
        given = kwargs.get(name)
        if isinstance(given, (str, os.PathLike)):
            kwargs[name] = os.path.abspath(given)
        elif isinstance(given, tuple) and given and isinstance(given[0], (str, os.PathLike)):
            kwargs[name] = (os.path.abspath(given[0]), *given[1:])


class Pool(Executor):
    """Calls of any functions on a run's workers, as any executor of `concurrent.futures` makes them.

    When it is shut down its calls are waited for; the run goes on. A call can be cancelled also while it runs.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()
        self._ended = False

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Make one call; its result comes in a future.

        :raises RuntimeError: after `shutdown`, or when the run has ended.
        :raises TypeError: if the function or an argument cannot be pickled, naming it.
        """
        with self._lock:
            if self._ended:
                raise RuntimeError("cannot schedule new futures after shutdown: make another with executor.pool()")
            try:
                future = self._calls.call(fn, args, kwargs, CallOptions())
            except RunEnded as error:
                raise RuntimeError(f"cannot schedule new futures: {error}") from error
            self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def map(
        self, fn: Callable[..., Result], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[Result]:
        """Return the results of many calls, in order. All inputs are read at once; the `map` of a `batch_app` reads on.

        :param timeout: seconds from now by which each result has to be there.
        :param chunksize: how many calls go to a worker together.
        :raises TimeoutError: when one is asked for that has not come in time; calls that were not begun are cancelled
            then, as they are when a call raises.
        """
        whole("chunksize", chunksize, "how many calls go to a worker together, 1 or more", 1)
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout)
        chunks = super().map(
            functools.partial(_call_each, fn), _chunks(zip(*iterables, strict=False), chunksize), timeout=timeout
        )
        return _joined(chunks)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls.

        :param wait: whether to return only when all its calls are done.
        :param cancel_futures: whether to cancel those that are not.
        """
        with self._lock:
            self._ended = True
            left = list(self._open)
        if cancel_futures:
            for future in left:
                future.cancel()
        if wait:
            _wait(left)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for its calls; Ctrl-C and `sys.exit` cancel them, also those that run."""
        self.shutdown(cancel_futures=kind is not None and not issubclass(kind, Exception))


_wait = wait


def _chunks(calls: Iterator[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    while chunk := list(itertools.islice(calls, size)):
        yield chunk


def _call_each(function: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
    return [function(*args) for args in chunk]


def _joined(chunks: Iterator[list[Result]]) -> Iterator[Result]:
    for chunk in chunks:
        yield from chunk
