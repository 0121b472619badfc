"""The event log: written, read back, torn, replayed."""

import dataclasses
import json
import time

import pytest

from ctxflow import ContextExecutor, batch_app, context, context_app
from ctxflow.scheduler import Limits, Policies, Scheduler
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import first_line, line, read, read_setup, replay
from ctxflow.sites import load_site
from ctxflow.testing import Evictions
from waiting import eventually

FAILURE = ev.Failure("exception", "ValueError", 'quotes " and \n and ü', traceback="t", output="o", worker="w")
BAD_HOST = dataclasses.replace(FAILURE, host="node7", machine=True)
EVENTS = [
    ev.TierOffered(0.0, ev.TierSpec("local", 0, 4, price=0.5)),
    ev.HostDrained(0.0, "node7", drained=False),
    ev.RegionOffered(0.0, ev.RegionSpec("north", {"south": 0.04}, {"south": 2e6}, 0.1, ["local"], home=True)),
    ev.ContextDeclared(0.0, ev.ContextSpec("c", "model", files=True, gpus=1, memory=10)),
    ev.AppDeclared(0.1, ev.AppSpec("a", "verify", context="c", deadline=5.0, priority=2)),
    ev.Retired(0.1, ["b"], ["d"]),
    ev.ItemsSubmitted(0.2, "a", range(5)),
    ev.ItemsCancelled(0.3, [4, 1, 2], stop=True),
    ev.ItemsCancelled(0.3, []),
    ev.WorkerJoined(0.4, ev.WorkerSpec("w", topology={"gpus": [1, 2]}, gpu_model="A10")),
    ev.WorkerJoined(0.4, ev.WorkerSpec("w2", machine="m.pool", devices=("GPU-1", "GPU-2"), pin=3)),
    ev.MachinesFound(0.4, "local", {"m.pool": {"name": "m.pool", "nodes": [], "edges": []}}),
    ev.MachinesFound(0.4, "local", {}, reason="the pool does not answer"),
    ev.PlanMade(0.4, results=object()),
    ev.PlanMade(0.4, failure="ValueError: no such tier"),
    ev.ContextStaged(0.5, "w", "c"),
    ev.ContextReady(0.6, "w", "c", 0.25, memory=5),
    ev.ContextFailed(0.7, "w", "c", FAILURE),
    ev.ContextUnloaded(0.8, "w", "c"),
    ev.ContextReady(0.8, "w", "c", 0.25, memory=5, parks=True),
    ev.ContextParked(0.8, "w", "c", 0.01, memory=5, gpu_memory=0),
    ev.ContextWoken(0.8, "w", "c", 0.01),
    ev.ParkFailed(0.8, "w", "c", FAILURE),
    ev.BatchFinished(0.9, "w", 1, 0.125, results=object()),
    ev.BatchFinished(0.9, "w", 1, 0.125, tokens=70),
    ev.BatchFailed(1.0, "w", 2, FAILURE, lost_context=True, exception=object()),
    ev.BatchFailed(1.0, "w", 2, FAILURE, at=7),
    ev.BatchFailed(1.0, "w", 2, FAILURE, lost_context=True, beside=(3, 4, 9)),
    ev.BatchFailed(1.0, "w", 2, BAD_HOST),
    ev.ItemsFinished(1.0, "w", 3, first=2, count=5, results=object()),
    ev.BatchEnded(1.0, "w", 3, 0.5),
    ev.EvictionNotice(1.1, "w"),
    ev.JobStarted(1.2, "local", "7.0", waited=12.5),
    ev.JobEvicted(1.2, "local", "7.0", "preempted by another's job"),
    ev.JobHeld(1.2, "local", "7.0", 'the disk is "full"'),
    ev.JobFailed(1.2, "local", "7.0", "n1", "it ended with status 127"),
    ev.WorkerLost(1.2, "w", evicted=True),
    ev.SessionOpened(1.3, 1, "a", 64),
    ev.SessionPrompted(1.3, 1),
    ev.ChunksWanted(1.3, 1, 128),
    ev.SessionSuspended(1.3, 1),
    ev.SessionResumed(1.3, 1),
    ev.SessionClosed(1.3, 1),
    ev.StepFinished(1.3, "w", 4, 0.5, [{"made": 1, "frozen": ["ab12", 3]}, {"failure": {"kind": "exception"}}]),
    ev.StateArrived(1.3, "w", 1, 7),
    ev.StateLost(1.3, "w", 1, 7, "it is gone"),
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


def test_a_log_from_before_several_were_blamed_at_once_is_read():
    written = line(ev.BatchFailed(1.0, "w", 2, FAILURE), []).replace(',"beside":[]', "")
    [(back, _)] = read([written + "\n"])
    assert back == ev.BatchFailed(1.0, "w", 2, FAILURE)


def test_hosts_that_are_not_to_be_asked_are_in_the_log():
    [(_, [written])] = read([line(ev.Tick(1.0), [cmd.Exclude("a10", ("node7", "node9"))]) + "\n"])
    assert written == {"is": "Exclude", "tier": "a10", "hosts": ["node7", "node9"]}


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
    with pytest.raises(ValueError, match=r"^line 1 is no line"):
        list(read(['{"event": {"is": "Eclipse"}, "commands": []}\n']))
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

    @batch_app(base(10))
    def total(base, numbers):
        return "x" * len(numbers)

    with executor:
        assert {str(error)[:20] for error in total.map(range(3), on_error="return")} == {"total returned a str"}
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


def scheduler(size=3):
    chosen = {"routing": "round-robin", "batching": {"policy": "fixed", "size": size}}
    return Scheduler(Policies.chosen(chosen), Limits(crashes=1))


def test_a_real_run_replayed_takes_the_same_decisions(recorded):
    fresh = scheduler()
    with recorded.open() as lines:
        count = replay(lines, fresh)
    kinds = {event["is"] for event in events_of(recorded)}
    assert {"BatchFailed", "WorkerLost", "ContextFailed", "ItemsCancelled", "BatchFinished"} <= kinds
    failures = [event["failure"] for event in events_of(recorded) if event["is"] == "BatchFailed"]
    assert {failure["error"] for failure in failures if failure["kind"] == "contract"} == {"BatchContractError"}
    assert count == len(recorded.read_text().splitlines()) - 1 > 30
    fresh.validate()
    assert fresh.state.counters.evicted == 1 and not fresh.state.open
    with recorded.open() as lines:
        assert replay(lines) == count, "the log itself says how the run decides"


def events_of(path):
    return [json.loads(text)["event"] for text in path.read_text().splitlines()[1:]]


def test_other_policies_are_noticed(recorded):
    with recorded.open() as lines, pytest.raises(ValueError, match=r"event \d+ \(\w+\) led to .* but now leads to"):
        replay(lines, scheduler(size=4))


@pytest.mark.parametrize("batching", ["opportunistic", {"policy": "fixed", "size": 7, "share": False, "linger": 0.02}])
def test_a_run_with_evictions_several_apps_and_contexts_is_replayed_from_its_log_alone(batching, tmp_path):
    executor = ContextExecutor(load_site("local", slowdowns=(1, 2)), workers=3, batching=batching)
    executor.run_dir = str(tmp_path)

    @context
    def base(value):
        return value

    @batch_app(base(10))
    def add(base, numbers):
        time.sleep(0.002 * len(numbers))
        return [base + n for n in numbers]

    @context_app(base(30))
    def single(base, number):
        return base - number

    with executor, Evictions(executor, per_minute=200, seed=5, rejoin_seconds=0.1) as evictions:
        first = add.map(range(400))
        urgent = add.using(base(20), priority=2).map(range(300))
        alone = [single(n) for n in range(20)]
        assert (list(first), list(urgent)) == ([10 + n for n in range(400)], [20 + n for n in range(300)])
        assert [each.result() for each in alone] == [30 - n for n in range(20)]
        eventually(lambda: evictions.count)
        assert list(add.map(range(50))) == [10 + n for n in range(50)]
    log = tmp_path / "ctxflow" / "events.jsonl"
    with log.open() as lines:
        setup = read_setup(next(lines))
    assert setup.policies["batching"]["policy"] == (batching if isinstance(batching, str) else "fixed")
    with log.open() as lines:
        fresh = setup.scheduler()
        count = replay(lines, fresh)
    fresh.validate()
    assert count == len(events_of(log))
    assert "WorkerLost" in {event["is"] for event in events_of(log)}
    assert (fresh.state.counters.done, len(fresh.state.contexts)) == (770, 4)


def test_logs_that_do_not_say_how_the_run_decides(recorded):
    old = recorded.read_text().splitlines(keepends=True)[1:]
    with pytest.raises(ValueError, match="earlier version of ctxflow, which did not note the run's policies"):
        replay(old)
    assert replay(old, scheduler()) == len(old)
    own = Policies.chosen({"batching": Policies.chosen({}).batching})
    with pytest.raises(ValueError, match=r"batching policy was an object of ctxflow.policies.simple:Fixed"):
        replay([first_line(Scheduler(own)) + "\n"])
    strange = first_line(scheduler()).replace('"limits":{', '"limits":{"eclipses":3,')
    for text in ("{}\n", strange + "\n"):
        with pytest.raises(ValueError, match="line 1 is no line of an event log"):
            replay([text])


def test_a_log_from_before_failures_said_whether_it_was_the_machine_is_replayed(recorded):
    def without(record):
        if isinstance(record, dict):
            return {
                name: without(value)
                for name, value in record.items()
                if (record.get("is"), name) != ("Failure", "machine")
            }
        return list(map(without, record)) if isinstance(record, list) else record

    first, *rest = recorded.read_text().splitlines()
    events = [json.loads(text) for text in rest]
    old = [{"event": without(r["event"]), "commands": without(r["commands"])} for r in events]
    assert old != events
    assert replay([first + "\n", *(json.dumps(record) + "\n" for record in old)]) == len(events)


def test_limits_and_the_share_of_workers_are_in_the_first_line():
    made = Scheduler(Policies.chosen({}), Limits(losses=7), seed=3, start_when=0.5)
    back = read_setup(first_line(made)).scheduler()
    assert (back.state.limits, back.state.seed, back.state.start_when) == (Limits(losses=7), 3, 0.5)
