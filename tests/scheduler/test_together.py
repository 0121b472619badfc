"""Where reservations, sessions, alternatives, plans and tiers meet: workers that are given back, kept, or counted."""

import pytest
from pool_of_machines import GPUS, answer, device, full, graph, place, tier
from scheduler_bench import Bench, only, run_of
from test_reservations import asked, join, saturated
from test_steps import SessionBench, of_tier, step_of

from ctxflow.policies.flextopo.preemption import ExactPreemption
from ctxflow.policies.protocols import Assignment, Plan
from ctxflow.policies.registry import make
from ctxflow.policies.torta.quantities import Outlook
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler import session_moves


def exact():
    return ExactPreemption(patience=10.0, grace=20.0, idle=5.0)


class Planned:
    """A placement that is set by hand."""

    def __init__(self, **plan):
        self.now = Plan(**plan)

    def plan(self, view):
        return self.now


class Wants:
    """So many workers of the tier "default"."""

    def __init__(self, count):
        self.count = count

    def target(self, view):
        return {"default": self.count}


def let(bench, **policies):
    """Have other policies from now on."""
    bench.state.policies.__dict__.update(policies)


def ticks(bench, seconds):
    """What so many ticks lead to, a second each."""
    found = []
    for _ in range(seconds):
        bench.now += 1
        found += bench.tell(ev.Tick)
    return found


def with_a_place_of_its_own(**policies):
    """A bench whose one worker has such a place, and is busy there."""
    bench = Bench(preemption=exact(), **policies)
    bench.tell(ev.TierOffered, tier(GPUS))
    bench.context("small", gpus=1)
    bench.app("low", "small")
    bench.context("wide", gpus=4, affinity="guaranteed")
    bench.app("urgent", "wide", priority=10)
    [place] = only(answer(bench, bench.submit("urgent", 1), m1=graph("m1")), cmd.AcquireAt)
    bench.join("big", host="m1", gpus=4, devices=tuple(place.devices), pin=place.pin, tier=place.tier)
    run_of(bench.ready("big", "wide"))
    return bench


# --- how many workers


def test_sessions_get_workers_beyond_a_plan_that_knows_none():
    bench = SessionBench(workers=(), placement=Planned(workers={"t": (0, 2)}))
    bench.tell(ev.TierOffered, ev.TierSpec("t", 0, 8))
    assert bench.state.tiers["t"].asked == 2
    bench.open(*range(64))
    ticks(bench, 2)
    assert bench.state.tiers["t"].asked == 8


@pytest.mark.parametrize("scaling", ["queue-proportional", "closed-loop", "activation"])
def test_a_worker_with_a_place_of_its_own_is_nobody_else_s(scaling):
    bench = with_a_place_of_its_own(scaling=scaling)
    bench.submit("low", 4)
    ticks(bench, 100)
    assert bench.state.tiers["default"].asked >= 1


@pytest.mark.parametrize("scaling", ["queue-proportional", "closed-loop", "activation"])
def test_nobody_is_asked_for_beside_a_worker_with_a_place_of_its_own(scaling):
    bench = with_a_place_of_its_own(scaling=scaling)
    ticks(bench, 100)
    assert bench.state.tiers["default"].asked == 0


def test_regions_have_no_share_for_workers_with_places_of_their_own():
    bench = with_a_place_of_its_own()
    bench.join("m2-0", host="m2", gpus=1, region="elsewhere", slots=2)
    outlook = Outlook()
    outlook.look(bench.view)
    assert outlook.slots == {"elsewhere": 2}
    assert outlook.holders["wide", bench.state.workers["big"].shown.region] == 1


def test_nobody_is_asked_for_who_may_not_hold_what_waits():
    bench = Bench(preemption=exact(), scaling="queue-proportional")
    bench.tell(ev.TierOffered, tier(GPUS, gpus=4))
    bench.context("wide", gpus=2, affinity="guaranteed")
    bench.app("urgent", "wide")
    bench.submit("urgent", 40)
    ticks(bench, 5)
    assert bench.state.tiers["default"].asked == 0


def test_plans_are_not_made_anew_for_what_has_a_worker_of_its_own():
    bench = Bench(placement={"policy": "agh", "period": 10.0}, preemption=exact())
    bench.tell(ev.TierOffered, tier(GPUS))
    bench.context("small", gpus=1)
    bench.app("low", "small")
    bench.context("wide", gpus=4, affinity="guaranteed")
    bench.app("urgent", "wide", priority=10)
    bench.submit("low", 4000)
    runs = [run_of(place(bench, "m1", n, "small")) for n in range(2)]
    for _ in range(12):
        bench.now += 1
        runs = [run_of(bench.finish(run)) for run in runs]
        bench.tell(ev.Tick)
    commands = answer(bench, bench.submit("urgent", 400), m1=graph("m1", {0: "a", 1: "a"}))
    [found] = only(commands, cmd.AcquireAt)
    bench.join("big", host="m1", gpus=4, devices=tuple(found.devices), pin=found.pin, tier=found.tier)
    runs.append(run_of(bench.ready("big", "wide")))
    plans = []
    for _ in range(60):
        bench.now += 1
        commands = [c for run in runs for c in bench.finish(run)] + bench.tell(ev.Tick)
        for load in only(commands, cmd.Load):
            commands += bench.ready(load.worker, load.context)
        runs = only(commands, cmd.Run)
        plans += only(commands, cmd.Place)
    assert not any("urgent" in reason for reason in bench.state.plan.reasons)
    assert len(plans) <= 7


def test_those_that_gave_way_lower_the_most_and_not_what_is_wanted():
    bench = saturated()
    join(bench, asked(bench))
    bench.ready("big", "wide")
    let(bench, scaling=Wants(3))
    ticks(bench, 1)
    assert bench.state.tiers["default"].asked == 3


def test_who_is_about_to_be_evicted_goes_before_who_stays():
    bench = of_tier("w1")
    bench.tell(ev.TierOffered, ev.TierSpec("t", 0, 2))
    bench.open(1)
    bench.join("w2", tier="t")
    bench.tell(ev.EvictionNotice, "w1")
    bench.now += 1
    commands = bench.tell(ev.TierOffered, ev.TierSpec("t", 0, 1)) + bench.tell(ev.Tick)
    assert cmd.Release("w2") not in commands and not bench.state.workers["w2"].draining


# --- workers that are given back


def with_victim():
    """A bench of sessions on a machine where a context of eight GPUs may want room."""
    bench = SessionBench(workers=(), preemption=exact())
    bench.tell(ev.TierOffered, tier(GPUS))
    bench.context("wide", gpus=8, affinity="guaranteed")
    bench.app("urgent", "wide", priority=10)
    return bench


def wanted_room(bench):
    return answer(bench, bench.submit("urgent", 1), m1=full("m1", dict.fromkeys(range(1, 8))))


def test_a_victim_that_was_released_gets_no_step():
    bench = with_victim()
    bench.join("m1-0", host="m1", gpus=1, devices=(device("m1", 0),))
    step = step_of(bench.open(1))
    bench.tell(ev.SessionSuspended, 1)
    bench.finish(step_of(bench.finish(step)))
    assert cmd.Release("m1-0") in bench.finish(step_of(wanted_room(bench)))
    bench.tell(ev.SessionClosed, 1)
    assert only(bench.tell(ev.Tick), cmd.Step) == []


def test_a_victim_that_is_released_after_its_grace_gets_no_step():
    bench = with_victim()
    bench.context("other")
    bench.app("slow", "other")
    bench.join("m1-0", host="m1", gpus=1, devices=(device("m1", 0),))
    bench.finish(step_of(bench.open(1, wanted=1)))
    assert only(bench.submit("slow", 4) + bench.tell(ev.Tick), cmd.Run), "it holds the one slot"
    wanted_room(bench)
    bench.now += 21
    assert only(bench.tell(ev.Tick), cmd.Step) == []


def test_no_worker_with_sessions_is_emptied_in_place_of_one_whose_batch_ends_soon():
    bench = SessionBench(workers=(), scaling=Wants(2))
    bench.tell(ev.TierOffered, ev.TierSpec("default", 0, 4))
    bench.join("w1")
    step_of(bench.open(1))
    bench.app("other", "others")
    bench.join("w2")
    run = run_of(bench.submit("other", 1))
    assert run.worker == "w2" and bench.state.workers["w1"].sessions
    let(bench, scaling=Wants(1))
    assert only(bench.tell(ev.Tick), cmd.Release) == []
    assert not any(worker.draining for worker in bench.state.workers.values())
    Bench.finish(bench, run)
    assert only(bench.tell(ev.Tick), cmd.Release) == [cmd.Release("w2")]


def test_a_worker_to_which_a_session_is_on_its_way_is_given_back_last():
    bench = SessionBench(workers=("w1", "w2", "w3"), scaling=Wants(3))
    bench.build()
    step_of(bench.open(1))
    [owner] = [worker.id for worker in bench.state.workers.values() if worker.sessions]
    first, second = sorted({"w1", "w2", "w3"} - {owner})
    session_moves.follow(bench.state, bench.state.sessions[1], first, [])
    let(bench, scaling=Wants(2))
    bench.tell(ev.TierOffered, ev.TierSpec("default", 0, 4))
    assert only(bench.tell(ev.Tick), cmd.Release) == [] and bench.state.workers[second].released


def test_workers_that_hold_what_the_plan_wants_are_given_back_last():
    plan = {"workers": {"default": (0, 2)}, "holders": {("model", "default"): 1, ("others", "default"): 1}}
    bench = SessionBench(workers=(), scaling=Wants(3))
    bench.tell(ev.TierOffered, ev.TierSpec("default", 0, 4))
    for name in ("w1", "w2"):
        bench.join(name)
    bench.build()
    bench.open(1, 2, 3)
    bench.app("other", "others")
    bench.join("w3")
    Bench.finish(bench, run_of(bench.submit("other", 1)))
    most = max(bench.state.workers.values(), key=lambda worker: len(worker.sessions)).id
    let(bench, placement=Planned(**plan), scaling=Wants(2))
    bench.tell(ev.TierOffered, ev.TierSpec("default", 0, 4))
    assert [worker.id for worker in bench.state.workers.values() if worker.draining] == list({"w1", "w2"} - {most})


def test_who_hands_over_a_state_is_not_given_back_before_it_has_arrived():
    bench = SessionBench(workers=(), keep_every=4)
    bench.tell(ev.TierOffered, ev.TierSpec("t", 0, 2))
    for name in ("w1", "w2"):
        bench.join(name, tier="t")
    step = step_of(bench.open(1))
    for _ in range(5):
        step = step_of(bench.finish(step))
    session_moves.follow(bench.state, bench.state.sessions[1], "w2", [])
    bench.ready("w2", "model")
    step = step_of(bench.finish(step))
    assert only(bench.finish(step), cmd.Carry)
    commands = bench.tell(ev.TierOffered, ev.TierSpec("t", 0, 1)) + bench.tell(ev.Tick)
    assert only(commands, cmd.Release) == []
    bench.tell(ev.StateArrived, "w2", 1, 7)
    assert only(bench.tell(ev.Tick), cmd.Release)


def test_sessions_that_wait_come_to_a_worker_that_is_wanted_again():
    bench = of_tier("w1")
    step = step_of(bench.open(1))
    bench.tell(ev.TierOffered, ev.TierSpec("t", 0, 0))
    bench.finish(step)
    bench.open(2)
    bench.tell(ev.TierOffered, ev.TierSpec("t", 0, 1))
    assert bench.state.sessions[2].state == "placed"


def test_a_place_is_given_up_whose_worker_was_given_back_and_does_not_go():
    bench = saturated()
    join(bench, asked(bench))
    bench.finish(run_of(bench.ready("big", "wide")))
    ticks(bench, 8)
    assert bench.state.workers["big"].draining
    bench.submit("urgent", 1)
    found = ticks(bench, 100)
    assert any("does not go" in note.text for note in only(found, cmd.Note))
    assert only(found, cmd.Survey)


def gives_notice(bench):
    bench.tell(ev.EvictionNotice, "w2")


def is_given_back(bench):
    bench.tell(ev.TierOffered, ev.TierSpec("t", 0, 1))
    assert bench.state.workers["w2"].draining


@pytest.mark.parametrize(("built", "goes"), [(True, gives_notice), (True, is_given_back), (False, gives_notice)])
def test_a_session_does_not_go_to_a_worker_that_is_about_to_go(goes, built):
    bench = of_tier("w1")
    bench.tell(ev.TierOffered, ev.TierSpec("t", 0, 2))
    step = step_of(bench.open(1))
    bench.join("w2", tier="t")
    session_moves.follow(bench.state, bench.state.sessions[1], "w2", [])
    if built:
        bench.ready("w2", "model")
    goes(bench)
    assert bench.state.sessions[1].target is None
    assert [order.then for order in step_of(bench.finish(step)).orders] == ["keep"]


# --- what waits


class Counted(dict):
    """Sessions that count how often all of them are looked at."""

    looks = 0

    def values(self):
        self.looks += 1
        return super().values()

    def __iter__(self):
        self.looks += 1
        return super().__iter__()


def test_no_event_looks_at_every_session_to_see_whether_a_wide_context_waits():
    bench = with_victim()
    bench.app("low", "model")
    bench.open(*range(5), wanted=0)
    run = run_of(bench.join("w1") + bench.submit("low", 8))
    bench.state.streams.open = Counted(bench.state.streams.open)
    assert only(bench.scheduler.handle(ev.BatchFinished(bench.now, "w1", run.attempt, 1.0)), cmd.Run)
    assert bench.state.streams.open.looks == 0


def test_a_session_that_nobody_carries_waits_for_a_place_and_an_idle_one_does_not():
    bench = SessionBench(workers=(), preemption=exact())
    bench.tell(ev.TierOffered, tier(GPUS))
    bench.context("wide", gpus=4, affinity="guaranteed")
    bench.tell(ev.AppDeclared, ev.AppSpec("draw", "draw", "wide", batch=False, sessions=True, priority=10))
    assert only(bench.tell(ev.SessionOpened, 1, "draw", 0), cmd.Survey) == []
    assert only(bench.tell(ev.ChunksWanted, 1, 4), cmd.Survey)


def test_items_of_a_working_alternative_outlive_the_own_context():
    bench = Bench()
    bench.context("a")
    bench.context("b")
    bench.app("own", "a")
    bench.app("alt", "b", alternative_of="own", error=0.1)
    let(bench, placement=Planned(shares={("own", "a"): 0.5, ("own", "b"): 0.5}))
    bench.tell(ev.Tick)
    bench.submit("own", 8)
    assert bench.state.apps["alt"].backlog == 4
    commands = bench.join("w1", memory=100)
    for _ in range(20):
        bench.now += 30
        commands += bench.tell(ev.Tick)
        loads = only(commands, cmd.Load)
        commands = []
        if loads:
            context = loads[0].context
            commands = bench.fail_context("w1", "a") if context == "a" else bench.ready("w1", "b")
        if only(commands, cmd.Bury):
            break
    let(bench, placement=Planned(shares={("own", "a"): 0.4, ("own", "b"): 0.6}))
    assert not only(bench.tell(ev.Tick), cmd.Bury)


def test_a_place_for_an_alternative_has_the_priority_of_the_app_that_names_it():
    requests = []
    bench = Bench(preemption=Asks(requests))
    bench.tell(ev.TierOffered, tier(GPUS))
    bench.context("a")
    bench.context("b", gpus=4, affinity="guaranteed")
    bench.app("own", "a", priority=7)
    bench.app("alt", "b", priority=7, alternative_of="own")
    let(bench, placement=Planned(shares={("own", "b"): 1.0}))
    bench.tell(ev.Tick)
    answer(bench, bench.submit("own", 4), m1=graph("m1"))
    assert [(request.app, request.priority) for request in requests] == [("alt", 7)]


class Asks(ExactPreemption):
    """Notes what it is asked."""

    def __init__(self, requests):
        super().__init__()
        self.requests = requests

    def victims(self, view, request):
        self.requests.append(request)
        return super().victims(view, request)


class Warms(type(make("routing", "context-affinity"))):
    """Wants an app's context on a worker ahead of demand."""

    wanted = ()

    def warm(self, view):
        yield from self.wanted


@pytest.mark.parametrize("ahead", [True, False])
def test_a_context_that_sessions_are_about_to_come_to_is_not_unloaded_for_another(ahead):
    bench = SessionBench(workers=(), routing=Warms())
    for name in ("w1", "w2"):
        bench.join(name, memory=5)
    step = step_of(bench.open(1))
    bench.context("large", memory=10)
    bench.app("batch", "large")
    session_moves.follow(bench.state, bench.state.sessions[1], "w2", [])
    bench.ready("w2", "model")
    if ahead:
        bench.state.policies.routing.wanted = [Assignment("w2", "batch")]
        commands = ticks(bench, 1)
    else:
        commands = bench.submit("batch", 3)
    assert only(commands, cmd.Unload) == []
    step = step_of(bench.finish(step))
    assert [order.then for order in step.orders] == ["freeze"]


def test_what_cannot_be_built_ahead_of_demand_keeps_nothing_else_from_it():
    bench = Bench(routing=Warms())
    bench.context("passing", level="none")
    for context in ("passing", "model"):
        bench.app(f"app of {context}", context)
    bench.join("w1")
    bench.state.policies.routing.wanted = [Assignment("w1", f"app of {context}") for context in ("passing", "model")]
    assert bench.tell(ev.Tick) == [cmd.Load("w1", "model")]


def test_a_context_that_sessions_are_about_to_come_to_stays():
    bench = of_tier("w1")
    bench.tell(ev.TierOffered, ev.TierSpec("t", 0, 2))
    bench.open(1)
    bench.join("w2", tier="t")
    let(bench, placement=Planned(holders={("model", "t"): 1}))
    bench.tell(ev.Tick)
    bench.tell(ev.EvictionNotice, "w1")
    assert len(only(ticks(bench, 5), cmd.Load)) <= 1
