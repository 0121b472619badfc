"""What is measured of a game: waits, dollars, pauses, GPU-hours; and that the public workloads are what they say."""

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.executors.simulated import SimulatedMachine
from ctxflow.league import place_games, public_workloads, session_games
from ctxflow.league.contests import contest_of, contests
from ctxflow.league.games import GameLost, Steps, Waits, worker_seconds
from ctxflow.league.place_games import Bursts, PlaceDraw, UrgentApp, place_arena
from ctxflow.league.session_games import Pauses, SessionArena, SessionDraw, UserSession
from ctxflow.policies.registry import DEFAULTS, FAMILIES
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator.scenario import Scenario

DRAWS = [
    getattr(public_workloads, name)
    for name in (
        "azure_code", "flash_crowd", "many_models", "campus_day", "spot_market", "spot_job", "campus_job",
        "drained_job", "few_long_items", "owners_return", "azure_in_flight",
    )
]  # fmt: skip


def test_every_family_has_a_contest_with_workloads_of_unlike_names():
    found = {each.family: [workload.name for workload in each.workloads] for each in contests()}
    assert set(found) == set(FAMILIES) == set(DEFAULTS)
    assert all(len(set(names)) == len(names) >= 3 for names in found.values())
    assert all(workload.about.endswith(".") for each in contests() for workload in each.workloads)


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
def test_a_seed_draws_the_same_and_another_seed_more_than_noise(draw):
    assert draw(3) == draw(3)
    one, other = draw(3), draw(4)
    assert one.workload != other.workload
    for scenario in (one, other):
        apps = scenario.workload.apps
        assert all(app.spread == 0 for app in apps if app.tokens_per_second is None), "bounds would not hold"
        if apps[0].arrivals is not None:
            assert all(list(app.arrivals) == sorted(app.arrivals) for app in apps)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(public_workloads._ZONES), st.floats(600, 50_000))
def test_a_spot_market_has_nodes_from_the_start_on_and_all_of_them_in_the_end(seed, zone, seconds):
    found = public_workloads.fits()["spot"][zone]
    steps = public_workloads.spot_nodes(random.Random(seed), found, seconds)
    times = [time for time, _ in steps]
    assert times[0] == 0.0 and times == sorted(times) and steps[-1] == (seconds, found["nodes"])
    assert all(0 <= count <= found["nodes"] for _, count in steps)


def test_the_fits_come_back_from_what_is_drawn():
    """Of a long draw, the mean logarithm of how long all nodes were there is the fitted one, within its error."""
    zone = public_workloads.fits()["spot"]["16-node_us-east-2b"]
    steps = public_workloads.spot_nodes(random.Random(5), zone, 4e7)
    stretches = [
        math.log(until - since)
        for (since, count), (until, _) in itertools.pairwise(steps[1:-1])
        if count == zone["nodes"]
    ]
    assert len(stretches) > 1000
    wanted = zone["states"]["all"]
    assert sum(stretches) / len(stretches) == pytest.approx(
        wanted["mu"], abs=4 * wanted["sigma"] / len(stretches) ** 0.5
    )


def test_azures_requests_are_counted_as_the_trace_has_them():
    azure = public_workloads.fits()["azure"]
    assert sum(azure["arrivals"]) == 8819 and "CC BY 4.0" in azure["source"]
    assert sum(each["share"] for each in azure["classes"]) == pytest.approx(1.0, abs=1e-3)
    counts = [sum(len(app.arrivals) for app in public_workloads.azure_code(seed).workload.apps) for seed in range(6)]
    assert all(0.35 * 8819 < count < 0.95 * 8819 for count in counts) and max(counts) > 1.2 * min(counts)


def test_waits_are_from_submission_to_answer():
    waits = Waits()
    waits(ev.ItemsSubmitted(1.0, "a", range(2)), [])
    waits(ev.Tick(4.0), [cmd.Deliver(1, (0,), None)])
    waits(ev.Tick(7.0), [cmd.Deliver(2, (1,), None)])
    assert waits.took == [3.0, 6.0] and not waits.came


def test_too_many_events_are_the_end():
    steps = Steps(3)
    for time in range(3):
        steps(ev.Tick(float(time)), [])
    with pytest.raises(GameLost, match="not done after 3 events, at 3 s"):
        steps(ev.Tick(3.0), [])


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), max_size=6), st.floats(1, 60))
def test_worker_seconds_are_those_until_the_end(stays, end):
    machine = SimulatedMachine("m", tier="spot")
    presence = []
    for first, second in stays:
        presence += [(min(first, second), machine, 1), (max(first, second), machine, -1)]
    wanted = sum(min(max(a, b), end) - min(a, b, end) for a, b in stays)
    assert worker_seconds(presence, end).get("spot", 0.0) == pytest.approx(wanted)


def test_a_dollar_is_a_workers_hour_and_waiting_has_its_price():
    """One worker that is held for ten hours, one item: 10 $; and it waits for a tenth of what a patience costs."""
    found = contest_of("scaling").workload("flash-crowd").arena(0)
    scenario = found.scenario
    app = scenario.workload.apps[0].model_copy(
        update={"arrivals": ((0.0, 1), (36_000.0, 1)), "item_seconds": 10.0, "call_seconds": 0.0}
    )
    tier = scenario.site.tiers[0].model_copy(update={"workers": 1, "boot_seconds": 0.0, "price": 1.0})
    workload = scenario.workload.model_copy(
        update={"apps": (app,), "dispatch_seconds": 0.0,
                "contexts": (scenario.workload.contexts[0].model_copy(update={"load_seconds": 20.0}),)}
    )  # fmt: skip
    if app.context != workload.contexts[0].name:
        app = app.model_copy(update={"context": workload.contexts[0].name})
        workload = workload.model_copy(update={"apps": (app,)})
    site = scenario.site.model_copy(update={"tiers": (tier,)})
    arena = dataclasses.replace(found, scenario=Scenario(site, workload), hours=20.0)
    outcome = arena.play("fixed", 10**6)
    work = 20.0 / 3600  # Two items of ten seconds: the cheapest they can be had for.
    assert outcome.beside["dollars"] == pytest.approx(36_010 / 3600)
    second = work / 2 / 30.0
    assert outcome.score == pytest.approx(36_010 / 3600 + second * (30.0 + 10.0))
    assert outcome.bound == pytest.approx(work + second * 20.0)


def test_a_pause_is_from_chunk_to_chunk_and_to_the_end_but_not_while_a_user_pauses():
    pauses = Pauses([UserSession(((0.0, 10.0), (20.0, 26.0)))])

    def at(time):
        pauses(ev.Tick(time), [cmd.DeliverChunk(0, 1, 0)])

    pauses(ev.SessionOpened(0.0, 0, "talk", 9), [])
    at(4.0)
    at(9.0)
    pauses(ev.SessionSuspended(10.0, 0), [])
    at(11.0)
    pauses(ev.SessionResumed(20.0, 0), [])
    at(22.0)
    pauses(ev.SessionClosed(28.0, 0), [])
    assert pauses.all == [4.0, 5.0, 1.0, 2.0, 6.0] and pauses.longest == [6.0]


@pytest.mark.parametrize("draw", session_games.SESSION_DRAWS, ids=lambda draw: draw.__name__)
def test_users_want_chunks_in_stretches_one_after_the_other(draw):
    for seed in range(5):
        users = draw(seed).users
        assert len(users) >= 10
        for user in users:
            edges = [edge for stretch in user.stretches for edge in stretch]
            assert edges == sorted(edges) and edges[0] >= session_games.WARM and edges[-1] <= session_games.END


def test_alone_on_one_worker_a_user_waits_for_a_chunk_as_long_as_it_takes():
    begin = session_games.WARM + 10.0
    drawn = SessionDraw([UserSession(((begin, session_games.END),))], {"fast": [(0.0, 1)], "slow": [(0.0, 0)]})
    outcome = SessionArena(drawn, 0).play("least-loaded", 10**6)
    step = session_games.CHUNK["fast"] + 0.02
    assert outcome.score == pytest.approx(step, abs=0.03)
    assert outcome.bound < outcome.score < 1.5 * outcome.bound, "the bound is tight where nothing else is in the way"


def test_bursts_wait_for_their_last_answer_or_for_the_end():
    bursts = Bursts()
    bursts(ev.ItemsSubmitted(1.0, "quad", range(2)), [])
    bursts(ev.ItemsSubmitted(5.0, "quad", range(2, 4)), [])
    bursts(ev.Tick(6.0), [cmd.Deliver(1, (0, 2), None)])
    bursts(ev.Tick(9.0), [cmd.Deliver(2, (1,), None)])
    assert bursts.answered == {"quad": 3} and bursts.unserved("quad") == 1
    assert bursts.waited("quad", 25.0) == 8.0 + 20.0 and bursts.waited("pair", 25.0) == 0.0


def test_the_hours_of_a_game_of_preemption_are_what_is_not_useful_and_what_waits():
    """An empty machine and one burst, which waits for a worker and a load."""
    app = UrgentApp("pair-1", 2, 5, "guaranteed", [(60.0, 4)])
    drawn = PlaceDraw(1, {(0, gpu): [(0.0, place_games.END)] for gpu in range(8)}, [app])
    made = place_arena(lambda seed: drawn, 0)
    refused = made.play("none", 10**6)
    assert refused.beside["unserved"] == 1 and refused.beside["burst_mean_s"] == place_games.END - 60.0
    served = made.play("exact", 10**6)
    assert served.beside["unserved"] == 0 and served.score < refused.score
    for outcome in (served, refused):
        capacity = 8 * place_games.END
        waited = 2 * outcome.beside["burst_mean_s"]
        assert outcome.score * 3600 == pytest.approx(capacity * (1 - outcome.beside["useful_share"]) + waited)
        assert outcome.bound == pytest.approx((8 * 7.05 + 2 * 12.05) / 3600)  # Four items of three seconds.


def test_calls_take_longer_on_gpus_of_two_sockets():
    times, chance = place_games.PlaceTimes(), random.Random(0)
    near = SimulatedMachine("m", devices=("GPU-m0-0", "GPU-m0-3"))
    far = SimulatedMachine("m", devices=("GPU-m0-3", "GPU-m0-4"))
    assert times.call("a", far, range(4), chance) == 1.25 * times.call("a", near, range(4), chance) == 15.0
