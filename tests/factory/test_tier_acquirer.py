"""The pace at which jobs are asked for, whatever happens to them, and which of them are given up."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ctxflow.factory.condor_jobs import change_of
from ctxflow.factory.parsl_script import JobReport, JobStory
from ctxflow.factory.provider import JobChange, JobState
from ctxflow.factory.tier_acquirer import Connection, JobStanding, TierJobs, reconciled


class AnyQueue(RuleBasedStateMachine):
    """A batch system that does as it likes with the jobs of a tier whose plans are followed."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.number = 0.0, 0
        self.jobs = TierJobs(waiting=3, join_timeout=50)
        self.there: dict[str, bool] = {}  # Jobs whose workers are connected -> whether they have joined.

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
        assert not self.there.keys() & {*plan.surplus, *plan.absent}, "a job whose worker answers was given up"
        self.jobs.removed([*plan.surplus, *plan.absent])
        new = [f"{self.number + n}.0" for n in range(plan.submit)]
        self.number += plan.submit
        self.jobs.submitted(new, self.now)
        assert not plan.submit or len(self.waiting()) <= max(before, 40), "the queue is flooded"
        assert len(plan.surplus) <= before, "a job that runs was taken back"
        begun = plan.absent or any(job in self.there for job in new)
        assert not self.jobs.due(self.now) or begun, "there is always something to do"

    @precondition(lambda self: self.jobs.jobs)
    @rule(data=st.data(), state=st.sampled_from(["running", "evicted", "held", "queued", "ended"]))
    def change(self, data: st.DataObject, state: str) -> None:
        job = data.draw(st.sampled_from(sorted(self.jobs.jobs)))
        before = self.jobs.changed(JobChange(job, state), self.now)  # type: ignore[arg-type]
        assert before is not None and (job in self.jobs.jobs) == (state != "ended" or job in self.there)

    @rule(data=st.data(), joins=st.booleans())
    def connect(self, data: st.DataObject, joins: bool) -> None:
        """A job that runs, or whose start is not reported yet; or one that `submit` has still to return."""
        job = data.draw(st.sampled_from([*sorted(self.jobs.jobs), f"{self.number}.0"]))
        self.jobs.connected(job)
        if joins:
            self.jobs.joined(job)
        self.there[job] = joins or self.there.get(job, False)
        self.now += 1000
        assert job not in self.jobs.plan(self.now).absent

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.there)))
        del self.there[job]
        self.jobs.disconnected(job, self.now)
        assert job not in self.jobs.plan(self.now).absent, "it has as long to come back as to come"

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
        counts = self.jobs.counts()
        assert sum(counts.values()) == len(self.jobs.jobs)
        assert counts["joined"] == sum(joined and job in self.jobs.jobs for job, joined in self.there.items())


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


# What the batch system says of a job, and what the driver sees of its worker: all pairs.
GONE, LEFT_ALONE = None, (False, False)
TABLE: dict[JobState, dict[Connection, JobStanding | None]] = {
    "queued": {
        "none": JobStanding("queued", waits=True, awaited=False),
        "connected": JobStanding("running", *LEFT_ALONE),  # The batch system is late.
        "joined": JobStanding("joined", *LEFT_ALONE),
    },
    "running": {
        "none": JobStanding("running", waits=False, awaited=True),
        "connected": JobStanding("running", *LEFT_ALONE),  # Its environment is on the way, for hours perhaps.
        "joined": JobStanding("joined", *LEFT_ALONE),
    },
    "evicted": {
        "none": JobStanding("evicted", waits=True, awaited=False),
        "connected": JobStanding("running", *LEFT_ALONE),
        "joined": JobStanding("joined", *LEFT_ALONE),  # A schedd that restarts, a controller that requeues.
    },
    "held": {
        "none": JobStanding("held", waits=True, awaited=False),
        "connected": JobStanding("running", *LEFT_ALONE),
        "joined": JobStanding("joined", *LEFT_ALONE),
    },
    "ended": {
        "none": GONE,
        "connected": JobStanding("running", *LEFT_ALONE),
        "joined": JobStanding("joined", *LEFT_ALONE),  # A queue that was lost, with workers that work on.
    },
}
PAIRS = [(state, connection) for state in TABLE for connection in TABLE[state]]


def test_the_table_is_whole() -> None:
    assert list(TABLE) == list(get_args(JobState))
    assert all(list(row) == list(get_args(Connection)) for row in TABLE.values())


@pytest.mark.parametrize(("state", "connection"), PAIRS)
@pytest.mark.parametrize("first", ["batch system", "connection"])
def test_who_is_connected_has_joined_whatever_the_batch_system_says(
    state: JobState, connection: Connection, first: str
) -> None:
    jobs = TierJobs(join_timeout=10)

    def batch_system() -> None:
        for each in ("running", state):
            jobs.changed(JobChange("1.0", each), 1)  # type: ignore[arg-type]

    def connect() -> None:
        if connection != "none":
            getattr(jobs, connection)("1.0")

    expected = TABLE[state][connection]
    assert reconciled(state, connection) == expected
    if first == "batch system" and state != "ended":  # Of a job that has ended no worker comes any more.
        jobs.submitted(["1.0"], 0)
        batch_system()
        connect()
    else:
        connect()  # Before `submit` has returned it.
        jobs.submitted(["1.0"], 0)
        batch_system()
    late = jobs.plan(1000)
    if expected is None:
        assert not jobs.jobs and not late.absent
        return
    assert {name: count for name, count in jobs.counts().items() if count} == {expected.state: 1}
    assert late.absent == (("1.0",) if expected.awaited else ())
    assert late.surplus == (("1.0",) if expected.waits else ())
    # Once nobody is there, the batch system's word is all there is.
    jobs.disconnected("1.0", 2000)
    alone = TABLE[state]["none"]
    assert jobs.counts() == {**dict.fromkeys(jobs.counts(), 0), **({alone.state: 1} if alone else {})}
    assert jobs.plan(2009).absent == ()
    assert jobs.plan(2011).absent == (("1.0",) if alone and alone.awaited else ())


def htcondor_says(*kinds: int) -> list[JobChange]:
    event = {"Cluster": 1, "Proc": 0, "DisconnectReason": "Local schedd and job shadow died"}
    return [change for kind in kinds if (change := change_of({**event, "EventTypeNumber": kind}))]


def batch_says(*reports: JobReport | str) -> list[JobChange]:
    story = JobStory("1.0")
    return [
        change
        for each in reports
        for change in (story.on_event(each) if isinstance(each, str) else story.on_report(each))
    ]


QUEUED, RUNS = JobReport("queued"), JobReport("running", host="n1")
STORIES = {
    "HTCondor: its schedd restarts": htcondor_says(1, 22, 23),
    "HTCondor: its shadow died": htcondor_says(1, 7, 1),
    "Slurm: a requeue that is reported when it runs again": batch_says(
        "began n1", JobReport("running", host="n1", restarts=0), JobReport("running", host="n1", restarts=1)
    ),
    "Slurm: suspended for a moment": batch_says("began n1", JobReport("evicted", "Slurm suspended it"), RUNS),
    "PBS, Grid Engine: slow to see that it runs": batch_says("began n1", QUEUED, QUEUED, RUNS, RUNS),
    "PBS, Grid Engine: without the script's word": batch_says(QUEUED, RUNS, RUNS),
    "a factory is replaced": [JobChange("1.0", "running"), JobChange("1.0", "evicted"), JobChange("1.0", "running")],
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_no_batch_system_s_story_ends_a_worker_that_works_on(story: list[JobChange]) -> None:
    assert story
    for joins_before in range(len(story) + 1):
        jobs = TierJobs(join_timeout=10)
        jobs.wanted = 1
        jobs.submitted(["1.0"], 0)
        for number, change in enumerate(story):
            if number == joins_before:
                jobs.joined("1.0")
            jobs.changed(change, number)
        jobs.joined("1.0")
        assert jobs.counts()["joined"] == 1 and not jobs.due(10_000)


def test_a_worker_that_left_has_proven_its_job_and_another_is_awaited() -> None:
    jobs = TierJobs(join_timeout=10)
    jobs.submitted(["1.0"], 0)
    begin(jobs, ["1.0"], 1)
    jobs.disconnected("1.0", 100)
    # Whatever its job says next, it did join: nothing is wrong with workers of this tier.
    before = jobs.changed(JobChange("1.0", "evicted"), 101)
    assert before is not None and before.proven
    jobs.changed(JobChange("1.0", "running"), 102)
    assert jobs.counts()["running"] == 1
    assert jobs.plan(112).absent == () and jobs.plan(113).absent == ("1.0",)
    before = jobs.changed(JobChange("1.0", "ended"), 120)
    assert before is not None and not before.proven


def test_removals_are_heeded_for_longer_each_time_and_forgotten_after_hours() -> None:
    jobs, hour = TierJobs(), 3600.0
    assert [jobs.removed_by_others(now) for now in (0.0, 5.0, 600.0, 605.0)] == [0.0, 0.0, 600.0, 595.0]
    assert jobs.removed_by_others(2 * hour) == 1200.0
    assert jobs.lacks_removed(2 * hour + 1199.0) and not jobs.lacks_removed(2 * hour + 1201.0)
    assert jobs.removed_by_others(20 * hour) == 0.0 and jobs.removed_by_others(21 * hour) == 600.0


def test_jobs_that_fail_on_one_host_stop_no_others_once_it_is_excluded() -> None:
    jobs = TierJobs(waiting=2)
    jobs.wanted = 4
    for _ in range(6):
        pause = jobs.failed(0.0, host="n3")
    assert pause > 30 and not jobs.plan(1.0).submit
    jobs.excluded(["n3"])
    assert jobs.plan(1.0).submit == 2
    jobs.failed(2.0, host="n3")
    jobs.failed(2.0)
    jobs.excluded(["n3"])
    assert not jobs.plan(2.5).submit, "the batch system itself is down, say"
