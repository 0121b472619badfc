"""Workers in places of one's choice: as an acquirer gets them, and as HTCondor is told of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ctxflow.factory import LocalProvider, ProviderError, WorkerJob
from ctxflow.factory.acquirer import Acquirer
from ctxflow.factory.condor_jobs import describe, variables_text
from ctxflow.factory.condor_machines import PRIORITY, pinned
from ctxflow.factory.run_files import Lead, worker_job
from ctxflow.sites.site_model import Tier
from ctxflow.topology import Gpu, Topology
from waiting import eventually


class Knowing(LocalProvider):
    """A batch system that knows its machines; it may be down."""

    def __init__(self) -> None:
        super().__init__()
        self.down = False
        self.acts: list[list[str]] = []

    def machines(self, job: WorkerJob) -> list[Topology]:
        if self.down:
            raise ProviderError("the collector does not answer: see whether condor_status works on this machine")
        return [Topology("m1", gpus=(Gpu(0, "GPU-1", used_by="bob"),))]

    def submit(self, job: WorkerJob, count: int) -> list[str]:
        if self.down:
            raise ProviderError("the schedd does not answer: see whether condor_q works on this machine")
        return super().submit(job, count)

    def remove(self, jobs: Sequence[str]) -> None:
        self.acts.append(sorted(jobs))
        super().remove(jobs)


class Bench:
    """An acquirer of one tier."""

    def __init__(self, directory: Path, provider: LocalProvider) -> None:
        self.provider = provider
        self.heard = threading.Event()
        self.states: dict[str, str] = {}
        self.surveyed: list[tuple[str, dict[str, object], str]] = []
        self.job = WorkerJob("a10", ["sleep", "1000"], memory=10**7, disk=10**7)
        self.acquirer = Acquirer({"a10": (provider, self.job)}, str(directory), self.heard.set)
        self.acquirer.start()

    def until(self, condition: Callable[[], object]) -> None:
        def holds() -> bool:
            if condition():
                return True
            self.acquirer.look()
            self.heard.wait(0.05)
            self.heard.clear()
            self.states.update((change.job, change.state) for _, change in self.acquirer.take())
            self.surveyed += self.acquirer.surveyed()
            return False

        eventually(holds, what=lambda: f"what follows {self.states} {self.surveyed}", pause=0.001)

    def running(self) -> list[str]:
        return [job for job, state in self.states.items() if state == "running"]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[LocalProvider], Bench]]:
    made: list[Bench] = []

    def bench(provider: LocalProvider) -> Bench:
        made.append(Bench(tmp_path, provider))
        return made[-1]

    yield bench
    for each in made:
        each.acquirer.stop()


def test_they_are_beside_those_that_are_held(make: Callable[[LocalProvider], Bench]) -> None:
    bench = make(Knowing())
    bench.acquirer.hold("a10", 1)
    bench.until(bench.running)
    [ordinary] = bench.running()
    bench.acquirer.pin("a10", 7, bench.job)
    bench.until(lambda: len(bench.running()) == 2)
    [own] = set(bench.running()) - {ordinary}
    assert (bench.acquirer.pin_of("a10", own), bench.acquirer.pin_of("a10", ordinary)) == (7, None)
    assert bench.acquirer.counts()["a10"]["running"] == 1
    bench.acquirer.forgo("a10", 7)
    bench.until(lambda: bench.running() == [ordinary])


def test_one_that_is_forgone_before_it_was_asked_for_never_runs(make: Callable[[LocalProvider], Bench]) -> None:
    bench = make(Knowing())
    with bench.acquirer._condition:  # The thread does not come in between.
        bench.acquirer.pin("a10", 1, bench.job)
        bench.acquirer.forgo("a10", 1)
    bench.acquirer.hold("a10", 1)
    bench.until(bench.running)
    assert len(bench.states) == 1 and bench.acquirer.pin_of("a10", bench.running()[0]) is None


def test_what_is_given_up_goes_in_one_act_with_what_waits(make: Callable[[LocalProvider], Bench]) -> None:
    """Else a GPU that a victim gives up would go to one of our own that waits."""
    provider = Knowing()
    bench = make(provider)
    bench.acquirer.hold("a10", 2)
    bench.until(lambda: len(bench.running()) == 2)
    first, second = bench.running()
    with bench.acquirer._condition:
        bench.acquirer._tiers["a10"].jobs.jobs[second].state = "queued"
        bench.acquirer.hold("a10", 0)
        bench.acquirer.remove("a10", first)
    bench.until(lambda: not bench.running())
    assert provider.acts == [sorted([first, second])]


def test_a_survey_tells_machines_or_why_there_are_none(make: Callable[[LocalProvider], Bench]) -> None:
    provider = Knowing()
    bench = make(provider)
    bench.acquirer.survey("a10")
    bench.until(lambda: bench.surveyed)
    [(tier, machines, reason)] = bench.surveyed
    assert (tier, list(machines), reason) == ("a10", ["m1"], "")
    provider.down = True
    bench.acquirer.survey("a10")
    bench.until(lambda: len(bench.surveyed) == 2)
    assert bench.surveyed[1][1] == {} and "condor_status works" in bench.surveyed[1][2]


def test_a_batch_system_without_machines_says_so(make: Callable[[LocalProvider], Bench]) -> None:
    bench = make(LocalProvider())
    bench.acquirer.survey("a10")
    bench.until(lambda: bench.surveyed)
    assert bench.surveyed[0][1:] == ({}, "its batch system does not tell which machines it has: leave machine_gpus out")


def test_a_job_that_is_not_taken_is_trouble_and_nothing_more(make: Callable[[LocalProvider], Bench]) -> None:
    provider = Knowing()
    bench = make(provider)
    provider.down = True
    bench.acquirer.pin("a10", 1, bench.job)
    bench.until(lambda: bench.acquirer.counts()["a10"]["failures"] == 1)
    bench.acquirer.forgo("a10", 1)
    provider.down = False
    bench.acquirer.hold("a10", 1)
    bench.until(bench.running)
    assert len(bench.states) == 1


def test_what_htcondor_is_told(tmp_path: Path) -> None:
    program = tmp_path / "ctxflow.pyz"
    program.touch()
    tier = Tier(name="a10", cores=2, memory_gb=10, requirements="HasX || HasY", priority=3, env={"N": "4"})
    there = pinned(tier, 12, "n1.pool", ["GPU-0a1b2c3d-4e5f", "GPU-ffff0000-1"])
    job = worker_job(there, Lead("n0", 9123, str(program), str(program)))
    told = describe(job, str(tmp_path), "run", now=0, lease=600)
    assert told["requirements"].startswith('((HasX || HasY) && (Machine == "n1.pool")) && ')
    assert '"GPU-ffff0000-1"' in told["require_gpus"] and '"0a1b2c3d-4e5f"' in told["require_gpus"]
    assert (told["request_gpus"], told["request_cpus"], told["priority"]) == ("2", "4", str(3 + PRIORITY))
    assert variables_text(job).split() == ["export", "N=4", "export", "CTXFLOW_PIN=12"]
    assert "--cores 4 --memory 20000" in told["arguments"]
