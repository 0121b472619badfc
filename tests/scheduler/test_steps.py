"""Sessions and their steps in the scheduler: by examples, and against a random pool that keeps their states."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_bench import Bench, only

from ctxflow.policies.simple import LeastLoadedSessions
from ctxflow.scheduler import Limits, Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

FAILURE = ev.Failure("exception", "ValueError", "bad")


class SessionBench(Bench):
    """A bench with an app of sessions, and one worker that has built its context."""

    def __init__(self, workers=("w1",), keep_every=2, chunk_target=None, **policies):
        super().__init__(**policies)
        self.app("talk", "model", batch=False, sessions=True, keep_every=keep_every, chunk_target=chunk_target)
        self.steps = []
        for worker in workers:
            self.join(worker)

    def tell(self, kind, *values, **named):
        commands = super().tell(kind, *values, **named)
        for load in only(commands, cmd.Load):
            commands = [*commands, *self.tell(ev.ContextReady, load.worker, load.context, seconds=1.0)]
        return commands

    def open(self, *numbers, wanted=100):
        return [c for number in numbers for c in self.tell(ev.SessionOpened, number, "talk", wanted)]

    def build(self):
        """Have all workers build the context, each for an item of another app."""
        self.app("first", "model")
        for run in only(self.submit("first", len(self.state.workers)), cmd.Run):
            super().finish(run)
        assert all("model" in worker.contexts for worker in self.state.workers.values())

    def finish(self, step, seconds=0.1, **odd):
        """End a step; `odd` has what else came of a session, as in s1={"idle": 1}."""
        outcomes = []
        for order in step.orders:
            outcome = {"made": 1} if order.chunk is not None else {}
            if order.then in ("keep", "leave"):
                outcome["kept"] = 10
            elif order.then == "freeze":
                outcome["frozen"] = ["digest", 10]
            outcomes.append({**outcome, **odd.get(f"s{order.session}", {})})
        return self.tell(ev.StepFinished, step.worker, step.attempt, seconds, outcomes)


def step_of(commands):
    """The one step that the commands start."""
    [step] = only(commands, cmd.Step)
    return step


def made(commands):
    """The chunks that were delivered, as (session, number)."""
    return [(each.session, each.chunk) for each in only(commands, cmd.DeliverChunk)]


def test_all_ready_sessions_share_a_step():
    bench = SessionBench()
    step = step_of(bench.open(1))
    assert only(bench.open(2, 3), cmd.Step) == []  # The worker has one slot.
    commands = bench.finish(step)
    assert made(commands) == [(1, 0)]
    step = step_of(commands)
    assert [(order.session, order.thaw, order.chunk) for order in step.orders] == [
        (1, "", 1),
        (2, "anew", 0),
        (3, "anew", 0),
    ]
    assert [order.then for order in step.orders] == ["keep", "", ""]


def test_k_grows_while_steps_meet_the_target_and_not_beyond():
    bench = SessionBench(chunk_target=0.5)
    commands, sizes = bench.open(*range(12)), []
    step = step_of(commands)
    for _ in range(8):
        sizes.append(len(step.orders))
        step = step_of(bench.finish(step, seconds=0.1 * len(step.orders)))
    assert sizes == [1, 2, 4, 5, 5, 5, 5, 5]


def test_those_longest_unserved_go_first():
    bench = SessionBench(chunk_target=1e-9)  # One session a step.
    step, served = step_of(bench.open(1, 2, 3)), []
    for _ in range(6):
        bench.now += 1
        served.append(step.orders[0].session)
        step = step_of(bench.finish(step))
    assert served == [1, 2, 3, 1, 2, 3]


def test_an_idle_session_waits_for_its_prompt():
    bench = SessionBench()
    step = step_of(bench.open(1))
    commands = bench.finish(step, s1={"idle": 1})
    assert only(commands, cmd.EndTurn) == [cmd.EndTurn(1, 0)] and only(commands, cmd.Step) == []
    assert step_of(bench.tell(ev.SessionPrompted, 1)).orders[0].chunk == 1


def test_a_prompt_that_came_meanwhile_is_a_turn_of_its_own():
    bench = SessionBench()
    step = step_of(bench.open(1))
    bench.tell(ev.SessionPrompted, 1)
    commands = bench.finish(step, s1={"idle": 1})
    assert only(commands, cmd.EndTurn) == [] and step_of(commands).orders[0].chunk == 1


def test_no_more_than_is_wanted_is_made():
    bench = SessionBench()
    commands = bench.finish(step_of(bench.open(1, wanted=1)))
    assert only(commands, cmd.Step) == []
    assert step_of(bench.tell(ev.ChunksWanted, 1, 2)).orders[0].chunk == 1


def of_tier(*names):
    """A bench with a tier of so many workers, each of which has built the context."""
    bench = SessionBench(workers=())
    bench.tell(ev.TierOffered, ev.TierSpec("t", 0, len(names)))
    for name in names:
        bench.join(name, tier="t")
    bench.build()
    return bench


def test_sessions_move_to_who_stays_before_a_worker_is_given_back():
    bench = of_tier("w1", "w2")
    running = {step.worker: step for step in only(bench.open(1, 2), cmd.Step)}
    assert set(running) == {"w1", "w2"}
    commands = bench.tell(ev.TierOffered, ev.TierSpec("t", 0, 1))
    assert only(commands, cmd.Release) == []
    leaving, staying = ("w1", "w2") if bench.state.workers["w1"].draining else ("w2", "w1")
    assert bench.state.workers[leaving].draining and not bench.state.workers[staying].draining
    step = step_of(bench.finish(running[leaving]))  # Its session leaves it with its state.
    assert [order.then for order in step.orders] == ["leave"]
    bench.finish(step)
    assert only(bench.tell(ev.Tick), cmd.Release) == [cmd.Release(leaving)]
    step = step_of(bench.finish(running[staying]))
    assert len(step.orders) == 2
    assert only(bench.lose(leaving), cmd.Step) == []


def test_a_worker_that_is_wanted_again_keeps_its_sessions():
    bench = of_tier("w1", "w2")
    bench.open(1, 2)
    bench.tell(ev.TierOffered, ev.TierSpec("t", 0, 1))
    assert sum(worker.draining for worker in bench.state.workers.values()) == 1
    bench.tell(ev.TierOffered, ev.TierSpec("t", 0, 2))
    assert not any(worker.draining for worker in bench.state.workers.values())
    assert not bench.state.tiers["t"].emptying


def test_a_suspended_session_is_frozen_and_thawed():
    bench = SessionBench()
    step = step_of(bench.open(1))
    assert bench.tell(ev.SessionSuspended, 1) == []
    step = step_of(bench.finish(step))
    assert step.orders == [cmd.Order(1, "", 1, None, "freeze")]
    assert only(bench.finish(step), cmd.Step) == []
    assert bench.state.sessions[1].state == "suspended" and bench.state.sessions[1].state_bytes == 10
    step = step_of(bench.tell(ev.SessionResumed, 1))
    assert step.orders == [cmd.Order(1, "frozen", 1, 1, "keep")]


def test_a_state_leaves_between_the_chunks_of_others():
    bench = SessionBench()
    step = step_of(bench.open(1, 2))
    step = step_of(bench.finish(step, s1={"idle": 1}))
    bench.tell(ev.SessionSuspended, 1)
    step = step_of(bench.finish(step))
    assert step.orders == [cmd.Order(1, "", 1, None, "freeze")], "a step without chunks is over soon"
    step = step_of(bench.finish(step))
    assert [order.session for order in step.orders] == [2] and step.orders[0].chunk is not None


class Emptying:
    """Sessions stay where they are, and those that are idle are to leave."""

    def __init__(self):
        self.home = LeastLoadedSessions()

    def place(self, view):
        idle = [session.id for session in view.sessions.values() if session.idle and session.state == "placed"]
        return {**self.home.place(view), **dict.fromkeys(idle)}


def test_a_session_stays_that_gets_a_prompt_before_it_has_left():
    bench = SessionBench(sessions=Emptying())
    step = step_of(bench.open(1, 2))
    step = step_of(bench.finish(step, s1={"idle": 1}))
    bench.tell(ev.Tick)
    assert bench.state.sessions[1].suspending
    bench.tell(ev.SessionPrompted, 1)
    step = step_of(bench.finish(step))
    assert [(order.session, order.then) for order in step.orders if order.chunk is None] == []
    assert {order.session for order in step.orders} == {1, 2}


def test_a_session_goes_on_elsewhere_when_its_frozen_state_has_arrived():
    bench = SessionBench(("w1", "w2"))
    bench.build()
    step = step_of(bench.open(1))
    bench.tell(ev.SessionSuspended, 1)
    bench.finish(step_of(bench.finish(step)))
    others = only(bench.open(2, 3, 4), cmd.Step)
    commands = bench.tell(ev.SessionResumed, 1)
    [carry] = only(commands, cmd.Carry)
    assert carry == cmd.Carry("w2", "w1", 1, 1, "digest", 10)
    assert bench.state.sessions[1].state == "migrating"
    assert only(bench.tell(ev.StateArrived, "w2", 1, 1), cmd.Step) == []
    [step] = [step for step in others if step.worker == "w2"]
    assert cmd.Order(1, "frozen", 1, 1, "keep") in step_of(bench.finish(step)).orders


def test_a_state_that_does_not_arrive_is_made_again_from_what_is_kept():
    bench = SessionBench(("w1", "w2"))
    step = step_of(bench.open(1))
    for _ in range(3):
        step = step_of(bench.finish(step))
    bench.tell(ev.SessionSuspended, 1)
    bench.finish(step_of(bench.finish(step)))
    bench.tell(ev.EvictionNotice, "w1")
    bench.tell(ev.SessionResumed, 1)
    step = step_of(bench.tell(ev.StateLost, "w2", 1, 4, "gone"))
    assert step.orders == [cmd.Order(1, "kept", 4, 4, "")] and made(bench.finish(step)) == [(1, 4)]


def test_chunks_that_an_eviction_costs_are_made_again_and_not_delivered_again():
    bench = SessionBench(("w1", "w2"), keep_every=4)
    step = step_of(bench.open(1))
    for _ in range(6):
        step = step_of(bench.finish(step))
    step = step_of(bench.lose("w1", evicted=True))
    assert step.worker == "w2" and step.orders == [cmd.Order(1, "kept", 4, 4, "")]
    delivered = []
    for _ in range(3):
        commands = bench.finish(step)
        delivered += made(commands)
        step = step_of(commands)
    assert delivered == [(1, 6)]


def test_a_worker_with_notice_gives_its_states_away_before_it_leaves():
    bench = SessionBench(("w1", "w2"), keep_every=None)
    step = step_of(bench.open(1))
    bench.tell(ev.EvictionNotice, "w1")
    step = step_of(bench.finish(step))
    assert step.orders == [cmd.Order(1, "", 1, 1, "leave")]
    assert step_of(bench.finish(step)).orders == [cmd.Order(1, "kept", 2, 2, "")]


def test_the_session_to_blame_is_found_by_halves_and_the_others_go_on():
    bench = SessionBench(keep_every=1)
    step = step_of(bench.finish(step_of(bench.open(*range(1, 6)))))
    ended, delivered = [], []
    for _ in range(60):
        bench.now += 1
        bad = [order for order in step.orders if order.session == 4 and order.chunk == 2]
        commands = bench.tell(ev.BatchFailed, step.worker, step.attempt, FAILURE) if bad else bench.finish(step)
        ended += only(commands, cmd.EndSession)
        delivered += made(commands)
        step = step_of(commands)
    assert ended == [cmd.EndSession(4, FAILURE)]
    for session in (1, 2, 3, 5):
        numbers = [number for each, number in delivered if each == session]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) and len(numbers) > 10
    assert len(step.orders) == 4  # All together again.


MACHINE = ev.Failure("exception", "RuntimeError", "CUDA error: uncorrectable ECC error", machine=True)


def on_hosts(*names, **options):
    bench = SessionBench((), **options)
    for name in names:
        bench.join(name, host=f"host of {name}")
    return bench


def break_step(bench, step, failure=MACHINE):
    return bench.tell(ev.BatchFailed, step.worker, step.attempt, failure)


def test_sessions_of_a_step_that_a_machine_failed_go_on_elsewhere_all_together():
    bench = on_hosts("w1", keep_every=1)
    step = step_of(bench.finish(step_of(bench.open(1, 2, 3))))
    bench.join("w2", host="host of w2")
    commands = break_step(bench, step)
    step = step_of(commands)
    assert step.worker == "w2" and [order.session for order in step.orders] == [1, 2, 3]
    assert [order.thaw for order in step.orders] == ["kept", "anew", "anew"]
    assert not only(commands, cmd.EndSession) and bench.state.streams.charges.open
    commands = bench.finish(step)
    assert made(commands) == [(1, 1), (2, 0), (3, 0)]
    assert not bench.state.streams.charges.open, "what was answered elsewhere tells against the host"
    assert not any(session.failed_on for session in bench.state.sessions.values())


def test_what_fails_elsewhere_too_is_a_sessions_fault_and_the_others_go_on():
    bench = on_hosts("w1", "w2", keep_every=1)
    steps = only(bench.open(1, 2, 3), cmd.Step)
    ended, numbers = [], {1: 0, 2: 0, 3: 0}
    for _ in range(60):
        bench.now += 1
        step = steps.pop(0)
        bad = any(order.session == 2 and order.chunk == 1 for order in step.orders)
        commands = break_step(bench, step) if bad else bench.finish(step)
        steps += only(commands, cmd.Step)
        ended += [(each.session, each.failure) for each in only(commands, cmd.EndSession)]
        for session, _ in made(commands):
            numbers[session] += 1
    assert ended == [(2, MACHINE)] and numbers[2] == 1 and min(numbers[1], numbers[3]) > 10
    assert not bench.state.streams.charges.open


def test_without_an_elsewhere_a_step_ends_as_ever():
    bench = on_hosts("w1")
    commands = break_step(bench, step_of(bench.open(1)))
    assert only(commands, cmd.EndSession) == [cmd.EndSession(1, MACHINE)]


def test_a_session_goes_back_where_it_failed_when_nobody_else_is_left():
    bench = on_hosts("w1", "w2")
    step = step_of(break_step(bench, step_of(bench.open(1))))
    assert step.worker == "w2"
    bench.now += 1
    assert step_of(bench.lose("w2", evicted=True)).worker == "w1"


@pytest.mark.parametrize("policy", ["least-loaded", "turboserve"])
def test_a_host_that_fails_steps_is_named_and_no_session_is_lost(policy):
    bench = on_hosts("bad", "w1", "w2", sessions=policy, health="sequential")
    steps = only(bench.open(*range(12)), cmd.Step)
    ended, quarantined, delivered = [], [], 0
    for n in range(400):
        bench.now += 0.05
        commands = []
        if steps:
            step = steps.pop(0)
            commands += break_step(bench, step) if step.worker == "bad" else bench.finish(step)
        commands += bench.tell(ev.Tick)
        if n % 5 == 0:
            commands += bench.open(100 + n)  # The bad one has nothing to do, and is the least loaded.
        steps += only(commands, cmd.Step)
        ended += only(commands, cmd.EndSession)
        quarantined += [each.host for each in only(commands, cmd.Quarantine)]
        delivered += len(made(commands))
    assert not ended and quarantined == ["host of bad"] and delivered > 400


def test_sessions_of_a_context_that_breaks_are_over():
    bench = Bench(Limits(failures=1))
    bench.app("talk", "model", batch=False, sessions=True)
    bench.join("w1")
    bench.tell(ev.SessionOpened, 1, "talk", 10)
    commands = bench.fail_context("w1", "model")
    [over] = only(commands, cmd.EndSession)
    assert over.session == 1 and over.context == "model" and over.failure is not None


class Scaling:
    """As many workers as are wanted."""

    wanted = 1

    def target(self, view):
        return {"default": self.wanted}


def test_a_worker_is_given_back_when_its_sessions_have_left_it():
    scaling = Scaling()
    bench = SessionBench((), scaling=scaling)
    bench.tell(ev.TierOffered, ev.TierSpec("default", 0, 4))
    bench.join("w1")
    bench.finish(step_of(bench.open(1)), s1={"idle": 1})
    scaling.wanted = 0
    commands = bench.tell(ev.Tick)
    assert only(commands, cmd.Release) == [] and step_of(commands).orders == [cmd.Order(1, "", 1, None, "leave")]
    bench.finish(step_of(commands))
    assert only(bench.tell(ev.Tick), cmd.Release) == [cmd.Release("w1")]
    bench.tell(ev.SessionPrompted, 1)
    bench.lose("w1", evicted=True)
    scaling.wanted = 1
    assert step_of(bench.join("w2")).orders == [cmd.Order(1, "kept", 1, 1, "keep")]


def test_a_context_with_states_in_it_is_not_unloaded_for_another():
    bench = SessionBench(workers=())
    bench.join("w1", memory=5)
    bench.finish(step_of(bench.open(1)), s1={"idle": 1})
    bench.context("large", gpus=0, memory=10)
    bench.app("batch", "large")
    assert only(bench.submit("batch", 3), cmd.Unload) == []


class Roaming:
    """Sessions go where they are, or to a random worker, or to sleep."""

    def __init__(self):
        self.random, self.moves = random.Random(1), False
        self.home = LeastLoadedSessions()

    def place(self, view):
        placed = dict(self.home.place(view))
        for session in view.sessions.values() if self.moves else ():
            if self.random.random() < 0.3:
                placed[session.id] = self.random.choice([*view.workers, None])
        return placed


@dataclass
class Library:
    """A worker's library process and cache: sessions' states are the numbers of chunks that they have made."""

    ready: bool = False
    loading: bool = False
    live: dict[int, int] = field(default_factory=dict)
    frozen: dict[int, int] = field(default_factory=dict)


class SessionPool(RuleBasedStateMachine):
    @initialize(keep_every=st.sampled_from([1, 3, None]), chunk_target=st.sampled_from([None, 0.3]))
    def begin(self, keep_every, chunk_target):
        self.now, self.spawned, self.opened = 0.0, 0, 0
        self.placement = Roaming()
        policies = Policies.chosen({"sessions": self.placement})
        self.scheduler = Scheduler(policies, Limits(retry_seconds=1.0))
        self.workers: dict[str, Library] = {}
        self.steps: dict[int, cmd.Step] = {}
        self.carries: list[cmd.Carry] = []
        self.kept: dict[int, int] = {}
        self.chunks: dict[int, int] = {}
        self.over: set[int] = set()
        self.bad: dict[int, int] = {}  # Session -> the chunk at which the app raises.
        self.released: list[str] = []
        self.tell(ev.ContextDeclared, ev.ContextSpec("model", "model"))
        spec = ev.AppSpec(
            "talk", "talk", "model", batch=False, sessions=True, keep_every=keep_every, chunk_target=chunk_target
        )
        self.tell(ev.AppDeclared, spec)

    def tell(self, kind, *values, **named):
        self.now += 0.01
        for command in self.scheduler.handle(kind(self.now, *values, **named)):
            self.obey(command)
        self.scheduler.validate()
        if self.released:  # Who is given back goes at once.
            name = self.released.pop()
            del self.workers[name]
            self.carries = [each for each in self.carries if name not in (each.worker, each.source)]
            self.tell(ev.WorkerLost, name, evicted=True)

    def obey(self, command):
        if isinstance(command, cmd.Load):
            library = self.workers[command.worker]
            assert not library.ready and not library.loading
            library.loading = True
        elif isinstance(command, cmd.Step):
            self.check(command)
            self.steps[command.attempt] = command
        elif isinstance(command, cmd.Carry):
            assert self.workers[command.source].frozen[command.session] == command.made
            self.carries.append(command)
        elif isinstance(command, cmd.Release):
            self.takes_nothing_along(command.worker)
            self.released.append(command.worker)
        elif isinstance(command, cmd.DeliverChunk):
            assert command.chunk == self.chunks[command.session] and command.session not in self.over
            self.chunks[command.session] += 1
        elif isinstance(command, cmd.EndSession):
            assert command.session not in self.over
            assert (command.failure is not None) == (command.session in self.bad) or command.failure is None
            self.over.add(command.session)

    def takes_nothing_along(self, name):
        """What a worker has of sessions that are open, when it is given back, is kept as well."""
        library = self.workers[name]
        assert not any(step.worker == name for step in self.steps.values())
        carried = [each for each in self.carries if each.session not in self.over]
        assert not any(name in (each.worker, each.source) for each in carried)
        assert not library.live.keys() - self.over
        if name not in self.scheduler.state.contexts["model"].suspects:
            for number in library.frozen.keys() - self.over:
                assert library.frozen[number] <= self.kept.get(number, 0)

    def check(self, step):
        library = self.workers[step.worker]
        assert library.ready and not any(s.worker == step.worker for s in self.steps.values())
        assert len({order.session for order in step.orders}) == len(step.orders)
        for order in step.orders:
            if order.then == "drop":
                continue
            where = {"": library.live, "kept": self.kept, "frozen": library.frozen}
            if order.thaw != "anew":
                assert where[order.thaw][order.session] == order.made, f"{order} goes on from another state"
            else:
                assert order.made == 0
            assert order.chunk in (None, order.made)
            others = [name for name, each in self.workers.items() if order.session in each.live and name != step.worker]
            assert not others, f"session {order.session} is on {others} too"

    # --- users

    @precondition(lambda self: len(self.chunks) < 12)
    @rule(bad=st.one_of(st.none(), st.none(), st.integers(0, 5)))
    def open(self, bad):
        self.opened += 1
        self.chunks[self.opened] = 0
        if bad is not None:
            self.bad[self.opened] = bad
        self.tell(ev.SessionOpened, self.opened, "talk", 4)

    def some_session(self, data):
        return data.draw(st.sampled_from(sorted(set(self.chunks) - self.over)))

    @precondition(lambda self: set(self.chunks) - self.over)
    @rule(data=st.data(), kind=st.sampled_from(["prompt", "want", "suspend", "resume", "close", "want", "resume"]))
    def user(self, data, kind):
        number = self.some_session(data)
        if kind == "want":
            self.tell(ev.ChunksWanted, number, self.chunks[number] + 4)
        else:
            events = {"prompt": ev.SessionPrompted, "suspend": ev.SessionSuspended, "resume": ev.SessionResumed}
            self.tell({**events, "close": ev.SessionClosed}[kind], number)

    # --- workers

    @precondition(lambda self: len(self.workers) < 4)
    @rule()
    def join(self):
        self.tell(ev.TierOffered, ev.TierSpec("default", 0, 4))
        self.spawned += 1
        name = f"w{self.spawned}"
        self.workers[name] = Library()
        self.tell(ev.WorkerJoined, ev.WorkerSpec(name, host=name))

    def some_worker(self, data, those=lambda library: True):
        return data.draw(st.sampled_from(sorted(name for name, library in self.workers.items() if those(library))))

    @precondition(lambda self: any(library.live or library.frozen for library in self.workers.values()))
    @rule(data=st.data(), evicted=st.booleans())
    def lose(self, data, evicted):
        name = self.some_worker(data)
        del self.workers[name]
        self.steps = {n: step for n, step in self.steps.items() if step.worker != name}
        self.carries = [each for each in self.carries if name not in (each.worker, each.source)]
        self.tell(ev.WorkerLost, name, evicted=evicted)

    @precondition(lambda self: any(library.live or library.frozen for library in self.workers.values()))
    @rule(most=st.integers(0, 4))
    def lend(self, most):
        """So many workers are wanted from now on."""
        self.tell(ev.TierOffered, ev.TierSpec("default", 0, most))
        self.tell(ev.Tick)

    @precondition(lambda self: any(library.live or library.frozen for library in self.workers.values()))
    @rule(data=st.data())
    def notice(self, data):
        self.tell(ev.EvictionNotice, self.some_worker(data))

    @precondition(lambda self: any(library.loading for library in self.workers.values()))
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def build(self, data, fails):
        name = self.some_worker(data, lambda library: library.loading)
        library = self.workers[name]
        library.loading = False
        staying = sum(not worker.leaving for worker in self.scheduler.state.workers.values())
        # Else that would be enough for the context to be broken.
        if fails and staying > 2 and not self.scheduler.state.contexts["model"].failures:
            self.tell(ev.ContextFailed, name, "model", FAILURE)
        else:
            library.ready = True
            self.tell(ev.ContextReady, name, "model", 1.0)

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), how=st.sampled_from(["ends", "ends", "ends", "ends", "idle", "crashes"]))
    def step(self, data, how):
        number = data.draw(st.sampled_from(sorted(self.steps)))
        self.end_step(self.steps.pop(number), how)

    @rule(rounds=st.integers(1, 4))
    def go_on(self, rounds):
        """Nothing happens to anybody for a while."""
        for _ in range(rounds):
            self.settle()

    def end_step(self, step, how):
        library = self.workers[step.worker]
        makers = [order for order in step.orders if order.chunk is not None]
        if how == "crashes":
            library.live.clear()
            library.ready = False
            failure = ev.Failure("crash", "LibraryDied", "it died")
            if not any(order.session in self.bad for order in makers):
                # A crash that is nobody's fault, now and then: it must not end a session.
                self.tell(ev.ContextUnloaded, step.worker, "model")
            else:
                self.tell(ev.BatchFailed, step.worker, step.attempt, failure, lost_context=True)
            return
        for order in step.orders:
            if order.then == "drop":
                library.live.pop(order.session, None)
                library.frozen.pop(order.session, None)
        if any(self.bad.get(order.session) == order.chunk for order in makers):
            for order in makers:
                library.live.pop(order.session, None)
            self.tell(ev.BatchFailed, step.worker, step.attempt, MACHINE if step.attempt % 2 else FAILURE)
            return
        outcomes = [self.outcome(library, order, how) for order in step.orders]
        self.tell(ev.StepFinished, step.worker, step.attempt, 0.1 * max(1, len(makers)), outcomes)

    def outcome(self, library, order, how):
        if order.then == "drop":
            return {}
        count = order.made + (order.chunk is not None)
        if order.thaw == "frozen" and order.chunk is None:
            self.kept[order.session] = library.frozen.pop(order.session)
            return {"kept": 10}
        outcome = {"made": 1} if order.chunk is not None else {}
        if outcome and how == "idle":
            outcome["idle"] = 1
        library.live[order.session] = count
        if order.thaw == "frozen":
            library.frozen.pop(order.session)
        if order.then in ("keep", "leave"):
            self.kept[order.session], outcome["kept"] = count, 10
        if order.then == "freeze":
            library.frozen[order.session], outcome["frozen"] = count, ["digest", 10]
        if order.then in ("leave", "freeze"):
            del library.live[order.session]
        return outcome

    @precondition(lambda self: self.carries)
    @rule(data=st.data(), arrives=st.sampled_from([True, True, False]))
    def carry(self, data, arrives):
        carry = self.carries.pop(data.draw(st.integers(0, len(self.carries) - 1)))
        made_by = self.workers[carry.source].frozen.pop(carry.session, None)
        if arrives and made_by == carry.made:
            self.workers[carry.worker].frozen[carry.session] = carry.made
            self.tell(ev.StateArrived, carry.worker, carry.session, carry.made)
        else:
            self.tell(ev.StateLost, carry.worker, carry.session, carry.made, "it is gone")

    @rule()
    def policy(self):
        """Sessions roam for a moment."""
        self.placement.moves = True
        self.tell(ev.Tick)
        self.placement.moves = False

    @invariant()
    def nobody_has_two_states(self):
        if not hasattr(self, "workers"):
            return
        for number in set(self.chunks) - self.over:
            assert sum(number in library.live for library in self.workers.values()) <= 1

    def teardown(self):
        """Left alone, on workers that stay, every session makes all that is wanted."""
        if not hasattr(self, "workers"):
            return
        self.lend(8)
        while len([name for name in self.workers if self.scheduler.state.workers[name].noticed is None]) < 2:
            self.spawned += 1
            self.workers[f"w{self.spawned}"] = Library()
            self.tell(ev.WorkerJoined, ev.WorkerSpec(f"w{self.spawned}", host=f"w{self.spawned}"))
        wanted = {}
        for number in sorted(set(self.chunks) - self.over):
            wanted[number] = self.chunks[number] + 4
            self.tell(ev.SessionResumed, number)
            self.tell(ev.SessionPrompted, number)
            self.tell(ev.ChunksWanted, number, wanted[number])
        for _ in range(1000):
            left = [n for n in wanted if n not in self.over and self.chunks[n] < wanted[n]]
            if not left:
                return
            self.settle()
        raise AssertionError(f"these do not go on: {[self.scheduler.state.sessions[n] for n in left]}")

    def settle(self):
        self.now += 1.0
        self.tell(ev.Tick)
        for name, library in list(self.workers.items()):
            if library.loading and name in self.workers:
                library.loading, library.ready = False, True
                self.tell(ev.ContextReady, name, "model", 1.0)
        while self.carries:
            carry = self.carries.pop()
            count = self.workers[carry.source].frozen.pop(carry.session, None)
            if count is None:
                self.tell(ev.StateLost, carry.worker, carry.session, carry.made, "it is gone")
            else:
                self.workers[carry.worker].frozen[carry.session] = count
                self.tell(ev.StateArrived, carry.worker, carry.session, carry.made)
        for number in sorted(self.steps):
            if number in self.steps:
                self.end_step(self.steps.pop(number), "ends")


SessionPool.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestSessionPool = SessionPool.TestCase
