"""What benchmarks/engines.py makes of an event log, and of what cannot be measured."""

import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import engine_runs

    yield engine_runs
    for name in ("engine_rounds", "engine_runs", "engines", "engine_workload", "common"):
        sys.modules.pop(name, None)


@pytest.fixture
def engines(runs):
    import engines

    return engines


def log_of(path, entries):
    lines = [{"run": {}}]
    for time, ended, given in entries:
        event = {"is": "BatchFinished" if ended else "Tick", "time": time, "attempt": ended}
        commands = [{"is": "Run", "attempt": attempt, "items": [[attempt, attempt + 1]]} for attempt in given]
        lines.append({"event": event, "commands": commands})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_run_lasts_from_the_first_rows_given_to_the_last_answered(runs, tmp_path):
    entries = [(1.0, 0, []), (10.0, 0, [1, 2, 3, 4]), (12.0, 1, [5]), (20.0, 2, []), (24.0, 3, [6]), (30.0, 6, [])]
    assert runs.timed(log_of(tmp_path / "log", entries)) == (20.0, 3)


def test_a_batch_that_reports_its_rows_in_parts_ends_with_the_last_of_them(runs, tmp_path):
    run = {"event": {"is": "Tick", "time": 1.0}, "commands": [{"is": "Run", "attempt": 1, "items": [[0, 9]]}]}
    part = {"event": {"is": "ItemsFinished", "time": 5.0, "attempt": 1}, "commands": []}
    end = {"event": {"is": "BatchEnded", "time": 5.0, "attempt": 1}, "commands": []}
    path = tmp_path / "log"
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"run": {}}, run, part, end]))
    assert runs.timed(path) == (4.0, 9)


def test_a_run_without_rows_is_told(runs, tmp_path):
    with pytest.raises(runs.Missing, match="has no rows that were run"):
        runs.timed(log_of(tmp_path / "log", [(1.0, 0, [])]))


def test_what_a_failed_command_said_is_the_reason(runs, tmp_path):
    place = runs.Place(sys.executable, {})
    with pytest.raises(runs.Missing, match="ended with 1: ValueError: no such engine"):
        place.run(["-c", "raise ValueError('no such engine')"], tmp_path)


def test_a_contender_that_is_missing_leaves_the_others(engines, runs):
    found = engines.Found()

    def fails():
        raise runs.Missing("It is not there.")

    contenders = {"ours": lambda: runs.Measured(2.0, 100), "theirs": lambda: runs.Measured(1.0, 100), "none": fails}
    samples = engines.take_turns(contenders, 3, "test", found)
    found.ratio("ours_vs_theirs", samples, "ours", "theirs")
    found.ratio("ours_vs_none", samples, "ours", "none")
    assert found.figures["ours_vs_theirs"].value == 0.5 and found.figures["ours_vs_theirs"].n == 3
    assert found.missing["ours_vs_none"] == "It is not there."
