"""What runs may have: their shares of a tier's workers, and limits of GPU-hours and cost.

A job counts from its start to its end, times its GPUs; a worker without GPUs counts as one with one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ctxflow.errors import CtxflowError
from ctxflow.factory.provider import JobChange
from ctxflow.files import make_own_folder, read_own, write_private
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier

if TYPE_CHECKING:
    from prometheus_client.core import Metric

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
    """Count what the jobs of a tier use, without I/O and clock.

    :param gpus: of a worker, unless `submitted` gives another number; `price`: of an hour of a worker.

    >>> meter = SpendingMeter(gpus=2, price=1.5)
    >>> meter.changed(JobChange("7.0", "running"), now=0.0)
    >>> meter.spent(now=1800.0)
    Spent(gpu_hours=1.0, cost=0.75)
    >>> meter.changed(JobChange("7.0", "evicted"), now=3600.0)
    >>> meter.spent(now=7200.0)
    Spent(gpu_hours=2.0, cost=1.5)
    """

    def __init__(self, gpus: int, price: float | None = None) -> None:
        self._gpus = gpus
        self._price = price or 0.0
        self._others: dict[str, int] = {}  # Jobs with another number of GPUs -> that.
        self._began: dict[str, float] = {}
        self._evicted: dict[str, float] = {}  # Since when.
        self._past = Spent()

    def submitted(self, jobs: Iterable[str], gpus: int) -> None:
        """Record jobs that were submitted with this many GPUs each."""
        if gpus != self._gpus:
            self._others.update(dict.fromkeys(jobs, gpus))

    def changed(self, change: JobChange, now: float) -> None:
        """Record a change of a job."""
        evicted = self._evicted.pop(change.job, now)
        if change.state == "running":
            self._began.setdefault(change.job, (evicted if change.resumed else now) - change.ran)
        elif change.job in self._began:
            self._past += self._of(change.job, now)
            del self._began[change.job]
            if change.state == "evicted":
                self._evicted[change.job] = now
        if change.state == "ended":
            self._others.pop(change.job, None)

    def spent(self, now: float) -> Spent:
        """Return what was used until now, by jobs that run, too."""
        return total([self._past, *(self._of(job, now) for job in list(self._began))])

    def _of(self, job: str, now: float) -> Spent:
        hours = (now - self._began[job]) / 3600
        return Spent(hours * max(1, self._others.get(job, self._gpus)), hours * self._price)


def total(each: Iterable[Spent]) -> Spent:
    """Return the sum of what was used."""
    return sum(each, Spent())


def limits_of(site: Site, scope: Scope) -> dict[str, float]:
    """Return the limits that a site sets, by measure.

    >>> limits_of(Site(gpu_hours_per_run=8), "run")
    {'gpu_hours': 8.0}
    """
    found = {measure: getattr(site, f"{measure}_per_{scope}") for measure in MEASURES}
    return {measure: most for measure, most in found.items() if most is not None}


def standing(scope: Scope, spent: Spent, limits: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return what is used of each limit, as plain data.

    >>> standing("run", Spent(1.25), {"gpu_hours": 8})
    [{'scope': 'run', 'measure': 'gpu_hours', 'used': 1.25, 'limit': 8}]
    """
    return [
        {"scope": scope, "measure": measure, "used": round(getattr(spent, measure), 6), "limit": most}
        for measure, most in limits.items()
    ]


def reached(standings: Iterable[Mapping[str, Any]]) -> str:
    """Return the first limit that is reached, with the figures; "" if none is.

    >>> reached(standing("run", Spent(8.01), {"gpu_hours": 8, "cost": 100}))
    'the limit of this run, gpu_hours_per_run = 8, is reached: 8.01 GPU-hours are used'
    """
    for each in standings:
        if each["used"] >= each["limit"]:
            key, used = f"{each['measure']}_per_{each['scope']}", f"{each['used']:.4g}"
            what = f"{used} GPU-hours are used" if each["measure"] == "gpu_hours" else f"its workers cost {used}"
            return f"the limit {_WHOSE[each['scope']]}, {key} = {each['limit']:g}, is reached: {what}"
    return ""


def spending_file(site: str, host: str | None = None) -> str:
    """Return where the factory of a site on a machine (by default this one) keeps its record."""
    name = f"spent-{urllib.parse.quote(site, safe='')}@{host or socket.gethostname()}.json"
    return os.path.join(os.path.expanduser("~"), ".ctxflow", name)


class SpendingRecord:
    """The record of what a user's factories of a site have used: a file for each machine, in a home that may be shared.

    :raises CtxflowError: if the record cannot be read: what was used is unknown then.
    """

    def __init__(self, site: str) -> None:
        self.path = spending_file(site)
        self._others = f"{glob.escape(self.path.rpartition('@')[0])}@*.json"
        self._before = _read(self.path)
        self._written = self._before
        self._last = 0.0  # When the factory before this one counted, in Unix time.
        with contextlib.suppress(OSError):
            self._last = os.stat(self.path).st_mtime
        self._beside = self._read_others()

    def behind(self) -> float:
        """Return for how long nothing has counted what a factory that was killed has left running."""
        return max(0.0, time.time() - self._last) if self._last else 0.0

    def total(self, now: Spent) -> Spent:
        """Return all that was used, with what this factory's runs have used since it began."""
        return self._before + self._beside + now

    def write(self, now: Spent) -> None:
        """Write the record, or that it is still so, and read those of other machines."""
        with contextlib.suppress(CtxflowError):  # One that cannot be read now counts as it did.
            self._beside = self._read_others()
        spent = self._before + now
        if spent == self._written:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.path)
                return
        make_own_folder(os.path.dirname(self.path))
        write_private(self.path, json.dumps({"gpu_hours": spent.gpu_hours, "cost": spent.cost}) + "\n")
        self._written = spent

    def _read_others(self) -> Spent:
        return total(_read(path) for path in glob.glob(self._others) if path != self.path)


def _read(path: str) -> Spent:
    try:
        found = json.loads(read_own(path))
        return Spent(float(found["gpu_hours"]), float(found["cost"]))
    except FileNotFoundError:
        return Spent()
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"what was used of this user's limits cannot be read from {path} ({error})"
        raise CtxflowError(f"{what}: mend it, or remove it to count from nothing") from None


_RECORD_SECONDS = 10.0


class FactoryLimits:
    """What is used of a factory's limits, and the limit that is reached, in words; "" if none is."""

    def __init__(self, site: str, say: Callable[[str], None]) -> None:
        self.standing: list[dict[str, Any]] = []
        self.reached = ""
        self._name = site
        self._say = say
        self._record: SpendingRecord | None = None
        self._trouble = ""
        self._write_at = 0.0

    def look(self, site: Site, spent: Spent, last: bool = False) -> None:
        """Check the limits against what the factory's runs have used since it began; report once what is reached.

        :param last: whether the record must be written.
        :raises CtxflowError: if the user's record cannot be read.
        """
        own, user = limits_of(site, "factory"), limits_of(site, "user")
        if user and self._record is None:
            self._record = SpendingRecord(self._name)
        self.standing = standing("factory", spent, own)
        if user and self._record is not None:
            self._keep(self._record, spent, last)
            self.standing += standing("user", self._record.total(spent), user)
        before, self.reached = self.reached, reached(self.standing)
        if self.reached and not before:
            self._say(f"{self.reached}; no worker is asked for, and those that run end what they do and leave")
        elif before and not self.reached:
            self._say("no limit is reached any more: workers are asked for again")

    def behind(self) -> float:
        """Return for how long nothing has counted jobs that are taken over now; 0 where no user's limit is set."""
        return self._record.behind() if self._record is not None else 0.0

    def _keep(self, record: SpendingRecord, spent: Spent, last: bool) -> None:
        if not last and time.monotonic() < self._write_at:
            return
        self._write_at = time.monotonic() + _RECORD_SECONDS
        try:
            record.write(spent)
            self._trouble = ""
        except OSError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._say(f"what was used cannot be recorded in {record.path}: {error}; it is tried again")


def shares(wants: Mapping[str, int], maximum: int) -> dict[str, int]:
    """Return each run's share: equal parts, but none more than it wants; what one leaves goes to the others.

    A remainder goes to the first runs.

    >>> shares({"a": 2, "b": 20, "c": 20}, 11)
    {'a': 2, 'b': 5, 'c': 4}
    """
    given = dict.fromkeys(wants, 0)
    left = min(maximum, sum(wants.values()))
    while left > 0:
        hungry = [run for run, want in wants.items() if given[run] < want]
        each = max(1, left // len(hungry))
        for run in hungry[:left]:
            more = min(each, wants[run] - given[run])
            given[run] += more
            left -= more
    return given


def grants(wants: Mapping[str, int], held: Mapping[str, int], maximum: int) -> dict[str, int]:
    """Return how many jobs each run may hold now: its share, as soon as there is room for it.

    Nobody is granted a job beyond the maximum while others still hold more than their share.

    :param held: how many jobs each has, also those of runs that want nothing any more.

    >>> grants({"old": 8, "new": 8}, {"old": 7, "new": 0}, 8)
    {'old': 4, 'new': 1}
    """
    share = shares(wants, maximum)
    lacking = {run: max(0, share[run] - held.get(run, 0)) for run in wants}
    room = max(0, maximum - sum(held.values()))
    more = shares(lacking, room)
    return {run: min(share[run], held.get(run, 0) + more[run]) for run in wants}


def bounds(
    wants: Mapping[str, int], held: Mapping[str, int], leaving: Mapping[str, int], maximum: int
) -> dict[str, int]:
    """Return the maximum that each run is given: the tier's, unless there are more workers, as after that was lowered.

    Then a run that has more than its share drains the others.

    :param leaving: what runs that are over still hold.

    >>> bounds({"a": 8, "b": 1}, {"a": 7, "b": 1}, {}, 4), bounds({"a": 8, "b": 1}, {"a": 3, "b": 1}, {}, 4)
    ({'a': 3, 'b': 4}, {'a': 4, 'b': 4})
    """
    share = shares(wants, maximum)
    too_many = sum(held.values()) + sum(leaving.values()) > maximum
    return {run: share[run] if too_many and held.get(run, 0) > share[run] else maximum for run in wants}


def to_reclaim(
    wants: Mapping[str, int], held: Mapping[str, int], running: Mapping[str, int], maximum: int
) -> dict[str, int]:
    """Return how many running workers each run must give up, so that others get their share.

    None where nobody lacks any: after the maximum was lowered, workers are drained as `bounds` says. None of a run that
    wants no more than its share either: it releases what it does not need by itself.

    :param running: how many of the jobs held run; the others are taken back without this.

    >>> to_reclaim({"old": 8, "new": 8}, {"old": 8, "new": 0}, {"old": 8, "new": 0}, 8)
    {'old': 4, 'new': 0}
    """
    share = shares(wants, maximum)
    if all(held.get(run, 0) >= share[run] for run in wants):
        return dict.fromkeys(wants, 0)
    # No more than the others lack: where a run wants more than its share, the shares are all there is.
    return {run: max(0, running.get(run, 0) - share[run]) if want > share[run] else 0 for run, want in wants.items()}


def maximum_of(site: Site, tier: Tier) -> int:
    """Return how many workers of a tier there may be, over all runs together.

    >>> a10 = Tier(name="a10", workers=8)
    >>> maximum_of(Site(tiers=(a10,)), a10), maximum_of(Site(tiers=(a10,), workers=3), a10)
    (8, 3)
    """
    return tier.workers if site.workers is None or tier.name != site.tiers[0].name else site.workers


def limit_metrics(
    prefix: str, limits: Sequence[Mapping[str, Any]], labels: Sequence[str] = ("scope",)
) -> Iterator[Metric]:
    """Yield what is used of limits of GPU-hours and of cost, and how much they are, labelled by these keys of each."""
    from prometheus_client.core import GaugeMetricFamily

    for measure, name in MEASURES.items():
        for key, what in (("used", "used of a limit"), ("limit", "that may be used")):
            text = f"{name[0].upper()}{name[1:]} {what}"
            metric = GaugeMetricFamily(f"{prefix}_{measure}_{key}", text, labels=labels)
            for each in limits:
                if each["measure"] == measure:
                    metric.add_metric([str(each.get(label, "")) for label in labels], each[key])
            yield metric
