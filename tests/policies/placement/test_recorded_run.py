"""A run of the testbed (tests/cluster/test_placement.py) played again from its log: the same plans, and their effect.

To record it anew, where other decisions are wanted: run that test with --basetemp=FOLDER, and gzip -9n the events.jsonl
that it leaves there.
"""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest
from placement_run import moments, placed, stood_in_vain

from ctxflow.observe.history_reader import read_history
from ctxflow.observe.run_report import tables
from ctxflow.scheduler.log import read_setup, replay

LOG = Path(__file__).parent / "data" / "testbed_run.jsonl.gz"
CHANGE = 26.7  # Seconds on the run's clock.
PERIOD = 12.0


@pytest.fixture(scope="module")
def lines():
    with gzip.open(LOG, "rt") as file:
        return list(file)


def test_a_replay_makes_the_same_plans(lines):
    assert read_setup(lines[0]).policies["placement"]["policy"] == "agh"
    recorded = [
        (record["event"]["time"], command["holders"])
        for record in map(json.loads, lines[1:])
        for command in record["commands"]
        if command["is"] == "Place"
    ]
    assert replay(lines) == len(lines) - 1
    found = moments(lines)
    planned = [(b.time, b.plan) for a, b in itertools.pairwise(found) if a.plan != b.plan]
    assert [time for time, _ in planned] == [time for time, _ in recorded] and len(recorded) >= 3
    assert [sum(plan.holders.values()) for _, plan in planned] == [
        sum(count for *_, count in holders) for _, holders in recorded
    ]


def test_calls_were_answered_while_plans_were_made(lines):
    """Each plan was asked for at one event, and was there at a later one: others came between."""
    events = list(map(json.loads, lines[1:]))
    asked = [n for n, each in enumerate(events) if any(command["is"] == "MakePlan" for command in each["commands"])]
    there = [n for n, each in enumerate(events) if each["event"]["is"] == "PlanMade"]
    assert len(asked) == len(there) >= 3 and all(events[n]["event"]["failure"] is None for n in there)
    assert all(begun < made for begun, made in zip(asked, there, strict=True))
    assert any(made > begun + 1 for begun, made in zip(asked, there, strict=True))


def test_a_plan_that_was_other_than_recorded_is_told(lines):
    rarely = lines[0].replace('"period":12', '"period":40')
    assert rarely != lines[0]
    with pytest.raises(ValueError, match="but now leads to"):
        replay([rarely, *lines[1:]])


def test_workers_and_contexts_were_as_planned_before_and_after_the_change(lines):
    found = moments(lines)
    before, after = placed(found, 0.0, CHANGE), placed(found, CHANGE, CHANGE + 2 * PERIOD)
    assert before.plan != after.plan and before.workers != after.workers
    assert before.held == {("small", "single"): 3, ("large", "pair"): 1}
    assert after.held == {("small", "single"): 1, ("large", "pair"): 2}
    assert stood_in_vain(found, PERIOD) == []


def test_the_report_tells_the_plan_that_holds(lines):
    history = read_history(lines)
    assert len(history.plans) == 6
    [(heads, rows)] = [table for table in tables(history) if table[0][0] == "Planned"]
    assert heads[:2] == ["Planned", "workers"] and sorted(heads[2:]) == ["large", "small"]
    by_tier = {row[0]: dict(zip(heads[1:], row[1:], strict=True)) for row in rows if len(row) == len(heads)}
    assert by_tier["single"] == {"workers": "0 to 1", "small": "1", "large": "-"}
    assert by_tier["pair"] == {"workers": "0 to 1", "small": "-", "large": "1"}
    assert "the 6. placement" in rows[-1][0]
