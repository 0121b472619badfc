"""What worker jobs use, in GPU-hours and by their prices, and the limits of that. Pure: no I/O, no clock.

A job counts from its start to its end, times its GPUs; a worker without GPUs counts as one with one. What does not live
here: who is told of a limit (executors/run.py, service.py), and the record over runs (spending_record.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ctxflow.factory.provider import JobChange
from ctxflow.sites.model import Site

Scope = Literal["run", "factory", "user"]
MEASURES = {"gpu_hours": "GPU-hours", "cost": "cost"}
_WHOSE = {"run": "of this run", "factory": "of the factory", "user": "of this user over all runs"}


@dataclasses.dataclass(frozen=True)
class Spent:
    """What was used so far.

    >>> Spent(1.0, 2.0) + Spent(0.5)
    Spent(gpu_hours=1.5, cost=2.0)
    """

    gpu_hours: float = 0.0
    cost: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.gpu_hours + other.gpu_hours, self.cost + other.cost)


class SpendingMeter:
    """Counts what the jobs of a tier use.

    :param gpus: of a worker, where `asked` does not say otherwise.
    :param price: of an hour of a worker.

    >>> meter = SpendingMeter(gpus=2, price=1.5)
    >>> meter.heard(JobChange("7.0", "running"), now=0.0)
    >>> meter.spent(now=1800.0)
    Spent(gpu_hours=1.0, cost=0.75)
    >>> meter.heard(JobChange("7.0", "evicted"), now=3600.0)
    >>> meter.spent(now=7200.0)
    Spent(gpu_hours=2.0, cost=1.5)
    """

    def __init__(self, gpus: int, price: float | None = None) -> None:
        self._gpus = gpus
        self._price = price or 0.0
        self._others: dict[str, int] = {}  # Jobs with another number of GPUs -> that.
        self._began: dict[str, float] = {}
        self._past = Spent()

    def asked(self, jobs: Iterable[str], gpus: int) -> None:
        """Jobs were submitted with so many GPUs."""
        if gpus != self._gpus:
            self._others.update(dict.fromkeys(jobs, gpus))

    def heard(self, change: JobChange, now: float) -> None:
        """Take note of news of a job."""
        if change.state == "running":
            self._began.setdefault(change.job, now)
        elif change.job in self._began:
            self._past += self._of(change.job, now)
            del self._began[change.job]
        if change.state == "ended":
            self._others.pop(change.job, None)

    def spent(self, now: float) -> Spent:
        """What was used until now, by jobs that run, too."""
        return total([self._past, *(self._of(job, now) for job in list(self._began))])

    def _of(self, job: str, now: float) -> Spent:
        hours = (now - self._began[job]) / 3600
        return Spent(hours * max(1, self._others.get(job, self._gpus)), hours * self._price)


def total(each: Iterable[Spent]) -> Spent:
    """All of it together."""
    return sum(each, Spent())


def limits_of(site: Site, scope: Scope) -> dict[str, float]:
    """The limits that a site sets: measure -> how much.

    >>> limits_of(Site(gpu_hours_per_run=8), "run")
    {'gpu_hours': 8.0}
    """
    found = {measure: getattr(site, f"{measure}_per_{scope}") for measure in MEASURES}
    return {measure: most for measure, most in found.items() if most is not None}


def standing(scope: Scope, spent: Spent, limits: Mapping[str, float]) -> list[dict[str, Any]]:
    """What is used of each limit, as plain data.

    >>> standing("run", Spent(1.25), {"gpu_hours": 8})
    [{'scope': 'run', 'measure': 'gpu_hours', 'used': 1.25, 'limit': 8}]
    """
    return [
        {"scope": scope, "measure": measure, "used": round(getattr(spent, measure), 6), "limit": most}
        for measure, most in limits.items()
    ]


def reached(standings: Iterable[Mapping[str, Any]]) -> str:
    """The first limit that is reached, with the figures; "" if none is.

    >>> reached(standing("run", Spent(8.01), {"gpu_hours": 8, "cost": 100}))
    'the limit of this run, gpu_hours_per_run = 8, is reached: 8.01 GPU-hours are used'
    """
    for each in standings:
        if each["used"] >= each["limit"]:
            key, used = f"{each['measure']}_per_{each['scope']}", f"{each['used']:.4g}"
            what = f"{used} GPU-hours are used" if each["measure"] == "gpu_hours" else f"its workers cost {used}"
            return f"the limit {_WHOSE[each['scope']]}, {key} = {each['limit']:g}, is reached: {what}"
    return ""
