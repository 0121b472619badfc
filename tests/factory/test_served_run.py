"""What one run gets of a tier: no more than it is granted, and first what an earlier factory left."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from ctxflow.factory import JobChange, ProviderError, WorkerJob
from ctxflow.factory.exchange import Wishes
from ctxflow.factory.limits import SpendingMeter, Spent
from ctxflow.factory.provider import FoundJob, PoolSurvey
from ctxflow.factory.served_run import GrantedProvider, ServedRun

JOB = WorkerJob("a10", ["true"])


class Queue:
    """A batch system in memory: its queue outlives those who ask."""

    def __init__(self, *found: FoundJob) -> None:
        self.queries = 0
        self.jobs = {job.job: job for job in found}
        self.news: list[JobChange] = []
        self.mine: list[str] = []
        self.down = False

    def start(self, directory):
        pass

    def submit(self, job, count):
        new = [f"9.{len(self.mine) + number}" for number in range(count)]
        self.jobs.update((name, FoundJob(name, "abc", "queued")) for name in new)
        self.mine += new
        return new

    def remove(self, jobs):
        for job in jobs:
            if job in self.mine:
                self.jobs.pop(job, None)
                self.news.append(JobChange(job, "ended", "it was removed"))

    def changes(self):
        news, self.news = self.news, []
        return news

    def last_words(self, job):
        return "words"

    def survey(self, job):
        return PoolSurvey(machines=3)

    def find(self):
        self.queries += 1
        if self.down:
            raise ProviderError("the queue does not answer")
        return list(self.jobs.values())

    def discard(self, jobs):
        for job in jobs:
            del self.jobs[job]

    def stop(self):
        self.remove(list(self.mine))


class Granted:
    """A granted provider, and the time that it sees."""

    def __init__(self, queue: Queue, joined=(), behind=0.0) -> None:
        self.now = 100.0
        self.left: list[tuple[int, int]] = []
        self.lock = threading.Lock()
        self.provider = GrantedProvider(
            queue,
            "abc",
            joined,
            self.lock,
            lambda *left: self.left.append(left),
            behind=lambda: behind,
            clock=lambda: self.now,
        )

    def held(self) -> int:
        with self.lock:
            return self.provider.held()


def test_no_more_than_is_allowed():
    queue = Queue()
    granted = Granted(queue)
    provider = granted.provider
    provider.allowed = 3
    assert provider.submit(JOB, 5) == []  # What an earlier factory left is not known yet.
    assert provider.changes() == [] and granted.left == [(0, 0)]
    jobs = provider.submit(JOB, 5)
    assert (len(jobs), granted.held()) == (3, 3)
    assert provider.submit(JOB, 5) == []
    provider.remove(jobs[:1])
    assert granted.held() == 2
    assert len(provider.submit(JOB, 5)) == 1
    provider.allowed = 1
    assert provider.submit(JOB, 5) == []
    queue.news.append(JobChange(jobs[1], "ended"))
    assert JobChange(jobs[1], "ended") in provider.changes()
    assert granted.held() == 2
    assert (provider.last_words("9.0"), provider.survey(JOB).machines, provider.queries) == ("words", 3, 1)
    provider.stop()
    assert (granted.held(), queue.jobs) == (0, {})


def test_what_runs_is_taken_over_and_what_waits_is_asked_for_anew():
    others = FoundJob("2.0", "another run", "running", "n1")
    queue = Queue(
        FoundJob("1.0", "abc", "running", "n1"),
        FoundJob("1.1", "abc", "queued"),
        FoundJob("1.2", "abc", "held"),
        FoundJob("1.3", "abc", "running", "n2"),
        others,
    )
    granted = Granted(queue)
    granted.provider.allowed = 4
    granted.provider.changes()
    assert granted.left == [(2, 2)] and set(queue.jobs) == {"1.0", "1.3", "2.0"}
    assert granted.held() == 2  # They count before anybody has asked for them.
    jobs = granted.provider.submit(JOB, 4)
    assert jobs[:2] == ["1.0", "1.3"] and len(jobs) == 4 and granted.held() == 4
    told = granted.provider.changes()
    assert told == [JobChange("1.0", "running"), JobChange("1.3", "running")]
    assert [granted.provider.is_old_news(told[0]) for _ in range(2)] == [True, False]  # Only once.
    granted.provider.remove(["1.0"])
    assert granted.provider.changes() == [JobChange("1.0", "ended", "it was removed")]
    assert "1.0" not in queue.jobs
    granted.provider.stop()
    assert list(queue.jobs.values()) == [others]


def test_what_becomes_of_those_that_were_taken_over_is_asked_now_and_then():
    queue = Queue(*(FoundJob(f"1.{number}", "abc", "running", "n1") for number in range(3)))
    granted = Granted(queue)
    granted.provider.changes()
    granted.provider.allowed = 3
    granted.provider.submit(JOB, 3)
    granted.provider.changes()
    del queue.jobs["1.0"]
    queue.jobs["1.1"] = FoundJob("1.1", "abc", "queued")
    asked = queue.queries
    assert granted.provider.changes() == [] and queue.queries == asked  # Not each time.
    granted.now += 60
    told = [(change.job, change.state) for change in granted.provider.changes()]
    assert told == [("1.0", "ended"), ("1.1", "evicted")]
    assert granted.held() == 2
    queue.jobs["1.1"] = FoundJob("1.1", "abc", "running", "n4")
    granted.now += 60
    assert granted.provider.changes() == [JobChange("1.1", "running", "", "n4")]


def test_what_was_taken_over_counts_for_the_time_in_which_there_was_no_factory():
    granted = Granted(Queue(FoundJob("1.0", "abc", "running", "n1")), behind=1800.0)
    granted.provider.allowed = 2
    granted.provider.changes()
    granted.provider.submit(JOB, 2)
    meter = SpendingMeter(gpus=2)
    for change in granted.provider.changes():
        meter.changed(change, now=0.0)
    assert meter.spent(now=1800.0) == Spent(2.0, 0.0)


def test_a_queue_that_does_not_answer_is_asked_again():
    queue = Queue(FoundJob("1.0", "abc", "running", "n1"))
    queue.down = True
    granted = Granted(queue)
    with pytest.raises(ProviderError):
        granted.provider.changes()
    assert not granted.provider.settled and granted.provider.submit(JOB, 1) == []
    queue.down = False
    granted.now += 60
    granted.provider.changes()
    assert granted.provider.settled and granted.left == [(1, 0)]


def test_the_runs_word_counts_where_the_queue_cannot_say():
    queue = Queue()
    granted = Granted(queue, joined=["local-7-1"])
    granted.provider.changes()
    granted.provider.allowed = 2
    assert granted.provider.submit(JOB, 2)[0] == "local-7-1"
    granted.now += 60
    granted.provider.changes()
    assert granted.held() == 2
    granted.provider.remove(["local-7-1"])
    assert granted.held() == 1


def test_only_jobs_of_its_own_are_kept_from_hosts():
    class Excluding(Queue):
        def exclude(self, jobs, hosts):
            asked.append((list(jobs), list(hosts)))
            return list(jobs)

    asked: list[tuple[list[str], list[str]]] = []
    provider = Granted(Excluding(FoundJob("1.0", "abc", "running", "n1"))).provider
    provider.allowed = 9
    provider.changes()
    [old, new] = provider.submit(JOB, 2)
    assert provider.exclude([old, new], ["n1"]) == [new]
    assert asked == [([new], ["n1"])]
    assert Granted(Queue()).provider.exclude(["9.0"], ["n1"]) is None


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({}, {"1": 0}, ["connected"]),
        ({}, {"1": 4}, ["connected", "joined"]),  # Also where this factory has just begun.
        ({"1": 0}, {"1": 4}, ["connected", "joined"]),
        ({"1": 4}, {"1": 4}, []),
        ({"1": 4}, {"1": 7}, ["disconnected", "connected", "joined"]),  # Another worker of the job.
        ({"1": 4}, {"1": 0}, ["disconnected", "connected"]),
        ({"1": 4}, {}, ["disconnected"]),
        ({"1": 0}, {}, ["disconnected"]),
    ],
)
def test_what_a_run_says_of_its_connections_is_passed_on(before, now, told):
    heard: list[str] = []

    class Acquirer:
        def __getattr__(self, name):
            return lambda tier, job: heard.append(name)

    run = ServedRun(None, Wishes("lab"), None, threading.Lock(), print, print)
    tier = SimpleNamespace(acquirer=Acquirer(), joined={})
    for joined in (before, now):
        heard.clear()
        run.wishes = Wishes("lab", joined={"a10": joined})
        run._connect("a10", tier)
    assert heard == told
    for state in ("evicted", "running", "held", "ended"):
        run._record(SimpleNamespace(running={}), JobChange("1", state))
    assert heard == told, "no news of a batch system has a say in it"
