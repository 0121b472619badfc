"""What a job's own words and the batch system's make together."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.factory.parsl_script import GIVEN_BACK, JobReport, JobStory

LINES = ["began n1", "began n2", "notice TERM", "notice USR1", "ended 0", "ended 143", "ended", "nonsense", ""]
WORDS = st.builds(
    JobReport,
    st.sampled_from(["queued", "running", "held", "evicted", "ended"]),
    st.sampled_from(["", "why"]),
    st.booleans(),
    st.sampled_from([None, "n1"]),
    st.sampled_from([None, 0, 1, 2]),
)
FOLLOWS = {
    "queued": {"running", "held", "ended"},
    "running": {"evicted", "ended"},
    "evicted": {"running", "held", "ended"},
    "held": {"queued", "running", "ended"},
    "ended": set(),
}


def states(story: JobStory, *told: str | JobReport) -> list[str]:
    news = [story.on_event(each) if isinstance(each, str) else story.on_report(each) for each in told]
    return [change.state for changes in news for change in changes]


@given(st.lists(st.sampled_from(LINES) | WORDS, max_size=30))
def test_news_follow_the_protocol_whatever_is_told(told: list[str | JobReport]) -> None:
    found = ["queued", *states(JobStory("1"), *told)]
    for before, after in itertools.pairwise(found):
        assert after in FOLLOWS[before], found


@given(st.lists(st.sampled_from(LINES) | WORDS, max_size=30), st.integers(0, 30))
def test_of_a_job_that_was_removed_only_the_end_is_told(told: list[str | JobReport], place: int) -> None:
    story = JobStory("1")
    states(story, *told[:place])
    story.removed = story.state != "ended"
    news = [story.on_event(each) if isinstance(each, str) else story.on_report(each) for each in told[place:]]
    changes = [change for each in news for change in each]
    assert [(change.state, change.reason) for change in changes] in ([], [("ended", GIVEN_BACK)])


RUNS, AGAIN = JobReport("running", host="n1", restarts=0), JobReport("running", host="n2", restarts=1)


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        (["began n1", RUNS, "ended 0", JobReport("ended")], "running ended"),
        ([RUNS, "began n1", RUNS, "ended 3", JobReport("ended")], "running ended"),
        # Notice, and a worker that takes its time.
        (["began n1", "notice USR1", RUNS, "ended 0", JobReport("ended")], "running evicted ended"),
        # All processes are ended, which takes a while.
        (["began n1", "notice TERM", RUNS, "ended 143", JobReport("ended", taken=True)], "running evicted ended"),
        # Killed without a word, and queued again; the script begins before or after it is asked for.
        (["began n1", JobReport("queued", restarts=1), AGAIN, "began n2"], "running evicted running"),
        (["began n1", AGAIN, "began n2", AGAIN, "ended 0"], "running evicted running"),
        (["began n1", "began n2", AGAIN, AGAIN], "running evicted running"),
        (
            ["began n1", "notice TERM", "ended 143", JobReport("queued", restarts=1), "began n2", AGAIN],
            "running evicted running",
        ),
        # Where nobody counts: a batch system that is late, one that insists.
        (["began n1", JobReport("queued"), JobReport("running"), JobReport("queued")], "running"),
        (["began n1", JobReport("queued"), JobReport("queued"), "began n2"], "running evicted running"),
        (["began n1", "ended 1", JobReport("queued"), "began n2"], "running evicted running"),
        ([JobReport("running"), "began n1"], "running"),
        ([JobReport("running"), JobReport("running"), "began n1"], "running"),
        # Suspended, held, released.
        (["began n1", JobReport("evicted", "suspended"), RUNS], "running evicted running"),
        ([JobReport("held", "why"), JobReport("held", "why"), JobReport("queued"), "began n1"], "held queued running"),
        (["began n1", JobReport("held", restarts=1), JobReport("queued", restarts=1)], "running evicted held queued"),
        ([JobReport("ended", taken=True)], "ended"),
    ],
)
def test_stories(told: list[str | JobReport], wanted: str) -> None:
    assert states(JobStory("1"), *told) == wanted.split()


@pytest.mark.parametrize(
    ("reason", "by_hand"),
    [("Slurm does not run it: JobHeldAdmin", True), ("Slurm does not run it: PartitionTimeLimit", False)],
)
def test_what_a_person_put_on_hold_is_told_from_what_slurm_did(reason, by_hand):
    [change] = JobStory("1").on_report(JobReport("held", reason))
    assert (change.state, change.by_hand) == ("held", by_hand)
