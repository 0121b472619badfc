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
        (JobChange("7.0", "ended", "it was removed"), None),
    ],
)
def test_changes_are_events(change, event):
    assert events_of_job(3.0, "a10", change) == ([] if event is None else [event])
