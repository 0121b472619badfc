"""The placement policy `agh` on the simulated engine: the plan is followed, and follows demand."""

import dataclasses
import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.observe.history import history_data
from ctxflow.observe.history_reader import read_history
from ctxflow.observe.run_report import tables
from ctxflow.policies.agh.placement import AdaptivePlacement
from ctxflow.policies.registry import make
from ctxflow.scheduler import Policies, Scheduler, log
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Drawn, GpuTimes, Simulation, Workload, pools
from ctxflow.simulator.pools import MixedTimes
from ctxflow.simulator.simulation import tiers_of

PERIOD = 300.0
CHANGE = 1800.0
COUNTS = {"cheap": 12, "middle": 8, "fast": 4}
PRICES = {"cheap": 0.3, "middle": 1.0, "fast": 2.5}
# The large model is slow on cheap GPUs: it belongs on the others.
SECONDS = {"small": {"cheap": 2.0, "middle": 1.2, "fast": 0.8}, "large": {"cheap": 30.0, "middle": 6.0, "fast": 2.0}}


def contexts():
    return [ev.ContextSpec("small", "small", gpus=1), ev.ContextSpec("large", "large", gpus=1)]


def arrivals(until, every=60.0):
    """Much for the small model and little for the large one; half way it turns round."""
    found, time = [], 0.0
    while time < until:
        small, large = (240, 6) if time < CHANGE else (30, 60)
        found += [(time, "ask-small", small), (time, "ask-large", large)]
        time += every
    return found


def simulated(until, listener=None, placement=None, counts=None, evicted=None, arriving=None, **engine_options):
    counts = counts or COUNTS
    machines = [
        SimulatedMachine(f"{tier}-{n}", tier, tier, gpus=1, available=(evicted or {}).get(tier, pools.during(0.0)))
        for tier, count in counts.items()
        for n in range(count)
    ]
    items = {
        f"ask-{model}": {(tier, tier): GpuTimes({tier: seconds}, 0.2) for tier, seconds in by_tier.items()}
        for model, by_tier in SECONDS.items()
    }
    loading = {
        model: {(tier, tier): Drawn(seconds) for tier in counts}
        for model, seconds in (("small", 10.0), ("large", 40.0))
    }
    times = MixedTimes(items, loading, {tier: Drawn(5.0) for tier in counts})
    engine = SimulatedEngine(machines, times, None, 1, **engine_options)
    choice = placement or {"policy": "agh", "period": PERIOD, "clear": 600.0}
    policies = Policies.chosen({"placement": choice, "batching": {"policy": "fixed", "size": 4}})
    apps = [ev.AppSpec("ask-small", "ask-small", "small"), ev.AppSpec("ask-large", "ask-large", "large")]
    tiers = [dataclasses.replace(tier, price=PRICES[tier.name]) for tier in tiers_of(machines)]
    return Simulation(
        engine, policies, Workload(contexts(), apps, arriving or arrivals(until)), tiers, listener=listener
    )


class Watch:
    """Notes at each tick how many workers each tier has, who holds what, and the plan."""

    def __init__(self):
        self.simulation = None
        self.seen = []

    def __call__(self, event, commands):
        if type(event) is not ev.Tick:
            return
        state = self.simulation.scheduler.state
        if int(event.time) % 50 == 0:
            self.simulation.scheduler.validate()
        workers = Counter(worker.tier for worker in state.workers.values())
        held = Counter((context, w.tier) for w in state.workers.values() for context in w.contexts)
        self.seen.append((event.time, +workers, +held, state.plan))

    def at(self, time):
        return next(each for each in self.seen if each[0] >= time)


def watched(until, **options):
    watch = Watch()
    watch.simulation = simulated(until, watch, **options)
    watch.simulation.run(until)
    return watch


@pytest.fixture(scope="module")
def watch():
    return watched(CHANGE + 2 * PERIOD + 60)


def test_the_plan_is_followed_and_a_change_of_demand_changes_it_within_two_periods(watch):
    _, workers, held, plan = watch.at(CHANGE - 20)
    assert workers == +Counter({tier: most for tier, (_, most) in plan.workers.items()})
    assert held == Counter(plan.holders)
    assert plan.tiers["small"] and plan.tiers["large"]
    _, later_workers, later_held, later = watch.at(CHANGE + 2 * PERIOD)
    assert later_workers != workers and later_held != held
    assert later_held == Counter(later.holders)
    assert later_workers == +Counter({tier: most for tier, (_, most) in later.workers.items()})

    def power(count, model):
        return sum(n / SECONDS[model][tier] for (context, tier), n in count.items() if context == model)

    # An hour of the first demand takes four small items a second, the second one an item of the large model.
    assert power(held, "small") > 3.5 > power(later_held, "small")
    assert power(held, "large") < 0.5 < power(later_held, "large")


def test_a_plan_that_stands_is_what_there_is(watch):
    seen = watch.seen
    since = seen[0][0]
    for before, (now, workers, held, plan) in itertools.pairwise(seen):
        since = since if plan == before[3] else now
        if plan.holders and now - since > 200:
            assert all(count <= plan.holders[pair] for pair, count in held.items())
            assert all(count <= plan.workers[tier][1] for tier, count in workers.items())


def test_a_run_with_plans_is_replayed_to_the_same_decisions():
    lines = []
    simulated(500, lambda event, commands: lines.append(log.line(event, commands) + "\n")).run(500)
    again = []
    simulated(500, lambda event, commands: again.append(log.line(event, commands) + "\n")).run(500)
    assert lines == again


@settings(max_examples=4, deadline=None)
@given(
    counts=st.dictionaries(st.sampled_from(sorted(COUNTS)), st.integers(1, 5), min_size=1),
    up=st.sampled_from([None, 200.0, 900.0]),
    period=st.sampled_from([20.0, 100.0, 400.0]),
    planning_seconds=st.sampled_from([0.0, 3.0, 90.0]),
)
def test_all_is_done_whatever_the_pool(counts, up, period, planning_seconds):
    evicted = {tier: pools.evicted(up, 30.0) for tier in counts} if up is not None else None
    choice = {"policy": "agh", "period": period, "clear": 300.0}
    options = {"counts": counts, "evicted": evicted, "planning_seconds": planning_seconds}
    few = [(time, app, count // 12 or 1) for time, app, count in arrivals(180)]
    outcome = simulated(180, placement=choice, arriving=few, **options).run()
    assert (outcome.done, outcome.dead) == (outcome.items, 0)


def test_a_tier_that_gives_no_workers_is_not_counted_on():
    late = {"cheap": pools.during(1e6)}
    plan = watched(1000, evicted=late).at(990)[3]
    assert sum(n for (_, tier), n in plan.holders.items() if tier != "cheap") >= 3
    assert plan.workers["cheap"][1] <= 1


def test_a_pool_that_changed_while_it_was_planned_is_planned_again_at_once():
    noted = []

    def listen(event, commands):
        noted.extend((event.time, type(each)) for each in (event, *commands))

    gone = {"fast": pools.during(0.0, 80.0), "middle": pools.during(0.0, 80.0)}
    simulated(500, listen, evicted=gone, planning_seconds=60.0).run(500)
    (begun, _), (made, kind), (again, next_kind), *_ = [n for n in noted if n[1] in (cmd.MakePlan, ev.PlanMade)]
    # The first plan is begun when a worker is there for a fifth of the period; half of the workers go meanwhile.
    assert begun < 80 and (kind, next_kind) == (ev.PlanMade, cmd.MakePlan)
    assert made == begun + 60 and again <= made + 1


def test_before_anything_is_measured_there_is_no_plan():
    policies = Policies.chosen({"placement": "agh"})
    scheduler = Scheduler(policies)
    scheduler.handle(ev.TierOffered(0.0, ev.TierSpec("cheap", 0, 3)))
    scheduler.handle(ev.Tick(500.0))
    assert not scheduler.state.plan.workers and not scheduler.state.plan.tiers


def test_what_is_impossible_is_said_and_the_rest_is_planned():
    watch = Watch()
    watch.simulation = simulated(400, watch, counts={"cheap": 2})
    apps = watch.simulation._workload.apps
    apps[:] = [dataclasses.replace(app, max_delay=0.5 if app.id == "ask-large" else None) for app in apps]
    watch.simulation.run(400)
    plan = watch.at(395)[3]
    assert plan.reasons[0].startswith("ask-large: (5i) no tier answers an item within max_delay = 0.5 s")
    assert plan.reasons[1].startswith("(5g) all workers together do not answer in time all that waits")
    assert sum(plan.holders.values()) >= 2


def test_the_report_of_a_run_shows_the_margins_of_its_plan():
    """Of the log as a run writes it: limits on delays, and speeds that spread, have room below the limit."""
    lines = []
    run = simulated(400, lambda event, commands: lines.append(log.line(event, commands) + "\n"))
    apps = run._workload.apps
    apps[:] = [dataclasses.replace(app, max_delay=20.0) for app in apps]
    run.run(400)
    history = read_history([log.first_line(run.scheduler, simulated=True) + "\n", *lines])
    margins = history_data(history)["plans"][-1]["margins"]
    assert margins and all(0 <= work <= 0.5 and 0 < delay <= 0.5 for _, _, work, delay in margins)
    [(_, rows)] = [table for table in tables(history) if table[0][0] == "Planned"]
    shown = [row[0] for row in rows if row[0].startswith("  margin for")]
    assert len(shown) == len(margins) and all(row.endswith("% below a limit on delays") for row in shown)


@pytest.mark.parametrize("option", ["period", "clear", "least_gain", "margin"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "often", True, None])
def test_options_that_make_no_sense(option, value):
    with pytest.raises(ValueError, match=option):
        make("placement", {"policy": "agh", option: value})
    assert isinstance(make("placement", {"policy": "agh", option: 1.0}), AdaptivePlacement)
