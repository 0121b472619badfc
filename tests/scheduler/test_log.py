"""The event log: written, read back, torn, replayed."""

import dataclasses
import json

import pytest

from ctxflow import ContextExecutor, batch_app, context, context_app
from ctxflow.policies.registry import make
from ctxflow.scheduler import Limits, Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import line, read, replay

FAILURE = ev.Failure("exception", "ValueError", 'quotes " and \n and ü', traceback="t", output="o", worker="w")
EVENTS = [
    ev.TierOffered(0.0, ev.TierSpec("local", 0, 4, price=0.5)),
    ev.ContextDeclared(0.0, ev.ContextSpec("c", "model", files=True, gpus=1, memory=10)),
    ev.AppDeclared(0.1, ev.AppSpec("a", "verify", context="c", deadline=5.0, priority=2)),
    ev.ItemsSubmitted(0.2, "a", range(5)),
    ev.ItemsCancelled(0.3, [4, 1, 2], stop=True),
    ev.ItemsCancelled(0.3, []),
    ev.WorkerJoined(0.4, ev.WorkerSpec("w", topology={"gpus": [1, 2]}, gpu_model="A10")),
    ev.ContextStaged(0.5, "w", "c"),
    ev.ContextReady(0.6, "w", "c", 0.25, memory=5),
    ev.ContextFailed(0.7, "w", "c", FAILURE),
    ev.ContextUnloaded(0.8, "w", "c"),
    ev.BatchFinished(0.9, "w", 1, 0.125, results=object()),
    ev.BatchFailed(1.0, "w", 2, FAILURE, lost_context=True, exception=object()),
    ev.BatchFailed(1.0, "w", 2, FAILURE, at=7),
    ev.ItemsFinished(1.0, "w", 3, first=2, count=5, results=object()),
    ev.BatchEnded(1.0, "w", 3, 0.5),
    ev.EvictionNotice(1.1, "w"),
    ev.JobStarted(1.2, "local", "7.0", waited=12.5),
    ev.JobEvicted(1.2, "local", "7.0", "preempted by another's job"),
    ev.JobHeld(1.2, "local", "7.0", 'the disk is "full"'),
    ev.WorkerLost(1.2, "w", evicted=True),
    ev.Tick(1e-9),
]


def plain(event):
    """An event with its items as a list, for comparison."""
    return dataclasses.replace(event, items=list(event.items)) if hasattr(event, "items") else event


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_come_back(event):
    written = line(event, [cmd.Bury([1, 2], FAILURE, "c"), cmd.Deliver(1, range(3), [0])])
    assert "\n" not in written
    [(back, commands)] = read([written + "\n"])
    assert plain(back) == plain(event)
    assert [command["is"] for command in commands] == ["Bury", "Deliver"]


def test_every_event_is_tried_here():
    assert {type(event).__name__ for event in EVENTS} == {kind.__name__ for kind in ev.Event.__subclasses__()}


def test_a_torn_last_line_is_left_out_and_another_is_named():
    lines = [line(event, []) + "\n" for event in EVENTS]
    assert len(list(read([*lines, lines[0][:20]]))) == len(EVENTS)
    assert len(list(read([*lines[:-1], lines[-1][:-1]]))) == len(EVENTS) - 1
    with pytest.raises(ValueError, match=r"line 2 is no line of an event log .* is this the run's events.jsonl"):
        list(read([lines[0], "{}\n", lines[1]]))
    with pytest.raises(ValueError, match=r"^line 3 is no line"):
        list(read([*lines[:2], "{}\n"]))
    assert list(read([])) == []


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The log of a real run with failures, cancellations, evictions and several contexts."""
    folder = tmp_path_factory.mktemp("run")
    executor = ContextExecutor(
        workers=2, routing="round-robin", batching={"policy": "fixed", "size": 3}, limits=Limits(crashes=1)
    )
    executor.run_dir = str(folder)

    @context
    def base(value):
        if value < 0:
            raise RuntimeError("cannot build this one")
        return value

    @batch_app(base(10))
    def add(base, numbers):
        if 5 in numbers:
            raise ValueError("five")
        return [base + n for n in numbers]

    with executor:
        results = list(add.map(range(20), on_error="return"))
        assert isinstance(results[5], ValueError) and results[6] == 16
        executor.engine.evict()
        assert list(add.using(base(20), priority=1).map([1, 2])) == [21, 22]
        with pytest.raises(Exception, match="cannot build this one"):
            context_app(base(-1))(abs)().result()
        results = add.map(range(10, 500))
        assert next(results) == 20
        results.close()
    return folder / "ctxflow" / "events.jsonl"


def scheduler(routing="round-robin", size=3):
    policies = Policies(
        make("routing", routing),
        make("batching", {"policy": "fixed", "size": size}),
        make("placement", "everywhere"),
        make("preemption", "none"),
        make("scaling", "fixed"),
    )
    return Scheduler(policies, Limits(crashes=1))


def test_a_real_run_replayed_takes_the_same_decisions(recorded):
    with recorded.open() as lines:
        fresh = scheduler()
        count = replay(fresh, lines)
    kinds = {json.loads(text)["event"]["is"] for text in recorded.read_text().splitlines()}
    assert {"BatchFailed", "WorkerLost", "ContextFailed", "ItemsCancelled", "BatchFinished"} <= kinds
    assert count == len(recorded.read_text().splitlines()) > 30
    fresh.validate()
    assert fresh.state.counters.evicted == 1 and not fresh.state.open


def test_other_policies_are_noticed(recorded):
    with recorded.open() as lines, pytest.raises(ValueError, match=r"event \d+ \(\w+\) led to .* but now leads to"):
        replay(scheduler(size=4), lines)
