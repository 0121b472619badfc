"""The loop of a run: events of an engine go to the scheduler, its commands to the engine, and answers to who waits.

A thread of its own waits for the engine's events; submissions are handled on the thread that submits, so that a call is
in the engine's hands when `submit` returns. A lock orders the two. Commands leave in their order and outside the lock,
with what calls take pickled before: a value's `__reduce__` may take long, and a disk stall under a kept state.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ctxflow.errors import RunEnded
from ctxflow.executors.contract import CallPayload, ContextPayload, Engine, EngineFailed, Payloads
from ctxflow.executors.declarations import Declaration, Declared, Retirement
from ctxflow.executors.figures import WorkerBounds
from ctxflow.executors.futures import Callbacks, CallFuture
from ctxflow.executors.kept_files import NOTED, EventLog, WorkerTable, tokens_of
from ctxflow.executors.loss_notes import LOSSES, LossNotes
from ctxflow.executors.pending import Answer, AnswerCommand, Making, Sink, Unsent, Waiting, beginnings
from ctxflow.executors.protocol import opened
from ctxflow.executors.session_store import SessionStore
from ctxflow.host.linux import advice
from ctxflow.ownership import undivided, uninterrupted
from ctxflow.scheduler import Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.dispatch import computed
from ctxflow.terminal import guard_log

logger = logging.getLogger("ctxflow")
guard_log(logger)  # Its lines quote what workers and batch systems say.
TICK_SECONDS = 1.0
_TOGETHER = 16  # Events whose commands go to the engine together, which may put them in one message.
_IDLE_SECONDS = 0.005  # How often `wait_idle` looks.


class RunLoop(abc.ABC):
    """Drives an engine as a scheduler decides."""

    def __init__(self, engine: Engine, scheduler: Scheduler, directory: str) -> None:
        self.engine = engine
        self.directory = directory
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._origin = time.monotonic()
        self._declared = Declared()
        self._with_files: set[str] = set()  # Batch apps, of whose items some have held files.
        self.sessions = SessionStore(os.path.join(directory, "sessions"))
        self._waiting = Waiting(self.sessions, self._declared.contexts)
        self._retirement = Retirement()
        self._unsent: collections.deque[Unsent] = collections.deque()  # What the engine is to get, in this order.
        self._sending = threading.Lock()
        self._bounds = WorkerBounds(engine, directory)
        self._log: EventLog | None = None
        self._table: WorkerTable | None = None
        self._losses = LossNotes()
        self._said: set[str] = set()
        self._ended = threading.Event()
        self._failed: EngineFailed | None = None
        self._undelivered: list[Answer] = []  # What was to be told when the run failed.
        self._actions: collections.deque[Callable[[], None]] = collections.deque()
        self._tick_due = 0.0
        self._loop_over = threading.Event()
        self.callbacks = Callbacks(self._loop, self._wake)
        self.is_copy = False
        self.files_travel = False

    @abc.abstractmethod
    def _each_second(self, now: float) -> None:
        """Do what is done each second, on the loop's thread."""

    @abc.abstractmethod
    def _take_up(self, declaration: Declaration, now: float) -> None:
        """Have an app known that is to be used."""

    @abc.abstractmethod
    def placed(self, app: Declaration, items: Sequence[Any]) -> Sequence[Any]:
        """Return a batch app's items, with the places of files among their values where these have to be brought."""

    @abc.abstractmethod
    def _write_status(self, state: str = "running", reason: str = "") -> None:
        """Have the status file say how the run stands."""

    def clock(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self._origin

    def _loop(self) -> None:
        while not self._ended.is_set() and self._failed is None:
            try:
                self._turn()
            except EngineFailed as error:
                self._failed = error
            except Exception as error:
                if not self._ended.is_set():
                    self._failed = _broken(error, "in its loop")
            if self.callbacks.queue and not self.callbacks.run():
                return  # To go on, on another thread.
        if self._failed is not None and not self._loop_over.is_set():
            logger.error("%s", self._failed)
            self._write_status("failed", str(self._failed))
            self._fail_all(self._failed)
        self._loop_over.set()

    def _wake(self) -> None:
        if not self._ended.is_set():  # Else the engine may be stopped.
            self.engine.wake()

    def _turn(self) -> None:
        """Wait for events, and pass them to the scheduler."""
        wake = self._scheduler.next_wake
        due = self._tick_due if wake is None else min(self._tick_due, wake)
        events = [opened(event) for event in self.engine.poll(max(0.0, due - self.clock()))]
        if self._actions:
            self._act()
        now = self.clock()
        if now >= due:
            self._tick_due = now + TICK_SECONDS
            events.append(ev.Tick(now))
            events += self._bounds.events(self._scheduler.state, now)
        self._feed(*events)
        if now >= due:
            try:
                self._each_second(now)
            except EngineFailed:
                raise
            except Exception:  # What only tells of the run must not end it.
                logger.exception("what is done each second failed")

    def soon(self, action: Callable[[], None]) -> None:
        """Have the run's thread do something. Takes no lock, so that a finalizer may call it."""
        if not self.is_copy:
            self._actions.append(action)
            self._wake()

    def _act(self) -> None:
        while self._actions:
            try:
                self._actions.popleft()()
            except Exception:
                logger.exception("what was left to the run's thread failed")

    @uninterrupted
    def _feed(self, *events: ev.Event) -> None:
        answers: list[Answer] = []
        try:
            for event in events:
                known = self._kept(event) if isinstance(event, ev.StepFinished) else event
                with self._lock:
                    answers += self._handle(known)
                if len(self._unsent) >= _TOGETHER:
                    self._send()
        except EngineFailed:
            with self._lock:
                self._undelivered += answers
            raise
        self._send(answers)

    def _kept(self, event: ev.StepFinished) -> ev.StepFinished:
        """Keep the states that came with an event on the disk, for which nobody else has to wait; return the event."""
        with self._lock:
            orders = self._scheduler.state.streams.steps.get(event.attempt)
        return event if orders is None else self.sessions.opened(event, orders)

    @undivided
    def _handle(self, event: ev.Event) -> list[Answer]:  # noqa: PLR0912 - Splitting it would add a call to each event.
        """Let the scheduler decide; gives back what tells whoever waits for it. `_send` follows.

        :raises EngineFailed: if anything goes wrong in it. What is half done cannot be undone: all calls fail, since
            one that is passed over would be waited for forever.
        """
        answers: list[Answer] = []
        state, kind = self._scheduler.state, type(event)
        try:
            attempt = state.attempts.get(getattr(event, "attempt", -1))
            context = None if attempt is None else self._declared.labels.get(attempt.app)
            if attempt is not None and type(event) is ev.BatchFinished and state.apps[attempt.app].windowed:
                event = dataclasses.replace(event, tokens=tokens_of(event.results))  # From which policies learn.
            if self._table is not None and kind in NOTED:
                self._table.note(event, state, self.engine)
            if kind in LOSSES and (lost := self._losses.of(event, state)):
                logger.warning("%s", lost)
            try:
                commands = self._scheduler.handle(event)
            except Exception as error:  # A policy's, most likely.
                text = f"the run cannot go on, for a policy raised {type(error).__name__}: {error}"
                raise EngineFailed(text) from error
            commanded: list[cmd.Command] = []
            calls: list[Making] = []
            making = self._waiting.payload
            contexts: dict[str, ContextPayload] = {}
            for command in commands:
                if isinstance(command, AnswerCommand):
                    answers.append(self._waiting.answer(command, event, context))
                elif isinstance(command, (cmd.Note, cmd.Place, cmd.Quarantine, cmd.MakePlan)):
                    self._carry_out_here(command)
                else:
                    commanded.append(command)
                    if isinstance(command, cmd.Run):
                        calls.append((command, making(command, self._declared.apps, state.sessions, self._with_files)))
                    elif isinstance(command, (cmd.Stage, cmd.Load, cmd.Unload)):
                        contexts[command.context] = self._declared.contexts[command.context]
            if commanded:
                self._unsent.append((commanded, calls, contexts))
            if self._log is not None:
                self._log.add(event, commands)
        except Exception as error:
            raise self._broken_by(error, f"at {type(event).__name__}", answers) from error
        except BaseException:  # An interrupt, which waited longer than any decision should take.
            self._broken_by(EngineFailed("the run cannot go on, for it was interrupted within a decision"), "", answers)
            raise
        return answers

    def _send(self, answers: Iterable[Answer] = (), engine_ended: bool = False) -> None:
        """Send the engine its commands, unless another thread is at that, then answers; outside the lock.

        :raises EngineFailed: if anything goes wrong in the engine; answers follow with the end of the run then.
        """
        try:
            while self._unsent and not engine_ended and self._sending.acquire(blocking=False):
                try:
                    while self._unsent:
                        commands: list[cmd.Command] = []
                        made: dict[int, CallPayload] = {}
                        contexts: dict[str, ContextPayload] = {}
                        for _ in range(len(self._unsent)):
                            these, calls, more = self._unsent[0]
                            for command, make in calls:
                                try:
                                    made[command.attempt] = make if isinstance(make, CallPayload) else make()
                                except Exception as error:
                                    these = [each for each in these if each is not command]
                                    self._not_sent(command, error)
                            commands += these
                            contexts.update(more)
                            self._unsent.popleft()
                        self.engine.execute(commands, Payloads(made, contexts))
                finally:
                    self._sending.release()
        except Exception as error:
            with self._lock:
                failed = self._broken_by(error, "when the engine was told what to do", answers)
            raise failed from error
        for answer in answers:
            try:
                answer()
            except Exception:
                logger.exception("a callback of a future raised")

    def _not_sent(self, call: cmd.Run, error: Exception) -> None:
        """Report a call whose inputs cannot be sent as failed."""
        failure = ev.Failure("input", type(error).__name__, str(error))
        self.soon(lambda: self._feed(ev.BatchFailed(self.clock(), call.worker, call.attempt, failure, exception=error)))

    def _carry_out_here(self, command: cmd.Note | cmd.Place | cmd.Quarantine | cmd.MakePlan) -> None:
        """Carry out what no engine does."""
        if isinstance(command, cmd.MakePlan):
            self._make_plan(command)
        elif isinstance(command, cmd.Place):
            for reason in command.reasons:  # What no plan can do is said once.
                if reason not in self._said:
                    self._said.add(reason)
                    logger.warning("placement: %s", reason)
        elif isinstance(command, cmd.Note):
            logger.log(logging.WARNING if command.trouble else logging.INFO, "%s", command.text)

    def _make_plan(self, command: cmd.MakePlan) -> None:
        """Compute a plan on a thread of its own: it may take seconds, in which events go on."""

        def make() -> None:
            event = dataclasses.replace(computed(command.planning), time=self.clock())
            self.soon(functools.partial(self._feed, event))

        threading.Thread(target=make, name="ctxflow-plan", daemon=True).start()

    # --- submissions

    @uninterrupted
    def submit_call(self, app: Declaration, inputs: Any) -> CallFuture:
        """Submit one call, or one item of a batch app; return the future of its answer."""
        future = CallFuture(self._cancel_one, self.callbacks)
        waiting = self._waiting
        with self._lock:
            now = self._use(app)
            item = future.item = waiting.next_item
            waiting.next_item = item + 1
            waiting.inputs[item] = inputs
            waiting.sinks[item] = future
            answers = self._handle(ev.ItemsSubmitted(now, app.id, (item,)))
        self._send(answers)
        if self._scheduler.next_wake is not None:  # Something is held back for a time.
            self._wake()
        return future

    @uninterrupted
    def submit(
        self, app: Declaration, inputs: Sequence[Any], sink: Sink, numbered: Callable[[range], None] | None = None
    ) -> range:
        """Submit items of an app, each a tuple of the app's parameters; return their numbers.

        :param sink: gets the answers, perhaps before this returns.
        :param numbered: called with the numbers before anything is answered.
        :raises RunEnded: if the run was stopped.
        """
        if self.files_travel:
            inputs = self.placed(app, inputs)
        waiting = self._waiting
        prefixes = beginnings(inputs) if app.apps[0].style == "item" else ()
        with self._lock:
            if self._failed is not None or self._ended.is_set():
                self._check_running()
            now, use = self.clock(), self._retirement.apps.get(app.id)
            if use is not None:
                use.at = now
            else:
                self._take_up(app, now)
            items = range(waiting.next_item, waiting.next_item + len(inputs))
            waiting.next_item = items.stop
            waiting.inputs.update(zip(items, inputs, strict=True))
            waiting.sinks.update(dict.fromkeys(items, sink))
            if numbered is not None:
                numbered(items)
            answers = self._handle(ev.ItemsSubmitted(now, app.id, items, prefixes))
        self._send(answers)
        if self._scheduler.next_wake is not None:
            self._wake()
        return items

    @uninterrupted
    def tell(self, make: Callable[[], ev.Event | None], app: Declaration | None = None) -> None:
        """Pass the scheduler an event of a session.

        :param app: of a session that is opened.
        :param make: gives the event, or None if there is none; called under the run's lock.
        :raises RunEnded: if the run was stopped.
        """
        with self._lock:
            self._check_running()
            if app is not None:
                self._use(app)
            event = make()
            answers = [] if event is None else self._handle(event)
        self._send(answers)
        if self._scheduler.next_wake is not None:
            self._wake()

    def _use(self, declaration: Declaration) -> float:
        """Note that an app is used, which may have been forgotten since it was declared; gives the time."""
        if self._failed is not None or self._ended.is_set():
            self._check_running()
        now = self.clock()
        use = self._retirement.apps.get(declaration.id)
        if use is None:
            self._take_up(declaration, now)
        else:
            use.at = now
        return now

    def _check_running(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._ended.is_set():
            raise RunEnded("the run was stopped: make calls while its executor is running")

    @uninterrupted
    def cancel(self, items: Sequence[int], stop: bool = False) -> list[int]:
        """Cancel items, and with `stop` running calls that hold nothing else; return those that were not answered."""
        with self._lock:
            if self._ended.is_set():
                return []
            gone = self._waiting.forget(items)
            answers = self._handle(ev.ItemsCancelled(self.clock(), gone, stop))
        self._send(answers)
        return gone

    def _cancel_one(self, item: int) -> None:
        self.cancel([item], stop=True)

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is queued, and no call runs though nobody waits for it; False if time is up first."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                state = self._scheduler.state
                if not state.open and not state.attempts and not self._unsent:
                    return True
            if time.monotonic() >= until:
                return False
            time.sleep(_IDLE_SECONDS)

    def _broken_by(self, error: Exception, where: str, answers: Iterable[Answer]) -> EngineFailed:
        """Have the loop end the run, with these answers among its last; return why it ends."""
        if self._failed is None:
            self._failed = error if isinstance(error, EngineFailed) else _broken(error, where)
        self._undelivered += answers
        self._wake()
        return self._failed

    def _fail_all(self, error: BaseException) -> None:
        """Tell everybody who waits that no answer will come."""
        with self._lock:
            answers, self._undelivered = [*self._undelivered, *self._waiting.end_all(error)], []
        self._send(answers, engine_ended=True)


def _broken(error: Exception, where: str) -> EngineFailed:
    do = advice(error) or "; please report it, with what led to it"
    return EngineFailed(f"the run cannot go on, for {type(error).__name__} came {where}: {error}{do}")
