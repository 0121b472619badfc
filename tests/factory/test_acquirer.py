"""The acquirer, with real processes on this machine, and with a batch system that can be made to fail."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ctxflow.causes import lasting
from ctxflow.factory import JobChange, LocalProvider, ProviderError, WorkerJob
from ctxflow.factory.acquirer import Acquirer
from ctxflow.factory.provider import PoolSurvey
from ctxflow.factory.tier_acquirer import AcquirerPatience
from waiting import eventually, happened, joined


class Moody(LocalProvider):
    """A batch system that may be down, hold jobs, or have no machine that will do."""

    def __init__(self) -> None:
        super().__init__(pause=0.05)
        self.down = self.silent = self.deaf = False
        self.grants: int | None = None
        self.calls: list[int] = []
        self.jobs: list[str] = []
        self.news: list[JobChange] = []
        self.found = PoolSurvey(machines=1, free=1)

    def submit(self, job: WorkerJob, count: int) -> list[str]:
        self.calls.append(count)
        if self.grants is not None:
            count = min(count, self.grants)
        if self.down:
            raise ProviderError("the schedd does not answer: see whether condor_q works on this machine")
        jobs = super().submit(job, count)
        self.jobs += jobs
        return jobs

    def remove(self, jobs: Sequence[str]) -> None:
        if self.down:
            raise ProviderError("the schedd does not answer: see whether condor_q works on this machine")
        super().remove(jobs)

    def changes(self) -> list[JobChange]:
        if self.silent:
            return []
        if self.deaf:
            raise ProviderError("condor_q does not answer")
        # The test appends to this very list meanwhile.
        return [*super().changes(), *(self.news.pop(0) for _ in range(len(self.news)))]

    def survey(self, job: WorkerJob) -> PoolSurvey:
        self.queries += 1
        return self.found


class Picky(Moody):
    """A batch system that can keep jobs from hosts; those named `fixed` it cannot change."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: list[tuple[str, ...]] = []
        self.told: list[tuple[list[str], tuple[str, ...]]] = []
        self.fixed: list[str] = []

    def submit(self, job: WorkerJob, count: int) -> list[str]:
        jobs = super().submit(job, count)
        self.submitted += [job.excluded] * len(jobs)
        return jobs

    def exclude(self, jobs: Sequence[str], hosts: Sequence[str]) -> list[str]:
        if self.down:
            raise ProviderError("the schedd does not answer: see whether condor_q works on this machine")
        self.told.append((list(jobs), tuple(hosts)))
        return [job for job in self.fixed if job in jobs]


class Bench:
    """An acquirer of one tier, and what it decided and heard."""

    def __init__(
        self, directory: Path, command: Sequence[str], told: bool = False, picky: bool = False, **options: Any
    ) -> None:
        self.provider = Picky() if picky else Moody()
        self.decisions: list[str] = []
        self.changes: list[JobChange] = []
        self._heard = threading.Lock()
        decided = self._decided if told else None  # Else what it decides is logged.
        job = WorkerJob("a10", command, memory=10**7, disk=10**7)
        self.acquirer = Acquirer({"a10": (self.provider, job)}, str(directory), self._changed, decided, **options)
        self.acquirer.start()

    def _changed(self) -> None:
        with self._heard:
            self.changes += [change for _, change in self.acquirer.take()]

    def _decided(self, tier: str, sentence: str) -> None:
        with self._heard:
            self.decisions.append(sentence)

    def until(self, condition: Callable[[], object]) -> None:
        def holds() -> bool:
            with self._heard:
                if condition():
                    return True
            self.acquirer.look()
            return False

        eventually(holds, what=lambda: f"what follows {self.decisions} {self.changes}")

    def reason(self) -> str:
        return lasting(self.acquirer.causes(), "a10")

    def states(self) -> list[str]:
        return [change.state for change in self.changes]

    def counts(self) -> dict[str, int]:
        return self.acquirer.counts()["a10"]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def bench(*command: str, **options: Any) -> Bench:
        made.append(Bench(tmp_path, command or ("sleep", "1000"), **options))
        return made[-1]

    yield bench
    for each in made:
        each.acquirer.stop()


def test_it_holds_what_is_wanted_and_says_what_it_does(make: Callable[..., Bench]) -> None:
    bench = make(told=True)
    bench.acquirer.hold("a10", 3)
    bench.until(lambda: bench.states().count("running") == 3)
    assert bench.decisions == ["asked for 3 workers: 3 wanted, 0 held"]
    assert all(change.waited is not None and change.waited >= 0 for change in bench.changes)
    for change in bench.changes:
        bench.acquirer.joined("a10", change.job)
    counts = bench.counts()
    assert (counts["joined"], counts["running"], counts["submitted"], counts["submissions"]) == (3, 0, 3, 1)
    bench.acquirer.hold("a10", 1)  # Those that run stay, until they are removed.
    bench.acquirer.remove("a10", bench.changes[0].job)
    bench.acquirer.remove("a10", bench.changes[1].job)
    bench.until(lambda: bench.states().count("ended") == 2)
    assert bench.counts()["joined"] == 1


def test_a_batch_system_that_is_down_is_told_once_and_tried_again(
    make: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    bench.provider.down = True
    bench.acquirer.hold("a10", 2)
    bench.until(lambda: len(bench.provider.calls) >= 2)
    assert bench.acquirer.failure is None
    bench.provider.down = False
    bench.until(lambda: bench.states().count("running") == 2)
    assert [record.message for record in caplog.records] == [
        "tier a10: the schedd does not answer: see whether condor_q works on this machine"
    ]


def test_a_job_on_hold_is_given_up_with_its_reason(
    make: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    bench.acquirer.hold("a10", 1)
    bench.until(lambda: bench.states() == ["running"])
    bench.provider.news.append(JobChange(bench.changes[0].job, "held", "memory usage exceeded request_memory"))
    bench.until(lambda: bench.states().count("running") == 2)
    (warning,) = [record.message for record in caplog.records]
    assert "was put on hold, and is given up: memory usage exceeded request_memory" in warning
    assert bench.counts()["holds"] == bench.counts()["removed"] == 1
    told = "jobs are put on hold, and given up: memory usage exceeded request_memory"
    assert told in bench.reason().replace(f" on {bench.changes[0].host}", ""), "until a worker joins"
    bench.acquirer.joined("a10", bench.changes[-1].job)
    assert bench.reason() == ""


def test_jobs_that_somebody_else_removes_are_told_and_that_is_heeded_from_the_second_time_on(
    make: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    bench.acquirer.hold("a10", 2)
    bench.until(lambda: bench.states() == ["running"] * 2)
    why = "owner must stop, ask ops (by user root)"
    for change in list(bench.changes):
        bench.acquirer.joined("a10", change.job)
        bench.provider.news.append(JobChange(change.job, "ended", why, by_hand=True))
        bench.acquirer.disconnected("a10", change.job)
    bench.until(lambda: bench.states().count("running") == 4)
    assert "was removed by another user, and another is asked for: owner must stop" in caplog.messages[0]
    [tier] = bench.acquirer._tiers.values()
    tier.jobs._removed_at -= 60.0  # A minute later, and once more.
    bench.provider.news += [
        JobChange(each.job, "ended", why, by_hand=True) for each in bench.changes if each.state == "running"
    ][-2:]
    bench.until(lambda: len(caplog.messages) == 2)
    assert "removed by another user, again: nothing more is asked for in the next 600 s: owner" in caplog.messages[1]
    causes = {each.kind: each for each in bench.acquirer.causes()}
    assert causes["removed"].why == why and causes["back-off"].until > time.time() + 500
    assert len(bench.provider.calls) == 2 and bench.counts()["failures"] == 0
    bench.acquirer.joined("a10", "another")
    assert "jobs were removed by another user: owner must stop" in bench.reason(), "while the pause lasts"
    tier.jobs._removed_at = tier.jobs._heeded = time.monotonic() - 600.0
    assert "removed" not in {each.kind for each in bench.acquirer.causes()}


def test_a_batch_system_that_answers_again_is_not_down(make: Callable[..., Bench]) -> None:
    """Also where nothing is to be submitted; and where it was not asked since, it still is."""
    bench = make()
    bench.acquirer.hold("a10", 1)
    bench.until(lambda: bench.states() == ["running"])
    [tier] = bench.acquirer._tiers.values()
    with bench.acquirer._condition:
        tier.lost = "workers end before they join"
        tier.jobs.pause(time.monotonic() + 600.0)
        tier.jobs.wanted = 2
    bench.provider.deaf = True
    bench.until(lambda: "condor_q does not answer" in bench.reason())
    bench.provider.deaf = False
    bench.until(lambda: "condor_q does not answer" not in bench.reason())
    assert "workers end before they join" in bench.reason()
    bench.provider.down = True
    with bench.acquirer._condition:
        tier.jobs._again_at = float("-inf")
    before = len(bench.provider.calls)
    bench.until(lambda: len(bench.provider.calls) >= before + 2)
    assert "the schedd does not answer" in bench.reason()
    bench.provider.down = False  # So that its jobs can be removed.


def test_of_jobs_on_hold_nothing_is_said_that_contradicts_it(make: Callable[..., Bench]) -> None:
    bench = make(patience=AcquirerPatience(stuck=0.0))
    bench.provider.found = PoolSurvey(machines=4, free=4)
    bench.acquirer.hold("a10", 1)
    bench.until(lambda: bench.states() == ["running"])
    job = bench.changes[0].job
    bench.provider.news += [JobChange(job, "evicted"), JobChange(job, "held", "draining", by_hand=True)]
    bench.until(lambda: bench.counts()["held"] == 1)
    bench.until(lambda: bench.counts()["queries"] >= 1)
    assert bench.reason() == "1 job is put on hold until it is released: draining"


def test_a_job_that_somebody_put_on_hold_stays_so_and_is_not_asked_for_again(
    make: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    bench.acquirer.hold("a10", 2)
    bench.until(lambda: bench.states() == ["running"] * 2)
    held, other = (change.job for change in bench.changes)
    bench.acquirer.joined("a10", other)
    why = "via condor_hold (by user root)"
    bench.provider.news.append(JobChange(held, "held", why, by_hand=True))
    bench.until(lambda: "held" in bench.states())
    assert bench.reason() == f"1 job is put on hold until it is released: {why}"
    assert [record.message for record in caplog.records] == [
        f"tier a10: job {held} was put on hold, and stays so until it is released: {why}"
    ]
    assert bench.provider.calls == [2] and bench.counts()["removed"] == 0 and bench.counts()["held"] == 1
    bench.provider.news += [JobChange(held, "queued"), JobChange(held, "running")]
    bench.until(lambda: bench.counts()["running"] == 1)
    bench.acquirer.joined("a10", held)
    assert bench.reason() == "" and bench.provider.calls == [2]


def test_it_says_why_there_are_fewer_workers_than_are_wanted(make: Callable[..., Bench]) -> None:
    bench = make(patience=AcquirerPatience(stuck=0.0))
    bench.provider.down = True
    bench.acquirer.hold("a10", 1)
    down = "the schedd does not answer: see whether condor_q works on this machine"
    bench.until(lambda: bench.reason() == f"{down}; nothing more is asked for")
    bench.provider.down = False
    bench.until(lambda: bench.states() == ["running"])
    assert bench.reason() == "1 worker starts"
    job = bench.changes[0].job
    bench.provider.found = PoolSurvey(machines=4, free=0)
    bench.provider.news.append(JobChange(job, "evicted", "its owner came back"))
    bench.until(lambda: bench.reason().startswith("all 4 machines that would do are busy; "))
    bench.provider.news.append(JobChange(job, "running"))
    bench.until(lambda: bench.reason() == "1 worker starts")
    bench.acquirer.joined("a10", job)
    assert bench.reason() == ""


def test_a_batch_system_that_loses_sight_of_workers_costs_none_of_them(
    make: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    """As HTCondor does when its schedd restarts: it reports that all were evicted, and finds them again."""
    bench = make(join_timeout=0.0)
    bench.provider.silent = True  # Else they would be late before they have joined.
    bench.acquirer.hold("a10", 3)
    jobs = eventually(lambda: len(bench.provider.jobs) == 3 and list(bench.provider.jobs))
    bench.acquirer.connected("a10", jobs[0])  # Its environment is still on the way.
    for job in jobs[1:]:
        bench.acquirer.joined("a10", job)
    bench.provider.silent = False
    for state in ("evicted", "running", "ended"):
        if state == "ended":
            bench.acquirer.joined("a10", jobs[0])
        bench.provider.news += [JobChange(job, state, resumed=state == "running") for job in jobs]  # type: ignore[arg-type]
        bench.until(lambda state=state: bench.states().count(state) >= 3)
        assert bench.reason() == ("" if state == "ended" else "1 worker starts")
    assert bench.provider.calls == [3] and bench.counts()["removed"] == 0
    assert not caplog.records, [record.message for record in caplog.records]
    bench.acquirer.disconnected("a10", jobs[0])  # Only now its job is known to be over.
    bench.until(lambda: len(bench.provider.jobs) > 3)


def test_jobs_that_cannot_be_removed_are_no_reason_for_lacking_workers(
    make: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = make(patience=AcquirerPatience(remove=0.05))
    bench.acquirer.hold("a10", 2)
    bench.until(lambda: bench.states() == ["running"] * 2)
    bench.provider.down = True
    bench.acquirer.hold("a10", 1)
    bench.acquirer.remove("a10", bench.changes[0].job)
    bench.until(lambda: caplog.records)
    assert bench.reason() == "1 worker starts"
    assert [record.message for record in caplog.records] == [
        "tier a10: the schedd does not answer: see whether condor_q works on this machine; it is tried again"
    ]
    bench.provider.down = False
    bench.until(lambda: bench.counts()["removed"] == 1)


def test_a_worker_that_never_joins_is_given_up_with_its_last_words(
    make: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = make("sh", "-c", "echo no route to the manager; sleep 1000", join_timeout=0.0)
    bench.provider.silent = True
    bench.acquirer.hold("a10", 1)
    [job] = eventually(lambda: bench.provider.jobs)
    eventually(lambda: bench.provider.last_words(job))
    bench.provider.silent = False
    bench.until(lambda: bench.states().count("running") == 2)
    assert "runs and does not join, so it is given up: no route to the manager" in caplog.records[0].message


def test_workers_that_end_at_once_do_not_end_the_run(
    make: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    bench = make("sh", "-c", "echo /shared/envs/ctxflow/bin/python: not found; exit 127")
    bench.acquirer.hold("a10", 1)
    bench.until(lambda: bench.states().count("ended") >= 3)
    assert [record.message for record in caplog.records] == [
        f"tier a10: workers end before they join on {socket.gethostname()} (it ended with status 127): "
        "/shared/envs/ctxflow/bin/python: not found"
    ]
    assert bench.acquirer.failure is None


def test_a_job_that_fails_is_told_with_its_host(make: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    bench = make("sh", "-c", "echo python: not found; exit 127")
    bench.acquirer.hold("a10", 1)
    bench.until(lambda: "ended" in bench.states())
    began, ended = bench.changes[:2]
    assert ended.failed and ended.host == began.host is not None
    assert f"workers end before they join on {began.host} (it ended with status 127): python" in caplog.messages[0]


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        (["held"], [True]),
        (["joined", "held"], [False]),
        (["joined", "ended"], [False]),
        (["evicted", "ended"], [False, False]),
        (["evicted", "held"], [False, False]),
    ],
)
def test_only_a_job_whose_worker_never_joined_has_failed(
    make: Callable[..., Bench], changes: list[Any], failed: list[bool]
) -> None:
    bench = make()
    bench.acquirer.hold("a10", 1)
    bench.until(lambda: bench.states() == ["running"])
    job = bench.changes[0].job
    if changes[0] == "joined":
        bench.acquirer.joined("a10", job)
    bench.provider.news += [JobChange(job, state) for state in changes if state != "joined"]
    bench.until(lambda: len(bench.changes) > len(failed))
    assert [change.failed for change in bench.changes[1 : len(failed) + 1]] == failed


def test_an_evicted_job_is_no_failure(make: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    bench = make()
    bench.acquirer.hold("a10", 1)
    bench.until(lambda: bench.states() == ["running"])
    bench.provider.evict(bench.changes[0].job)
    bench.until(lambda: bench.states() == ["running", "evicted", "running"])
    assert bench.counts()["evictions"] == 1 and not caplog.records
    assert len(bench.provider.calls) == 1  # It came back by itself.


def test_a_job_that_ends_with_its_eviction_is_no_failure(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.acquirer.hold("a10", 1)
    bench.until(lambda: bench.states() == ["running"])
    job = bench.changes[0].job
    bench.provider.news = [JobChange(job, "evicted", "the node failed"), JobChange(job, "ended", "the node failed")]
    bench.until(lambda: bench.states().count("running") == 2)
    assert bench.counts()["evictions"] == 1 and bench.counts()["failures"] == 0


def test_where_no_machine_will_do_it_says_why(make: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    bench = make(patience=AcquirerPatience(stuck=0.0))
    bench.acquirer.hold("a10", 1)
    bench.until(lambda: bench.states() == ["running"])
    bench.provider.found = PoolSurvey(machines=0, advice=("no machine has 9 GPUs: the most is 4",))
    before = bench.counts()["queries"]
    bench.provider.news.append(JobChange(bench.changes[0].job, "queued"))
    bench.until(lambda: caplog.records)
    assert caplog.records[0].message == (
        "tier a10: its jobs wait in vain, since no machine will do: no machine has 9 GPUs: the most is 4"
    )
    assert bench.counts()["queries"] == before + 1


def test_other_workers_from_now_on_and_none_of_those_there_is_lost(make: Callable[..., Bench], tmp_path: Path) -> None:
    bench = make()
    bench.acquirer.hold("a10", 1)
    bench.until(lambda: bench.states() == ["running"])
    bench.acquirer.change("a10", WorkerJob("a10", ["sh", "-c", "echo other; sleep 1000"]), waiting=5)
    bench.acquirer.hold("a10", 2)
    bench.until(lambda: len(bench.changes) == 2)
    assert bench.states() == ["running", "running"]
    bench.until(lambda: bench.provider.last_words(bench.changes[1].job) == "other")


def test_what_could_not_be_removed_is_removed_later(make: Callable[..., Bench]) -> None:
    bench = make(patience=AcquirerPatience(remove=0.2))
    bench.acquirer.hold("a10", 1)
    bench.until(lambda: bench.states() == ["running"])
    job = bench.changes[0].job
    bench.acquirer.joined("a10", job)
    bench.provider.down = True
    bench.acquirer.hold_none()
    bench.acquirer.remove("a10", job)
    bench.until(lambda: bench.counts()["failures"] >= 2)
    bench.provider.down = False
    bench.until(lambda: bench.states() == ["running", "ended"])
    assert bench.counts()["removed"] == 1


def test_a_provider_that_grants_less_is_not_asked_without_end(make: Callable[..., Bench]) -> None:
    bench = make(told=True)
    bench.provider.grants = 0
    begun = time.monotonic()
    bench.acquirer.hold("a10", 3)
    eventually(lambda: bench.provider.calls)
    time.sleep(0.5)  # In which it would be asked again and again.
    assert len(bench.provider.calls) <= 1 + (time.monotonic() - begun) and bench.decisions == []
    bench.provider.grants = None
    bench.until(lambda: bench.states().count("running") == 3)
    assert bench.counts()["submissions"] == 1


def test_workers_are_asked_for_elsewhere_also_where_jobs_cannot_be_changed(make: Callable[..., Bench]) -> None:
    bench = make(told=True, picky=True)
    provider = bench.provider
    assert isinstance(provider, Picky)
    bench.acquirer.exclude("a10", ["n2", "n1", "n3\n#SBATCH --comment=x"])  # Names are what workers tell.
    bench.acquirer.hold("a10", 2)
    bench.until(lambda: bench.states().count("running") == 2)
    assert provider.submitted == [("n1", "n2")] * 2
    assert provider.told == [([], ("n1", "n2"))]
    first, second = [change.job for change in bench.changes]
    provider.fixed = [second]
    bench.acquirer.exclude("a10", ["n2", "n1"])  # As it was.
    bench.acquirer.exclude("a10", [])
    bench.until(lambda: bench.states().count("running") == 3)
    assert provider.told[1:] == [([first, second], ())]
    assert provider.submitted[2:] == [()]
    ended = [change.job for change in bench.changes if change.state == "ended"]
    assert ended == [second], "a job that cannot be changed makes room for one that is asked for anew"
    said = ["asks for workers not on n1, n2", "asks for workers on all hosts again: 1 job anew"]
    assert [each for each in bench.decisions if "asks for" in each] == said


def test_a_batch_system_that_was_down_hears_later_where_workers_are_not_wanted(make: Callable[..., Bench]) -> None:
    bench = make(told=True, picky=True, patience=AcquirerPatience(remove=0.05))
    provider = bench.provider
    assert isinstance(provider, Picky)
    bench.acquirer.hold("a10", 1)
    bench.until(lambda: bench.states() == ["running"])
    provider.down = True
    bench.acquirer.exclude("a10", ["n1"])
    bench.until(lambda: any("does not answer" in each for each in bench.decisions))
    provider.down = False
    bench.until(lambda: provider.told)
    assert provider.told == [([bench.changes[0].job], ("n1",))]


def test_a_batch_system_that_knows_no_such_thing_is_not_told(make: Callable[..., Bench]) -> None:
    bench = make(told=True)
    bench.acquirer.hold("a10", 1)
    bench.until(lambda: bench.states() == ["running"])
    bench.acquirer.exclude("a10", ["n1"])
    bench.acquirer.hold("a10", 2)
    bench.until(lambda: bench.states() == ["running"] * 2)
    assert not any("n1" in each for each in bench.decisions), "it would not be true"


def test_a_batch_system_that_hangs_is_not_waited_for_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, ["sleep", "100"], patience=AcquirerPatience(end=0.3))
    hangs, goes_on = threading.Event(), threading.Event()

    def changes() -> list[JobChange]:
        hangs.set()
        goes_on.wait()
        return []

    bench.provider.changes = changes  # type: ignore[method-assign]
    try:
        happened(hangs)
        bench.acquirer.stop()
        assert caplog.messages[-1].startswith("the batch system of tier a10 has not answered for 0 s")
    finally:
        goes_on.set()
        [held] = bench.acquirer._tiers.values()
        joined(held.thread)


def test_a_tier_whose_batch_system_hangs_keeps_no_other_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor at the end, of which it alone is told."""
    hanging, goes_on = Moody(), threading.Event()
    hangs = threading.Event()

    def submit(job: WorkerJob, count: int) -> list[str]:
        hangs.set()
        goes_on.wait()
        return []

    hanging.submit = submit  # type: ignore[method-assign]
    other = Moody()
    tiers = {name: (provider, WorkerJob(name, ["sleep", "100"], memory=10**7, disk=10**7)) for name, provider in
             (("slurm", hanging), ("local", other))}  # fmt: skip
    asker = Acquirer(tiers, str(tmp_path), lambda: None, patience=AcquirerPatience(end=10.0))
    asker.start()
    try:
        asker.hold("slurm", 1)
        happened(hangs)
        asker.hold("local", 2)
        eventually(lambda: asker.counts()["local"]["running"] == 2)
        assert asker.counts()["slurm"]["running"] == 0
        asker.stop()
        assert caplog.messages[-1].startswith("the batch system of tier slurm has not answered")
    finally:
        goes_on.set()
        asker.stop()
