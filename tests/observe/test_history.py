"""The history of real runs, against what the runs themselves counted."""

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observe_data import EVENTS
from played_run import RELIEF, SQUEEZE, Played

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.observe.history import MOST, Causes, TierHistory, pattern
from ctxflow.observe.history_reader import read_history
from ctxflow.observe.run_report import Report, as_data, as_text
from ctxflow.observe.transfers import Transfers
from waiting import eventually


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
        eventually(lambda: executor.status().evictions)  # All may be answered before anybody hears that one went.
    status = executor.status()  # After the end: a worker in place of the evicted one may join until then.
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
    assert 1 <= loads.load_seconds.count == status.loads


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


# --- tiers


@pytest.fixture(scope="module")
def squeezed():
    """The history of a run on three tiers, and the state in which its scheduler ended."""
    lines = []
    state = Played(lines).play()
    return read_history(lines), state


def test_tiers_are_told_as_the_scheduler_counted_them(squeezed):
    history, state = squeezed
    assert history.tiers.keys() == state.tiers.keys()
    for name, tier in history.tiers.items():
        of = state.tiers[name]
        assert tier.lifetimes == list(of.lifetimes or [])
        assert (tier.jobs_started, tier.jobs_evicted, tier.held) == (of.jobs_started, of.jobs_evicted, of.held)
        assert (tier.waits.count, tier.unexplained, tier.returned) == (tier.jobs_started, 0, 0)
        there = sum(state.now - worker.joined for worker in state.workers.values() if worker.tier == name)
        assert tier.worker_seconds == pytest.approx(of.worker_seconds + there)
        assert tier.eviction_rate == pytest.approx(3600 * len(tier.lifetimes) / tier.worker_seconds)
        assert len(tier.lifetimes) + len(tier.stays) == tier.joined
    assert history.workers.held == {"the job's memory usage exceeded its request": 1}
    assert history.workers.items_done == sum(tier.items_done for tier in history.tiers.values()) == 40_000
    assert history.mean_workers == pytest.approx(history.workers.worker_seconds / state.now)


def test_the_squeeze_is_seen(squeezed):
    history, _ = squeezed
    counts = dict(history.workers.counts)
    assert history.peak_workers == 8
    assert counts[SQUEEZE] == 2
    assert all(count == 2 for time, count in counts.items() if SQUEEZE < time < RELIEF)
    assert max(count for time, count in counts.items() if time > RELIEF) == 8


def test_tiers_as_text_and_data(squeezed, tmp_path):
    history, _ = squeezed
    report = Report(tmp_path, history, Transfers(), [])
    text = as_text(report)
    for name, tier in history.tiers.items():
        [counts, ages] = [row.split() for row in text.splitlines() if row.startswith(name)]
        assert counts[1:6] == [f"{n:,}" for n in (tier.items_done, tier.joined, tier.evicted, 0, 0)]
        assert ages[1:3] == [str(tier.evicted), f"{tier.eviction_rate:.1f}"], "with as many decimals in each row"
        data = json.loads(json.dumps(as_data(report)))["history"]["tiers"][name]
        assert data["lifetimes"]["p50"] == pytest.approx(statistics.median(tier.lifetimes))
        assert data["evictions_per_worker_hour"] == pytest.approx(tier.eviction_rate)
        assert (data["queue_seconds"]["count"], data["held"]) == (tier.jobs_started, tier.held)
    assert "  held: the job's memory usage exceeded its request\n" in text


def test_why_workers_went():
    """Given back is not taken, lost without notice is not evicted, and lost after a notice is."""

    def line(kind, time, *commands, **fields):
        return json.dumps({"event": {"is": kind, "time": time, **fields}, "commands": commands}) + "\n"

    names = ("given back", "noticed", "evicted", "lost", "stays")
    joins = [line("WorkerJoined", 0.0, worker={"id": name, "host": "h", "tier": "t"}) for name in names]
    history = read_history([
        *joins,
        line("Tick", 1.0, {"is": "Release", "worker": "given back"}),
        line("EvictionNotice", 2.0, worker="noticed"),
        line("WorkerLost", 3.0, worker="given back", evicted=True),
        line("WorkerLost", 4.0, worker="noticed", evicted=False),
        line("WorkerLost", 5.0, worker="evicted", evicted=True),
        line("WorkerLost", 6.0, worker="lost", evicted=False),
        line("Tick", 9.0),
    ])  # fmt: skip
    tier = history.tiers["t"]
    assert (tier.lost, tier.returned, tier.evicted, tier.unexplained) == (4, 1, 2, 1)
    assert (tier.lifetimes, tier.stays) == ([4.0, 5.0], [3.0, 6.0, 9.0])
    assert tier.worker_seconds == 3 + 4 + 5 + 6 + 9
    assert history.losses == [(4.0, True), (5.0, True), (6.0, False)]
    assert "5 joined on 1 host, 2 evicted, 1 lost, 1 given back" in as_text(Report(Path(), history, Transfers(), []))


AGES = st.lists(st.floats(0.1, 1e4), max_size=30)


@given(AGES, AGES)
def test_the_share_evicted_by_an_age(lifetimes, stays):
    shares = [share for _, share in TierHistory(lifetimes=lifetimes, stays=stays).survival()]
    assert len(shares) == len(lifetimes)
    assert shares == sorted(shares)
    assert all(0 < share <= 1 for share in shares)
    if lifetimes:
        assert shares[-1] >= len(lifetimes) / (len(lifetimes) + len(stays)) - 1e-9, "who stays hides no eviction"
    if lifetimes and not stays:
        assert shares[-1] == pytest.approx(1.0)


def test_what_was_done_and_failed_on_each_host():
    def line(kind, time, *commands, **fields):
        return json.dumps({"event": {"is": kind, "time": time, **fields}, "commands": commands}) + "\n"

    def run(worker, attempt):
        return {
            "is": "Run",
            "worker": worker,
            "attempt": attempt,
            "app": "a",
            "context": "c",
            "items": [[attempt, attempt + 1]],
        }

    failure = {"kind": "exception", "error": "OSError", "message": "no disk", "traceback": "", "output": ""}
    quarantine = {"is": "Quarantine", "host": "bad", "worker": "", "devices": [], "cause": "it fails", "until": 60.0}
    workers = {"w1": "good", "w2": "good", "b1": "bad", "b2": "bad"}
    history = read_history([
        *(line("WorkerJoined", 0.0, worker={"id": name, "host": host, "tier": "t"}) for name, host in workers.items()),
        line("Tick", 1.0, run("w1", 1), run("b1", 2), run("b1", 3), run("w2", 4)),
        line("BatchFinished", 2.0, worker="w1", attempt=1, seconds=1.0),
        line("BatchFailed", 2.0, quarantine, worker="b1", attempt=2, failure=failure),
        line("BatchFailed", 2.5, worker="b1", attempt=3, failure={**failure, "kind": "cancelled"}),
        line("ContextFailed", 3.0, worker="b2", context="c", failure=failure),
        line("WorkerLost", 4.0, worker="b2", evicted=False),
        line("WorkerLost", 4.0, worker="w2", evicted=True),
        *[line("JobFailed", 4.5, tier="t", job=f"{n}.0", host="bad", reason="status 127") for n in range(2)],
        line("StepFinished", 5.0, worker="w1", attempt=9),
    ])  # fmt: skip
    report = Report(Path(), history, Transfers(), [])
    found = as_data(report)["history"]["by_host"]
    assert list(found["bad"].values()) == [2, 0, 1, 1, 1, 0, 1, 2]
    assert list(found["good"].values()) == [2, 2, 0, 0, 0, 1, 0, 0]
    rows = [row.split() for row in as_text(report).splitlines() if row.startswith(("bad ", "good "))]
    assert [row[0] for row in rows][:2] == ["bad", "good"], "those with trouble come first"
    assert rows[0][1:] == ["2", "2", "0", "1", "1", "1", "0", "1"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("row 3 of 10", "row 41 of 10"),
        ("no file /home/alice/a/b.csv: 3", "no file /scratch/7/c.csv: 4"),
        ("at 0x7f3a object 12", "at 0x9bb1 object 3"),
        ("took 1.5e-3 s", "took 12,000 s"),
        ("job 123e4567-e89b-12d3-a456-426614174000", "job 00000000-e89b-12d3-a456-426614174fff"),
        ("two\n  lines", "two lines"),
    ],
)
def test_numbers_paths_and_ids_do_not_tell_causes_apart(one, other):
    assert pattern(one) == pattern(other)


@pytest.mark.parametrize(("one", "other"), [("no text", "no label"), ("a/b", "a/c"), ("true and/or false", "true")])
def test_words_do(one, other):
    assert pattern(one) != pattern(other)


def failure(message, error="ValueError", kind="exception", **more):
    return {"kind": kind, "error": error, "message": message, **more}


def letter(code, message, **more):
    return json.dumps({"error": {"code": code, "message": message}, **more}).encode() + b"\n"


def test_a_dead_letter_joins_the_calls_that_it_failed_in():
    causes = Causes()
    causes.call(failure("row 1 is empty", traceback="Traceback: here", worker="w1", host="node3"))
    causes.call(failure("the library process died with signal 9", "", "crash", output="Killed"))
    causes.bury(failure("row 1 is empty"), 3)
    lines = [
        letter("ValueError", "row 2 is empty", place="a.csv, row 2 below the header"),
        letter("RemoteError", "ValueError: row 7 is empty"),
        letter("CallCrashed", "the library process died with signal 11"),
        letter("InvalidRow", "no JSON object", place="line 4", traceback=""),
        b"not JSON\n", b'{"error": null}\n', b"[]\n",
    ]  # fmt: skip
    causes.dead_letters(lines)
    found = {cause.error: cause for cause in causes.ordered()}
    assert set(found) == {"ValueError", "crash", "InvalidRow"}
    empty = found["ValueError"]
    assert (empty.calls, empty.items, empty.rows) == (1, 3, 2)
    assert (empty.where, empty.place) == ("worker w1 on node3", "a.csv, row 2 below the header")
    assert (empty.message, empty.traceback) == ("row 1 is empty", "Traceback: here")
    assert (found["crash"].rows, found["crash"].output) == (1, "Killed")
    assert causes.ordered()[0] is empty


def test_there_are_not_more_causes_than_can_be_held():
    causes = Causes()
    for n in range(2 * MOST):
        causes.call(failure(f"nothing like {chr(97 + n % 26) * (1 + n // 26)}"))
    assert len(causes.found) == MOST + 1
    assert sum(cause.calls for cause in causes.ordered()) == 2 * MOST
    assert causes.ordered()[0].error == "other causes"
