"""Workers that are gone, and their jobs: with a real provider, on this machine."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctxflow.executors.taskvine.engine import TaskVineEngine
from ctxflow.executors.taskvine.vine_workers import Losses, VineWorker
from ctxflow.factory import JobChange, LocalProvider, WorkerJob
from ctxflow.factory.acquirer import Acquirer
from ctxflow.factory.provider import JobState
from ctxflow.host.messages import WorkerFacts
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier
from waiting import patience


class Jobs:
    """One job that is held, and what is heard of it and its successors."""

    def __init__(self, directory: Path) -> None:
        self._news: queue.SimpleQueue[JobChange] = queue.SimpleQueue()
        job = WorkerJob("any", ["sleep", "1000"], memory=10**7, disk=10**7)
        self.acquirer = Acquirer({"any": (LocalProvider(), job)}, str(directory), self._heard)
        self.acquirer.start()
        self.acquirer.hold("any", 1)

    def _heard(self) -> None:
        for _, change in self.acquirer.take():
            self._news.put(change)

    def next(self, state: str) -> str:
        """The next job of which that is heard."""
        while (change := self._news.get(timeout=patience())).state != state:
            pass
        return change.job


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path)
    yield jobs
    jobs.acquirer.stop()


def test_a_worker_that_is_gone_while_its_job_runs_on_is_replaced(jobs: Jobs) -> None:
    now = 0.0
    losses = Losses(jobs.acquirer, lambda: now)
    worker = VineWorker("w1", "here", "127.0.0.1:1", since=0.0, tier="any", job=jobs.next("running"), joined=True)
    losses.add(worker)
    assert losses.explained() == []
    now += losses.due()
    assert losses.explained() == [(worker, False)]
    assert jobs.next("running") != worker.job


def test_a_worker_whose_job_was_evicted_is_not_to_blame_and_keeps_it(jobs: Jobs) -> None:
    losses = Losses(jobs.acquirer, lambda: 1.0)
    worker = VineWorker("w1", "here", "127.0.0.1:1", since=0.0, tier="any", job=jobs.next("running"), joined=True)
    assert worker.job is not None
    losses.add(worker)
    jobs.acquirer.provider("any").evict(worker.job)  # type: ignore[attr-defined]
    losses.heard("any", JobChange(jobs.next("evicted"), "evicted"))
    assert losses.explained() == [(worker, True)]
    assert jobs.next("running") == worker.job


def test_a_batch_system_may_take_seconds_to_report_an_eviction(jobs: Jobs) -> None:
    """Measured: 0.8 s on a busy pool, and more for each second that the job's processes take to end."""
    now = 0.0
    losses = Losses(jobs.acquirer, lambda: now)
    worker = VineWorker("w1", "here", "127.0.0.1:1", since=0.0, tier="any", job=jobs.next("running"), joined=True)
    assert worker.job is not None
    losses.add(worker)
    now += 9.0
    assert losses.explained() == []
    losses.heard("any", JobChange(worker.job, "evicted"))
    assert losses.explained() == [(worker, True)]


def test_a_job_that_ends_after_its_eviction_was_evicted(jobs: Jobs) -> None:
    now = 1.0
    losses = Losses(jobs.acquirer, lambda: now)

    def loses(*states: JobState, resumed: bool = False) -> bool:
        for state in states:
            losses.heard("any", JobChange("7", state, resumed=resumed and state == "running"))
        losses.add(VineWorker("w1", "here", "127.0.0.1:1", since=0.0, tier="any", job="7", joined=True))
        [(_, evicted)] = losses.explained()
        return evicted

    assert loses("evicted", "ended")
    assert loses("evicted", "held", "ended")
    assert not loses("ended")
    assert not loses("evicted", "running", "ended")
    assert loses("evicted", "running"), "by another worker of the job, before this one was missed"
    assert not loses("evicted", "running", "ended", resumed=True)


def test_what_ends_a_worker_after_it_was_found_again_is_another_matter(jobs: Jobs) -> None:
    losses = Losses(jobs.acquirer, lambda: 1.0)
    for change in (JobChange("7", "evicted"), JobChange("7", "running", resumed=True)):
        losses.heard("any", change)
    losses.add(VineWorker("w1", "here", "127.0.0.1:1", since=0.0, tier="any", job="7", joined=True))
    assert losses.explained() == [], "it is not explained by what was no eviction"


def test_jobs_that_ended_without_their_workers_being_missed_are_not_kept_for_ever(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctxflow.executors.taskvine.vine_workers._MOST_TOLD", 10)
    losses = Losses(jobs.acquirer, lambda: 1.0)
    for number in range(100):
        losses.heard("any", JobChange(str(number), "ended"))
    assert len(losses._told) == 10 and ("any", "99") in losses._told


def test_a_worker_joins_when_the_one_whose_place_it_takes_is_lost() -> None:
    """The other way round a tier has one too many for a moment, and the new one is given back."""
    given_up = VineWorker("w0", "here", "127.0.0.1:0", since=0.0, tier="gpu", job="0", joined=True)
    given_up.reason = "its context host has not answered for 21 s"
    news = [("gpu", JobChange("1", "ended", "given back")), ("gpu", JobChange("2", "running"))]
    played: dict[str, Any] = {"joined": lambda tier, job: None, "look": lambda: None, "pin_of": lambda tier, job: None}
    played["output"] = lambda tier, job: ""
    acquirer: Any = SimpleNamespace(take=lambda: [news.pop(0) for _ in range(len(news))], **played)
    engine: Any = TaskVineEngine.__new__(TaskVineEngine)
    engine._acquirer, engine._losses, engine._events = acquirer, Losses(acquirer, lambda: 1.0), []
    engine._stagings, engine._run = SimpleNamespace(joined=lambda worker: None), SimpleNamespace(clock=lambda: 1.0)
    engine._site = Site(tiers=(Tier(name="gpu"),))
    lost = VineWorker("w1", "here", "127.0.0.1:1", since=0.0, tier="gpu", job="1", joined=True)
    engine._losses.add(lost)
    engine._losses.add(given_up)
    assert engine._losses.explained() == [(given_up, False)], "nobody else is asked why, for its place is not kept"
    hello = WorkerFacts(host="here", ctxflow="", memory=1, gpus=1)
    engine._join(VineWorker("w2", "here", "127.0.0.1:2", since=1.0, tier="gpu", job="2"), hello)
    assert [type(event).__name__ for event in engine._events] == ["JobStarted", "WorkerLost", "WorkerJoined"]
