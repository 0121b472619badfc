"""Whole runs in virtual time with `torta` and the reactive baselines: they end, whatever the regions do."""

import dataclasses
import math
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_runs import Run, machine

from ctxflow.policies.torta.quantities import _paces
from ctxflow.policies.torta.routing import Torta
from ctxflow.scheduler import events as ev
from suite import depth
from suite.depth import for_release

MACHINES = st.lists(
    st.tuples(
        st.sampled_from(["campus", "north", "nowhere"]),
        st.sampled_from(["fast", "slow"]),
        st.sampled_from([30.0, 90.0, math.inf]),
    ),
    max_size=6,
)
ARRIVALS = st.lists(
    st.tuples(st.floats(0, 200), st.sampled_from(["a0", "a1"]), st.integers(1, 40)), min_size=1, max_size=12
)
ROUTINGS = st.one_of(
    st.sampled_from(["skylb", "sdib"]),
    st.builds(
        lambda **options: {"policy": "torta", **options},
        macro=st.sampled_from(["transport", "lookahead"]),
        slot_seconds=st.sampled_from([5.0, 45.0]),
        patience=st.sampled_from([0.0, 10.0]),
        search=st.integers(0, 4),
        prewarm=st.booleans(),
    ),
)


@settings(max_examples=depth.some(8, deeply=40), deadline=None)
@given(machines=MACHINES, arrivals=ARRIVALS, routing=ROUTINGS)
def test_every_run_ends_though_regions_vanish(machines, arrivals, routing):
    """One machine stays, so that there is an end; events are checked by the scheduler's invariants."""
    some = [machine(f"m{n}", region, model, until) for n, (region, model, until) in enumerate(machines)]
    run = Run(routing, [machine("last", "north"), *some], arrivals)
    assert run.outcome.done == run.outcome.items == sum(count for _, _, count in arrivals)


def test_a_context_is_not_loaded_where_the_queue_would_be_over_first():
    """The second burst takes 8 s on its holder; the load takes 20."""
    machines = [machine(f"m{n}") for n in range(4)]
    arrivals = [(0.0, "a0", 4), (60.0, "a0", 8)]
    counts = {
        name: len(Run(name, machines, arrivals, load=20.0, regions=()).loads) for name in ("torta", "round-robin")
    }
    assert counts["torta"] == 4, "at first nobody knows what a load takes: all are tried"
    some = Run("torta", [machine("m0"), machine("m1", since=50.0)], arrivals, load=20.0, regions=())
    assert [worker for _, worker, _ in some.loads] == [some.loads[0][1]], "one load, on the worker that was there"
    more = Run("torta", [machine("m0"), machine("m1", since=50.0)], [(0.0, "a0", 4), (60.0, "a0", 80)], load=20.0)
    assert len({worker for _, worker, _ in more.loads}) == 2, "a long queue is worth a load"


def test_an_app_does_not_wait_for_ever_behind_another_with_its_context():
    run = Run("torta", [machine("m0")], [(0.0, "a0", 1000), (30.0, "a1", 4)], shared=True, regions=())
    assert 90 <= min(time for time, _, app in run.calls if app == "a1") < 90 + 8


@pytest.mark.parametrize("workers", [1, 2])
def test_no_app_waits_for_ever_behind_a_queue_that_does_not_end(workers):
    machines = [machine(f"m{n}") for n in range(workers)]
    arrivals = [(0.0, "a0", 1000 * workers), (30.0, "a1", 4)]
    patient = Run({"policy": "torta", "longest_wait": 60.0}, machines, arrivals)
    first = min(time for time, _, app in patient.calls if app == "a1")
    assert 30 < first < 30 + 60 + 8 + 4 + 2, "it waits its time, then somebody ends a call, and loads"
    affine = Run("context-affinity", machines, arrivals)
    assert min(time for time, _, app in affine.calls if app == "a1") > 900, "else it waits until the queue is over"


def test_work_goes_to_the_region_where_power_is_cheap_as_far_as_there_is_room():
    machines = [machine(f"{region}{n}", region) for region in ("campus", "north") for n in range(3)]
    arrivals = [(5.0 * n, "a0", 4) for n in range(60)]
    shares = {}
    for routing in ("context-affinity", "torta"):
        run = Run(routing, machines, arrivals, contexts=1, load=2.0)
        later = [run.regions[worker] for time, worker, _ in run.calls if time > 60]
        shares[routing] = later.count("north") / len(later)
    assert shares["torta"] == 1.0 > shares["context-affinity"]


def test_a_queue_beyond_all_capacity_goes_everywhere():
    machines = [machine(f"{region}{n}", region) for region in ("campus", "north") for n in range(3)]
    run = Run("torta", machines, [(0.0, "a0", 2000)], contexts=1, load=2.0)
    assert {run.regions[worker] for time, worker, _ in run.calls if time > 60} == {"campus", "north"}
    assert run.outcome.seconds < 1.1 * 2000 / 6 + 10


def test_what_the_forecast_says_will_lack_workers_is_loaded_before_it_waits_and_no_more():
    """A stream that one worker can hardly serve: Eq. 6 wants two, while the queue alone would be worth no load."""
    machines = [machine("m0"), machine("m1", since=41.0), machine("m2", since=41.0)]
    arrivals = [(4.2 * n, "a0", 4) for n in range(60)]
    ahead, reactive = (
        Run({"policy": "torta", "prewarm": on}, machines, arrivals, contexts=1, load=20.0).loads for on in (True, False)
    )
    assert [time > 40 for time, _, _ in ahead] == [False, True], "one more worker, and not both"
    assert len(reactive) == 1


def test_what_was_loaded_ahead_gives_way_to_what_is_wanted():
    """All that is free is loaded with a0 for a stream that then ends; a1 gets workers at once."""
    machines = [machine(f"m{n}") for n in range(3)]
    arrivals = [(1.0 * n, "a0", 3) for n in range(60)] + [(0.0, "a1", 1), (62.0, "a1", 400)]
    run = Run("torta", machines, arrivals)
    begun = [time for time, _, context in run.loads if context == "c1" and time >= 62]
    assert begun and min(begun) < 62 + 8 + 3, "when a call or a load has ended at the latest"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"macro": "magic"}, "write one of transport, lookahead"),
        ({"slot_seconds": 0}, "slot_seconds"),
        ({"patience": -1}, "negative"),
        ({"hold": -0.5}, "negative"),
        ({"longest_wait": math.nan}, "negative"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        Torta(**options)


def test_the_look_ahead_without_scipy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ModuleNotFoundError, match=r"^the look-ahead needs SciPy: .*pip install"):
        Torta("lookahead")


def used(run, after=60.0):
    """Return how many calls each tier's workers did, by the first letter of their names."""
    later = [worker[0] for time, worker, _ in run.calls if time > after]
    return {name: later.count(name) for name in sorted(set(later))}


def test_work_goes_to_the_cheapest_tier_as_far_as_it_has_room():
    tiers = [ev.TierSpec("cheap", 0, 2, gpus=1, price=1.0), ev.TierSpec("dear", 0, 2, gpus=1, price=2.0)]
    machines = [machine(f"{tier[0]}{n}", tier=tier) for tier in ("dear", "cheap") for n in range(2)]
    half = [(0.0, "a0", 4)] + [(20.0 + 2.0 * n, "a0", 1) for n in range(200)]
    run = Run("torta", machines, half, contexts=1, load=2.0, size=1, regions=(), tiers=tiers)
    assert used(run).keys() == {"c"}
    over = [(0.0, "a0", 4)] + [(20.0 + 0.4 * n, "a0", 1) for n in range(600)]
    busy = used(Run("torta", machines, over, contexts=1, load=2.0, size=1, regions=(), tiers=tiers))
    assert busy["c"] > 1.5 * busy["d"] > 0
    careless = Run({"policy": "torta", "thrift": 0.0}, machines, half, contexts=1, load=2.0, regions=(), tiers=tiers)
    assert "d" in used(careless)


def test_of_workers_at_one_price_the_nearest_to_where_items_come_from_is_taken():
    far = [
        ev.RegionSpec("campus", {"north": 0.4}, home=True, tiers=["here"]),
        ev.RegionSpec("north", {"campus": 0.4}, tiers=["there"]),
    ]
    tiers = [ev.TierSpec(name, 0, 2, gpus=1, price=1.0) for name in ("here", "there")]
    machines = [
        machine(f"{region[0]}{n}", region, tier=tier)
        for region, tier in (("north", "there"), ("campus", "here"))
        for n in range(2)
    ]
    arrivals = [(0.0, "a0", 8)] + [(20.0 + 2.0 * n, f"a{n % 2}", 1) for n in range(200)]
    run = Run(
        "torta", machines, arrivals, load=2.0, size=1, shared=True, regions=far, tiers=tiers,
        origins=("campus", "north"),
    )  # fmt: skip
    later = {(app, run.regions[worker]) for time, worker, app in run.calls if time > 60}
    assert later == {("a0", "campus"), ("a1", "north")}


def test_apps_of_one_context_share_its_queue():
    """Eight apps of eight items each: each queue is over before a load is, all together are worth one."""
    machines = [machine("m0"), *(machine(f"m{n}", since=50.0) for n in (1, 2))]
    arrivals = [(0.0, "a0", 4)] + [(60.0, f"a{n}", 8) for n in range(8)]
    run = Run("torta", machines, arrivals, contexts=8, load=20.0, shared=True, regions=())
    assert len({worker for _, worker, _ in run.loads}) == 3
    alone = Run("torta", machines, arrivals[:2], contexts=8, load=20.0, shared=True, regions=())
    assert len({worker for _, worker, _ in alone.loads}) == 1


def test_a_queue_that_is_worth_one_load_is_given_one_whoever_shares_it():
    """Eight apps of six items and seven workers without work: each app had a load of its own."""
    machines = [machine("m0"), *(machine(f"m{n}", since=50.0) for n in range(1, 8))]
    arrivals = [(0.0, "a0", 4)] + [(60.0, f"a{n}", 6) for n in range(8)]
    reactive = {"policy": "torta", "prewarm": False}
    run = Run(reactive, machines, arrivals, contexts=8, load=20.0, shared=True, regions=())
    assert len({worker for _, worker, _ in run.loads}) == 2


def test_a_worker_goes_over_to_the_context_that_has_less_headroom():
    """Six workers, two streams: one of them grows fivefold; it gets workers before its queue is worth a load."""
    machines = [machine(f"m{n}") for n in range(6)]
    even = [(1.0 * n, f"a{k}", 1) for n in range(100) for k in range(2)]
    more = [(100.0 + 0.25 * n, "a0", 1) for n in range(800)] + [(100.0 + 2.0 * n, "a1", 1) for n in range(100)]
    runs = [
        Run({"policy": "torta", "prewarm": on}, machines, sorted(even + more), load=10.0, size=1, regions=())
        for on in (True, False)
    ]
    holders = [len({w for t, w, app in run.calls if app == "a0" and 200 < t < 300}) for run in runs]
    assert holders[0] >= 4 and holders[0] >= holders[1]
    assert all(run.outcome.done == run.outcome.items for run in runs)


@pytest.mark.parametrize("seed", [0, *for_release(1, 2)])
def test_chance_in_what_comes_is_no_reason_for_loads_ahead(seed):
    """Two streams of long items, 4 to 1, at eight tenths: there were 50 loads on 12 workers in 20 minutes."""
    chance = random.Random(seed)
    arrivals = []
    for app, rate in (("a0", 0.512), ("a1", 0.128)):
        time = chance.expovariate(rate)
        while time < 1500:
            arrivals.append((time, app, 1))
            time += chance.expovariate(rate)
    run = Run("torta", [machine(f"m{n}") for n in range(12)], arrivals, load=30.0, item=15.0, size=1, regions=())
    assert sum(time > 300 for time, _, _ in run.loads) <= 12
    assert run.outcome.done == len(arrivals)


def test_few_items_make_no_model_fast():
    """Both models are as fast; on one of them each app was measured on one item."""

    @dataclasses.dataclass
    class Seen:
        gpu_model: str
        paces: dict[str, float]
        items: int

        def seconds_per_item(self, app):
            return self.paces.get(app)

        def items_done(self, app):
            return self.items

        def calls_beside(self, app):
            return None

    chance = random.Random(5)
    apps = [f"a{n}" for n in range(200)]
    many = [Seen("usual", {app: chance.uniform(13, 17) for app in apps}, 20) for _ in range(8)]
    few = [Seen("rare", {app: chance.uniform(5, 25) for app in apps}, 1)]
    items, speeds = _paces([*many, *few], apps)
    assert speeds == {"usual": 1.0, "rare": 1.0} and 14 < items["a0"] < 16
    slow = [Seen("slow", {app: chance.uniform(10, 50) for app in apps}, 1)]
    assert _paces([*many, *slow], apps)[1] == {"usual": 1.0, "slow": pytest.approx(0.5, rel=0.1)}
