"""What becomes of workers' jobs, and whether a worker that is gone was taken back: nobody in it is to blame then.

What does not live here: noticing that it is gone (manager.py), and what follows (scheduler/).
"""

from __future__ import annotations

from collections.abc import Callable

from ctxflow.executors.taskvine.vine_workers import VineWorker
from ctxflow.factory.acquirer import Acquirer
from ctxflow.factory.exchange import FactoryClient
from ctxflow.factory.provider import JobChange
from ctxflow.scheduler import events as ev

_PATIENCE_SECONDS = 2.0  # How long the batch system may take to say so. HTCondor took up to one second.
_MOST_TOLD = 10_000  # Jobs of which it is known how they ended before their workers were missed.
_FACTORY_SECONDS = 1.0  # And how much longer where its word comes by way of a factory.


class Losses:
    """Workers that are gone, until it is known why, or time is up.

    :param clock: seconds.
    """

    def __init__(self, acquirer: Acquirer | FactoryClient, clock: Callable[[], float]) -> None:
        self._acquirer = acquirer
        self._patience = _PATIENCE_SECONDS + (_FACTORY_SECONDS if isinstance(acquirer, FactoryClient) else 0.0)
        self._clock = clock
        self._waiting: list[tuple[float, VineWorker]] = []
        self._explained: list[tuple[VineWorker, bool]] = []
        # Of a job: when something ended it, whether it was evicted, and whether it began again since.
        self._told: dict[tuple[str, str], tuple[float, bool, bool]] = {}

    def add(self, worker: VineWorker) -> None:
        """A worker is gone; what it is given up for is known, and is told at once: its place is asked for anew."""
        told = self._told.pop((worker.tier, worker.job), None) if worker.job is not None else None
        if worker.leaving:
            self._explained.append((worker, True))
        elif told is not None and told[0] > worker.since:
            self._explained.append((worker, told[1]))
        elif worker.job is None or worker.reason:
            self._explained.append((worker, False))
        else:
            self._waiting.append((self._clock() + self._patience, worker))
            self._acquirer.look()

    def heard(self, tier: str, change: JobChange) -> None:
        """News of a job."""
        before, was_evicted, again = self._told.get((tier, change.job), (0.0, False, False))
        if change.state == "running" and was_evicted:
            self._told[tier, change.job] = before, True, True
        if change.state not in ("evicted", "ended", "held"):
            return
        # A job that is evicted may be held, or end, without having begun again: it is evicted all the same.
        evicted = change.state == "evicted" or (was_evicted and not again)
        for entry in [entry for entry in self._waiting if (entry[1].tier, entry[1].job) == (tier, change.job)]:
            self._waiting.remove(entry)
            self._explained.append((entry[1], evicted))
            return
        self._told.pop((tier, change.job), None)
        self._told[tier, change.job] = self._clock(), evicted, False
        if len(self._told) > _MOST_TOLD:  # The oldest is of a job whose worker never was here.
            del self._told[next(iter(self._told))]

    def due(self) -> float:
        """Return seconds until the next is told without an explanation."""
        if self._explained:
            return 0.0
        return max(0.0, self._waiting[0][0] - self._clock()) if self._waiting else float("inf")

    def explained(self) -> list[tuple[VineWorker, bool]]:
        """Return those that can be told now, each with whether it was an eviction."""
        now = self._clock()
        while self._waiting and self._waiting[0][0] <= now:
            worker = self._waiting.pop(0)[1]
            self._explained.append((worker, False))
            if worker.job is not None:
                # To the batch system it may run on, out of reach or stopped, for as long as the run lasts.
                self._acquirer.remove(worker.tier, worker.job)
        found, self._explained = self._explained, []
        return found


def events_of_job(now: float, tier: str, change: JobChange, pin: int | None = None) -> list[ev.Event]:
    """Return the events that a change of a worker's job stands for; none if it only waits, or has ended.

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
