"""Streams that keep a state on a worker: `@session_app`, and the sessions that it opens.

What does not live here: where sessions are and when they move (scheduler/sessions.py), and their states
(host/sessions.py).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from ctxflow.app_options import check_context
from ctxflow.context import Context, ContextFunction
from ctxflow.digest import digest
from ctxflow.errors import CtxflowError, RunEnded
from ctxflow.executors.declarations import App
from ctxflow.executors.executor import active_executor
from ctxflow.executors.run import Run
from ctxflow.executors.status import SessionStatus
from ctxflow.pickling import dumps
from ctxflow.scheduler import events as ev
from ctxflow.turns import idle, last

_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class SessionOptions:
    """What may be said of a session app where it is defined.

    :ivar chunk_target: seconds that a chunk may take: so many sessions share a step as meet it. None for all.
    :ivar keep_every: after how many chunks a session's state is kept beside its worker: at most so many are made again
        when the worker is lost. None for never: then a session begins anew.
    :ivar ahead: how many chunks are made before they are taken.
    :ivar timeout: seconds that a step may take; it is stopped then, which counts against the sessions in it.
    :ivar retries: how often a session that raises on its own is tried again, from its kept state.
    :ivar executor: the label of the executor, where several are running.
    """

    chunk_target: float | None = None
    keep_every: int | None = 8
    ahead: int = 32
    timeout: float | None = None
    retries: int = 0
    executor: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("chunk_target", 0), ("keep_every", 1), ("ahead", 1), ("timeout", 0), ("retries", 0)):
            value = getattr(self, name)
            if value is None and name not in ("ahead", "retries"):
                continue
            kinds = (int, float) if name in ("chunk_target", "timeout") else int
            if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
                raise ValueError(f"{name}={value!r} makes no sense: give {least} or more")


class SessionApp:
    """A function that makes the next chunks of several sessions at a time; a person opens sessions of it.

    The function gets the live context (if there is one), the list of the sessions' states (None before a session's
    first chunk), and the list of their prompts: for each session those that came since its last chunk, in a list. It
    returns, or yields, one pair of chunk and state for each session, in their order.
    """

    def __init__(self, function: Callable[..., Any], context: Context | None, options: SessionOptions) -> None:
        check_context(context)
        if not callable(function):
            raise TypeError(f"a session app is made of a function, not of a {type(function).__name__}")
        functools.update_wrapper(self, function)  # type: ignore[arg-type]
        self.__name__: str = getattr(function, "__name__", type(function).__name__)
        self.function = function
        self.context = context
        self.options = options
        self._declared: tuple[str, str] = ("", "")

    def open(self, prompt: Any = None) -> Session:
        """Begin a session, with a first prompt if there is one.

        :raises TypeError: if the prompt cannot be pickled.
        :raises CtxflowError: if no executor is running.
        """
        executor, _ = active_executor(self.options.executor)
        run = executor.calls.run
        return Session(run, self._declare(run), self.options.ahead, prompt)

    def _declare(self, run: Run) -> str:
        if self._declared[0] != run.id:
            run.prepare_pickling()
            options = self.options
            context = run.declare_context(self.context, ev.PERVASIVE)
            identity = (self.function, context, dataclasses.astuple(options))
            spec = ev.AppSpec(
                f"{self.__name__}-{digest(identity)[:12]}",
                self.__name__,
                context=context,
                batch=False,
                retries=options.retries,
                sessions=True,
                chunk_target=options.chunk_target,
                keep_every=options.keep_every,
            )
            function = dumps(self.function, f"the app {self.__name__}")
            run.declare_app(App(spec, "step", function, timeout=options.timeout))
            self._declared = (run.id, spec.id)
        return self._declared[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.function, self.context, self.options)


class _Inbox:
    """A session's chunks on their way to who takes them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.chunks: collections.deque[bytes] = collections.deque()
        self.turn_over_after = -1  # How many prompts it had got by then.
        self.is_over = False
        self.error: BaseException | None = None

    def chunk(self, number: int, value: bytes) -> None:
        with self.changed:
            self.chunks.append(value)
            self.changed.notify_all()

    def turn_over(self, prompts: int) -> None:
        with self.changed:
            self.turn_over_after = prompts
            self.changed.notify_all()

    def over(self, error: BaseException | None) -> None:
        with self.changed:
            self.is_over, self.error = True, error
            self.changed.notify_all()


class Session:
    """One stream of chunks with a state of its own, on whichever worker.

    Iterate over it for its chunks: the loop ends when its turn is over (the app said `idle`) or the session is, and
    another loop goes on after the next prompt. Chunks come in order, each once, wherever they are made. It is closed at
    the end of a `with` statement, and when nobody holds it any more.

    :ivar number: what the run knows it by.
    """

    def __init__(self, run: Run, app: str, ahead: int, prompt: Any = None) -> None:
        self.number = next(_numbers)
        self._run = run
        self._ahead = self._wanted = ahead
        self._taken = 0
        self._prompts = 0 if prompt is None else 1
        self._inbox = _Inbox()
        prompts = [] if prompt is None else [_pickled(prompt)]

        def opened() -> ev.Event:
            run.sessions.add(self.number, self._inbox, prompts)
            return ev.SessionOpened(run.clock(), self.number, app, ahead, len(prompts))

        run.tell(opened)
        self._closing = weakref.finalize(self, run.soon, functools.partial(_close, run, self.number))
        self._closing.atexit = False

    def prompt(self, prompt: Any) -> None:
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
        """Have it make no chunks for now, and its worker rid of it: its state goes to that worker's cache.

        Chunks that were made before can be taken; then it is waited until it is resumed.
        """
        self._run.tell(lambda: ev.SessionSuspended(self._run.clock(), self.number))

    def resume(self) -> None:
        """Have a suspended session go on, on whichever worker."""
        self._run.tell(lambda: ev.SessionResumed(self._run.clock(), self.number))

    def close(self) -> None:
        """End it: nobody wants anything of it any more, and its state is forgotten."""
        if self._closing.detach() is not None:
            _close(self._run, self.number)

    def take(self, timeout: float | None = None) -> Any:
        """The next chunk.

        :param timeout: seconds to wait for it.
        :raises StopIteration: if its turn, or the session, is over, and no chunk is left of it.
        :raises TimeoutError: if it does not come.
        :raises Exception: what the app raised, as for any call.
        """
        inbox = self._inbox
        with inbox.changed:
            come = inbox.changed.wait_for(
                lambda: inbox.chunks or inbox.is_over or inbox.turn_over_after == self._prompts, timeout
            )
            if not come:
                raise TimeoutError(f"no chunk came within {timeout:g} s")
            if not inbox.chunks:
                if inbox.error is not None:
                    raise inbox.error
                raise StopIteration
            chunk = inbox.chunks.popleft()
        self._taken += 1
        if self._wanted - self._taken <= self._ahead // 2 and not inbox.is_over:
            self._wanted = self._taken + self._ahead
            with contextlib.suppress(CtxflowError):  # What was made can be taken, also of a run that has ended.
                self._run.tell(lambda: ev.ChunksWanted(self._run.clock(), self.number, self._wanted))
        return pickle.loads(chunk)

    def __iter__(self) -> Iterator[Any]:
        """The chunks until its turn is over."""
        while True:
            try:
                chunk = self.take()
            except StopIteration:
                return
            yield chunk

    @property
    def status(self) -> SessionStatus | None:
        """How it stands at this moment; None once it is over."""
        return self._run.session_status(self.number)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Session({self.number}, {self.status})"


def _close(run: Run, number: int) -> None:
    with contextlib.suppress(RunEnded):
        run.tell(lambda: ev.SessionClosed(run.clock(), number))


def _pickled(prompt: Any) -> bytes:
    return dumps(prompt, "the prompt", "give plain data instead")


def session_app(context: Any = None, /, **options: Any) -> Any:
    """Make a function the app of sessions: streams that keep a state on a worker, and share the model's calls.

    :param options: those of `SessionOptions`.
    :raises TypeError: for an unknown option, or a context that is no recipe.

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
    if unknown := sorted(set(options) - {field.name for field in dataclasses.fields(SessionOptions)}):
        known = ", ".join(field.name for field in dataclasses.fields(SessionOptions))
        raise TypeError(f"a session app has no option {unknown[0]!r}: it takes {known}")

    chosen = SessionOptions(**options)

    def decorate(function: Callable[..., Any]) -> SessionApp:
        return SessionApp(function, context, chosen)

    if callable(context) and not isinstance(context, (Context, ContextFunction)):
        return SessionApp(context, None, SessionOptions())
    check_context(context)
    return decorate


__all__ = ["Session", "SessionApp", "SessionOptions", "idle", "last", "session_app"]
