"""Tiers that are the same machines: no more GPUs of all of them than there are, where they are needed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.policies.agh.live_plan import cut_best, cuts, groups, limited
from ctxflow.policies.agh.live_work import ContextOption, Offer, Wanted
from ctxflow.scheduler import Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.view import ShownTier
from ctxflow.scheduler.worker_state import TierState
from ctxflow.simulator import Drawn, GpuTimes, Simulation, Workload
from ctxflow.simulator.pools import MixedTimes

GPUS = {"one": 1, "two": 2, "four": 4}
SPECS = {name: ev.TierSpec(name, 0, 8 // gpus, gpus, float(gpus), machines="a100") for name, gpus in GPUS.items()}
TIERS = {name: ShownTier(TierState(spec)) for name, spec in SPECS.items()}
OFFERS = [Offer(name, tier.maximum, float(tier.gpus)) for name, tier in TIERS.items()]
# The large model fits four GPUs alone, and the middle one is more than twice as fast on two.
SECONDS = {
    "small": {"one": 1.0, "two": 0.8, "four": 0.7},
    "middle": {"one": 9.0, "two": 3.0, "four": 2.0},
    "large": {"four": 2.0},
}


def wanted(**rates):
    return [
        Wanted(name, 3600 * rate, (ContextOption(name, SECONDS[name], 10.0),), None, None)
        for name, rate in rates.items()
        if rate
    ]


def cut_of(asked, before=None):
    mixes = {each.app: {each.app: 1.0} for each in asked}
    return cut_best(asked, mixes, OFFERS, TIERS, before or {}, 0.05)


def gpus_of(cut):
    return sum(GPUS[name] * most for name, most in cut.items())


def test_there_is_no_cut_where_all_of_them_are_not_needed():
    assert cut_of(wanted(small=2.0)) == {}
    assert cut_of(wanted(small=0.5, large=0.3)) == {}


def test_gpus_go_to_who_needs_them():
    assert cut_of(wanted(small=8.0, large=0.4)) == {"one": 4, "two": 0, "four": 1}
    assert cut_of(wanted(middle=2.0, large=0.4)) == {"one": 0, "two": 2, "four": 1}


def test_a_cut_stays_where_another_is_hardly_better():
    asked = wanted(small=8.0, large=0.4)
    cut = cut_of(asked)
    assert cut_of(asked, before=cut) == cut


@settings(max_examples=6, deadline=None)
@given(st.floats(0.1, 12), st.floats(0, 3), st.floats(0, 2))
def test_no_cut_has_more_gpus_than_there_are(small, middle, large):
    cut = cut_of(wanted(small=small, middle=middle, large=large))
    assert gpus_of(cut) <= 8
    assert all(offer.workers <= most.workers for offer, most in zip(limited(OFFERS, cut), OFFERS, strict=True))


def test_cuts_use_up_the_machines():
    found = cuts(OFFERS, GPUS, 8)
    assert all(gpus_of(cut) <= 8 for cut in found)
    assert {"one": 8, "two": 0, "four": 0} in found and {"one": 2, "two": 1, "four": 1} in found


def test_tiers_by_themselves_are_no_group():
    alone = {name: ShownTier(TierState(ev.TierSpec(name, 0, 2, gpus))) for name, gpus in GPUS.items()}
    assert groups(OFFERS, alone) == []
    assert [len(group) for group in groups(OFFERS, TIERS)] == [3]


@pytest.mark.parametrize(("declared", "expected"), [(None, ["big", "small"]), (40, ["big"]), (10, ["big", "small"])])
def test_a_context_is_not_planned_where_its_weights_do_not_fit(declared, expected):
    scheduler = Scheduler(Policies.chosen({}))
    for name, memory in (("small", None), ("big", 80 * 10**9)):
        scheduler.handle(ev.TierOffered(0.0, ev.TierSpec(name, 0, 2, gpus=1, gpu_memory=memory)))
    scheduler.handle(ev.WorkerJoined(1.0, ev.WorkerSpec("w", tier="small", gpus=1, gpu_memory=24 * 10**9)))
    needs = None if declared is None else declared * 10**9
    scheduler.handle(ev.ContextDeclared(2.0, ev.ContextSpec("c", "c", gpus=1, gpu_memory=needs)))
    scheduler.handle(ev.AppDeclared(2.0, ev.AppSpec("a", "a", "c")))
    view = scheduler.view
    assert sorted(name for name, tier in view.tiers.items() if view.able(view.apps["a"], tier)) == expected


def test_a_run_holds_no_more_gpus_than_the_machines_have():
    seconds = {"ask-small": {"one": 1.0, "four": 0.7}, "ask-large": {"four": 2.0}}
    names = ("one", "four")
    machines = [
        SimulatedMachine(f"{name}-{n}", name, name, gpus=GPUS[name]) for name in names for n in range(8 // GPUS[name])
    ]
    items = {
        app: {(tier, tier): GpuTimes({tier: by_tier.get(tier, 1e3)}) for tier in names}
        for app, by_tier in seconds.items()
    }
    loads = {name: {(tier, tier): Drawn(3.0) for tier in names} for name in ("small", "large")}
    engine = SimulatedEngine(machines, MixedTimes(items, loads, {tier: Drawn(1.0) for tier in names}), None, 1)
    contexts = [ev.ContextSpec("small", "small", gpus=1), ev.ContextSpec("large", "large", gpus=4)]
    apps = [ev.AppSpec("ask-small", "ask-small", "small"), ev.AppSpec("ask-large", "ask-large", "large")]
    # Much for the small one, a little for the large one; then nothing, and much.
    arrivals = [
        (float(time), app, count)
        for time in range(0, 800, 10)
        for app, count in (("ask-small", 30 if time < 400 else 0), ("ask-large", 2 if time < 400 else 7))
    ]
    plans = []

    def listen(event, commands):
        plans.extend((event.time, command) for command in commands if isinstance(command, cmd.Place))

    policies = Policies.chosen(
        {"placement": {"policy": "agh", "period": 100, "clear": 100}, "batching": {"policy": "fixed", "size": 4}}
    )
    tiers = [SPECS[name] for name in names]
    Simulation(engine, policies, Workload(contexts, apps, arrivals), tiers, listener=listen).run(800)
    for _, plan in plans:
        assert sum(GPUS[tier] * most for tier, _, most in plan.workers) <= 8, plan
    before, after = [plan for time, plan in plans if time < 400][-1], plans[-1][1]
    assert set(before.holders) == {("large", "four", 1), ("small", "one", 4)}
    assert set(after.holders) == {("large", "four", 2)}
