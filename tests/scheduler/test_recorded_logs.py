"""Logs that earlier revisions wrote lead to the same decisions now; those of another version are refused by it.

recorded/NAME-REVISION.jsonl.gz: a run on embedded workers with evictions, failures, cancellations and sessions; and
simulated ones on machines that are taken away, under several policies, sessions among them. Of those with the earliest
revision the first line says today's version: their decisions are the same, while those of plans are not. To record
some of them anew: record_logs.py.
"""

import gzip
import json
from pathlib import Path

import pytest

from ctxflow.scheduler import Policies, Scheduler
from ctxflow.scheduler.log import LOG_VERSION, first_line, read_setup, replay, replayed

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.jsonl.gz"))


def lines(path):
    with gzip.open(path, "rt") as file:
        return file.readlines()


def kinds(path):
    return {json.loads(text)["event"]["is"] for text in lines(path)[1:]}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_a_recorded_log_leads_to_the_same_decisions(path):
    text = lines(path)
    count, last = 0, None
    for _, state in replayed(text):
        count, last = count + 1, state
    assert count == len(text) - 1 > 200
    assert last.counters.done > 50


def test_what_the_recorded_logs_have():
    found = set.union(*map(kinds, RECORDED))
    assert found >= {
        "AppDeclared",
        "BatchFailed",
        "BatchFinished",
        "ContextFailed",
        "ContextReady",
        "ContextUnloaded",
        "ItemsCancelled",
        "JobEvicted",
        "PlanMade",
        "SessionClosed",
        "SessionSuspended",
        "StateArrived",
        "StepFinished",
        "WorkerLost",
    }


@pytest.mark.parametrize("given", [False, True])
def test_a_log_of_another_version_is_refused_by_it(given):
    first, *rest = lines(RECORDED[0])
    run = json.loads(first)["run"]
    other = json.dumps({"run": {"ctxflow": "0.0.7", "log": 0, "policies": run["policies"], "limits": {"bears": 3}}})
    expected = (
        rf"^this log is of version 0, written by ctxflow 0\.0\.7, and ctxflow \S+ replays version {LOG_VERSION} alone: "
        "replay it with the ctxflow that wrote it$"
    )
    scheduler = Scheduler(Policies.chosen({})) if given else None
    with pytest.raises(ValueError, match=expected):
        replay([other.replace(": ", ":", 1) + "\n", *rest], scheduler)


def test_a_log_says_its_version():
    first = first_line(Scheduler(Policies.chosen({})))
    assert json.loads(first)["run"]["log"] == LOG_VERSION
    assert read_setup(first).policies
    with pytest.raises(ValueError, match=r"^this log is of version 1, "):  # The first one did not say it.
        read_setup(first.replace(f',"log":{LOG_VERSION}', ""))
