"""The futures of single calls, the exceptions that stand for failures, and the threads on which callbacks run.

The thread that leads a run's loop runs the callbacks of futures between its turns; where one blocks, another takes the
lead. A thread of their own would cost each call two more switches between threads, a tenth of its time.
"""

from __future__ import annotations

import collections
import copy
import functools
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

from ctxflow import errors
from ctxflow.executors.protocol import ENDS
from ctxflow.ownership import Process, belongs_here, foreign_text
from ctxflow.scheduler.events import Failure

logger = logging.getLogger("ctxflow")
_CALLBACK_SECONDS = 0.05  # How long a callback may take before another thread goes on with the loop.
_LEFT_SECONDS = 5.0  # How long callbacks have at the end of a run.

Callback: TypeAlias = Callable[["Future[Any]"], object]

_KINDS: dict[str, type[errors.CallError]] = {
    "crash": errors.CallCrashed,
    "timeout": errors.CallTimeout,
    "lost": errors.WorkersLost,
}


def error_of(failure: Failure, exception: BaseException | None, context: str | None = None) -> BaseException:
    """Return the exception that a person gets for a failure: the app's own where it can be had here.

    :param context: the name of the context, if it is that which failed.
    """
    host = host_of(failure)
    if context is not None:
        where = f" on {failure.host}" if failure.host else ""
        message = f"the context {context} could not be built{where}: {failure.error}: {failure.message}"
        return _with_cause(
            errors.ContextError(message, failure.traceback, failure.output, failure.worker, host), failure
        )
    if exception is not None:
        return exception if failure.kind == "input" else _with_cause(exception, failure)
    cls = _KINDS.get(failure.kind, errors.RemoteError)
    message = failure.message if cls is not errors.RemoteError else f"{failure.error}: {failure.message}"
    if cls is errors.RemoteError and failure.error in [each.__name__ for each in ENDS]:
        message = (
            f"the app let {failure.error} out, which would silently end the loop that asks for its result: give next() "
            "a default, or catch it there"
        )
    return _with_cause(cls(message, failure.traceback, failure.output, failure.worker, host), failure)


def _with_cause(error: BaseException, failure: Failure) -> BaseException:
    text = failure.traceback or ""
    if failure.output:
        text += f"\nlast lines that it printed:\n{failure.output}"
    if text or (failure.worker and not isinstance(error, errors.CallError)):
        error.__cause__ = errors.RemoteTraceback(text, failure.worker, host_of(failure))
    return error


def host_of(failure: Failure) -> str:
    """Return the machine on which it happened, "" if on none."""
    return failure.host or (socket.gethostname() if failure.worker else "")


class Callbacks:
    """Runs callbacks in the order in which their futures were answered, one after the other, between turns of a loop.

    One that blocks holds up the loop and the next callback for a moment: then another thread goes on with both. So a
    callback may wait for any other future. A thread that has lost the lead stays until the end, for the processes that
    it forked would die with it; it is the next to lead where one is needed.

    :param loop: what the leading thread does; it calls `run` now and then, and returns once that says False.
    :param wake: has the loop soon call `run`; called on any thread.
    :ivar queue: the callbacks that wait; only where there are some need `run` be called.
    """

    def __init__(self, loop: Callable[[], None], wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self.queue: collections.deque[tuple[Callback, Future[Any]]] = collections.deque()
        self._lead = threading.Condition()
        self._leader: int | None = None  # The identity of the thread that leads.
        self._followers = 0
        self._threads: list[threading.Thread] = []
        self._begun = math.inf  # When the callback began that the leader runs.
        self._waiting = threading.Event()  # For who leads when the loop is over: there are callbacks.
        self._armed = threading.Event()  # For who watches: there have been callbacks.
        self._watches = False
        self._ended = threading.Event()
        belongs_here(self)

    def start(self) -> None:
        """Begin the loop."""
        with self._lead:
            self._start(self._work, "ctxflow-run")

    def _start(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def started(self) -> bool:
        """Whether there are threads."""
        return bool(self._threads)

    @property
    def leads(self) -> bool:
        """Whether it is the leading thread that asks."""
        return self._leader == threading.get_ident()

    def put(self, callback: Callback, future: Future[Any]) -> None:
        """Run a callback soon; at once where the run has ended."""
        if self._ended.is_set():
            _run(callback, future)
            return
        self.queue.append((callback, future))
        if not self._armed.is_set():
            self._arm()
        if self._leader != threading.get_ident():
            self._waiting.set()
            self._wake()

    def run(self) -> bool:
        """Run the callbacks that wait, on the leading thread; return whether it leads still, and the run goes on."""
        own, queue, lead = threading.get_ident(), self.queue, self._lead
        while queue:
            callback, future = queue.popleft()
            self._begun = time.monotonic()
            _run(callback, future)
            with lead:
                if self._leader != own:
                    return False
                self._begun = math.inf
        return not self._ended.is_set()

    # --- the threads

    def _work(self) -> None:
        while self._leads_next():
            self._loop()
            while self.leads and self.run():  # The loop is over; callbacks of what its end answered are not.
                self._waiting.wait()
                self._waiting.clear()

    def _leads_next(self) -> bool:
        """Wait until nobody leads, and lead; False when all is over."""
        with self._lead:
            self._followers += 1
            while self._leader is not None and not self._ended.is_set():
                self._lead.wait()
            self._followers -= 1
            if not self._ended.is_set():
                self._leader = threading.get_ident()
            return not self._ended.is_set()

    def _arm(self) -> None:
        self._armed.set()
        with self._lead:
            if not self._watches:
                self._watches = True
                self._start(self._watch, "ctxflow-watch")

    def _watch(self) -> None:
        """Take the lead from a thread whose callback blocks. It sleeps while there are no callbacks."""
        while not self._ended.is_set():
            if self._begun == math.inf:
                self._armed.wait()
                self._armed.clear()
            self._ended.wait(_CALLBACK_SECONDS)
            with self._lead:
                if time.monotonic() - self._begun >= _CALLBACK_SECONDS and not self._ended.is_set():
                    self._leader, self._begun = None, math.inf
                    if self._followers:
                        self._lead.notify()
                    else:
                        self._start(self._work, "ctxflow-run")

    # --- the end

    def flush(self, seconds: float | None = None) -> None:
        """Wait until all callbacks so far have begun."""
        if self._threads:
            begun = threading.Event()
            self.put(lambda _: begun.set(), Future())
            begun.wait(seconds)

    def stop(self) -> None:
        """Wait for the callbacks, a few seconds at most, and end the threads. The loop is over."""
        deadline = time.monotonic() + _LEFT_SECONDS
        self.flush(_LEFT_SECONDS)
        with self._lead:
            self._ended.set()
            self._lead.notify_all()
        self._waiting.set()
        self._armed.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def forked(self) -> None:
        """Have no threads, in a child."""
        self._lead = threading.Condition()
        self._ended = threading.Event()
        self._ended.set()
        self.queue.clear()
        self._threads = []


def _run(callback: Callback, future: Future[Any]) -> None:
    try:
        callback(future)
    except (Exception, SystemExit):
        logger.exception("a callback of a future raised")


class CallFuture(Future[Any]):
    """The answer to one call.

    Cancelling it takes it out of the queue, and interrupts it where it runs and nobody waits for another item of its
    batch. (A future of `concurrent.futures` cannot be cancelled while it runs; this one can until it is answered.)

    :ivar context: the name of the context that answered it, for an app with alternatives.
    """

    def __init__(self, cancel: Callable[[int], None], callbacks: Callbacks) -> None:
        super().__init__()
        self._cancel = cancel
        self._cancel_notified = False
        self._callbacks = callbacks
        self.item = -1
        self.context: str | None = None
        self._generation = Process.generation

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer and return it; see `concurrent.futures.Future`.

        :raises CtxflowError: in a forked child of the process that made the call, if it was not answered before.
        """
        self._check_owner()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the answer and return the exception that it is, None if it is a result; raises as `result` does."""
        self._check_owner()
        return super().exception(timeout)

    def _check_owner(self) -> None:
        if self._generation != Process.generation and not self.done():
            raise errors.CtxflowError(foreign_text("the executor of this call"))

    def add_done_callback(self, fn: Callback) -> None:
        """Have a function called with this future once it is answered or cancelled; at once if it is.

        It may take its time and wait for other futures: answers and other callbacks go on coming.
        """
        if not self.done():
            fn = functools.partial(self._callbacks.put, fn)
        super().add_done_callback(fn)

    def cancel(self) -> bool:
        """Cancel the call, queued or running; say whether it is cancelled, which what is answered cannot be."""
        cancelled = super().cancel()
        if cancelled:
            self._begun()  # `concurrent.futures.wait` and `as_completed` wait for that.
        if cancelled and self.item >= 0:
            self._cancel(self.item)
        return cancelled

    def deliver(self, items: Sequence[int], results: Sequence[Any]) -> None:
        """Set the answer."""
        if self._begun():
            self.set_result(results[0])

    def fail(self, items: Sequence[int], error: BaseException, inputs: Sequence[Any] = ()) -> None:
        """Set the error that there is in place of an answer."""
        if self._begun():
            self.set_exception(error)

    def _begun(self) -> bool:
        """Mark it as about to be answered; if it was cancelled, notify those who wait, once, and return False."""
        with self._condition:  # Of the future's own: it may be cancelled meanwhile.
            if self._cancel_notified:
                return False
            begun = self.set_running_or_notify_cancel()
            self._cancel_notified = not begun
            return begun

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the answer in a coroutine; if the coroutine is cancelled, so is the call."""
        import asyncio  # Which most programs do not use: it would hold up their start.

        return asyncio.wrap_future(self).__await__()

    def note(self, items: Sequence[int], context: str) -> None:
        """Note which context answers it."""
        self.context = context


def own_copy(error: BaseException) -> BaseException:
    """Return a copy for one of many who wait: raised again and again, one object would grow an endless traceback."""
    try:
        copied = copy.copy(error)
    except Exception:
        return error
    copied.__cause__ = error.__cause__
    return copied
