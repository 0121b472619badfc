"""Idle workers are given back in the time that `linger` says, on the run's own clock: its event log has each step."""

import json
import os
import time
from pathlib import Path

import pytest

from ctxflow import ContextExecutor, batch_app, context
from waiting import eventually


@context()
def place():
    return "there"


@batch_app(place(), batch_size=1)
def slow(_, folders):
    """Begins once both workers have something to do."""
    for folder in folders:
        Path(folder, str(os.getpid())).touch()
        eventually(lambda folder=folder: len(os.listdir(folder)) == 2)
    time.sleep(0.02)
    return folders


@pytest.mark.parametrize("linger", [0.0, 2.0])
def test_idle_workers_are_given_back_after_the_linger(tmp_path, monkeypatch, linger):
    monkeypatch.chdir(tmp_path)
    scaling = {"policy": "queue-proportional", "linger": linger, "calls_per_worker": 1, "batch_size": 1}
    with ContextExecutor(workers=2, scaling=scaling) as executor:
        (tmp_path / "both").mkdir()
        assert len(list(slow.map(["both"] * 20))) == 20
        eventually(lambda: not executor.status().workers, what="they are given back")
        log = Path(executor.calls.run.directory, "events.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    steps = [(each["event"], command["is"]) for each in lines for command in each["commands"]]
    finished = [each["event"]["time"] for each in lines if each["event"]["is"] == "BatchFinished"]
    released = [event["time"] for event, command in steps if command == "Release" and event["time"] > finished[0]]
    # Fewer workers are wanted from the last batch but one on, and none from the last on.
    assert len(released) == 2
    for ended, at in zip(finished[-2:], released, strict=True):
        assert at >= ended + linger
    # Ticks ask the policy, which counts from the first at which fewer were wanted.
    ticks = [each["event"]["time"] for each in lines if each["event"]["is"] == "Tick"]
    asked = next(tick for tick in ticks if tick >= finished[-1])
    assert max(released) <= next(tick for tick in ticks if tick >= asked + linger)
