"""Whole runs in virtual time with `torta` and the reactive baselines: they end, whatever the regions do."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_runs import Run, machine

from ctxflow.policies.torta.routing import Torta

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


@settings(max_examples=40, deadline=None)
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
        ({"longest_wait": math.nan}, "negative"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        Torta(**options)
