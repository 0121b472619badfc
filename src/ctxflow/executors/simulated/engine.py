"""The simulated engine: a virtual clock with its heap of timers, and what a worker does with each command."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
import threading
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any

from ctxflow.executors.contract import NO_PAYLOADS, Payloads, RunServices
from ctxflow.executors.simulated.market import (
    POISON,
    Fault,
    Faults,
    MachineState,
    Market,
    NoStaging,
    SimulatedMachine,
    Staging,
    Times,
)
from ctxflow.executors.simulated.shared_pace import InFlight, SharedPace
from ctxflow.executors.simulated.timer_queue import TimerQueue
from ctxflow.host.call_results import EVERY_SECONDS
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.dispatch import computed
from ctxflow.sites.engine_kinds import Capabilities


@dataclasses.dataclass(slots=True)
class Account:
    """What the workers' time went into, in seconds; calls without a result are in `lost_seconds` alone."""

    worker_seconds: float = 0.0
    stage_seconds: float = 0.0
    load_seconds: float = 0.0
    call_seconds: float = 0.0
    lost_seconds: float = 0.0
    lost_items: int = 0
    loads: int = 0
    joined: int = 0
    evicted: int = 0
    raised: int = 0  # Calls, and builds of contexts.
    wakes: int = 0
    wake_seconds: float = 0.0
    tokens: float = 0.0  # Of items that engines with several in flight answered.


@dataclasses.dataclass(slots=True, eq=False)
class Library:
    """A context's library process on a worker; calls on it take turns, or share it if they overlap.

    :ivar busy_until: of as many calls as it bears at a time, when each has ended.
    """

    ready: bool = False
    parked_until: float = 0.0  # Until when it is being parked.
    busy_until: list[float] = dataclasses.field(default_factory=lambda: [0.0])
    flying: InFlight | None = None  # Its calls that overlap.


@dataclasses.dataclass(slots=True)
class Call:
    """A call in flight; `salvaged`: whether its app answers its items one by one."""

    context: str
    items: int
    begins: float
    seconds: float
    salvaged: bool
    shared: bool = False

    def done(self, time: float) -> int:
        """Return how many items are done by then, if they take equally long."""
        share = (time - self.begins) / self.seconds if self.seconds else 1.0
        return max(0, min(self.items, math.floor(share * self.items + 1e-9)))


@dataclasses.dataclass(slots=True, eq=False)
class SimulatedWorker:
    """A worker on its machine, with its contexts by id, since when each is brought, and its calls by attempt."""

    id: str
    place: MachineState
    joined: float
    libraries: dict[str, Library] = dataclasses.field(default_factory=dict)
    staging: dict[str, float] = dataclasses.field(default_factory=dict)
    calls: dict[int, Call] = dataclasses.field(default_factory=dict)


class SimulatedEngine:
    """An engine whose clock is virtual: `poll` never waits, it jumps to what happens next.

    The same seed, models and commands give the same events. When machines can be had, and how long matching and
    loading take there, depends on the seed alone, so that policies can be compared on the same evictions and loads.
    Nothing is executed: results are None; there are no exceptions but those of faults, no crashes, timeouts or missing
    files, and payloads are not asked for. Events carry the engine's clock, not the run's.

    :param machines: what can be lent; workers are given to a tier's idle machines in their order.
    :param times: how long things take.
    :param staging: where files come from; by default they are everywhere.
    :param seed: of all that is drawn.
    :param notice: seconds from an eviction's notice to the eviction; 0 for none.
    :param salvage: the apps that answer their items one by one. Their calls end at a notice with the item in flight;
        without one, what was done half a second before is kept. (It is told when the worker is lost, not before.)
    :param state_bytes: the size of each session's state, or of a session by its number.
    :param carry_seconds: how long a state takes to another worker, or one of so many bytes.
    :param turn_over: whether the user of a session wants nothing more for now: then a chunk of it is its turn's last.
    :param planning_seconds: how long a plan is computed; by default it is there at once.
    :param faults: what is wrong with hosts; by default nothing is.
    :param poison: app -> of how many of its items one raises wherever it runs, and its call with it.
    :param zygote: whose loads after the first are spared the share of `times.imports`, if it has that: "none", a
        "worker"'s, or all of a "host".
    :param concurrency: context -> how many calls of plain apps its library process runs at a time, each as fast as if
        it were alone; 1 for others. What a run declares of its contexts is known besides.

    >>> class Times:
    ...     match = dispatch = lambda self, *of: 0.0
    ...     load = lambda self, *of: 20.0
    ...     call = lambda self, app, machine, items, generator: 0.5 * len(items)
    >>> engine = SimulatedEngine([SimulatedMachine("m")], Times())
    >>> engine.execute([cmd.Acquire("default", 1)])
    >>> [type(event).__name__ for event in engine.poll(60.0)]
    ['JobStarted', 'WorkerJoined']
    >>> engine.execute([cmd.Load("m-1", "model")])
    >>> engine.poll(60.0)
    [ContextReady(time=20.0, worker='m-1', context='model', seconds=20.0, memory=None, gpu_memory=None, parks=False)]
    >>> engine.execute([cmd.Run("m-1", 1, "app", "model", range(8))])
    >>> engine.poll(60.0)
    [BatchFinished(time=24.0, worker='m-1', attempt=1, seconds=4.0)]
    """

    capabilities = Capabilities()

    def __init__(
        self,
        machines: Iterable[SimulatedMachine],
        times: Times,
        staging: Staging | None = None,
        seed: int = 0,
        notice: float = 0.0,
        salvage: Container[str] = (),
        state_bytes: int | Callable[[int], int] = 0,
        carry_seconds: float | Callable[[int], float] = 0.0,
        planning_seconds: float = 0.0,
        faults: Iterable[Fault] = (),
        poison: Mapping[str, int] | None = None,
        zygote: str = "none",
        concurrency: Mapping[str, int] | None = None,
        turn_over: Callable[[int], bool] | None = None,
    ) -> None:
        self._zygote, self._zygotes = zygote, set[str]()  # Workers, or hosts, that have one.
        self._imports: Callable[[str, SimulatedMachine], float] | None = getattr(times, "imports", None)
        self._concurrency = dict(concurrency or {})
        self._faults = Faults(faults)
        self._poison = poison or {}
        self._troubled = bool(self._poison) or self._faults.any
        self._state_bytes: Callable[[int], int] = state_bytes if callable(state_bytes) else lambda session: state_bytes
        self._carry_seconds = carry_seconds
        self._turn_over, self._planning_seconds = turn_over, planning_seconds
        self.now = 0.0
        self.account = Account()
        # (time, machine, +1 or -1) for every worker that joined or went.
        self.presence: list[tuple[float, SimulatedMachine, int]] = []
        self._times = times
        self._pace: Callable[[str, SimulatedMachine], SharedPace | None] | None = getattr(times, "pace", None)
        self._way: Callable[[str, SimulatedMachine], float] | None = getattr(times, "way", None)
        # What may be parked: seconds to park and to wake it, and the bytes of the host that it holds then.
        self._parks: Callable[[str], tuple[float, float, int] | None] = getattr(times, "park", lambda context: None)
        self._seed = seed
        self._staging = staging or NoStaging()
        self._salvage = salvage
        self._generator = random.Random(seed)
        self._timers = TimerQueue()
        self._numbers = itertools.count(1)
        self._out: list[ev.Event] = []
        self._workers: dict[str, SimulatedWorker] = {}
        self._holders: dict[MachineState, SimulatedWorker] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self._of_workers: dict[type[cmd.Command], Callable[[SimulatedWorker, Any], None]] = {
            cmd.Run: self._run,
            cmd.Step: self._step,
            cmd.Carry: self._carry,
            cmd.Load: self._load,
            cmd.Stage: self._stage,
            cmd.Unload: self._unload,
            cmd.Park: self._park,
            cmd.Wake: self._wake,
            cmd.Abandon: self._abandon,
            cmd.Interrupt: self._interrupt,
            cmd.Release: self._release,
            cmd.Drain: lambda worker, drain: self._end_calls(worker),
        }
        self._of_others: dict[type[cmd.Command], Callable[[Any], None]] = {
            cmd.Acquire: lambda ask: self._market.ask(ask.tier, ask.workers),
            cmd.AcquireAt: lambda ask: self._market.ask_at(ask.pin, ask.tier, ask.machine, ask.devices),
            cmd.Forgo: lambda ask: self._market.forgo(ask.pin),
            cmd.Exclude: lambda ask: self._market.exclude(ask.tier, ask.hosts),
            cmd.Survey: self._survey,
            cmd.MakePlan: self._make_plan,
        }
        self._staging.attach(self)
        self._market = Market(machines, times.match, self, self, seed, notice)

    # --- the contract

    def start(self, run: RunServices) -> None:
        """Do nothing: nothing has to be started."""

    def forget(self, functions: Collection[str]) -> None:
        """Do nothing: no function is kept."""

    def execute(self, commands: Sequence[cmd.Command], payloads: Payloads = NO_PAYLOADS) -> None:
        """Carry out commands, in order, at the present virtual time."""
        with self._lock:
            if self._stopped:
                return
            for context, payload in payloads.contexts.items():
                if payload.concurrency is not None:
                    self._concurrency[context] = payload.concurrency
            for command in commands:
                kind = type(command)
                if kind in self._of_workers:
                    worker = self._workers.get(command.worker)  # type: ignore[attr-defined]
                    if worker is not None:
                        self._of_workers[kind](worker, command)
                elif kind in self._of_others:
                    self._of_others[kind](command)

    def poll(self, timeout: float) -> list[ev.Event]:
        """Return what happens next, if it is within `timeout` virtual seconds; the clock stands there afterwards."""
        with self._lock:
            deadline = self.now + timeout
            while not self._out and (timer := self._timers.due(deadline)) is not None:
                self.now, _, action, values = timer
                action(*values)
            if not self._out and deadline < math.inf and not self._stopped:
                self.now = deadline
            out, self._out = self._out, []
            return out

    def wake(self) -> None:
        """Do nothing: `poll` never waits."""

    def stop(self) -> None:
        """End all workers; what they did until now is in the account."""
        with self._lock:
            for worker in self._workers.values():
                self.account.worker_seconds += self.now - worker.joined
            self._stopped = True
            self._workers.clear()
            self._timers.clear()
            self._out.clear()

    # --- for whoever drives it

    @property
    def idle(self) -> bool:
        """Whether nothing will happen without another command."""
        return not self._timers and not self._out

    def at(self, time: float, action: Callable[..., None], *values: Any) -> None:
        """Have something done at a time, after all that is due before."""
        self._timers.set(time, action, *values)

    def evict(self, worker: str, notice: float = 0.0) -> None:
        """Take a worker away, at once or with notice; its machine can be had again."""
        with self._lock:
            self._market.take(self._workers[worker].place, notice)

    # --- what becomes of machines (Tenant)

    def joined(self, place: MachineState) -> None:
        """Start a worker on a machine."""
        machine = place.machine
        worker = SimulatedWorker(f"{machine.name}-{next(self._numbers)}", place, self.now)
        self._workers[worker.id] = self._holders[place] = worker
        self.account.joined += 1
        self.presence.append((self.now, machine, 1))
        self._out.append(ev.JobStarted(self.now, machine.tier, worker.id, self.now - place.since, place.pin))
        self._out.append(ev.WorkerJoined(self.now, machine.spec(worker.id, place.pin)))

    def noticed(self, place: MachineState) -> None:
        """Report that a worker's machine will be taken soon."""
        worker = self._holders[place]
        self._out.append(ev.EvictionNotice(self.now, worker.id))
        self._end_calls(worker)

    def _end_calls(self, worker: SimulatedWorker) -> None:
        """End calls that answer their items one by one as soon as they can."""
        for attempt, call in worker.calls.items():
            if call.salvaged:
                # The item in flight is done; a call that has not begun does not begin.
                done = min(call.items, call.done(self.now) + 1) if call.begins <= self.now else 0
                ends = call.begins + call.seconds * done / call.items if done else self.now
                self.at(ends, self._cut, worker, attempt, done)

    def taken(self, place: MachineState) -> None:
        """Take a worker's machine."""
        worker = self._holders[place]
        self.account.evicted += 1
        self._out.append(ev.JobEvicted(self.now, place.machine.tier, worker.id))
        self._lose(worker)

    def _lose(self, worker: SimulatedWorker) -> None:
        """Lose a worker with all that it held."""
        del self._workers[worker.id], self._holders[worker.place]
        self.account.worker_seconds += self.now - worker.joined
        for attempt, call in worker.calls.items():
            kept = call.done(self.now - EVERY_SECONDS) if call.salvaged else 0
            if kept:
                self._out.append(ev.ItemsFinished(self.now, worker.id, attempt, 0, kept))
            self._lose_call(worker, attempt, call, kept)
        self.presence.append((self.now, worker.place.machine, -1))
        self._staging.lost(worker.id)
        self._out.append(ev.WorkerLost(self.now, worker.id, evicted=True))

    def _lose_call(self, worker: SimulatedWorker, attempt: int, call: Call, kept: int = 0) -> None:
        library = worker.libraries.get(call.context)
        if call.shared:
            self.account.lost_items += call.items
            if library is not None and library.flying is not None:
                self.account.lost_seconds += library.flying.drop(attempt)
            return
        kept_seconds = call.seconds * kept / call.items if kept else 0.0
        self.account.call_seconds += kept_seconds
        self.account.lost_seconds += max(0.0, self.now - call.begins - kept_seconds)
        self.account.lost_items += call.items - kept

    # --- commands

    def _survey(self, command: cmd.Survey) -> None:
        names = {place: worker.id for place, worker in self._holders.items()}
        self._out.append(ev.MachinesFound(self.now, command.tier, self._market.survey(command.tier, names)))

    def _make_plan(self, command: cmd.MakePlan) -> None:
        event = computed(command.planning, self.now + self._planning_seconds)
        self.at(event.time, lambda: self._out.append(event))

    def _release(self, worker: SimulatedWorker, command: cmd.Release) -> None:
        self._lose(worker)
        self._market.give_back(worker.place)

    def _stage(self, worker: SimulatedWorker, command: cmd.Stage) -> None:
        context = command.context
        worker.staging[context] = self.now
        self._staging.fetch(worker.id, worker.place.machine, context, lambda: self._staged(worker, context))

    def _staged(self, worker: SimulatedWorker, context: str) -> None:
        begun = worker.staging.pop(context, None)
        if begun is not None and worker.id in self._workers:
            self.account.stage_seconds += self.now - begun
            self._out.append(ev.ContextStaged(self.now, worker.id, context))

    def _load(self, worker: SimulatedWorker, command: cmd.Load) -> None:
        library = Library(busy_until=[0.0] * self._concurrency.get(command.context, 1))
        worker.libraries[command.context] = library
        machine, generator = worker.place.machine, worker.place.generator
        seconds = self._times.load(command.context, machine, generator)
        if self._zygotes and self._imports is not None and self._zygote_of(worker) in self._zygotes:
            seconds *= 1.0 - self._imports(command.context, machine)
        fault = self._faults.of_build(machine, self.now, generator)
        ends = self._room_at(worker) + (seconds if fault is None else fault.seconds)
        self.at(ends, self._built, worker, command.context, library, seconds, fault)

    def _built(
        self, worker: SimulatedWorker, context: str, library: Library, seconds: float, fault: Fault | None
    ) -> None:
        if worker.id not in self._workers or worker.libraries.get(context) is not library:
            return
        if fault is not None:
            del worker.libraries[context]
            self.account.raised += 1
            failure = fault.failure(worker.id, worker.place.machine)
            self._out.append(ev.ContextFailed(self.now, worker.id, context, failure))
            return
        library.ready = True
        if self._zygote != "none":
            self._zygotes.add(self._zygote_of(worker))
        self.account.loads += 1
        self.account.load_seconds += seconds
        parks = self._parks(context) is not None
        self._out.append(ev.ContextReady(self.now, worker.id, context, seconds, parks=parks))

    def _zygote_of(self, worker: SimulatedWorker) -> str:
        return worker.id if self._zygote == "worker" else worker.place.machine.host_name

    def _unload(self, worker: SimulatedWorker, command: cmd.Unload) -> None:
        worker.libraries.pop(command.context, None)
        if command.files:
            worker.staging.pop(command.context, None)
            self._staging.remove(worker.id, command.context)
        self._out.append(ev.ContextUnloaded(self.now, worker.id, command.context))

    def _park(self, worker: SimulatedWorker, command: cmd.Park) -> None:
        library, (seconds, _, size) = self._library(worker, command), self._parks(command.context) or (0.0, 0.0, 0)
        library.ready, library.parked_until = False, self.now + seconds
        event = ev.ContextParked(library.parked_until, worker.id, command.context, seconds, size, 0)
        self.at(library.parked_until, self._moved, worker, library, event)

    def _wake(self, worker: SimulatedWorker, command: cmd.Wake) -> None:
        library, (_, seconds, _) = worker.libraries[command.context], self._parks(command.context) or (0.0, 0.0, 0)
        event = ev.ContextWoken(self._room_at(worker) + seconds, worker.id, command.context, seconds)
        self.at(event.time, self._moved, worker, library, event)

    def _moved(self, worker: SimulatedWorker, library: Library, event: ev.ContextParked | ev.ContextWoken) -> None:
        """Report that a context is parked, or takes calls again."""
        if worker.id not in self._workers or worker.libraries.get(event.context) is not library:
            return
        if isinstance(event, ev.ContextWoken):
            library.ready = True
            self.account.wakes += 1
            self.account.wake_seconds += event.seconds
        self._out.append(event)

    def _room_at(self, worker: SimulatedWorker) -> float:
        """Return when all that gives way on a worker has done so."""
        return max([self.now, *(library.parked_until for library in worker.libraries.values())])

    def _run(self, worker: SimulatedWorker, command: cmd.Run) -> None:
        pace = self._pace(command.app, worker.place.machine) if self._pace is not None else None
        if pace is None:
            self._begin(worker, command, command.items, self._finish)
        else:
            self._join_in(worker, command, pace)

    def _join_in(self, worker: SimulatedWorker, command: cmd.Run, pace: SharedPace) -> None:
        """Begin a call that shares the engine with those in flight there."""
        library = self._library(worker, command)
        machine, attempt = worker.place.machine, command.attempt
        tokens = sum(pace.draw(self._seed, command.app, item) for item in command.items)
        fault = self._fault(command, command.items, tokens / pace.rate(1), worker) if self._troubled else None
        begins = self.now + self._dispatch(command.app, machine)
        if fault is not None:
            worker.calls[attempt] = Call(command.context, len(command.items), begins, fault.seconds, salvaged=False)
            self.at(begins + fault.seconds, self._raise, worker, attempt, fault)
            return
        if library.flying is None:

            def ended(attempt: int, seconds: float, tokens: float, share: float) -> None:
                self._finish_shared(worker, attempt, seconds, tokens, share)

            library.flying = InFlight(self, ended, lambda: self._faults.slower(machine, self.now))
        worker.calls[attempt] = Call(command.context, len(command.items), begins, 0.0, salvaged=False, shared=True)
        self.at(begins, self._joins, worker, library, attempt, tokens, pace)

    def _joins(self, worker: SimulatedWorker, library: Library, attempt: int, tokens: float, pace: SharedPace) -> None:
        if worker.id in self._workers and attempt in worker.calls and library.flying is not None:
            library.flying.begin(attempt, tokens, pace)

    def _finish_shared(
        self, worker: SimulatedWorker, attempt: int, seconds: float, tokens: float, share: float
    ) -> None:
        if self._pop_call(worker, attempt) is not None:
            self.account.call_seconds += share
            self.account.tokens += tokens
            counted = max(1, round(tokens))
            self._out.append(ev.BatchFinished(self.now, worker.id, attempt, seconds, tokens=counted))

    def _library(self, worker: SimulatedWorker, command: cmd.Run | cmd.Park) -> Library:
        library = worker.libraries.get(command.context)
        if library is None or not library.ready:
            name = type(command).__name__
            raise ValueError(f"{worker.id} is told to {name} {command.context!r}, which it has not built, or parked")
        return library

    def _begin(
        self, worker: SimulatedWorker, command: cmd.Run, items: Sequence[int], end: Callable[..., None], *more: Any
    ) -> None:
        """Begin a call, at whose end `end` is called."""
        library = self._library(worker, command)
        machine = worker.place.machine
        seconds = self._times.call(command.app, machine, items, self._generator) if items else 0.0
        fault = self._fault(command, items, seconds, worker) if self._troubled else None
        if self._troubled:
            seconds *= self._faults.slower(machine, self.now)
        if fault is not None:
            seconds, end, more = fault.seconds, self._raise, (fault,)
        begins = max(self.now + self._dispatch(command.app, machine), library.busy_until[0])
        ends = begins + seconds
        heapq.heapreplace(library.busy_until, ends)
        salvaged = type(command) is cmd.Run and command.app in self._salvage and fault is None
        worker.calls[command.attempt] = Call(command.context, len(items), begins, seconds, salvaged)
        self.at(ends, end, worker, command.attempt, *more)

    def _dispatch(self, app: str, machine: SimulatedMachine) -> float:
        """Return the seconds of a call's way to its worker and back."""
        seconds = self._times.dispatch(machine, self._generator)
        return seconds if self._way is None else seconds + self._way(app, machine)

    def _fault(self, command: cmd.Run, items: Sequence[int], seconds: float, worker: SimulatedWorker) -> Fault | None:
        """Return what makes a call raise, if anything does: its host, or one of its items, once it has been at work."""
        place = worker.place
        fault = self._faults.of_call(place.machine, self.now, place.generator)
        every = self._poison.get(command.app)
        if fault is None and every and any((item + 1) % every == 0 for item in items):
            fault = dataclasses.replace(POISON, seconds=seconds)
        return fault

    def _pop_call(self, worker: SimulatedWorker, attempt: int) -> Call | None:
        """Remove and return a call that ends; None if its worker or its context went before."""
        return worker.calls.pop(attempt, None) if worker.id in self._workers else None

    def _finish(self, worker: SimulatedWorker, attempt: int) -> None:
        if (call := self._pop_call(worker, attempt)) is not None:
            self.account.call_seconds += call.seconds
            self._out.append(ev.BatchFinished(self.now, worker.id, attempt, call.seconds))

    def _cut(self, worker: SimulatedWorker, attempt: int, done: int) -> None:
        """End a call with what is done."""
        if (call := self._pop_call(worker, attempt)) is not None:
            seconds = call.seconds * done / call.items
            self.account.call_seconds += seconds
            if done:
                self._out.append(ev.ItemsFinished(self.now, worker.id, attempt, 0, done))
            self._out.append(ev.BatchEnded(self.now, worker.id, attempt, seconds))

    def _raise(self, worker: SimulatedWorker, attempt: int, fault: Fault) -> None:
        """End a call with an error."""
        if (call := self._pop_call(worker, attempt)) is not None:
            self.account.lost_seconds += call.seconds
            self.account.raised += 1
            failure = fault.failure(worker.id, worker.place.machine)
            self._out.append(ev.BatchFailed(self.now, worker.id, attempt, failure))

    def _step(self, worker: SimulatedWorker, command: cmd.Step) -> None:
        """Begin a step, which takes as long as a batch of as many items as it makes chunks."""
        made = sum(order.chunk is not None for order in command.orders)
        self._begin(worker, command, range(made), self._step_ended, command.orders)

    def _step_ended(self, worker: SimulatedWorker, attempt: int, orders: Sequence[cmd.Order]) -> None:
        call = self._pop_call(worker, attempt)
        if call is None:
            return
        self.account.call_seconds += call.seconds
        outcomes: list[dict[str, Any]] = []
        for order in orders:
            outcome: dict[str, Any] = {"made": 1} if order.chunk is not None else {}
            if outcome and self._turn_over is not None and self._turn_over(order.session):
                outcome["idle"] = True
            if order.then in ("keep", "leave"):
                outcome["kept"] = self._state_bytes(order.session)
            elif order.then == "freeze":
                outcome["frozen"] = ["", self._state_bytes(order.session)]
            outcomes.append(outcome)
        self._out.append(ev.StepFinished(self.now, worker.id, attempt, call.seconds, outcomes))

    def _carry(self, worker: SimulatedWorker, command: cmd.Carry) -> None:
        seconds = self._carry_seconds
        if callable(seconds):
            seconds = seconds(command.bytes)
        self.at(self.now + seconds, self._carried, command)

    def _carried(self, command: cmd.Carry) -> None:
        if command.worker in self._workers and command.source in self._workers:
            self._out.append(ev.StateArrived(self.now, command.worker, command.session, command.made))

    def _interrupt(self, worker: SimulatedWorker, command: cmd.Interrupt) -> None:
        call = worker.calls.pop(command.attempt, None)
        if call is None:
            return
        self._lose_call(worker, command.attempt, call)
        library = worker.libraries[call.context]
        ends = call.begins + call.seconds
        if len(library.busy_until) > 1 and ends in library.busy_until:
            library.busy_until.remove(ends)
            library.busy_until.append(self.now)
            heapq.heapify(library.busy_until)
        elif not any(other.context == call.context for other in worker.calls.values()):
            library.busy_until[0] = self.now
        failure = ev.Failure("cancelled", "CallInterrupted", "nobody waits for it any more", worker=worker.id)
        self._out.append(ev.BatchFailed(self.now, worker.id, command.attempt, failure))

    def _abandon(self, worker: SimulatedWorker, command: cmd.Abandon) -> None:
        for number in [n for n, call in worker.calls.items() if call.context == command.context]:
            self._lose_call(worker, number, worker.calls.pop(number))
        worker.libraries.pop(command.context, None)
