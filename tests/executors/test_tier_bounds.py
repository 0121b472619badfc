"""A live run with fewer workers than its site says: its factory has fewer now, or a limit is reached."""

import itertools
import json
import sys
import threading
import time
from pathlib import Path

import pytest

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.cli import main
from ctxflow.executors.contract import LimitReached
from ctxflow.executors.embedded import EmbeddedEngine
from ctxflow.executors.figures import TierBounds
from ctxflow.factory.limits import Spent, standing
from ctxflow.policies.registry import make
from ctxflow.scheduler import Policies, Scheduler
from ctxflow.scheduler import events as ev
from waiting import eventually, joined, looked


class BoundedEngine(EmbeddedEngine):
    """The embedded engine, bounded as one that acquires workers is."""

    def __init__(self, *words, **options):
        super().__init__(*words, **options)
        self.most, self.used = BOUNDS

    def maxima(self):
        return dict(self.most)

    def limits(self):
        return standing("run", Spent(self.used[0]), {"gpu_hours": 1.0})


BOUNDS: tuple[dict[str, int], list[float]] = ({}, [0.0])


@pytest.fixture(autouse=True)
def bounded(monkeypatch):
    """What bounds a run, to be set: each tier's maximum, and what is used of the limit."""
    BOUNDS[0].clear()
    BOUNDS[1][0] = 0.0
    monkeypatch.setattr("ctxflow.executors.embedded.EmbeddedEngine", BoundedEngine)
    return BOUNDS


@pytest.fixture
def limited(bounded):
    return bounded[1]


@context()
def place():
    return "there"


@batch_app(place(), batch_size=1)
def slow(_, items):
    time.sleep(0.05)
    return items


def test_the_least_of_all_that_bound_a_tier_counts_and_what_was_offered_comes_back():
    families = {"routing": "context-affinity", "batching": "fixed", "placement": "everywhere", "scaling": "fixed"}
    policies = {family: make(family, name) for family, name in families.items()}
    scheduler = Scheduler(Policies(preemption=make("preemption", "none"), **policies))
    scheduler.handle(ev.TierOffered(0.0, ev.TierSpec("gpu", minimum=2, maximum=8)))
    bounds = TierBounds()

    def told(*words, **options):
        found = bounds.events(scheduler.state, 1.0, *words, **options)
        for event in found:
            scheduler.handle(event)
        return [(event.tier.minimum, event.tier.maximum) for event in found]

    assert told((), {}) == []
    assert told((), {"gpu": 3}) == [(2, 3)]
    assert told((), {"gpu": 3}) == []
    assert told((), {"gpu": 1}, none=True) == [(0, 0)]
    assert told(["gpu"], {"gpu": 9}) == []
    assert told((), {"gpu": 9}) == [(2, 8)]  # The factory's word gives nobody more than the site.


def test_a_lowered_maximum_drains_a_live_run_and_no_row_is_lost(tmp_path, monkeypatch, bounded):
    monkeypatch.chdir(tmp_path)
    maxima, _ = bounded
    with ContextExecutor(workers=2) as executor:
        results: list[int] = []
        enough = threading.Event()
        items = itertools.takewhile(lambda _: not enough.is_set(), itertools.count())
        reader = threading.Thread(target=lambda: results.extend(slow.map(items, window=20)))
        reader.start()
        eventually(lambda: executor.status().workers == 2 and len(results) > 5)
        maxima["local"] = 1
        eventually(lambda: executor.status().workers == 1)
        assert reader.is_alive()
        maxima["local"] = 2
        eventually(lambda: executor.status().workers == 2)
        enough.set()
        joined(reader)
        assert results == list(range(executor.status().items_done))
        assert executor.status().items_dead == executor.status().crashes == 0


def test_a_limit_that_is_reached_ends_a_run_when_its_workers_have_ended_what_they_ran(
    tmp_path, monkeypatch, limited, caplog
):
    monkeypatch.chdir(tmp_path)
    with ContextExecutor(workers=2) as executor:
        assert list(slow.map(range(4))) == [0, 1, 2, 3]
        limited[0] = 1.25
        eventually(lambda: executor.status().workers == 0)
        assert executor.status().limits[0]["used"] == 1.25
        with pytest.raises(LimitReached, match=r"gpu_hours_per_run = 1, is reached: 1\.25 GPU-hours"):
            list(slow.map(range(50)))
    assert len([each for each in caplog.records if "no worker is asked for" in each.message]) == 1


def test_work_that_was_answered_before_its_limit_is_done(tmp_path, monkeypatch, limited):
    monkeypatch.chdir(tmp_path)
    with ContextExecutor(workers=1) as executor:
        assert list(slow.map(range(2))) == [0, 1]
        limited[0] = 2.0
        eventually(lambda: executor.status().workers == 0)
        looked(executor.run, 1)  # A tick later, nobody waits for anything.
        limited[0] = 0.5  # A site file that was read again.
        looked(executor.run, 1)
        assert list(slow.map(range(3))) == [0, 1, 2]


def test_a_batch_whose_limit_is_reached_has_an_exit_status_of_its_own_and_goes_on(
    tmp_path, monkeypatch, limited, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("n\n" + "".join(f"{n}\n" for n in range(120)))
    Path("work.py").write_text(
        "import os, time\n\ndef one(n):\n    time.sleep(0.0 if os.path.exists('limited') else 0.25)\n    return n\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def call():
        words = "ctxflow batch rows.csv -o out.jsonl --function work:one --column n --workers 2 --batch-size 1 --quiet"
        monkeypatch.setattr(sys, "argv", words.split())
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    def reach():
        eventually(lambda: Path("out.jsonl").exists() and Path("out.jsonl").read_text().count("\n") > 5)
        limited[0] = 1.0

    reaching = threading.Thread(target=reach)
    reaching.start()
    assert call() == 4
    reaching.join()
    said = capsys.readouterr().err
    assert "gpu_hours_per_run" in said and "call the same again" in said
    assert 5 < Path("out.jsonl").read_text().count("\n") < 120
    limited[0] = 0.0
    Path("limited").touch()
    assert call() == 0
    lines = Path("out.jsonl").read_text().splitlines()
    assert sorted(int(json.loads(line)["result"]) for line in lines) == list(range(120))
