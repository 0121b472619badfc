"""What the changes of a worker's job mean to the scheduler."""

from __future__ import annotations

from ctxflow.factory.provider import JobChange
from ctxflow.scheduler import events as ev


def events_of_job(now: float, tier: str, change: JobChange, pin: int | None = None) -> list[ev.Event]:
    """The events that a change of a worker's job stands for; none if it only waits, or has ended.

    :param pin: the number of the `AcquireAt` that it was submitted for, None for others.

    >>> events_of_job(2.0, "a10", JobChange("7.0", "held", "the disk is full"))
    [JobHeld(time=2.0, tier='a10', job='7.0', reason='the disk is full')]
    """
    if change.state == "running":
        return [ev.JobStarted(now, tier, change.job, change.waited, pin)]
    if change.state == "evicted":
        return [ev.JobEvicted(now, tier, change.job, change.reason)]
    if change.state == "held":
        return [ev.JobHeld(now, tier, change.job, change.reason)]
    return []
