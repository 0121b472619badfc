"""What becomes of a worker's job, as the scheduler hears it."""

import pytest

from ctxflow.executors.taskvine.vine_workers import events_of_job
from ctxflow.factory.provider import JobChange
from ctxflow.scheduler import events as ev


@pytest.mark.parametrize(
    ("change", "event"),
    [
        (JobChange("7.0", "running", host="node1", waited=12.5), ev.JobStarted(3.0, "a10", "7.0", 12.5)),
        (JobChange("7.0", "running"), ev.JobStarted(3.0, "a10", "7.0", None)),
        (JobChange("7.0", "evicted", "vacated"), ev.JobEvicted(3.0, "a10", "7.0", "vacated")),
        (JobChange("7.0", "held", "no such image"), ev.JobHeld(3.0, "a10", "7.0", "no such image")),
        (JobChange("7.0", "queued"), None),
        (JobChange("7.0", "ended", "it was removed", "node1"), None),
        (JobChange("7.0", "ended", "exit 127", "n1", failed=True), ev.JobFailed(3.0, "a10", "7.0", "n1", "exit 127")),
        (JobChange("7.0", "ended", "status 127", failed=True), None),
    ],
)
def test_changes_are_events(change, event):
    assert events_of_job(3.0, "a10", change) == ([] if event is None else [event])


def test_a_job_that_is_held_where_it_could_not_begin_counts_for_its_machine():
    change = JobChange("7.0", "held", "no space left", "node1", failed=True)
    held = ev.JobHeld(3.0, "a10", "7.0", "no space left")
    assert events_of_job(3.0, "a10", change) == [held, ev.JobFailed(3.0, "a10", "7.0", "node1", "no space left")]
