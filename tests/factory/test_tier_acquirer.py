"""The pace at which jobs are asked for, whatever happens to them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ctxflow.factory.provider import JobChange
from ctxflow.factory.tier_acquirer import TierJobs


class AnyQueue(RuleBasedStateMachine):
    """A batch system that does as it likes with the jobs of a tier whose plans are followed."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.number = 0.0, 0
        self.jobs = TierJobs(waiting=3, join_timeout=50)

    def waiting(self) -> list[str]:
        return [name for name, job in self.jobs.jobs.items() if job.state != "running"]

    @rule(wanted=st.integers(0, 40), after=st.floats(0, 100))
    def want(self, wanted: int, after: float) -> None:
        self.now += after
        self.jobs.wanted = wanted

    @rule()
    def follow(self) -> None:
        before = len(self.waiting())
        plan = self.jobs.plan(self.now)
        self.jobs.removed([*plan.surplus, *plan.absent])
        new = [f"{self.number + n}.0" for n in range(plan.submit)]
        self.number += plan.submit
        self.jobs.submitted(new, self.now)
        assert not plan.submit or len(self.waiting()) <= max(before, 40), "the queue is flooded"
        assert len(plan.surplus) <= before, "a job that runs was taken back"
        assert not self.jobs.due(self.now) or plan.absent, "there is always something to do"

    @precondition(lambda self: self.jobs.jobs)
    @rule(data=st.data(), state=st.sampled_from(["running", "evicted", "held", "queued", "ended"]))
    def change(self, data: st.DataObject, state: str) -> None:
        job = data.draw(st.sampled_from(sorted(self.jobs.jobs)))
        before = self.jobs.changed(JobChange(job, state), self.now)  # type: ignore[arg-type]
        assert before is not None and (job in self.jobs.jobs) == (state != "ended")

    @precondition(lambda self: any(job.state == "running" for job in self.jobs.jobs.values()))
    @rule(data=st.data())
    def join(self, data: st.DataObject) -> None:
        running = sorted(name for name, job in self.jobs.jobs.items() if job.state == "running")
        job = data.draw(st.sampled_from(running))
        self.jobs.joined(job)
        self.now += 1000
        assert job not in self.jobs.plan(self.now).absent

    @rule()
    def fail(self) -> None:
        pause = self.jobs.failed(self.now)
        assert 0 < pause <= 60 and self.jobs.plan(self.now).submit == 0
        self.now += pause

    @invariant()
    def never_more_than_wanted(self) -> None:
        plan = self.jobs.plan(self.now)
        assert len(self.jobs.jobs) + plan.submit - len(plan.surplus) <= max(self.jobs.wanted, len(self.jobs.jobs))
        assert plan.submit <= max(0, self.jobs.wanted - len(self.jobs.jobs))
        assert sum(self.jobs.counts().values()) == len(self.jobs.jobs)


TestAnyQueue = AnyQueue.TestCase


def begin(jobs: TierJobs, names: list[str], now: float) -> None:
    for name in names:
        jobs.changed(JobChange(name, "running"), now)
        jobs.joined(name)


def rounds(jobs: TierJobs, machines: int) -> list[int]:
    """How many jobs are asked for a round, where each round all that fit begin."""
    asked, now = [], 0.0
    for number in range(30):
        plan = jobs.plan(now)
        asked.append(plan.submit)
        jobs.submitted([f"{number}.{n}" for n in range(plan.submit)], now)
        waiting = [name for name, job in jobs.jobs.items() if job.state != "running"]
        free = machines - (len(jobs.jobs) - len(waiting))
        begin(jobs, waiting[:free], now)
        now += 5
    return asked


def test_a_pool_that_gives_much_is_filled_in_a_few_rounds() -> None:
    jobs = TierJobs(waiting=20)
    jobs.wanted = 200
    asked = rounds(jobs, machines=1000)
    assert sum(asked) == 200 and asked[:4] == [20, 40, 80, 60]


@given(st.integers(1, 12))
def test_a_pool_that_gives_little_is_not_flooded(machines: int) -> None:
    jobs = TierJobs(waiting=20)
    jobs.wanted = 200
    asked = rounds(jobs, machines)
    assert sum(asked) == machines + 20 and len([number for number in asked if number]) <= 2


def test_workers_that_end_are_replaced_although_others_wait() -> None:
    jobs = TierJobs(waiting=2)
    jobs.wanted = 10
    jobs.submitted(["1.0", "1.1"], 0)
    begin(jobs, ["1.0"], 1)
    assert jobs.plan(2).submit == 1
    jobs.changed(JobChange("1.0", "ended"), 3)
    assert jobs.plan(4).submit == 1


def test_refusals_are_hopeless_only_while_nobody_joins() -> None:
    jobs = TierJobs()
    for _ in range(5):
        jobs.failed(0.0, refused=True)
    assert jobs.hopeless
    jobs.submitted(["1.0"], 0)
    begin(jobs, ["1.0"], 1)
    assert not jobs.hopeless
    for _ in range(9):
        jobs.failed(0.0)  # A batch system that is down is no worker that cannot be used.
    assert not jobs.hopeless


def test_a_worker_may_join_before_its_job_is_said_to_run() -> None:
    jobs = TierJobs(join_timeout=10)
    jobs.submitted(["1.0"], 0)
    jobs.joined("1.0")
    jobs.changed(JobChange("1.0", "running"), 1)
    assert jobs.counts()["joined"] == 1 and not jobs.plan(100).absent
    jobs.changed(JobChange("1.0", "evicted"), 101)
    jobs.changed(JobChange("1.0", "running"), 102)
    assert jobs.counts()["running"] == 1 and jobs.plan(200).absent == ("1.0",)
