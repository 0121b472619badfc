"""The history of real runs, against what the runs themselves counted."""

import json

import pytest
from observe_data import EVENTS

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.observe.history import read_history


@context()
def base():
    return 1


@batch_app(base(), batch_size=4)
def halve(one, items):
    return [10 // (item - 7) for item in items]


def test_a_run_with_a_dead_item_and_evictions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Where the run goes into ./runs.
    with ContextExecutor(workers=2) as executor:
        futures = [halve(item) for item in range(40)]
        futures[0].result()
        executor.engine.evict(None, 0.1)
        errors = [future.exception() for future in futures]
        status = executor.status()
    assert sum(error is not None for error in errors) == 1
    [log] = tmp_path.rglob("events.jsonl")
    with open(log) as file:
        history = read_history(file)
    items = history.items
    assert (items.submitted, items.done, items.dead) == (40, 39, 1)
    assert (items.open, items.cancelled) == (0, 0)
    assert items.run_again == status.retried_items
    assert (history.workers.joined, history.workers.evicted) == (status.workers_joined, status.evictions)
    assert history.workers.counts[-1][1] == status.workers
    [app] = history.apps.values()
    assert app.name == "halve"
    assert app.calls == app.call_seconds.count
    assert app.failed["exception"] >= 1
    assert app.items == 39  # Nobody's answer was lost, and none was given twice.
    [loads] = history.contexts.values()
    assert (loads.name, loads.failed) == ("base", 0)
    assert 1 <= loads.load_seconds.count <= status.loads


def test_a_recorded_run():
    with open(EVENTS) as file:
        history = read_history(file)
    assert (history.items.done, history.items.run_again) == (600, 50)
    assert (history.workers.joined, history.workers.lost, history.workers.evicted) == (22, 20, 20)
    assert history.peak_workers == 3
    assert 1 < history.mean_workers < 3
    assert history.tiers["local"].done.cumulated()[-1][1] == 600
    assert [evicted for _, evicted in history.losses] == [True] * 20
    times = [time for time, _ in history.workers.counts]
    assert times == sorted(times)


def test_a_log_that_ends_anywhere():
    text = EVENTS.read_text()
    done = 0
    for end in range(0, len(text), 997):
        history = read_history(text[:end].splitlines(keepends=True))
        assert history.items.done >= done
        done = history.items.done


def test_a_file_that_is_no_event_log():
    with pytest.raises(ValueError, match=r"line 2 is no line of an event log .* is this the run's events.jsonl\?"):
        read_history([EVENTS.read_text().splitlines(keepends=True)[0], "hello\n", "hello\n"])


def test_items_of_a_duplicate_count_once():
    def line(event, *commands):
        return json.dumps({"event": event, "commands": commands}) + "\n"

    def run(worker, attempt):
        return {"is": "Run", "worker": worker, "attempt": attempt, "app": "a", "context": "", "items": [[0, 3]]}

    def finished(worker, attempt, time):
        return {"is": "BatchFinished", "time": time, "worker": worker, "attempt": attempt, "seconds": 1.5}

    history = read_history(
        [
            line({"is": "ItemsSubmitted", "time": 0.0, "app": "a", "items": [[0, 3]]}, run("v", 1), run("w", 2)),
            line(finished("v", 1, 2.0), {"is": "Deliver", "attempt": 1, "items": [[0, 3]], "positions": None}),
            line(finished("w", 2, 3.0)),
            line({"is": "ItemsCancelled", "time": 3.0, "items": [[0, 3]], "stop": False}),
        ]
    )
    assert (history.items.done, history.items.run_again, history.items.cancelled, history.items.open) == (3, 3, 0, 0)
    assert history.apps["a"].calls == 2
