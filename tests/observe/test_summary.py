"""The summary: beside what the simulator knows of the same run, and as text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observe_data import EVENTS
from played_run import Played

from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.observe.history_reader import read_history
from ctxflow.observe.measures import span_unit
from ctxflow.observe.summary import SUMMARY, fluid_seconds, keep, parts_rows, summarise, summary_text
from ctxflow.policies.registry import make
from ctxflow.scheduler import Policies
from ctxflow.scheduler.log import line
from ctxflow.simulator import Drawn, GpuTimes, Origin, Part, Simulation, TreeStaging, Workload, pools
from ctxflow.simulator.simulation import fluid_seconds as simulated_bound
from ctxflow.simulator.simulation import tiers_of

SECONDS = {"A10": 0.27, "TITAN X": 0.38}


def simulated(items=4000):
    """A run of two GPU models with evictions: its log, what the simulator says of it, and the times it rests on."""
    machines = [
        *pools.machines(3, "A10", pools.evicted(300, 30)),
        *pools.machines(4, "TITAN X", pools.evicted(200, 30)),
    ]
    times = GpuTimes(SECONDS, loading=Drawn(25, 5, 5), matching=Drawn(10))
    staging = TreeStaging({"context": [Part("model", 3e8, "filesystem")]}, {"filesystem": Origin(10e9, 1.25e8)})
    chosen = {"routing": "context-affinity", "batching": {"policy": "fixed", "size": 40}, "placement": "everywhere"}
    chosen |= {"preemption": "none", "scaling": "fixed"}
    policies = Policies(**{family: make(family, choice) for family, choice in chosen.items()})
    lines = []
    simulation = Simulation(
        SimulatedEngine(machines, times, staging, seed=3), policies, Workload.of(items, files=True), tiers_of(machines),
        listener=lambda event, commands: lines.append(line(event, commands) + "\n"),
    )  # fmt: skip
    return lines, simulation.run(), times


def test_it_says_what_the_simulator_knows():
    lines, outcome, times = simulated()
    summary = summarise(read_history(lines))
    account, hours = outcome.account, summary["hours"]
    assert (summary["unit"], summary["items"]["done"]) == ("GPU-hours", outcome.done)
    assert 3600 * hours["connected"] == pytest.approx(account.worker_seconds, rel=1e-6)
    assert account.evicted > 2
    assert 3600 * hours["evicted"] == pytest.approx(account.lost_seconds, rel=0.02)
    assert 3600 * hours["loading"] == pytest.approx(account.load_seconds, rel=0.02)
    assert 3600 * hours["staging"] >= account.stage_seconds  # Which leaves out what evictions cut short.
    measured = {model["gpu_model"]: model["items_per_second"] for model in summary["models"]}
    for model, seconds in SECONDS.items():
        assert measured[model] == pytest.approx(1 / seconds, rel=0.05)
    assert summary["fluid"]["bound"] == pytest.approx(outcome.fluid(times.item), rel=0.05)
    assert summary["fluid"]["efficiency"] == pytest.approx(outcome.fluid(times.item) / outcome.seconds, rel=0.05)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(200, 3000))
def test_nobody_is_faster_than_the_bound(seed, items):
    lines = []
    Played(lines, items, seed).play()
    summary = summarise(read_history(lines))
    assert 0 < summary["fluid"]["efficiency"] <= 1 + 1e-9
    for where in (summary, *summary["places"], *summary["models"]):
        hours = where["hours"]
        assert sum(hours[part] for part in hours if part != "connected") == pytest.approx(hours["connected"])
    assert sum(place["items"] for place in summary["places"]) == items


STAYS = st.tuples(st.floats(0, 100), st.sampled_from(list(SECONDS)), st.floats(1, 100))


@given(st.lists(STAYS, max_size=8), st.integers(1, 900))
def test_the_bound_is_the_simulators(workers, items):
    presence = [(joined, model, 1) for joined, model, _ in workers]
    presence += [(joined + stayed, model, -1) for joined, model, stayed in workers]
    presence.sort(key=lambda each: each[0])
    machines = {model: SimulatedMachine(model, model) for model in SECONDS}
    theirs = simulated_bound(
        [(time, machines[model], change) for time, model, change in presence], lambda m: SECONDS[m.gpu_model], items
    )
    ours = fluid_seconds(presence, {model: 1 / seconds for model, seconds in SECONDS.items()}, items)
    assert (float("inf") if ours is None else ours) == pytest.approx(theirs)


def test_work_begins_when_it_is_there():
    assert fluid_seconds([(0.0, "k", 1)], {"k": 2.0}, 10.0, begin=100.0) == 5.0
    assert fluid_seconds([(0.0, "k", 1), (50.0, "k", -1)], {"k": 2.0}, 10.0, begin=100.0) is None
    assert fluid_seconds([(0.0, "unknown", 1)], {}, 1.0) is None


def test_workers_without_gpus_are_counted_as_workers():
    with open(EVENTS) as file:
        summary = summarise(read_history(file))
    assert summary["unit"] == "worker-hours"
    text = summary_text(summary)
    assert "local   no GPU      1       22    600" in text
    assert "lost to evictions" in text
    assert "Efficiency  62 % of the fluid bound" in text
    assert text.splitlines()[-3].startswith("connected")
    [scale, unit] = span_unit(summary["unit"], summary["hours"]["connected"])
    assert unit == "worker-seconds"
    shown = sum(value for _, _, value, _ in parts_rows(summary))
    assert shown == pytest.approx(scale * summary["hours"]["connected"], rel=1e-3)


def test_a_run_without_workers_or_events():
    summary = summarise(read_history([]))
    assert summary_text(summary) == "No worker joined."
    assert summary["fluid"] == {"took": None, "bound": None, "efficiency": None}


def test_it_is_kept_whole(tmp_path):
    keep(tmp_path, SUMMARY, summarise(read_history([])))
    assert [path.name for path in tmp_path.iterdir()] == [SUMMARY]
    assert json.loads((tmp_path / SUMMARY).read_text())["unit"] == "worker-hours"
