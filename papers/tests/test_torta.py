"""TORTA's experiments, small: the shipped policies on the simulated engine, and what holds whatever the chance."""

import dataclasses
import json
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.cli.app import main
from ctxflow.policies.baselines import Sdib, SkyLB
from ctxflow.policies.registry import make
from ctxflow.policies.simple import RoundRobin
from ctxflow.policies.torta.routing import Torta
from ctxflow.policies.torta.scaling import Activation
from ctxflow_papers.torta import experiments, reproduction
from ctxflow_papers.torta.bounds import least_power, least_power_active
from ctxflow_papers.torta.demand import Tasks, tasks_of
from ctxflow_papers.torta.experiments import METHODS, Size, compared, failures
from ctxflow_papers.torta.runs import served
from ctxflow_papers.torta.settings import GPUS, IDLE_WATTS, LATENCY, OPENING, SLOT, WORKING_WATTS
from ctxflow_papers.torta.world import TASKS_PER_SLOT, TOPOLOGIES, World, slower, start_seconds, switch_seconds, world
from suite import depth

V100 = [gpu.name for gpu in GPUS].index("V100")
MEMORY_MODEL = 2  # The first model of the type that a V100 is for.


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_topology_is_table_1_s_and_a_seed_draws_the_rest(name):
    place = world(name)
    assert place.regions == {"abilene": 12, "polska": 12, "gabriel": 25, "cost2": 32}[name]
    for number, gpu in enumerate(GPUS):
        assert gpu.count[0] <= (place.gpu == number).sum() <= gpu.count[1]
    assert np.allclose(place.latency, place.latency.T) and (place.price > 0).all()
    ways = place.latency[:, :, None] + place.latency[None, :, :]
    assert (place.latency[:, None, :] <= ways + 1e-12).all()  # No detour is shorter.
    other = world(name, 1)
    assert (other.latency == place.latency).all()
    for drawn in ("demand", "phase", "price"):
        assert not np.array_equal(getattr(other, drawn), getattr(place, drawn)), drawn
    assert sorted(place.region) != sorted(other.region)
    quarter = len(world(name, 0, 0.25).gpu)
    assert abs(quarter - len(place.gpu) / 4) <= len(GPUS)


@pytest.mark.parametrize("number", range(5))
def test_a_random_topology_is_connected_and_stays_the_same(number):
    place = world(f"random-{number}")
    assert 8 <= place.regions <= 25 and np.isfinite(place.latency).all()
    assert min(LATENCY.values()) <= place.latency.sum() / place.regions / (place.regions - 1) <= max(LATENCY.values())
    assert (world(f"random-{number}", 1).latency == place.latency).all()
    with pytest.raises(ValueError, match="random-1 and so on"):
        world(f"random-{number}a")


def test_a_load_is_of_the_highest_slot():
    place = world("abilene")
    tasks = tasks_of(place, 0.8, 3, 200)
    per_slot = np.diff(tasks.starts) / (TASKS_PER_SLOT * len(place.gpu))
    assert 0.6 < np.sort(per_slot)[-5:].mean() < 0.9
    assert per_slot[0] < 0.2 * per_slot[OPENING:].mean(), "it rises from nothing"
    again = tasks_of(place, 0.8, 3, 200)
    assert (again.time == tasks.time).all() and (np.diff(tasks.time) >= 0).all()
    assert tasks.counts(place.regions).sum() == len(tasks.time)


def test_what_is_compared_is_what_a_site_file_names():
    classes = {name: type(make("routing", each["routing"])) for name, each in METHODS.items()}
    assert classes == {
        "round_robin": RoundRobin, "skylb": SkyLB, "sdib": Sdib, "skylb_sized": SkyLB, "sdib_sized": Sdib,
        "torta_unsized": Torta, "torta": Torta, "torta_transport": Torta,
    }  # fmt: skip
    sized = {name for name, each in METHODS.items() if isinstance(make("scaling", each["scaling"]), Activation)}
    assert sized == {"skylb_sized", "sdib_sized", "torta"}


def two_places(price=0.36, way=0.5):
    """A region with all of the demand, and one with the only server, a V100."""
    latency = np.array([[0.0, way], [way, 0.0]])
    return World(
        "two", ("asks", "serves"), latency, 0.25, np.full((24, 2), price), 8, np.array([1.0, 0.0]), np.zeros(2),
        np.array([V100]), np.array([1]),
    )  # fmt: skip


def some(times, slots=10):
    """Tasks of ten seconds each, of one model that a V100 is for."""
    count = len(times)
    slot = (np.array(times) / SLOT).astype(int)
    return Tasks(
        np.array(times), np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.int64),
        np.full(count, MEMORY_MODEL), np.full(count, 10.0), np.full(count, 100.0),
        np.searchsorted(slot, np.arange(slots + 1)),
    )  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_one_task_s_seconds_and_dollars_are_what_they_add_up_to(name):
    """The server starts, loads and does a task; what is measured is another, half a second away both ways."""
    start, switch = float(start_seconds()[V100]), float(switch_seconds()[V100, MEMORY_MODEL])
    found = served(two_places(), some([0.0, 300.0]), {**METHODS[name], "scaling": "fixed"}, begin=300.0)
    assert start + switch + 10.0 < 300.0
    assert found.response.tolist() == pytest.approx([1.0 + 0.25 + 10.0])
    assert (found.network[0], found.waiting[0], found.inference[0]) == pytest.approx((1.25, 0.0, 10.0))
    assert (found.loads, found.starts, found.overhead) == (0, 0, 0.0)
    joules = 250.0 * (WORKING_WATTS * 10.0 + 0.25 * 1.25)
    assert found.power == pytest.approx(0.36 * joules / 3.6e6)
    whole = served(two_places(), some([0.0]), {**METHODS[name], "scaling": "fixed"}, begin=0.0)
    assert whole.response.tolist() == pytest.approx([start + switch + 11.25], abs=5.1), "up to a tick"
    assert whole.overhead == pytest.approx((start + switch) / 3600) and (whole.loads, whole.starts) == (1, 1)


def test_an_unsuited_gpu_is_slower():
    assert slower(V100, 1, 100.0) == 1.0
    assert slower(V100, 0, 250.0) == pytest.approx(2.0 * 1.25)
    assert slower(0, 1, 100.0) == pytest.approx(1.25)


@settings(max_examples=depth.some(2, deeply=6), deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([*TOPOLOGIES, "random-1", "random-2"]), st.sampled_from([0.3, 0.7, 1.0]))
def test_nothing_beats_the_bounds_and_every_task_is_answered(seed, topology, load):
    found = compared(topology, load, [seed], depth.some(Size(0.03, 10, 5), deeply=Size(0.05, 16, 8)))
    assert set(found.values) == set(METHODS)
    for name, values in found.values.items():
        active = METHODS[name]["scaling"] == "fixed"
        for bound in ("response", "power", *["power_active"] * active):
            assert found.over_bound([name], bound)[0] >= 1 - 1e-9, (name, bound)
        assert values["waiting"][0] >= -1e-9 and values["network"][0] >= -1e-9
        assert 0 < values["balance"][0] <= 1


def test_the_bound_of_power_fills_the_cheapest_servers_first():
    place = dataclasses.replace(
        two_places(), gpu=np.array([V100, V100]), region=np.array([0, 1]), price=np.tile([0.1, 0.2], (24, 1))
    )
    tasks = some([1.0, 2.0, 3.0])
    joules = 250.0 * WORKING_WATTS / 3.6e6
    assert least_power(place, tasks, 0.0, 60.0) == pytest.approx(0.1 * joules * 30)
    assert least_power(place, tasks, 0.0, 20.0) == pytest.approx(joules * (0.1 * 20 + 0.2 * 10))


def test_with_all_servers_active_those_that_idle_count_as_long_as_it_lasts():
    """It may last from 23 s, when the last of the tasks is over, to 60: longer costs a quarter of both boards."""
    place = dataclasses.replace(
        two_places(), gpu=np.array([V100, V100]), region=np.array([0, 1]), price=np.tile([0.1, 0.2], (24, 1))
    )
    watts = 250.0 / 3.6e6
    working, idle = watts * WORKING_WATTS, watts * IDLE_WATTS
    found = least_power_active(place, some([1.0, 2.0, 13.0]), 0.0, 60.0)
    assert found == pytest.approx(0.1 * working * 23 + 0.2 * (working * 7 + idle * 16))
    # What came before has had its time: 3 s of the second task are left, and 10 of the third.
    later = least_power_active(place, some([1.0, 2.0, 13.0]), 9.0, 60.0)
    assert later == pytest.approx(0.1 * (working * 14) + 0.2 * idle * 14 + 0.2 * (working - idle) * 1)


@pytest.mark.release
def test_round_robin_is_near_skylb_and_torta_is_cheaper_than_both():
    found = compared("abilene", 0.6, [1000, 1001, 1002], Size(0.15, 32, 16), ("round_robin", "skylb", "torta_unsized"))
    assert np.median(found.over("round_robin", ["skylb"], "response")) < 1.15, "it keeps what is loaded"
    assert np.median(found.over("torta_unsized", ["round_robin", "skylb"], "power")) < 0.95
    assert np.median(found.over("torta_unsized", ["round_robin", "skylb"], "response")) < 1.01


def test_a_region_that_fails_has_its_tasks_served_elsewhere():
    found = failures([0], depth.some(Size(0.06, 18, 9), deeply=Size(0.1, 24, 12)), ("skylb", "torta"))
    for values in found.values():
        assert values["completed"][0] > 0.9 and values["response"][0] >= 5.0


def test_the_exact_program_is_solved():
    _, solved = experiments.milp_seconds(20, 0, 600.0)
    assert solved


def test_reproduce_prints_and_draws(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    small = dataclasses.replace(
        reproduction.QUICK, size=depth.some(Size(0.03, 10, 6), deeply=Size(0.05, 14, 8)), tasks=(20,)
    )
    monkeypatch.setattr(reproduction, "QUICK", small)
    monkeypatch.setattr(sys, "argv", ["ctxflow", "reproduce", "torta", "--quick", "--json", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    figures = json.loads(capsys.readouterr().out)["figures"]
    for name in ("torta_response", "torta_power_vs_best", "torta_power_vs_sized", "torta_power_vs_bound"):
        assert math.isfinite(figures[f"abilene_0.7_{name}"]["value"])
    assert math.isfinite(figures["milp_20"]["value"]) and math.isfinite(figures["failure_torta_completed"]["value"])
    assert all(figure["paper"] is None for figure in figures.values())
    assert {path.name for path in tmp_path.iterdir()} == {
        f"torta-figure{number}.png" for number in ("4", "5", "8", "9", "9b", "10", "11")
    }
