"""What like workers did with one thing lately: trials counted by host and by worker, and the tests that they are under.

A unit is a host, `(host, "")`, or one worker of it, `(host, its GPUs or its name)`. The sequential test (Page's) asks
whether one unit has failed more trials than its peers' share of failures explains.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Collection

SHARES = (0.3, 0.9)  # Of failures that a bad unit may have: one fails now and then, the other nearly always.


def null_share(failed: float, trials: float) -> float:
    """Return the share of failures that a good unit may have: three times its peers', and a little.

    A few trials of theirs prove little, so half a failure in five more is supposed.

    >>> round(null_share(0, 0), 2), round(null_share(0, 1000), 3), null_share(900, 1000)
    (0.32, 0.021, 0.9)
    """
    return min(0.9, 3 * (failed + 0.5) / (trials + 5) + 0.02)


def weight(passed: bool, share: float, null: float) -> float:
    """Return the logarithm of how much likelier a trial's outcome is with one share of failures than with another."""
    if share <= null:
        return 0.0
    return math.log((1 - share) / (1 - null)) if passed else math.log(share / null)


@dataclasses.dataclass(slots=True)
class Cusum:
    """One unit's evidence: for each share, the largest sum of weights that ends now, never below 0 (Page's test)."""

    start: float = 0.0  # The evidence that there was when all sums were 0.
    sums: tuple[float, ...] = ()
    failed: int = 0  # Trials since then.
    passed: int = 0
    climate: float = 0.0  # The null share when the trials failed, on average, by all failures of peers then.
    before: tuple[int, int] = (0, 0)  # What its host had tried and failed before, all its workers together.

    def __post_init__(self) -> None:
        self.sums = (self.start,) * len(SHARES)

    def add(self, passed: bool, null: float | None, climate: float = 0.0) -> float:
        """Count a trial; gives the largest sum.

        :param null: None where there is nobody to compare with yet.
        :param climate: the null share at the time when a failed one began, by all failures then.

        >>> test = Cusum()
        >>> for _ in range(5): _ = test.add(False, 0.05)
        >>> round(test.add(True, 0.05), 1)
        12.2
        """
        if passed:
            self.passed += 1
        else:
            self.failed += 1
            self.climate += (climate - self.climate) / self.failed
            null = None if null is None else max(null, climate)
        if null is None:
            return max(self.sums)
        self.sums = tuple(
            max(0.0, total + weight(passed, share, null)) for total, share in zip(self.sums, SHARES, strict=True)
        )
        return max(self.sums)

    def against(self, null: float) -> float:
        """Return the evidence of all that was counted since the sums were 0, with the null share as it is known now."""
        then = max(null, self.climate)
        return self.start + max(
            self.failed * weight(False, share, then) + self.passed * weight(True, share, null) for share in SHARES
        )


Unit = tuple[str, str]
EPOCH = 120.0
KIN = 1.0  # What the evidence of another GPU model is by chance: each sum is as likely above 0 as it is below.
MEASURE = 50  # Trials of peers that are enough to say how often good ones fail.
FRESH = 0.001  # Seconds for which a comparison of hosts holds, for each of them.


def _none() -> list[int]:
    """Return no trials and no failures."""
    return [0, 0]


class Counts:
    """Trials and failures of this epoch (`now`) and the one before, by unit."""

    def __init__(self) -> None:
        self.now: defaultdict[Unit, list[int]] = defaultdict(_none)
        self._before = self.now.copy()

    def roll(self) -> None:
        """Begin a new epoch."""
        self.now, self._before = defaultdict(_none), self.now

    def add(self, units: tuple[Unit, ...], failed: bool) -> None:
        """Count a trial of a worker and its host, or of a host."""
        for unit in units:
            self.now[unit][0] += 1
            self.now[unit][1] += failed

    def of(self, unit: Unit) -> tuple[int, int]:
        """Return a unit's trials and failures."""
        now, before = self.now.get(unit, (0, 0)), self._before.get(unit, (0, 0))
        return now[0] + before[0], now[1] + before[1]

    def hosts(self) -> dict[str, tuple[int, int]]:
        """Return those of each host."""
        return {host: self.of((host, "")) for host, part in (*self._before, *self.now) if not part}

    def parts(self, host: str) -> dict[str, tuple[int, int]]:
        """Return those of a host by worker."""
        names = dict.fromkeys(part for name, part in (*self.now, *self._before) if name == host and part)
        return {part: self.of((host, part)) for part in names}


class Peers:
    """What the better half of the other hosts did in all: bad ones, which may fail fast, are no measure."""

    def __init__(self, hosts: dict[str, tuple[int, int]], now: float) -> None:
        self.until = now + FRESH * len(hosts)
        ordered = sorted(hosts.items(), key=lambda pair: (pair[1][1] / pair[1][0], pair[0]))
        self._places = {host: n for n, (host, _) in enumerate(ordered)}
        self._failing = {host for host, (trials, failed) in ordered if 2 * failed >= trials}
        self._values = [counts for _, counts in ordered]
        self._sums = [(0, 0), *itertools.accumulate(self._values, lambda a, b: (a[0] + b[0], a[1] + b[1]))]

    def others(self, host: str) -> int:
        """Return how many hosts there are beside one."""
        return len(self._values) - (host in self._places)

    def failing(self, host: str) -> int:
        """Return how many hosts beside one failed at least half of their trials."""
        return len(self._failing) - (host in self._failing)

    def of(self, host: str) -> tuple[int, int]:
        """Return the trials and failures of the peers of a host.

        >>> peers = Peers({"a": (100, 1), "b": (50, 50), "c": (10, 0)}, 0.0)
        >>> peers.of("b"), peers.of("a"), peers.of("d")
        ((110, 1), (60, 50), (110, 1))
        """
        place = self._places.get(host, len(self._values))
        others = self.others(host)
        kept = others - max(0, others - 1) // 2
        if place >= kept:
            return self._sums[kept]
        (trials, failed), (own, own_failed) = self._sums[kept + 1], self._values[place]
        return trials - own, failed - own_failed


class Field:
    """Trials of one kind with one app or context, by workers of one tier and GPU model.

    :ivar kin: the same with the tier's other GPU models, and itself: failures, unlike speeds, can be compared.
    """

    def __init__(self, kind: str, subject: str, name: str, now: float) -> None:
        self.kind, self.subject, self.name = kind, subject, name
        self.counts = Counts()
        self.tests: dict[Unit, Cusum] = {}
        self.messages: dict[Unit, str] = {}
        self.misses = Counts()  # Attempts that failed, whoever's fault that was.
        self.running: dict[Unit, int] = {}  # How many failed there since one was answered.
        self.failing: dict[str, float] = {}  # Since when, by host.
        self.paces: dict[str, float] = {}  # Host -> seconds of an item, a moving average; kept by `learn`.
        self._ordered: list[float] = []  # The same, ascending.
        self.awaited = 0  # Hosts that are at work on their first trial, which takes far longer to pass than to fail.
        self.began = self.touched = now
        self.kin = [self]
        self._peers: dict[bool, Peers] = {}

    def roll(self, now: float) -> None:
        """Begin a new epoch if it is time; after a pause of two, nothing of before counts."""
        self.touched = now
        if now < self.began + EPOCH:
            return
        for counts in (self.counts, self.misses):
            if now >= self.began + 2 * EPOCH:
                counts.roll()
            counts.roll()
        self.began = now

    def peers(self, now: float, attempts: bool = False) -> Peers:
        """Return the hosts to compare with by their trials; or by attempts, whoever's fault it was that they failed."""
        known = self._peers.get(attempts)
        if known is None or now >= known.until:
            hosts = self.counts.hosts()
            if attempts:
                names = dict.fromkeys((*hosts, *self.misses.hosts()))
                hosts = {host: self.tried((host, "")) for host in names}
            known = self._peers[attempts] = Peers({host: pair for host, pair in hosts.items() if pair[0]}, now)
        return known

    def tried(self, unit: Unit) -> tuple[int, int]:
        """Return a unit's attempts, and those that failed, whoever's fault that was."""
        (trials, failed), (missed, _) = self.counts.of(unit), self.misses.of(unit)
        return trials - failed + missed, missed

    def null(self, unit: Unit, now: float) -> float | None:
        """Return the share of failures that a good unit may have by its peers'; siblings are peers.

        While those with its GPU model have tried little and failed nothing, those with others are peers as well. None
        if it has none, or if fewer have ended a trial than are at work on their first: those who fail are sooner.
        """
        peers = self.peers(now)
        if peers.others(unit[0]) < self.awaited:
            return None
        trials, failed = peers.of(unit[0])
        if unit[1]:
            here, own = self.counts.of((unit[0], "")), self.counts.of(unit)
            trials, failed = trials + here[0] - own[0], failed + here[1] - own[1]
        if not failed and trials < MEASURE:
            for other in self.kin:
                if other is not self:
                    more, more_failed = other.peers(now).of(unit[0])
                    trials, failed = trials + more, failed + more_failed
        return null_share(failed, trials) if trials else None

    def evidence(self, unit: Unit, now: float) -> float | None:
        """Return the evidence against a unit under test by what its peers have shown; None if it has no peers.

        Of a host, what its workers with other GPU models did counts as well, less the chance that each of them adds.
        """
        null = self.null(unit, now)
        if null is None:
            return None
        total = self.tests[unit].against(null)
        if total > KIN and not unit[1]:
            for other in [each for each in self.kin if each is not self and unit in each.tests]:
                share = other.null(unit, now)
                total += max(0.0, other.tests[unit].against(share) - KIN) if share is not None else 0.0
        return total

    def tried_on(self, host: str) -> tuple[int, int, set[str]]:
        """Return a host's trials and failures with all GPU models, and which of its workers failed any."""
        pairs = [each.counts.of((host, "")) for each in self.kin]
        parts = [each.counts.parts(host).items() for each in self.kin]
        failing = {name for each in parts for name, (_, failed) in each if failed}
        return sum(trials for trials, _ in pairs), sum(failed for _, failed in pairs), failing

    def add(self, units: tuple[Unit, ...], passed: bool, now: float, message: str = "", climate: float = 0.0) -> bool:
        """Count a trial; gives whether there is any evidence now against one of the units."""
        self.counts.add(units, not passed)
        if passed and not self.tests:
            return False
        for unit in units:
            test = self.tests.get(unit)
            if test is None and passed:
                continue
            null = self.null(unit, now)
            if test is None:
                trials, failed = self.counts.of(units[0])
                test = self.tests[unit] = Cusum(before=(trials - 1, failed - 1))
            if not passed and message:
                self.messages[unit] = message
            if test.add(passed, null, climate) <= 0 and null is not None:
                del self.tests[unit]
                self.messages.pop(unit, None)
        return bool(self.tests)

    def kin_median(self, host: str) -> float | None:
        """Return the median of all GPU models' medians of an item's seconds, without a host; None if none is known."""
        found = sorted(median for each in self.kin if (median := each.median(host)) is not None)
        return found[(len(found) - 1) // 2] if found else None

    def learn(self, host: str, seconds: float) -> None:
        """Learn from a batch how fast a host is."""
        before = self.paces.get(host)
        if before is not None:
            del self._ordered[bisect.bisect_left(self._ordered, before)]
            seconds = before + 0.3 * (seconds - before)
        self.paces[host] = seconds
        bisect.insort(self._ordered, seconds)

    def keep(self, hosts: Collection[str]) -> None:
        """Forget how fast all hosts are but these."""
        self.paces = {host: pace for host, pace in self.paces.items() if host in hosts}
        self._ordered = sorted(self.paces.values())

    def median(self, host: str) -> float | None:
        """Return the median of its peers' seconds of an item, None if it has none."""
        values, pace = self._ordered, self.paces.get(host)
        if pace is None:
            return values[len(values) // 2] if values else None
        if len(values) == 1:
            return None
        middle = (len(values) - 1) // 2
        return values[middle if values[middle] < pace else middle + 1]
