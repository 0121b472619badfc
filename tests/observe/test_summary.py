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
from ctxflow.observe.summary import (
    SUMMARY,
    conclusion,
    fluid_seconds,
    keep,
    parts_rows,
    presence_around,
    summarise,
    summary_text,
)
from ctxflow.policies.registry import make
from ctxflow.scheduler import Policies
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
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


def told(lines):
    history = read_history(lines)
    return conclusion(summarise(history), history)


class Run:
    """An event log of few events, with the commands that a scheduler would have given."""

    def __init__(self):
        self.lines = []
        self.attempts = 0
        self.tell(ev.ContextDeclared(0.0, ev.ContextSpec("c", "model")))
        self.tell(ev.AppDeclared(0.0, ev.AppSpec("a", "verify", "c")))

    def tell(self, event, *commands):
        self.lines.append(line(event, commands) + "\n")
        return self

    def submit(self, time, items=10):
        return self.tell(ev.ItemsSubmitted(time, "a", range(items)))

    def join(self, time, name="w", *commands):
        return self.tell(ev.WorkerJoined(time, ev.WorkerSpec(name)), *commands)

    def load(self, begin, end, name="w", then=()):
        self.tell(ev.Tick(begin), cmd.Load(name, "c"))
        return self.tell(ev.ContextReady(end, name, "c", end - begin), *then)

    def call(self, begin, end, name="w", items=range(10), seconds=None):
        self.attempts += 1
        self.tell(ev.Tick(begin), cmd.Run(name, self.attempts, "a", "c", items))
        finished = ev.BatchFinished(end, name, self.attempts, end - begin if seconds is None else seconds)
        return self.tell(finished, cmd.Deliver(self.attempts, items))

    def evicted(self, begin, end, name="w", items=range(10)):
        self.attempts += 1
        self.tell(ev.Tick(begin), cmd.Run(name, self.attempts, "a", "c", items))
        return self.tell(ev.WorkerLost(end, name, evicted=True))

    def end(self, time):
        return self.tell(ev.Tick(time))


def loading_again_and_again():
    run = Run().submit(0.0)
    for n in range(4):
        run.join(20.0 * n, f"w{n}").load(20.0 * n, 20.0 * n + 8, f"w{n}").evicted(20.0 * n + 8, 20.0 * n + 14, f"w{n}")
    return run.join(80.0).load(80.0, 88.0).call(88.0, 92.0)


def evictions():
    run = Run().submit(0.0)
    for n in range(3):
        run.join(50.0 * n, f"w{n}").load(50.0 * n, 50.0 * n + 1, f"w{n}").evicted(50.0 * n + 1, 50.0 * n + 40, f"w{n}")
    return run.join(150.0).load(150.0, 151.0).call(151.0, 190.0)


RUNS = {
    "useful": (
        Run().submit(0.0).join(0.0).load(0.0, 5.0).call(5.0, 100.0),
        "95 % of the time was useful; most of the rest, 5.0 %, went into loading, since a load took 5.00 s, and the "
        "run was over after 100 s.",
    ),
    "useful alone": (Run().submit(0.0).join(0.0).call(0.0, 100.0), "100 % of the time was useful."),
    "loading": (
        loading_again_and_again(),
        "59 % of the time went into loading, since a worker lived 13.6 s on average, and a load took 8.00 s; 5.9 % was "
        "useful.",
    ),
    "loading in a short run": (
        Run().submit(0.0).join(0.0).load(0.0, 9.0).call(9.0, 10.0),
        "90 % of the time went into loading, since a load took 9.00 s, and the run was over after 10.0 s; 10 % was "
        "useful.",
    ),
    "loading that never ends": (
        Run().submit(0.0).join(0.0, "w", cmd.Load("w", "c")).end(60.0),
        "100 % of the time went into loading, since no context was built to its end; nothing was useful.",
    ),
    "evictions": (
        evictions(),
        "73 % of the time went into calls that evictions ended, since a worker lived 40.0 s on average, and a call "
        "took 39.0 s: smaller batches lose less; 24 % was useful.",
    ),
    "idle after the last answer": (
        Run().submit(0.0).join(0.0).join(0.0, "w2").call(0.0, 20.0).end(100.0),
        "90 % of the time went into waiting, since workers stayed after the last answer, for 160 s together; 10 % was "
        "useful.",
    ),
    "idle before the first item": (
        Run().join(0.0).submit(90.0).call(90.0, 100.0),
        "90 % of the time went into waiting, since workers were there before the first item was, for 90.0 s together; "
        "10 % was useful.",
    ),
    "idle in between": (
        Run().submit(0.0).join(0.0).call(0.0, 5.0, items=range(5)).call(95.0, 100.0, items=range(5, 10)),
        "90 % of the time went into waiting, since too few items were there for all workers at a time; 10 % was "
        "useful.",
    ),
    "sending": (
        Run().submit(0.0).join(0.0).call(0.0, 10.0, seconds=0.5),
        "95 % of the time went into sending calls and answers, since a call took only 500 ms: larger batches are sent "
        "more rarely; 5.0 % was useful.",
    ),
    "nothing submitted": (
        Run().join(0.0).end(10.0),
        "Nothing was submitted: 100 % of the time went into waiting.",
    ),
    "no worker": (Run().submit(0.0).end(10.0), "No worker joined, so that nothing could run."),
    "nothing at all": (Run(), "No worker joined."),
}


@pytest.mark.parametrize(("run", "said"), RUNS.values(), ids=RUNS)
def test_what_the_time_went_into_and_why(run, said):
    assert told(run.lines) == said


def test_a_recorded_run_and_one_of_three_tiers():
    with EVENTS.open() as lines:
        assert told(lines) == (
            "60 % of the time was useful; most of the rest, 37 %, went into loading, since a worker lived 1.47 s on "
            "average, and a load took 645 ms."
        )
    lines = []
    Played(lines, 40_000).play()
    assert told(lines).startswith("87 % of the time was useful; most of the rest, 12 %, went into loading, since a ")


def test_a_summary_without_its_history_gives_no_reason():
    history = read_history(loading_again_and_again().lines)
    assert conclusion(summarise(history)) == "59 % of the time went into loading; 5.9 % was useful."


def test_presence_is_told_before_during_and_after():
    history = read_history(Run().join(0.0).join(5.0, "w2").tell(ev.WorkerLost(30.0, "w2")).end(40.0).lines)
    assert presence_around(history, 10.0, 20.0) == (15.0, 20.0, 30.0)
