"""Hold as many worker jobs of each tier as are wanted: `Acquirer`, with a thread for each tier (tier_acquirer.py)."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctxflow.causes import ShortfallCause
from ctxflow.factory.limits import SpendingMeter, Spent, total
from ctxflow.factory.provider import JobChange, KeepsOutput, Provider, ProviderError, WorkerJob
from ctxflow.factory.tier_acquirer import AcquirerPatience, AcquirerState, TierAcquirer, TierJobs
from ctxflow.host.linux import advice, none_left

logger = logging.getLogger("ctxflow")
_HOST = re.compile(r"[\w.-]+", re.ASCII)
_OFTEN_SECONDS = 4.0  # For how long providers are asked often after `look`.
_TOTALS = ("submissions", "submitted", "removed", "evictions", "holds", "failures")


class Acquirer:
    """The worker jobs of a run, requested from the providers of its tiers.

    A failure is reported once and retried after a pause: a batch system that is down, a requirement that no machine
    meets, or jobs that end before their workers join, never end a run.

    :param tiers: tier -> its provider, and the job of one worker.
    :param changed: called, on a tier's thread, when `take` or `failure` has something.
    :param decided: called, on a tier's thread, with the tier and a sentence for each decision and each failure; by
        default they are logged.
    :param waiting: tier -> how many jobs may be pending at first.
    :param join_timeout: seconds that a job may run while no worker of it is connected.
    :param took_over: whether a job that `submit` gave was there before, so that nothing was submitted for it.
    :ivar failure: why no worker can ever be used, once that is clear.
    """

    def __init__(
        self,
        tiers: Mapping[str, tuple[Provider, WorkerJob]],
        directory: str,
        changed: Callable[[], None],
        decided: Callable[[str, str], None] | None = None,
        waiting: Mapping[str, int] | None = None,
        join_timeout: float = 300.0,
        took_over: Callable[[str], bool] = lambda job: False,
        prices: Mapping[str, float | None] | None = None,
        *,
        patience: AcquirerPatience = AcquirerPatience(),  # noqa: B008 - It is frozen.
    ) -> None:
        first, costs = waiting or {}, prices or {}
        self._shared = AcquirerState(
            changed,
            decided or (lambda tier, sentence: logger.info("tier %s: %s", tier, sentence)),
            decided or (lambda tier, sentence: logger.warning("tier %s: %s", tier, sentence)),
            took_over,
            patience,
        )
        self._condition = self._shared.condition
        self._tiers = {
            name: TierAcquirer(
                name,
                self._shared,
                provider,
                job,
                TierJobs(first.get(name, 20), join_timeout),
                SpendingMeter(job.gpus, costs.get(name)),
            )
            for name, (provider, job) in tiers.items()
        }
        self._directory = directory
        self.failure: str | None = None

    def start(self) -> None:
        """Start the providers; a ProviderError says that one cannot be used here."""
        for name, held in self._tiers.items():
            directory = os.path.join(self._directory, name)
            os.makedirs(directory, mode=0o700, exist_ok=True)
            held.provider.start(directory)
        for held in self._tiers.values():
            held.thread = threading.Thread(target=held.run, name="ctxflow-acquirer", daemon=True)
            held.thread.start()

    def hold(self, tier: str, count: int) -> None:
        """Hold this many jobs of a tier from now on; pending surplus is withdrawn, and running jobs end by `remove`."""
        with self._condition:
            self._tiers[tier].jobs.wanted = count
            self._condition.notify_all()

    def change(self, tier: str, job: WorkerJob, waiting: int) -> None:
        """Request workers of another description from now on; those that are there stay as they are."""
        with self._condition:
            held = self._tiers[tier]
            held.job = dataclasses.replace(job, excluded=held.job.excluded)
            held.jobs.first = waiting

    def exclude(self, tier: str, hosts: Sequence[str]) -> None:
        """Request no worker of a tier on these hosts from now on, nor for pending jobs; on all others again."""
        with self._condition:
            # Workers report their hosts' names: text that is none must not get into a batch system's commands.
            excluded = tuple(sorted(host for host in hosts if _HOST.fullmatch(host)))
            held = self._tiers[tier]
            if excluded != held.job.excluded:
                held.job = dataclasses.replace(held.job, excluded=excluded)
                held.excluding, held.exclude_at = True, 0.0
                self._condition.notify_all()

    def hold_none(self) -> None:
        """Request nothing more: the run is about to end."""
        with self._condition:
            for held in self._tiers.values():
                held.jobs.wanted = 0
            self._condition.notify_all()

    def remove(self, tier: str, job: str) -> None:
        """End a job."""
        with self._condition:
            if tier in self._tiers:
                self._tiers[tier].give_up([job])
                self._condition.notify_all()

    def connected(self, tier: str, job: str) -> None:
        """Record that a worker of a job is connected: it is not given up, whatever its batch system says."""
        with self._condition:
            if tier in self._tiers:
                self._tiers[tier].jobs.connected(job)

    def disconnected(self, tier: str, job: str) -> None:
        """Record that no worker of a job is connected any more."""
        with self._condition:
            if tier in self._tiers:
                self._tiers[tier].jobs.disconnected(job, time.monotonic())
                self._condition.notify_all()

    def joined(self, tier: str, job: str) -> None:
        """Record that the worker of a job has joined."""
        with self._condition:
            if tier in self._tiers:
                held = self._tiers[tier]
                held.jobs.joined(job)
                held.reported.clear()  # Whatever the trouble was, it is over.
                held.down = held.lost = held.has = ""
                held.survey_at = 0.0

    def pin(self, tier: str, pin: int, job: WorkerJob) -> None:
        """Request one worker beside those that are held, under this number, for certain GPUs of one machine."""
        with self._condition:
            self._tiers[tier].places.wanted[pin] = job
            self._condition.notify_all()

    def forgo(self, tier: str, pin: int) -> None:
        """Withdraw the request for a pinned worker."""
        with self._condition:
            held = self._tiers[tier]
            held.removing += held.places.forgo(pin)
            self._condition.notify_all()

    def pin_of(self, tier: str, job: str) -> int | None:
        """Return the number of the pinned worker that a job was submitted for, None if it is one like others."""
        with self._condition:
            return self._tiers[tier].places.pin_of(job)

    def survey(self, tier: str) -> None:
        """Query which machines a tier's workers may be on; `surveyed` has them later, after a call of `changed`."""
        with self._condition:
            self._tiers[tier].places.asked = True
            self._condition.notify_all()

    def surveyed(self) -> list[tuple[str, dict[str, Any], str]]:
        """Return the answers to `survey` since the last call: tier, its machines' topologies by name, and why none."""
        with self._condition:
            found, self._shared.machines = self._shared.machines, []
        return found

    def refused(self, tier: str, job: str, reason: str) -> None:
        """Record that the worker of a job joined and cannot be used; it counts as one that never joins."""
        with self._condition:
            if tier in self._tiers:
                jobs = self._tiers[tier].jobs
                self._tiers[tier].give_up([job])
                jobs.failed(time.monotonic(), refused=True)
                if jobs.hopeless:
                    self.failure = f"no worker of tier {tier} can be used: {reason}"
                self._condition.notify_all()

    def look(self) -> None:
        """Query the batch systems at once, and often for a moment: a worker is gone for an unknown reason."""
        with self._condition:
            for held in self._tiers.values():
                held.look = True
            self._shared.look_until = time.monotonic() + _OFTEN_SECONDS
            self._condition.notify_all()

    def take(self) -> list[tuple[str, JobChange]]:
        """Return what happened to jobs since the last call, each change with its tier."""
        with self._condition:
            news, self._shared.news = self._shared.news, []
        return news

    def output(self, tier: str, job: str) -> str:
        """Return the path of what a job writes, "" if there is none on this machine."""
        provider = self._tiers[tier].provider if tier in self._tiers else None
        return provider.output(job) if isinstance(provider, KeepsOutput) else ""

    def provider(self, tier: str) -> Provider:
        """Return the provider of a tier's workers."""
        return self._tiers[tier].provider

    def counts(self) -> dict[str, dict[str, int]]:
        """Return each tier's counts: jobs by state now, wanted, and totals of what was done (`_TOTALS`) and queries."""
        with self._condition:
            return {
                name: {
                    **held.jobs.counts(),
                    "wanted": held.jobs.wanted,
                    **{total: held.totals[total] for total in _TOTALS},
                    "queries": held.provider.queries,
                }
                for name, held in self._tiers.items()
            }

    def spent(self) -> Spent:
        """Return what the jobs have used so far."""
        now = time.monotonic()
        with self._condition:
            return total(held.meter.spent(now) for held in self._tiers.values())

    def maxima(self) -> dict[str, int]:
        """Return no bounds: only a factory sets any beside the site's."""
        return {}

    def limits_beyond(self) -> list[dict[str, Any]]:
        """Return no limits: only a factory counts other runs' workers (see `FactoryClient`)."""
        return []

    def causes(self) -> list[ShortfallCause]:
        """Return why tiers have fewer workers than are wanted; none of those that have them."""
        now, wall = time.monotonic(), time.time()
        with self._condition:
            return [each for held in self._tiers.values() for each in held.causes(now, wall)]

    def stop(self) -> None:
        """End all jobs, waiting a minute for batch systems that do not answer."""
        with self._condition:
            self._shared.stopped = True
            self._condition.notify_all()
        ending = {name: threading.Thread(target=_end, args=(held,), daemon=True) for name, held in self._tiers.items()}
        for thread in ending.values():
            thread.start()
        deadline = time.monotonic() + self._shared.patience.end
        for thread in ending.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        if left := [f"tier {name}" for name, thread in ending.items() if thread.is_alive()]:
            logger.warning(
                "the batch system of %s has not answered for %.0f s: see with its own commands whether jobs are left",
                " and ".join(left),
                self._shared.patience.end,
            )


def _end(held: TierAcquirer) -> None:
    if held.thread is not None:
        held.thread.join()
    try:
        held.provider.stop()
    except ProviderError as error:
        logger.warning("%s", error)
    except Exception as error:
        what = "the jobs of a tier could not be ended"
        if none_left(error):
            logger.warning("%s (%s)%s, and see whether jobs are left", what, error, advice(error))
        else:
            logger.exception(what)
