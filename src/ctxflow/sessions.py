"""Streams that keep a state on a worker: `@session_app`, and the sessions that it opens."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from ctxflow.app_options import check_context
from ctxflow.context import ContextFunction
from ctxflow.digest import digest
from ctxflow.errors import CtxflowError, RunEnded, TurnOver
from ctxflow.executors.bare import active_executor
from ctxflow.executors.contract import EngineFailed
from ctxflow.executors.declarations import Declaration, DeclaredApp
from ctxflow.executors.figures import SessionStatus
from ctxflow.executors.live_run import LiveRun
from ctxflow.on_worker import idle, last
from ctxflow.option_values import (
    UNCHANGED,
    OptionsMethod,
    Unchanged,
    check_function,
    given,
    number,
    refusing,
    text,
    whole,
)
from ctxflow.ownership import InterruptibleCondition
from ctxflow.pickling import Referents, dumps
from ctxflow.recipe import Context
from ctxflow.scheduler import events as ev

if TYPE_CHECKING:
    from typing_extensions import TypeVar as DefaultTypeVar

    Prompt = DefaultTypeVar("Prompt", default=Any)
    Chunk = DefaultTypeVar("Chunk", default=Any)
else:
    Prompt = TypeVar("Prompt")
    Chunk = TypeVar("Chunk")
# Of functions; those of the classes have defaults, which checkers would take where nothing else fits.
_V = TypeVar("_V")
_S = TypeVar("_S")
_P = TypeVar("_P")
_C = TypeVar("_C")
# The states and the new prompts of some sessions give a chunk and the new state of each.
_Steps = Callable[[list[_S], list[list[_P]]], Iterable[tuple[_C, _S]]]
_StepsWith = Callable[[_V, list[_S], list[list[_P]]], Iterable[tuple[_C, _S]]]
_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """What may be said of a session app where it is defined; `session_app` describes each option."""

    chunk_target: float | None = None
    keep_every: int | None = 8
    ahead: int = 32
    timeout: float | None = None
    retries: int = 0
    executor: str | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None or name in ("ahead", "retries"):
                object.__setattr__(self, name, check(value))


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "chunk_target": lambda value: number("chunk_target", value, "seconds that a chunk may take, 0 or more"),
    "keep_every": lambda value: whole("keep_every", value, "a number of chunks, 1 or more, or None for never", 1),
    "ahead": lambda value: whole("ahead", value, "how many chunks are made before they are taken, 1 or more", 1),
    "timeout": lambda value: number("timeout", value, "seconds that a step may take, more than 0", above=True),
    "retries": lambda value: whole("retries", value, "how often a session is tried again, 0 or more", 0),
    "executor": lambda value: text("executor", value, "the label of an executor"),
}


class SessionApp(Generic[Prompt, Chunk]):
    """A function that makes the next chunks of several sessions at a time; a person opens sessions of it.

    The function gets the live context (if there is one), the list of the sessions' states (None before a session's
    first chunk), and the list of their prompts: for each session those that came since its last chunk, in a list. It
    returns, or yields, one pair of chunk and state for each session, in their order.
    """

    def __init__(self, function: Callable[..., Any], context: Context | None, options: SessionOptions) -> None:
        check_context(context)
        check_function("a session app", function)
        functools.update_wrapper(self, function)  # type: ignore[arg-type]
        self.__name__: str = getattr(function, "__name__", type(function).__name__)
        self.function = function
        self.context = context
        self.chosen = options
        self._run: tuple[str, str | None] = ("", None)  # Where it was declared last, and the id of its context there.
        self._declaration: Declaration | None = None
        self._referents: Referents | None = None

    @refusing("a session app")
    def options(
        self,
        context: Context | None = None,
        *,
        chunk_target: float | Unchanged | None = UNCHANGED,
        keep_every: int | Unchanged | None = UNCHANGED,
        ahead: int | Unchanged = UNCHANGED,
        timeout: float | Unchanged | None = UNCHANGED,
        retries: int | Unchanged = UNCHANGED,
        executor: str | Unchanged | None = UNCHANGED,
    ) -> SessionApp[Prompt, Chunk]:
        """Return the same app with another context or other options; what is not given stays. `using` is the same.

        :param context: another recipe, if not None; `session_app` describes each option.
        :raises TypeError: for an unknown option, or one of a wrong type.
        :raises ValueError: for an option that makes no sense.
        """
        changes = given(
            chunk_target=chunk_target, keep_every=keep_every, ahead=ahead, timeout=timeout, retries=retries,
            executor=executor,
        )  # fmt: skip
        changed = dataclasses.replace(self.chosen, **changes)
        return type(self)(self.function, context if context is not None else self.context, changed)

    using = options
    if not TYPE_CHECKING:
        options = OptionsMethod(options)

    def open(self, prompt: Prompt | None = None) -> Session[Prompt, Chunk]:
        """Begin a session, with a first prompt if there is one.

        :raises TypeError: if the prompt cannot be pickled.
        :raises CtxflowError: if no executor is running.
        """
        executor, _ = active_executor(self.chosen.executor)
        run = executor.calls.run
        return Session(run, self._declare(run), self.chosen.ahead, prompt)

    def _declare(self, run: LiveRun) -> Declaration:
        recipe = self.context.id if self.context is not None else None
        changed = self._run != (run.id, recipe) or self._referents is None or self._referents.changed()
        if self._declaration is None or changed:
            self._referents = Referents(self.function)
            run.prepare_pickling()
            options = self.chosen
            context = run.declare_context(self.context, ev.PERVASIVE)
            identity = (self.function, context.spec.id, dataclasses.astuple(options))
            spec = ev.AppSpec(
                f"{self.__name__}-{digest(identity)[:12]}", self.__name__, context=context.spec.id, batch=False,
                retries=options.retries, sessions=True, chunk_target=options.chunk_target,
                keep_every=options.keep_every,
            )  # fmt: skip
            function = run.pickled(dumps(self.function, f"the app {self.__name__}"))
            self._declaration = Declaration((DeclaredApp(spec, "step", function, timeout=options.timeout),), (context,))
            self._run = run.id, recipe
        return self._declaration

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.function, self.context, self.chosen)


class _Inbox:
    """A session's chunks on their way to who takes them."""

    def __init__(self) -> None:
        self.changed = InterruptibleCondition()
        self.chunks: collections.deque[bytes] = collections.deque()
        self.turn_over_after = -1  # How many prompts it had got by then.
        self.is_over = False
        self.error: BaseException | None = None

    def chunk(self, number: int, value: bytes) -> None:
        with self.changed.lock:
            self.chunks.append(value)
            self.changed.notify_all()

    def turn_over(self, prompts: int) -> None:
        with self.changed.lock:
            self.turn_over_after = prompts
            self.changed.notify_all()

    def over(self, error: BaseException | None) -> None:
        with self.changed.lock:
            self.is_over, self.error = True, error
            self.changed.notify_all()


class Session(Generic[Prompt, Chunk]):
    """One stream of chunks with a state of its own, on whichever worker.

    Iterate over it for its chunks: the loop ends when its turn is over (the app said `idle`) or the session is, and
    another loop goes on after the next prompt. Chunks come in order, each once, wherever they are made. It is closed at
    the end of a `with` statement, and when nobody holds it any more.

    :ivar number: what the run knows it by.
    """

    def __init__(self, run: LiveRun, app: Declaration, ahead: int, prompt: Prompt | None = None) -> None:
        self.number = next(_numbers)
        self._run = run
        self._ahead = self._wanted = ahead
        self._taken = 0
        self._prompts = 0 if prompt is None else 1
        self._inbox = _Inbox()
        prompts = [] if prompt is None else [_pickled(prompt)]

        def opened() -> ev.Event:
            run.sessions.add(self.number, self._inbox, prompts)
            return ev.SessionOpened(run.clock(), self.number, app.id, ahead, len(prompts))

        run.tell(opened, app)
        self._closing = weakref.finalize(self, run.soon, functools.partial(_close, run, self.number))
        self._closing.atexit = False

    def prompt(self, prompt: Prompt) -> None:
        """Give the session a prompt, for its next chunk that was not begun.

        :raises TypeError: if it cannot be pickled.
        :raises CtxflowError: if the session is over.
        """
        pickled, run = _pickled(prompt), self._run

        def prompted() -> ev.Event:
            if not run.sessions.prompt(self.number, pickled):
                raise CtxflowError("the session is over: open another one for this prompt")
            self._prompts += 1
            return ev.SessionPrompted(run.clock(), self.number)

        run.tell(prompted)

    def suspend(self) -> None:
        """Stop making chunks for now, and offload the state to the cache of its worker, which is free for others.

        Chunks that were made before can be taken; then `take` waits until the session is resumed.
        """
        self._run.tell(lambda: ev.SessionSuspended(self._run.clock(), self.number))

    def resume(self) -> None:
        """Continue a suspended session, on whichever worker."""
        self._run.tell(lambda: ev.SessionResumed(self._run.clock(), self.number))

    def close(self) -> None:
        """End the session; its state is discarded."""
        if self._closing.detach() is not None:
            _close(self._run, self.number)

    def take(self, timeout: float | None = None) -> Chunk:
        """Return the next chunk, waiting for it.

        The end is a `TurnOver`, an `EOFError` and no StopIteration: that would become a RuntimeError inside of a
        generator, and end a loop around it unnoticed.

        :param timeout: seconds to wait for it.
        :raises TurnOver: if its turn, or the session, is over, and no chunk is left of it.
        :raises TimeoutError: if it does not come.
        :raises Exception: what the app raised, as for any call.
        """
        inbox = self._inbox

        def is_over() -> bool:
            return inbox.is_over or inbox.turn_over_after == self._prompts

        if not inbox.changed.wait_for(lambda: inbox.chunks or is_over(), math.inf if timeout is None else timeout):
            raise TimeoutError(f"no chunk came within {timeout:g} s")
        with inbox.changed.lock:
            chunk, over = inbox.chunks.popleft() if inbox.chunks else None, is_over()
        if chunk is None and not over:  # Another thread has taken it.
            return self.take(timeout)
        if chunk is None:
            if inbox.error is not None:
                raise inbox.error
            raise TurnOver("the session's turn is over: give it another prompt for more chunks, or iterate over it")
        self._taken += 1
        if self._wanted - self._taken <= self._ahead // 2 and not inbox.is_over:
            self._wanted = self._taken + self._ahead
            with contextlib.suppress(CtxflowError):  # What was made can be taken, also of a run that has ended.
                self._run.tell(lambda: ev.ChunksWanted(self._run.clock(), self.number, self._wanted))
        return pickle.loads(chunk)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Chunk]:
        """Yield the chunks until its turn is over."""
        while True:
            try:
                chunk = self.take()
            except TurnOver:
                return
            yield chunk

    @property
    def status(self) -> SessionStatus | None:
        """Return its status at this moment; None once it is over."""
        return self._run.session_status(self.number)

    def __enter__(self) -> Session[Prompt, Chunk]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Session({self.number}, {self.status})"


def _close(run: LiveRun, number: int) -> None:
    if run.is_copy:
        return
    with contextlib.suppress(RunEnded, EngineFailed):
        run.tell(lambda: ev.SessionClosed(run.clock(), number))


def _pickled(prompt: Any) -> bytes:
    return dumps(prompt, "the prompt", "give plain data instead")


# fmt: off
@overload
def session_app(function: _Steps[_S, _P, _C], /) -> SessionApp[_P, _C]: ...
@overload
def session_app(
    context: Context[_V], /, *, chunk_target: float | None = ..., keep_every: int | None = ..., ahead: int = ...,
    timeout: float | None = ..., retries: int = ..., executor: str | None = ...,
) -> Callable[[_StepsWith[_V, _S, _P, _C]], SessionApp[_P, _C]]: ...
@overload
def session_app(
    context: None = None, /, *, chunk_target: float | None = ..., keep_every: int | None = ..., ahead: int = ...,
    timeout: float | None = ..., retries: int = ..., executor: str | None = ...,
) -> Callable[[_Steps[_S, _P, _C]], SessionApp[_P, _C]]: ...
# fmt: on


@refusing("a session app")
def session_app(
    context: Any = None,
    /,
    *,
    chunk_target: float | None = None,
    keep_every: int | None = 8,
    ahead: int = 32,
    timeout: float | None = None,
    retries: int = 0,
    executor: str | None = None,
) -> Any:
    """Make a function the app of sessions: streams that keep a state on a worker, and share the model's calls.

    :param context: the recipe; None, or the function itself, for none.
    :param chunk_target: seconds that a chunk may take: so many sessions share a step as meet it. None for all.
    :param keep_every: after how many chunks a session's state is kept beside its worker: at most so many are made
        again when the worker is lost. None for never: then a session begins anew.
    :param ahead: how many chunks are made before they are taken.
    :param timeout: seconds that a step may take; it is stopped then, which counts against the sessions in it.
    :param retries: how often a session that raises on its own is tried again, from its kept state.
    :param executor: the label of the executor, where several are running.
    :raises TypeError: for an unknown option, one of a wrong type, or a context that is no recipe.
    :raises ValueError: for an option that makes no sense, saying what to write.

    >>> from ctxflow import ContextExecutor
    >>> @session_app(keep_every=4)
    ... def count(states, prompts):
    ...     for state, new in zip(states, prompts):
    ...         left = new[0] if new else state - 1
    ...         yield (left if left else idle("lift off")), left
    >>> with ContextExecutor(workers=1), count.open(3) as session:
    ...     list(session)
    [3, 2, 1, 'lift off']
    """
    chosen = SessionOptions(chunk_target, keep_every, ahead, timeout, retries, executor)
    if callable(context) and not isinstance(context, (Context, ContextFunction)):
        return SessionApp(context, None, chosen)
    check_context(context)
    return lambda function: SessionApp(function, context, chosen)


__all__ = ["Session", "SessionApp", "SessionOptions", "idle", "last", "session_app"]
