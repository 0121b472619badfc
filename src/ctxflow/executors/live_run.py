"""A run as an executor holds it: it starts and stops, declares apps and contexts, and reports its status."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ctxflow.errors import CtxflowError, RunEnded
from ctxflow.executors.call_files import placed
from ctxflow.executors.contract import Bounded, Engine, EngineFailed, Explains, Pickled
from ctxflow.executors.declarations import (
    Declaration,
    DeclaredContext,
    UserModules,
    carry_user_modules,
    check,
    context_id,
    payload_of,
    spec_of,
)
from ctxflow.executors.figures import SessionStatus, Status, awaiting_text, status_of
from ctxflow.executors.futures import CallFuture
from ctxflow.executors.kept_files import DiskThread, EventLog, RunStatusFile, WorkerTable
from ctxflow.executors.run_loop import TICK_SECONDS, RunLoop
from ctxflow.host.linux import advice, none_left
from ctxflow.ownership import belongs_here, foreign_text, undivided, uninterrupted
from ctxflow.recipe import Context
from ctxflow.scheduler import Limits, Policies, Scheduler
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import first_line

logger = logging.getLogger("ctxflow")
_MOST_SAMPLES = 3600
_AWAITING_SECONDS = 60.0  # How often to warn that workers are awaited before the first call.


class LiveRun(RunLoop):
    """Everything between a person's calls and an engine.

    :param directory: where the event log and the workers' output are kept.
    :param level: how much of a context workers keep from call to call, where an app does not say.
    :param start_when: the share of the workers asked for that must be connected, once, before the first call.
    :ivar is_copy: whether this is a forked child of the process that runs it: here nothing can be done with it.
    :ivar files_travel: whether files among the arguments of calls are brought to workers, and outputs back.
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
        scheduler = Scheduler(policies, limits, start_when=start_when)
        super().__init__(engine, scheduler, os.path.abspath(directory))
        self.id = uuid.uuid4().hex[:12]
        self._tiers = list(tiers)
        self._regions = list(regions)
        self._log_events = log_events
        self._level = level
        self._disk = DiskThread()
        self._modules = UserModules()
        self._status_file: RunStatusFile | None = None
        self._status_due = 0.0
        self._status_waits = False  # For the disk.
        self._remind_at: float | None = None  # When to warn that calls still wait for workers.
        self.keeps_status = True
        self.each_second: Callable[[], None] | None = None
        self.samples: list[tuple[float, int, int]] = []
        belongs_here(self)

    # --- life

    def start(self) -> None:
        """Start the engine and ask for workers.

        :raises CtxflowError: if the run has no place for its files, or its workers for theirs.
        """
        self._modules.look()
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
        self._tick_due = self.clock() + TICK_SECONDS
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
                self._modules.close()
                if self._log is not None:
                    self._log.close()
                self._disk.close()

    def open_calls(self) -> list[CallFuture]:
        """Return the single calls that are not answered, in the order in which they were made."""
        with self._lock:
            return self._waiting.calls()

    # --- submissions

    def prepare_pickling(self) -> None:
        """Prepare for pickling a function: where workers lack the user's modules, or have old ones, these go along."""
        if self.engine.capabilities.remote:
            carry_user_modules()
        else:
            self._modules.look()

    @uninterrupted
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

    @undivided
    def _add_context(self, context: DeclaredContext) -> None:
        if context.spec.id not in self._declared.contexts:
            self._declared.contexts[context.spec.id] = context.payload
            self._retirement.context(context.spec.id, self.clock())
            self._handle(ev.ContextDeclared(self.clock(), context.spec))

    @uninterrupted
    def declare(self, declaration: Declaration) -> Declaration:
        """Make an app known, with its alternatives; gives what it is known by, if it was declared alike before."""
        with self._lock:
            self._use(declaration)
            held = self._retirement.held(declaration.id)
        self._send()
        return held

    @undivided
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

    # --- what is going on

    def _each_second(self, now: float) -> None:
        """Do what is done each second."""
        state = self._scheduler.state
        if self.each_second is not None:
            self.each_second()
        self._disk.give(self._bounds.look)
        self.samples.append((now, len(state.workers), state.counters.done))
        if len(self.samples) > _MOST_SAMPLES:  # An hour's; of a longer run, every second, fourth, ... of them.
            del self.samples[1::2]
        if state.awaiting and state.ready and (self._remind_at is None or now >= self._remind_at):
            if self._remind_at is not None:
                logger.warning("%s", awaiting_text(state))
            self._remind_at = now + _AWAITING_SECONDS
        with self._lock:
            self._retire()
            self._forget_parts()
            if self._log is not None:
                self._log.flush()
            if self._table is not None:
                self._table.write(state, now, self.engine)
        self._send()
        if now >= self._status_due:
            self._status_due = now + TICK_SECONDS
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

    def validate(self) -> None:
        """Check the scheduler's invariants, while no event is being handled: for tests and debugging.

        :raises AssertionError: naming the one that does not hold.
        """
        with self._lock:
            self._scheduler.validate()

    def session_status(self, number: int) -> SessionStatus | None:
        """Return how a session stands; None if it is over."""
        with self._lock:
            session = self._scheduler.state.sessions.get(number)
            return None if session is None else SessionStatus.of(session)

    def status(self) -> Status:
        """Return the run's figures of this moment."""
        with self._lock:
            told = self.engine.causes() if isinstance(self.engine, Explains) else ()
            limits = self.engine.limits() if isinstance(self.engine, Bounded) else ()
            causes = [*told, *self._bounds.causes()]
            return status_of(self._scheduler.state, self._declared.contexts, self.clock(), causes, limits)
