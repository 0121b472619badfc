"""A run: the shell around the scheduler that drives an engine, and answers who waits.

One thread waits for the engine's events; submissions are handled on the thread that submits, so that a call is
on its way when `submit` returns. A lock orders the two. What does not live here: decisions (scheduler/), what apps
and contexts are (declarations.py), what items hold and who waits for them (waiting.py), and how a person calls
(executor.py, apps.py).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ctxflow.errors import CtxflowError, RunEnded
from ctxflow.executors.call_files import placed
from ctxflow.executors.contract import (
    Bounded,
    ContextPayload,
    Engine,
    EngineFailed,
    Explains,
    Pickled,
)
from ctxflow.executors.run.declarations import (
    Declaration,
    Declared,
    DeclaredContext,
    Retirement,
    carry_user_modules,
    check,
    context_id,
    payload_of,
    spec_of,
)
from ctxflow.executors.run.figures import SessionStatus, Status, status_of
from ctxflow.executors.run.futures import CallFuture, Delivery, Sink, opened
from ctxflow.executors.run.kept_files import NOTED, AwaitingReminder, EventLog, RunStatusFile, WorkerTable
from ctxflow.executors.run.pending import Making, Outbox, Telling, Waiting
from ctxflow.executors.run.session_store import News, SessionStore
from ctxflow.executors.run.threads import Callbacks, DiskThread, uninterrupted
from ctxflow.executors.run.worker_bounds import WorkerBounds
from ctxflow.host.machine_errors import advice, none_left
from ctxflow.process_identity import belongs_here, foreign_text
from ctxflow.recipe import Context
from ctxflow.scheduler import Limits, Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.dispatch import computed
from ctxflow.scheduler.log import first_line
from ctxflow.terminal import guard_log

logger = logging.getLogger("ctxflow")
guard_log(logger)  # Its lines quote what workers and batch systems say.
_TICK_SECONDS = 1.0
_MOST_SAMPLES = 3600
_IDLE_SECONDS = 0.005  # How often `wait_idle` looks.


class LiveRun:
    """Everything between a person's calls and an engine.

    :param engine: carries out what is decided.
    :param directory: where the event log and the workers' output are kept.
    :param log_events: whether to keep the event log, `events.jsonl`.
    :param level: how much of a context workers keep from call to call, where an app does not say.
    :param start_when: the share of the workers asked for that must be connected, once, before the first call.
    :param regions: the site's, if it has any.
    :ivar is_copy: whether this is a forked child of the process that runs it: here nothing can be done with it.
    :ivar files_travel: whether files among the arguments of calls are brought to workers, and outputs back; else all
        see them.
    :ivar keeps_status: whether it rewrites `status.json` in its directory each second; a batch does it itself.
    :ivar each_second: called on the run's thread, for what depends on time alone.
    """

    def __init__(
        self,
        engine: Engine,
        policies: Policies,
        tiers: Iterable[ev.TierSpec],
        directory: str,
        limits: Limits | None = None,
        log_events: bool = True,
        level: str = ev.PERVASIVE,
        start_when: float = 0.0,
        regions: Iterable[ev.RegionSpec] = (),
    ) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.directory = os.path.abspath(directory)
        self.engine = engine
        self._outbox = Outbox(engine, self._not_sent)
        self._tiers = list(tiers)
        self._regions = list(regions)
        self._scheduler = Scheduler(policies, limits, start_when=start_when)
        self._lock = threading.Lock()
        self._origin = time.monotonic()
        self._said: set[str] = set()
        self.files_travel = False
        self._with_files: set[str] = set()  # Batch apps, of whose items some have held files.
        self._declared = Declared()
        self._retirement = Retirement()
        self.sessions = SessionStore(os.path.join(self.directory, "sessions"))
        self._waiting = Waiting(self.sessions, self._declared.contexts)
        self._ended = threading.Event()
        self._failed: EngineFailed | None = None
        self._undelivered: list[Delivery | News] = []  # What was to be told when the run failed.
        self._actions: collections.deque[Callable[[], None]] = collections.deque()
        self._log_events = log_events
        self._level = level
        self._log: EventLog | None = None
        self._disk = DiskThread()
        self._status_file: RunStatusFile | None = None
        self._table: WorkerTable | None = None
        self._bounds = WorkerBounds(engine, self.directory)
        self._status_due = 0.0
        self._status_waits = False  # For the disk.
        self._reminder = AwaitingReminder()
        self.keeps_status = True
        self.each_second: Callable[[], None] | None = None
        self.samples: list[tuple[float, int, int]] = []
        self._tick_due = 0.0
        self._loop_over = threading.Event()
        self.callbacks = Callbacks(self._loop, self._wake)
        self.is_copy = False
        belongs_here(self)

    # --- what the engine asks (RunServices)

    def clock(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self._origin

    # --- life

    def start(self) -> None:
        """Start the engine and ask for workers.

        :raises CtxflowError: if the run has no place for its files, or its workers for theirs.
        """
        try:
            os.makedirs(self.directory, exist_ok=True)
            if self._log_events:
                first = first_line(self._scheduler, self._level)
                self._log = EventLog(os.path.join(self.directory, "events.jsonl"), first, self._disk)
        except OSError as error:
            raise CtxflowError(
                f"the run cannot keep its files in {self.directory} ({error}): start the program in a directory that "
                "can be written, or with Parsl name another as run_dir"
            ) from error
        try:
            self.engine.start(self)
        except BaseException as error:
            if self._log is not None:
                self._log.close()
            if none_left(error):
                raise CtxflowError(f"the run cannot start: {error}{advice(error)}") from error
            raise
        self.declare_context(None)
        self._feed(*(ev.RegionOffered(self.clock(), region) for region in self._regions))
        self._feed(*(ev.TierOffered(self.clock(), tier) for tier in self._tiers))
        self._status_file = RunStatusFile(self.directory)
        self._table = WorkerTable(self.directory, self._disk.give)
        if self.keeps_status:
            self._status_file.write(self.status())
        self._tick_due = self.clock() + _TICK_SECONDS
        self.callbacks.start()

    def forked(self) -> None:
        """Be over, in a child, which never calls the engine, and whose locks may be held by threads that it lacks."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._ended.set()
        self._failed = EngineFailed(foreign_text("the executor"))
        self.is_copy = True

    def stop(self) -> None:
        """End all workers. Calls that are not answered fail with `RunEnded`."""
        with self._lock:
            if self._ended.is_set() or not self.callbacks.started:
                return
            self._ended.set()
        try:
            self.engine.wake()
            if not self.callbacks.leads:
                self._loop_over.wait(timeout=30)
            if self._table is not None:
                with self._lock:
                    self._table.write(self._scheduler.state, self.clock(), self.engine, end=True)
            if self._failed is None:
                self._write_status("done")
        finally:
            try:
                self.engine.stop()
            finally:
                # Whatever interrupts the end of the workers, nobody may wait for ever.
                error = RunEnded("the run was stopped before this call was answered: submit it again in a new run")
                self._fail_all(error)
                self.callbacks.stop()
                if self._log is not None:
                    self._log.close()
                self._disk.close()

    def _fail_all(self, error: BaseException) -> None:
        """Tell everybody who waits that no answer will come."""
        with self._lock:
            deliveries, self._undelivered = [*self._undelivered, *self._waiting.end_all(error)], []
        self._deliver(deliveries)

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is queued and no call runs, not even one for which nobody waits any more.

        :returns: whether it is so; False if `timeout` seconds have passed first.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                state = self._scheduler.state
                if not state.open and not state.attempts and not self._outbox.waiting:
                    return True
            if time.monotonic() >= until:
                return False
            time.sleep(_IDLE_SECONDS)

    def open_calls(self) -> list[CallFuture]:
        """Return the single calls that are not answered, in the order in which they were made."""
        with self._lock:
            return self._waiting.calls()

    # --- submissions

    def prepare_pickling(self) -> None:
        """Prepare for pickling a function: where workers lack the user's modules, these go along."""
        if self.engine.capabilities.remote:
            carry_user_modules()

    def declare_context(self, context: Context | None, level: str | None = None) -> DeclaredContext:
        """Make a context known, if it is not. None stands for calls without a context.

        :param level: by default the run's; a recipe at two levels is two contexts.
        :raises TypeError: if the recipe cannot be pickled.
        :raises ValueError: if it needs more GPUs than a worker has, or can have, or more memory on each.
        """
        level = level or self._level
        name = context_id(context, level)
        spec, known = spec_of(context, level), self._declared.contexts.get(name)
        if known is not None:
            return DeclaredContext(spec, known)
        self.prepare_pickling()
        check(spec, self._tiers, self._scheduler.state.policies.preemption.reserves)
        declared = DeclaredContext(spec, payload_of(context, level))
        with self._lock:
            self._add_context(declared)
        self._send()
        return declared

    def _add_context(self, context: DeclaredContext) -> None:
        if context.spec.id not in self._declared.contexts:
            self._declared.contexts[context.spec.id] = context.payload
            self._retirement.context(context.spec.id, self.clock())
            self._handle(ev.ContextDeclared(self.clock(), context.spec))

    def declare(self, declaration: Declaration) -> Declaration:
        """Make an app known, with its alternatives; gives what it is known by, if it was declared alike before."""
        with self._lock:
            self._use(declaration)
            held = self._retirement.held(declaration.id)
        self._send()
        return held

    def _use(self, declaration: Declaration) -> float:
        """Note that an app is used, which may have been forgotten since it was declared; gives the time."""
        now = self.clock()
        use = self._retirement.apps.get(declaration.id)
        if use is None:
            self._take_up(declaration, now)
        else:
            use.at = now
        return now

    def _take_up(self, declaration: Declaration, now: float) -> None:
        """Have an app known that is to be used."""
        for context in declaration.contexts:
            self._add_context(context)
        for app in declaration.apps:
            if self._declared.add_app(app):
                self._handle(ev.AppDeclared(self.clock(), app.spec))
        self._retirement.app(declaration, now)
        if self._retirement.due:
            self._retire()

    def _retire(self) -> None:
        """Forget what nobody has used for a while."""
        event = self._retirement.retired(self._scheduler.state, self.clock())
        if event is not None:
            self._handle(event)
            state = self._scheduler.state
            self._retirement.forget(state)
            self._declared.keep(state.apps, state.contexts)
            self._with_files.intersection_update(state.apps)

    def placed(self, app: Declaration, items: Sequence[Any]) -> Sequence[Any]:
        """Return a batch app's items, with the places of files among their values where these have to be brought."""
        if not self.files_travel:
            return items
        found = placed(items)
        if found is not items:
            self._with_files.add(app.id)
        return found

    def pickled(self, body: bytes) -> Pickled:
        """Return pickled function or constants as a part that calls may name for as long as somebody holds it."""
        return self._declared.parts.add(body)

    @uninterrupted
    def submit_call(self, app: Declaration, inputs: Any) -> CallFuture:
        """Submit one call, or one item of a batch app; return the future of its answer."""
        future = CallFuture(self._cancel_one, self.callbacks)
        with self._lock:
            self._check_running()
            now = self._use(app)
            item = future.item = self._waiting.add_one(inputs, future)
            deliveries = self._handle(ev.ItemsSubmitted(now, app.id, (item,)))
        self._submitted(deliveries)
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
        with self._lock:
            if self._failed is not None or self._ended.is_set():
                self._check_running()
            now = self._use(app)
            items = self._waiting.add(inputs, sink)
            if numbered is not None:
                numbered(items)
            deliveries = self._handle(ev.ItemsSubmitted(now, app.id, items))
        self._submitted(deliveries)
        return items

    @uninterrupted
    def tell(self, make: Callable[[], ev.Event | None], app: Declaration | None = None) -> None:
        """Have the scheduler hear of what somebody wants of a session.

        :param app: of a session that is opened.
        :param make: gives the event, or None if there is nothing to hear; called under the run's lock.
        :raises RunEnded: if the run was stopped.
        """
        with self._lock:
            self._check_running()
            if app is not None:
                self._use(app)
            event = make()
            deliveries = [] if event is None else self._handle(event)
        self._submitted(deliveries)

    def _check_running(self) -> None:
        if self._failed is not None:
            raise self._failed
        if self._ended.is_set():
            raise RunEnded("the run was stopped: make calls while its executor is running")

    def _submitted(self, deliveries: list[Delivery | News]) -> None:
        if self._outbox.waiting:
            self._send(deliveries)
        if self._scheduler.next_wake is not None:  # Something is held back for a time.
            self._wake()
        self._deliver(deliveries)

    @uninterrupted
    def cancel(self, items: Sequence[int], stop: bool = False) -> list[int]:
        """Cancel items; `stop` also ends running calls that hold nothing else.

        :returns: those of them that were not answered.
        """
        with self._lock:
            if self._ended.is_set():
                return []
            gone = self._waiting.forget(items)
            deliveries = self._handle(ev.ItemsCancelled(self.clock(), gone, stop))
        self._send(deliveries)
        self._deliver(deliveries)
        return gone

    def soon(self, action: Callable[[], None]) -> None:
        """Have the run's thread do something. Takes no lock, so that a finalizer may call it."""
        if not self.is_copy:
            self._actions.append(action)
            self._wake()

    def _cancel_one(self, item: int) -> None:
        self.cancel([item], stop=True)

    # --- events

    def _loop(self) -> None:
        while not self._ended.is_set() and self._failed is None:
            try:
                self._turn()
            except EngineFailed as error:
                self._failed = error
            except Exception as error:
                if not self._ended.is_set():
                    self._failed = _broken(error, "in its loop")
            if not self.callbacks.run():
                return  # To go on, on another thread.
        if self._failed is not None and not self._loop_over.is_set():
            self._give_up(self._failed)
        self._loop_over.set()

    def _wake(self) -> None:
        if not self._ended.is_set():  # Else the engine may be stopped.
            self.engine.wake()

    def _turn(self) -> None:
        """Wait for events, and let the scheduler hear of them."""
        wake = self._scheduler.next_wake
        due = self._tick_due if wake is None else min(self._tick_due, wake)
        events = [opened(event) for event in self.engine.poll(max(0.0, due - self.clock()))]
        if self._actions:
            self._act()
        now = self.clock()
        if now >= due:
            self._tick_due = now + _TICK_SECONDS
            events.append(ev.Tick(now))
            events += self._bounds.events(self._scheduler.state, now)
        self._feed(*events)
        if now >= due:
            self._each_second(now)

    def _act(self) -> None:
        while self._actions:
            try:
                self._actions.popleft()()
            except Exception:
                logger.exception("what was left to the run's thread failed")

    def _give_up(self, error: EngineFailed) -> None:
        """Fail all who wait, and all who come: nothing can run any more."""
        logger.error("%s", error)
        with self._lock:
            self._failed = error
        self._write_status("failed", str(error))
        self._fail_all(error)

    @uninterrupted
    def _feed(self, *events: ev.Event) -> None:
        deliveries: list[Delivery | News] = []
        try:
            for event in events:
                known = self._kept(event) if isinstance(event, ev.StepFinished) else event
                with self._lock:
                    deliveries += self._handle(known)
                if self._outbox.waiting:
                    self._send()
        finally:
            self._deliver(deliveries)

    def _kept(self, event: ev.StepFinished) -> ev.StepFinished:
        """Keep the states that came with an event on the disk, for which nobody else has to wait; return the event."""
        with self._lock:
            orders = self._scheduler.state.streams.steps.get(event.attempt)
        return event if orders is None else self.sessions.opened(event, orders)

    def _handle(self, event: ev.Event) -> list[Delivery | News]:
        """Let the scheduler decide; gives back what is to be told to whoever waits. `_send` follows.

        :raises EngineFailed: if anything goes wrong in it. What is half done cannot be undone: everybody is told, since
            who is passed over would wait for ever.
        """
        deliveries: list[Delivery | News] = []
        state = self._scheduler.state
        try:
            attempt = state.attempts.get(getattr(event, "attempt", -1))
            context = None if attempt is None else self._declared.labels.get(attempt.app)
            if self._table is not None and type(event) in NOTED:
                self._table.note(event, state, self.engine)
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
                if isinstance(command, Telling):
                    deliveries.append(self._waiting.told(command, event, context))
                elif isinstance(command, (cmd.Note, cmd.Place, cmd.Quarantine, cmd.MakePlan)):
                    self._carry_out_here(command)
                else:
                    commanded.append(command)
                    if isinstance(command, cmd.Run):
                        calls.append((command, making(command, self._declared.apps, state.sessions, self._with_files)))
                    elif isinstance(command, (cmd.Stage, cmd.Load, cmd.Unload)):
                        contexts[command.context] = self._declared.contexts[command.context]
            if commanded:
                self._outbox.put(commanded, calls, contexts)
            if self._log is not None:
                self._log.add(event, commands)
        except Exception as error:
            raise self._broken_by(error, f"at {type(event).__name__}", deliveries) from error
        return deliveries

    def _send(self, deliveries: Iterable[Delivery | News] = ()) -> None:
        """Let the engine act, outside the lock.

        :param deliveries: what is to be told even so.
        :raises EngineFailed: if anything goes wrong in it.
        """
        try:
            self._outbox.send()
        except Exception as error:
            with self._lock:
                failed = self._broken_by(error, "when the engine was told what to do", deliveries)
            raise failed from error

    def _not_sent(self, call: cmd.Run, error: Exception) -> None:
        """Have the scheduler hear that a call's inputs cannot be sent."""
        failure = ev.Failure("input", type(error).__name__, str(error))
        self.soon(lambda: self._feed(ev.BatchFailed(self.clock(), call.worker, call.attempt, failure, exception=error)))

    def _broken_by(self, error: Exception, where: str, deliveries: Iterable[Delivery | News]) -> EngineFailed:
        if self._failed is None:
            self._failed = error if isinstance(error, EngineFailed) else _broken(error, where)
        self._undelivered += deliveries
        self._wake()
        return self._failed

    def _carry_out_here(self, command: cmd.Note | cmd.Place | cmd.Quarantine | cmd.MakePlan) -> None:
        """Carry out what no engine does."""
        if isinstance(command, cmd.MakePlan):
            self._make_plan(command)
        elif isinstance(command, cmd.Place):
            self._say_reasons(command)
        elif isinstance(command, cmd.Note):
            logger.log(logging.WARNING if command.trouble else logging.INFO, "%s", command.text)

    def _make_plan(self, command: cmd.MakePlan) -> None:
        """Compute a plan on a thread of its own: it may take seconds, in which events go on."""

        def make() -> None:
            event = dataclasses.replace(computed(command.planning), time=self.clock())
            self.soon(functools.partial(self._feed, event))  # Once the run has ended, nobody hears of it.

        threading.Thread(target=make, name="ctxflow-plan", daemon=True).start()

    def _say_reasons(self, plan: cmd.Place) -> None:
        """Tell a person once what no plan can do."""
        for reason in plan.reasons:
            if reason not in self._said:
                self._said.add(reason)
                logger.warning("placement: %s", reason)

    @staticmethod
    def _deliver(deliveries: Iterable[Delivery | News]) -> None:
        for delivery in deliveries:
            try:
                delivery.make()
            except Exception:
                logger.exception("a callback of a future raised")

    # --- what is going on

    def _each_second(self, now: float) -> None:
        """Do what is done each second; a failure of what only tells of the run must not end it."""
        try:
            self._sample(now)
        except EngineFailed:
            raise
        except Exception:
            logger.exception("what is done each second failed")

    def _sample(self, now: float) -> None:
        state = self._scheduler.state
        if self.each_second is not None:
            self.each_second()
        self._disk.give(self._bounds.look)
        self.samples.append((now, len(state.workers), state.counters.done))
        if len(self.samples) > _MOST_SAMPLES:  # An hour's; of a longer run, every second, fourth, ... of them.
            del self.samples[1::2]
        if state.awaiting and state.ready:
            self._reminder.say(state, now)
        with self._lock:
            self._retire()
            self._forget_parts()
            if self._log is not None:
                self._log.flush()
            if self._table is not None:
                self._table.write(state, now, self.engine)
        self._send()
        if now >= self._status_due:
            self._status_due = now + _TICK_SECONDS
            self._write_status()

    def _forget_parts(self) -> None:
        """Have workers forget the functions and constants that nobody holds any more."""
        gone, names = self._declared.parts.gone, []
        while gone:
            names.append(gone.pop())
        if names:
            self.engine.forget(names)

    def _write_status(self, state: str = "running", reason: str = "") -> None:
        if not self.keeps_status or (state == "running" and self._status_waits):
            return
        self._status_waits, status = True, self.status()

        def write() -> None:
            self._status_waits = False
            if self._status_file is not None:
                self._status_file.write(status, state, reason)

        self._disk.give(write)

    def session_status(self, number: int) -> SessionStatus | None:
        """Return how a session stands; None if it is over."""
        with self._lock:
            session = self._scheduler.state.sessions.get(number)
            return None if session is None else SessionStatus.of(session)

    def status(self) -> Status:
        """Return the run's figures of this moment."""
        with self._lock:
            reasons = self.engine.reasons() if isinstance(self.engine, Explains) else None
            limits = self.engine.limits() if isinstance(self.engine, Bounded) else ()
            return status_of(self._scheduler.state, self._declared.contexts, self.clock(), reasons, limits)


def _broken(error: Exception, where: str) -> EngineFailed:
    do = advice(error) or "; please report it, with what led to it"
    return EngineFailed(f"the run cannot go on, for {type(error).__name__} came {where}: {error}{do}")
