"""Random joins, losses, failures, duplicates, preemptions and late messages; every invariant after every event."""

from collections import Counter
from dataclasses import dataclass, field, fields

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_of_machines import GPUS, device, graph

from ctxflow.policies.load_or_wait import LASTING, LOOK_SECONDS
from ctxflow.policies.registry import make
from ctxflow.policies.simple import Fixed
from ctxflow.scheduler import Limits, Policies, Scheduler, app_state
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

CONTEXTS = ("", "small", "large", "broken", "partial", "none", "wide", "wider", "flow", "pair")
FLOWS, PAIR = "flow", "pair"  # Whose calls overlap: of one item each, and batches, two at a time.
WIDE = {"wide": (2, "guaranteed"), "wider": (4, "best-effort")}  # How many GPUs, and how close together.
MACHINES = ("m1", "m2")
EVERY = st.just(set(range(GPUS)))
FILES = ("small", "partial", "none")
BAD_WORKER = 5  # Every fifth worker cannot build these:
HARD = ("large", "partial", "none")
PARKING = {"small": (5, 45, 90), "large": (25,), "flow": (15,), "pair": (5, None)}  # What they hold then, as measured.


class Duplicating(Fixed):
    """Orders a second try of any running batch that an idle worker could take; has few items in flight."""

    def __init__(self, size, window):
        super().__init__(size)
        self.most = window

    def window(self, view, app, worker):
        return self.most

    def duplicate(self, view, worker):
        for attempt in view.attempts.values():
            held = worker.contexts.get(attempt.context)
            if attempt.worker != worker.id and held and held.state == "ready" and view.random.random() < 0.5:
                return attempt.id
        return None


@dataclass
class FakeWorker:
    """What a worker has been told and not answered yet: the other side of the scheduler's commands."""

    number: int
    bad: bool
    loads: dict[str, str] = field(default_factory=dict)  # context -> "Stage" | "Load" | "Wake"
    parked: set[str] = field(default_factory=set)
    parking: list[str] = field(default_factory=list)  # Of which it has not said yet that they are parked.
    runs: dict[int, cmd.Run] = field(default_factory=dict)
    answered: Counter[int] = field(default_factory=Counter)  # attempt -> how many of its items, one by one
    built: Counter[str] = field(default_factory=Counter)  # context -> calls on what was built last
    files: set[str] = field(default_factory=set)  # Of these contexts.
    devices: tuple[str, ...] = ()
    slots: int = 1

    def end(self, context):
        """Its library process ends, whatever it was."""
        self.built.pop(context, None)
        self.parked.discard(context)
        self.parking = [each for each in self.parking if each != context]


class Pool(RuleBasedStateMachine):
    @initialize(
        routing=st.sampled_from(["context-affinity", "least-loaded", "round-robin", "skylb", "sdib"]),
        size=st.integers(1, 7),
        window=st.integers(1, 4),
        seed=st.integers(0, 9),
        start_when=st.sampled_from([0.0, 0.3, 0.5]),
        scaling=st.sampled_from(["fixed", {"policy": "queue-proportional", "calls_per_worker": 1, "linger": 0.05}]),
        preemption=st.sampled_from(["none", "standard", "imp", "exact"]),
        many=st.sampled_from([2, app_state.MANY]),
    )
    def begin(self, routing, size, window, seed, start_when, scaling, preemption, many):
        self.now = 0.0
        self.many, app_state.MANY = app_state.MANY, many
        chosen = preemption if preemption == "none" else {"policy": preemption, "patience": 5, "grace": 3, "idle": 2}
        self.contexts = [each for each in CONTEXTS if each not in WIDE or preemption != "none"]
        policies = Policies(
            self.routing(routing),
            Duplicating(size, window),
            make("placement", "everywhere"),
            make("preemption", chosen),
            make("scaling", scaling),
        )
        self.scheduler = Scheduler(policies, Limits(retry_seconds=1.0), seed, start_when)
        self.workers: dict[str, FakeWorker] = {}
        self.released: set[str] = set()
        self.spawned = 0
        self.fates: Counter[int] = Counter()
        self.dead: dict[int, str | None] = {}
        self.poison: set[int] = set()
        self.killers: set[int] = set()
        self.flowing: set[int] = set()  # Items of the app whose calls overlap.
        self.kinds: dict[int, str] = {}  # Of the failures that items died of.
        self.blamed: set[str] = set()  # Contexts whose building lost a worker.
        self.cancelled: set[int] = set()
        self.next_item = 0
        self.waits = routing == "context-affinity"  # For who holds a context, where that is sooner than a load.
        self.loaded_at: dict[str, float] = {}  # Context -> when its last load was ordered.
        self.stale: list[ev.Event] = []
        self.interrupted: set[int] = set()
        for region in ("default", "north"):
            self.tell(ev.RegionOffered, ev.RegionSpec(region, {"south": 0.1}, power_price=0.1, home=region == "north"))
        self.surveys: list[str] = []
        self.pins: dict[int, cmd.AcquireAt] = {}
        self.tell(ev.TierOffered, ev.TierSpec("default", 0, 8, gpus=1, machine_gpus=GPUS))
        for context in self.contexts:
            for priority in (0, 1):
                self.declare(context, priority)
        for _ in range(4 if preemption != "none" else 0):
            self.join(slots=1, gpus=1)

    def declare(self, context, priority):
        """As a run does before each use."""
        if context not in self.scheduler.state.contexts:
            gpus, affinity = WIDE.get(context, (1 if context == "large" else 0, None))
            files = context in FILES
            memory = 60 if context == "large" else 50
            level = context if context in ev.LEVELS else ev.PERVASIVE
            spec = ev.ContextSpec(
                context, context, files=files, gpus=gpus, memory=memory, level=level, affinity=affinity,
                concurrency=2 if context == PAIR else None,
            )  # fmt: skip
            self.tell(ev.ContextDeclared, spec)
        if f"{context}/{priority}" not in self.scheduler.state.apps:
            urgent = priority + 2 * (context in WIDE)
            app = ev.AppSpec(
                f"{context}/{priority}",
                context,
                context,
                priority=urgent,
                batch=context not in ("", FLOWS),
                overlaps=context == FLOWS,
            )
            self.tell(ev.AppDeclared, app)

    def routing(self, name):
        return make("routing", name)

    # --- the two sides

    def tell(self, kind, *values, **named):
        self.now += 0.01
        event = kind(self.now, *values, **named)
        for command in self.scheduler.handle(event):
            self.obey(command)
        self.scheduler.validate()
        self.check_nothing_idles()
        self.check_what_is_kept()

    def obey(self, command):
        if isinstance(command, cmd.Deliver):
            self.fates.update(command.items)
            assert not self.poison & set(command.items)
        elif isinstance(command, cmd.Bury):
            self.fates.update(command.items)
            self.dead.update(dict.fromkeys(command.items, command.context))
            self.kinds.update(dict.fromkeys(command.items, command.failure.kind))
        elif isinstance(command, cmd.Acquire):
            assert 0 <= command.workers <= 8
        elif isinstance(command, cmd.Release):
            victim = any(command.worker in each.room.victims for each in self.scheduler.state.reservations.all.values())
            assert not self.workers[command.worker].runs
            assert victim or not self.workers[command.worker].loads
            assert command.worker not in self.released, "it is given back twice"
            self.released.add(command.worker)
        elif isinstance(command, cmd.Survey):
            self.surveys.append(command.tier)
        elif isinstance(command, cmd.AcquireAt):
            assert len(set(command.devices)) == len(command.devices)
            self.pins[command.pin] = command
        elif isinstance(command, cmd.Forgo):
            self.pins.pop(command.pin, None)
        elif isinstance(command, cmd.Drain):
            assert command.worker in self.workers
        elif isinstance(command, cmd.Note):
            assert command.text
        elif isinstance(command, cmd.Quarantine):
            assert command.host and command.until > self.now
        elif isinstance(command, cmd.Exclude):
            assert "" not in command.hosts
        else:
            worker = self.workers[command.worker]
            if isinstance(command, cmd.Stage):
                assert command.context != "none" or "none" not in worker.files, "its files were to be removed"
            elif isinstance(command, cmd.Load):
                assert command.context not in FILES or command.context in worker.files, "it loads what is not there"
                assert command.context not in {*worker.built, *worker.parked}, "it loads what is loaded"
            elif isinstance(command, cmd.Park):
                assert command.context in PARKING and command.context in worker.built
                assert all(run.context != command.context for run in worker.runs.values()), "it parks what runs"
                worker.end(command.context)
                worker.parked.add(command.context)
                worker.parking.append(command.context)
            elif isinstance(command, cmd.Wake):
                assert command.context in worker.parked, "it wakes what is not parked"
            if isinstance(command, (cmd.Stage, cmd.Load)):
                self.loaded_at[command.context] = self.now
            if isinstance(command, (cmd.Stage, cmd.Load, cmd.Wake)):
                worker.loads[command.context] = type(command).__name__
            elif isinstance(command, cmd.Run):
                assert 1 <= len(command.items) <= 7 and len(set(command.items)) == len(command.items)
                worker.runs[command.attempt] = command
                beside = [run for run in worker.runs.values() if run.context == command.context]
                most = {FLOWS: self.scheduler.state.policies.windows.most, PAIR: 2}.get(command.context, worker.slots)
                assert len(beside) <= most, f"{len(beside)} calls on {command.context!r} at a time"
                assert len({run.context for run in worker.runs.values()}) <= worker.slots, "it has not so many slots"
                worker.built[command.context] += 1
                assert worker.built[command.context] == 1 or command.context not in ev.LEVELS, "it is used twice"
            elif isinstance(command, cmd.Interrupt):
                run = worker.runs[command.attempt]
                assert run.context == command.context
                assert not self.scheduler.state.open.keys() & set(run.items), "somebody waits for it"
                assert command.attempt not in self.interrupted, "it is told twice"
                self.interrupted.add(command.attempt)
            elif isinstance(command, cmd.Abandon):
                assert command.attempt in worker.runs
                for number in [n for n, run in worker.runs.items() if run.context == command.context]:
                    del worker.runs[number]  # The library process ends, and what runs beside it in there.
                worker.end(command.context)
            elif isinstance(command, cmd.Unload):
                assert command.context not in worker.loads
                assert command.files == (command.context == "none")
                worker.end(command.context)
                if command.files:
                    worker.files.discard(command.context)

    def check_nothing_idles(self):
        """No work is held back while a worker that could run it idles."""
        state = self.scheduler.state
        for worker in state.free.values():
            for app in state.ready.values():
                assert (
                    worker.pin is None or app.context in (*WIDE, FLOWS) or not self.scheduler.view.can_run(app, worker)
                )
                # What has to run alone waits until one worker has nothing else in flight.
                if app.context != FLOWS or len(app.queue) > app.cancelled:
                    able = self.scheduler.view.can_run(app, worker) and not (self.waits and self.may_wait(app, worker))
                    assert not able, f"{worker.id} idles while {app.id} waits"

    def may_wait(self, app, worker):
        """Whether others hold an app's context, and it has waited for less than a quarter of what a load takes.

        That one is leaving may be seen a second later.
        """
        view = self.scheduler.view
        there = [w for w in view.workers.values() if w.noticed is None or self.now - w.noticed <= LOOK_SECONDS]
        others = [each for each in there if app.context in each.contexts]
        if not others or app.context in {*worker.contexts, *worker.parked} or app.context == "none":
            return False
        since = max(app.waiting_since, self.loaded_at.get(app.context, 0.0))
        loads = [self.longest_load(context) for context in (app.context, *view.gives_way(app, worker))]
        return self.now - since <= LASTING * sum(loads)

    def longest_load(self, context):
        """How long a load has taken at most, with the staging of its files."""
        known = ((w.load_seconds(context), w.stage_seconds(context)) for w in self.scheduler.view.workers.values())
        return max((load + (stage or 0.0) for load, stage in known if load is not None), default=0.0)

    def check_what_is_kept(self):
        """Of a context of a lower level nothing is left but what is to be, or is in use."""
        for name, worker in self.workers.items():
            held, parked = self.scheduler.state.workers[name].contexts, self.scheduler.state.workers[name].parked
            waking = {context for context, step in worker.loads.items() if step == "Wake"}
            assert parked.keys() | waking == worker.parked, "what is parked is not known, or thought to be"
            assert worker.built.keys() <= held.keys() and (worker.files & {"none"}) <= held.keys()

    # --- what may happen

    @rule(
        context=st.sampled_from(CONTEXTS).filter(bool) | st.just(""),
        priority=st.integers(0, 1),
        count=st.integers(1, 20),
        bad=st.sets(st.integers(0, 19), max_size=2),
        kills=st.booleans(),
    )
    def submit(self, context, priority, count, bad, kills):
        if context not in self.contexts:
            return
        items = range(self.next_item, self.next_item + count)
        self.next_item = items.stop
        chosen = {items[n] for n in bad if n < count}
        (self.killers if kills else self.poison).update(chosen)
        self.flowing.update(items if context == FLOWS else ())
        self.declare(context, priority)
        self.tell(ev.ItemsSubmitted, f"{context}/{priority}", items)

    @precondition(lambda self: len(self.workers) < 8)
    @rule(slots=st.integers(1, 2), gpus=st.integers(0, 1), region=st.sampled_from(["default", "north"]))
    def some_join(self, slots, gpus, region):
        self.join(slots, gpus, region)

    def join(self, slots, gpus, region="default"):
        self.spawned += 1
        name = f"w{self.spawned}"
        free = [(machine, n) for machine in MACHINES for n in range(GPUS) if not self.taken(device(machine, n))]
        machine, number = free[0] if gpus and free else ("elsewhere", 0)
        devices = (device(machine, number),) if gpus and free else ()
        self.workers[name] = FakeWorker(self.spawned, self.spawned % BAD_WORKER == 0, devices=devices, slots=slots)
        self.tell(
            ev.WorkerJoined,
            ev.WorkerSpec(name, host=machine, slots=slots, gpus=gpus, memory=100, devices=devices, region=region),
        )

    def taken(self, gpu):
        """Whether a worker of ours has a GPU."""
        return any(gpu in worker.devices for worker in self.workers.values())

    @precondition(lambda self: self.surveys)
    @rule(others=st.sets(st.integers(0, GPUS - 1)) | EVERY, fails=st.sampled_from([False] * 4 + [True]))
    def survey(self, others, fails):
        """The batch system tells of the machines; some GPUs, often all that are not ours, are others'."""
        self.answer_survey({} if fails else dict.fromkeys(MACHINES, others))

    @precondition(lambda self: "wide" in self.contexts and any(worker.devices for worker in self.workers.values()))
    @rule(context=st.sampled_from(sorted(WIDE)), count=st.integers(1, 5))
    def press(self, context, count):
        """Urgent work comes that needs several GPUs, and all that are not ours are others'."""
        self.declare(context, 1)
        items = range(self.next_item, self.next_item + count)
        self.next_item = items.stop
        self.tell(ev.ItemsSubmitted, f"{context}/1", items)
        while self.surveys:
            self.answer_survey(dict.fromkeys(MACHINES, range(GPUS)))

    def answer_survey(self, others):
        tier = self.surveys.pop(0)
        graphs = {}
        for machine, theirs in others.items():
            users = dict.fromkeys(theirs, "bob")
            users |= {n: "alice" for n in range(GPUS) if self.taken(device(machine, n))}
            graphs[machine] = graph(machine, users)
        self.tell(ev.MachinesFound, tier, graphs, reason="" if others else "it does not answer")

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), runs=st.booleans())
    def join_pinned(self, data, runs):
        """The worker that was asked for in a place comes, or its job begins to run."""
        pin = data.draw(st.sampled_from(sorted(self.pins)))
        if runs:
            self.tell(ev.JobStarted, "default", str(pin), pin=pin)
        else:
            self.come(pin)

    def come(self, pin):
        command = self.pins[pin]
        if any(self.taken(each) for each in command.devices):  # By another of ours, that was faster.
            return
        del self.pins[pin]
        self.spawned += 1
        name, devices = f"w{self.spawned}", tuple(command.devices)
        self.workers[name] = FakeWorker(self.spawned, bad=False, devices=devices)
        spec = ev.WorkerSpec(name, host=command.machine, gpus=len(devices), memory=100, devices=devices, pin=pin)
        self.tell(ev.WorkerJoined, spec)

    def pick(self, data, names):
        return data.draw(st.sampled_from(sorted(names)))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), evicted=st.booleans())
    def lose(self, data, evicted):
        name = self.pick(data, self.workers)
        worker = self.workers.pop(name)
        if not evicted:
            self.blamed.update(context for context, step in worker.loads.items() if step != "Wake")
        for attempt in worker.runs:
            self.stale.append(ev.BatchFinished(self.now, name, attempt, 1.0))
            self.stale.append(ev.ItemsFinished(self.now, name, attempt, worker.answered[attempt], 3))
            self.stale.append(ev.BatchEnded(self.now, name, attempt, 1.0))
        self.tell(ev.WorkerLost, name, evicted=evicted)

    @precondition(lambda self: self.released & self.workers.keys())
    @rule(data=st.data())
    def go(self, data):
        self.lose_released(self.pick(data, self.released & self.workers.keys()))

    def lose_released(self, name):
        assert not self.workers[name].runs, "it was given back with work"
        self.released.discard(name)
        del self.workers[name]
        self.tell(ev.WorkerLost, name, evicted=True)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def notice(self, data):
        self.tell(ev.EvictionNotice, self.pick(data, self.workers))

    @precondition(lambda self: any(worker.loads for worker in self.workers.values()))
    @rule(data=st.data())
    def end_load(self, data):
        name = self.pick(data, [n for n, w in self.workers.items() if w.loads])
        self.finish_load(name, self.pick(data, self.workers[name].loads))

    def finish_load(self, name, context):
        worker = self.workers[name]
        self.end_parking(name, context)
        step = worker.loads.pop(context)
        if step == "Stage":
            worker.files.add(context)
            self.tell(ev.ContextStaged, name, context)
        elif step == "Wake":
            worker.parked.discard(context)
            worker.built[context] = 0
            self.tell(ev.ContextWoken, name, context, seconds=0.1, memory=20)
        elif context == "broken" or (context in HARD and worker.bad):
            failure = ev.Failure("exception", "RuntimeError", "cannot build")
            self.tell(ev.ContextFailed, name, context, failure)
        else:
            worker.built[context] = 0
            parks = context in PARKING
            self.tell(ev.ContextReady, name, context, seconds=1.0, memory=20 if parks else 55, parks=parks)

    @rule(context=st.sampled_from(sorted(PARKING)))
    def take_turns(self, context):
        """A context gets work while nobody is at something else for long."""
        if context not in self.contexts:
            return
        self.declare(context, 1)
        items = range(self.next_item, self.next_item + 2)
        self.next_item = items.stop
        self.flowing.update(items if context == FLOWS else ())
        self.tell(ev.ItemsSubmitted, f"{context}/1", items)
        for _ in range(10):
            name, worker = next(((n, w) for n, w in self.workers.items() if w.loads or w.runs), ("", None))
            if worker is not None:
                do = self.finish_load if worker.loads else self.finish_run
                do(name, next(iter(worker.loads or worker.runs)))

    def end_parking(self, name, context, size=None):
        worker = self.workers[name]
        if context in worker.parking:
            worker.parking.remove(context)
            self.tell(ev.ContextParked, name, context, seconds=0.1, memory=size or PARKING[context][0], gpu_memory=0)

    @precondition(lambda self: any(worker.parking for worker in self.workers.values()))
    @rule(data=st.data(), fails=st.sampled_from([False] * 5 + [True]))
    def say_parked(self, data, fails):
        name = self.pick(data, [n for n, w in self.workers.items() if w.parking])
        context = self.pick(data, self.workers[name].parking)
        if fails:
            self.fail_parked(name, context)
        else:
            self.end_parking(name, context, data.draw(st.sampled_from(PARKING[context])))

    @precondition(lambda self: any(worker.parked for worker in self.workers.values()))
    @rule(data=st.data(), dies=st.booleans())
    def parked_ends(self, data, dies):
        """The library process of a parked context dies, whether it is being woken or not, or it cannot be woken."""
        name = self.pick(data, [n for n, w in self.workers.items() if w.parked])
        context = self.pick(data, self.workers[name].parked)
        if not dies and self.workers[name].loads.get(context) == "Wake":
            self.fail_parked(name, context)
            return
        self.forget_parked(name, context)
        self.tell(ev.ContextUnloaded, name, context)

    def fail_parked(self, name, context):
        self.forget_parked(name, context)
        self.tell(ev.ParkFailed, name, context, ev.Failure("exception", "RuntimeError", "no room"))
        assert context not in self.scheduler.state.contexts or self.scheduler.state.contexts[context].parks is None

    def forget_parked(self, name, context):
        self.workers[name].loads.pop(context, None)
        self.workers[name].end(context)

    @precondition(lambda self: any(worker.built for worker in self.workers.values()))
    @rule(data=st.data())
    def library_dies(self, data):
        """Between two calls, or while one is on its way."""
        name = self.pick(data, [n for n, w in self.workers.items() if w.built])
        worker = self.workers[name]
        context = self.pick(data, worker.built)
        worker.end(context)
        worker.runs = {number: run for number, run in worker.runs.items() if run.context != context}
        self.tell(ev.ContextUnloaded, name, context)

    @precondition(lambda self: any(worker.runs for worker in self.workers.values()))
    @rule(data=st.data())
    def end_run(self, data):
        name = self.pick(data, [n for n, w in self.workers.items() if w.runs])
        self.finish_run(name, self.pick(data, self.workers[name].runs))

    def finish_run(self, name, attempt):
        run = self.workers[name].runs.pop(attempt)
        items = set(run.items)
        if items & self.killers:
            failure = ev.Failure("crash", "LibraryDied", "killed")
            for other, its in list(self.workers[name].runs.items()):
                if its.context == run.context:  # It dies with the library process.
                    del self.workers[name].runs[other]
            self.workers[name].end(run.context)
            self.tell(ev.BatchFailed, name, attempt, failure, lost_context=True)
        elif items & self.poison:
            self.tell(ev.BatchFailed, name, attempt, ev.Failure("exception", "ValueError", "bad item"))
        else:
            self.tell(ev.BatchFinished, name, attempt, 1.0)
            self.stale.append(ev.BatchFinished(self.now, name, attempt, 1.0))

    @precondition(lambda self: any(self.interrupted & w.runs.keys() for w in self.workers.values()))
    @rule(data=st.data(), lost_context=st.booleans())
    def end_interrupted(self, data, lost_context):
        """A call that nobody waits for has ended, with its library process or without; no item is to blame."""
        running = [(n, a) for n, w in self.workers.items() for a in w.runs if a in self.interrupted]
        name, attempt = data.draw(st.sampled_from(running))
        worker, state = self.workers[name], self.scheduler.state
        context = worker.runs.pop(attempt).context
        if lost_context:
            worker.runs = {number: run for number, run in worker.runs.items() if run.context != context}
            worker.end(context)
        counts = [dict(table) for table in (state.raised, state.crashes, state.losses)]
        dead = state.counters.dead
        failure = ev.Failure("cancelled", "CallInterrupted", "nobody waits for it")
        self.tell(ev.BatchFailed, name, attempt, failure, lost_context=lost_context)
        assert [state.raised, state.crashes, state.losses] == counts and state.counters.dead == dead

    @precondition(lambda self: any(worker.runs for worker in self.workers.values()))
    @rule(data=st.data(), again=st.booleans())
    def answer_some(self, data, again):
        """Results that come before the batch has ended; some come twice."""
        name = self.pick(data, [n for n, w in self.workers.items() if w.runs])
        worker = self.workers[name]
        attempt = self.pick(data, worker.runs)
        first, items = worker.answered[attempt], worker.runs[attempt].items
        good = self.good_from(items, first)
        if worker.runs[attempt].context and good:
            count = data.draw(st.integers(1, good))
            worker.answered[attempt] += count
            first -= again and first > 0
            part = (name, attempt, first, worker.answered[attempt] - first)
            self.tell(ev.ItemsFinished, *part)
            self.stale.append(ev.ItemsFinished(self.now, *part))

    def good_from(self, items, first):
        """How many items have a result, from the first that has none yet."""
        bad = [n for n in range(first, len(items)) if items[n] in self.poison | self.killers]
        return (bad[0] if bad else len(items)) - first

    @precondition(lambda self: any(worker.answered.total() for worker in self.workers.values()))
    @rule(data=st.data(), noticed=st.booleans())
    def end_early(self, data, noticed):
        """A batch ends with what is done: after notice, or since it is."""
        found = [(n, a) for n, w in self.workers.items() for a in w.runs if w.answered[a]]
        if not found:
            return
        name, attempt = data.draw(st.sampled_from(found))
        worker = self.workers[name]
        if noticed:
            self.tell(ev.EvictionNotice, name)
        run = worker.runs.pop(attempt)
        failing = worker.answered[attempt] + self.good_from(run.items, worker.answered[attempt])
        left = [item for item in run.items[worker.answered[attempt] :] if item in self.scheduler.state.open]
        counts = [dict(table) for table in (self.scheduler.state.raised, self.scheduler.state.crashes)]
        if not noticed and failing < len(run.items) and run.items[failing] in self.poison:
            good = failing - worker.answered[attempt]
            if good:
                self.tell(ev.ItemsFinished, name, attempt, worker.answered[attempt], good)
            failure = ev.Failure("exception", "ValueError", "bad item")
            self.tell(ev.BatchFailed, name, attempt, failure, at=failing)
            return
        self.tell(ev.BatchEnded, name, attempt, 1.0)
        assert [self.scheduler.state.raised, self.scheduler.state.crashes] == counts, "it cost an item something"
        assert set(left) <= self.scheduler.state.open.keys(), "what was not answered is not lost"
        self.stale.append(ev.BatchEnded(self.now, name, attempt, 1.0))

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def late_message(self, data):
        event = data.draw(st.sampled_from(self.stale))
        self.tell(type(event), *[getattr(event, f.name) for f in fields(event) if f.name != "time"])

    @rule(contexts=st.sets(st.sampled_from(CONTEXTS)), priorities=st.sets(st.integers(0, 1)))
    def retire(self, contexts, priorities):
        """What nobody uses is forgotten, and nothing else is."""
        state = self.scheduler.state
        apps = [f"{context}/{priority}" for context in sorted(contexts) for priority in sorted(priorities)]
        used = {app.id for app in state.open.values()} | {attempt.app for attempt in state.attempts.values()}
        held = {context for worker in state.workers.values() for context in worker.contexts}
        self.tell(ev.Retired, apps, sorted(contexts))
        assert used <= state.apps.keys()
        assert held | {app.context for app in state.apps.values()} <= state.contexts.keys()
        claims = [there.claim for worker in state.workers.values() for there in worker.contexts.values() if there.claim]
        assert not (set(apps) - used - {claim.app for claim in claims}) & state.apps.keys(), (
            "what is not used is not forgotten"
        )

    @rule(data=st.data(), stop=st.booleans())
    def cancel(self, data, stop):
        if self.next_item:
            first = data.draw(st.integers(0, self.next_item - 1))
            items = [i for i in range(first, min(first + 5, self.next_item)) if not self.fates[i]]
            self.cancelled.update(items)
            self.fates.update(items)
            self.tell(ev.ItemsCancelled, items, stop=stop)

    @rule(seconds=st.floats(0, 20))
    def tick(self, seconds):
        self.now += seconds
        self.tell(ev.Tick)

    @invariant()
    def nothing_twice(self):
        if hasattr(self, "fates"):
            assert not self.fates or max(self.fates.values()) == 1

    def teardown(self):
        """Everything comes to an end with healthy workers, and every item had the fate it deserved."""
        if not hasattr(self, "scheduler"):
            return
        try:
            self.end_all()
        finally:
            app_state.MANY = self.many

    def end_all(self):
        for name in list(self.workers):
            self.workers.pop(name)
            self.tell(ev.WorkerLost, name, evicted=True)
        for _ in range(4):
            self.join_healthy()
        for _ in range(20_000):
            name, worker = next(((n, w) for n, w in self.workers.items() if w.loads or w.runs), ("", None))
            if worker is None and not self.scheduler.state.open:
                break
            if worker is None:
                self.now += 100
                self.tell(ev.Tick)
                while self.surveys:
                    self.answer_survey(dict.fromkeys((*MACHINES, "m3"), ()))
                for pin in list(self.pins):
                    self.come(pin)
                for released in self.released & self.workers.keys():
                    self.lose_released(released)
                if len(self.workers) < self.scheduler.state.tiers["default"].asked:
                    self.join_healthy()
            elif worker.loads:
                self.finish_load(name, next(iter(worker.loads)))
            else:
                self.finish_run(name, next(iter(worker.runs)))
        assert not self.scheduler.state.open, "the run does not end"
        assert sorted(self.fates) == list(range(self.next_item)) or set(self.fates) >= set(range(self.next_item))
        for item, context in self.dead.items():
            bad = {"broken", *HARD, *self.blamed}
            assert context in bad or item in self.poison | self.killers | self.suspects()
            if item in self.flowing and self.kinds[item] != "lost":
                assert item in self.poison | self.killers, "it died of what another one in flight did"

    def join_healthy(self):
        self.spawned += 1 + ((self.spawned + 1) % BAD_WORKER == 0)
        name = f"w{self.spawned}"
        self.workers[name] = FakeWorker(self.spawned, bad=False)
        self.tell(ev.WorkerJoined, ev.WorkerSpec(name, gpus=1, memory=100))

    def suspects(self):
        """Items whose workers were lost too often without a reason are given up too."""
        return {item for item in self.dead if self.dead[item] is None}


Pool.TestCase.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPool = Pool.TestCase
