"""Lower bounds of what any policy could reach in a game: all workers as one, never idle, at their highest speeds.

They are bounds whatever is decided: of each item the least time that it can take counts, of all workers the most that
they could do while they can be had; loads, staging, boots, lost work and what bad hosts cost are left out.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from ctxflow.simulator.scenario import Scenario, tiers_of_site
from ctxflow.simulator.simulation import arrivals_of
from ctxflow.simulator.studies import build, machines_of

Steps = Sequence[tuple[float, float]]
"""(time, rate from then on), ascending, the first at 0."""


class Clock:
    """When work is done by a server whose rate changes at given times.

    >>> clock = Clock([(0.0, 1.0), (10.0, 0.0), (20.0, 2.0)])
    >>> clock.done(5.0, 6.0), clock.work(5.0, 21.0), clock.done(20.0, 4.0)
    (20.5, 7.0, 22.0)
    """

    def __init__(self, steps: Steps) -> None:
        self._times = [time for time, _ in steps]
        self._rates = [rate for _, rate in steps]
        pairs = itertools.pairwise(steps)
        self._work = [0.0, *itertools.accumulate(rate * (then - time) for (time, rate), (then, _) in pairs)]

    def _at(self, time: float) -> float:
        number = max(0, bisect.bisect_right(self._times, time) - 1)
        return self._work[number] + self._rates[number] * (time - self._times[number])

    def work(self, begin: float, end: float) -> float:
        """Return the most work that is done between two times."""
        return self._at(end) - self._at(begin)

    def done(self, begin: float, work: float) -> float:
        """Return when work that is begun at a time is done, infinity if never."""
        if work <= 0:
            return begin
        goal = self._at(begin) + work
        number = max(0, bisect.bisect_left(self._work, goal) - 1)
        if self._rates[number] <= 0:
            return math.inf
        return max(begin, self._times[number] + (goal - self._work[number]) / self._rates[number])


def shortest_first(arrivals: Iterable[tuple[float, float, int]], clock: Clock) -> tuple[float, float]:
    """Serve all by one server, whoever has the least work left first: nothing has a lower mean response.

    Shortest-remaining-processing-time is optimal on one server that may change its mind (Schrage, 1968), also if its
    rate changes, since that only changes the clock; and one server can do all that several do together.

    :param arrivals: (time, work of an item, items), ascending in time.
    :returns: the sum of all items' seconds from arrival to answer, and when the last was answered.

    >>> shortest_first([(0.0, 4.0, 1), (1.0, 1.0, 2)], Clock([(0.0, 1.0)]))
    (9.0, 6.0)
    """
    left: list[tuple[float, float, int]] = []  # (work of the next item, of each other, items).
    now = total = 0.0
    waits = 0
    come = [*arrivals, (math.inf, 0.0, 0)]
    for time, work, count in come:
        while left:
            first, each, items = left[0]
            until = clock.done(now, first)
            if until > time or until == math.inf:
                break
            heapq.heappop(left)
            total += waits * (until - now)
            now, waits = until, waits - 1
            if items > 1:
                heapq.heappush(left, (each, each, items - 1))
        if time == math.inf:
            return (math.inf, math.inf) if left else (total, now)
        if left:
            first, each, items = heapq.heappop(left)
            rest = max(0.0, first - clock.work(now, time))
            heapq.heappush(left, (rest, each, 1))
            if items > 1:
                heapq.heappush(left, (each, each, items - 1))
            total += waits * (time - now)
        now = time
        if count:
            heapq.heappush(left, (work, work, count))
            waits += count
    raise AssertionError("the last arrival never comes")


class ScenarioBounds:
    """The bounds of a scenario: how many seconds an item needs where, what all workers can do when, and what comes.

    :raises ValueError: where items of one app differ in what a worker's time they take by chance, unless their tokens
        are known beforehand, since then nothing bounds them.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        workload = scenario.workload
        if any(app.spread and app.tokens_per_second is None for app in workload.apps):
            raise ValueError("items take as long as it happens: give the workload's apps a spread of 0")
        built = build(scenario, seed)
        machines = {machine.tier: machine for machine in machines_of(scenario)[0]}
        self.arrivals = arrivals_of(workload, seed)
        self.items = {app: count for app, count in built.items.items() if count}
        self.seconds = {
            (app, tier): built.times.item(app, machine) for app in self.items for tier, machine in machines.items()
        }
        some = next(iter(machines.values()))
        self._overlapping = {app: pace for app in self.items if (pace := built.times.pace(app, some)) is not None}
        if self._overlapping:
            tokens = dict.fromkeys(self._overlapping, 0.0)
            number = 0
            for _, app, count in self.arrivals:  # Items are numbered as they come.
                if app in tokens:
                    tokens[app] += sum(
                        self._overlapping[app].draw(seed, app, item) for item in range(number, number + count)
                    )
                number += count
            for app, pace in self._overlapping.items():
                scale = tokens[app] / self.items[app] / pace.tokens
                self.seconds |= {(app, tier): scale * self.seconds[app, tier] for tier in machines}
        self._overhead = {app.name: app.call_seconds + workload.dispatch_seconds for app in workload.apps}
        self._tiers = {tier.spec.name: tier.spec for tier in tiers_of_site(scenario.site)}
        self._counts = {
            name: scenario.steps(name) or [(0.0, spec.maximum)] for name, spec in self._tiers.items() if spec.maximum
        }

    def responses(self) -> float:
        """Return the least sum of all items' seconds from arrival to answer.

        :raises ValueError: for apps whose calls overlap, whose items differ.
        """
        if self._overlapping:
            raise ValueError(f"items of {', '.join(self._overlapping)} differ, and only their sum is bounded")
        return max(self._pooled()[0], sum(count * self._alone(app) for app, count in self.items.items()))

    def makespan(self) -> float:
        """Return the earliest time at which all can be answered."""
        return max([self._pooled()[1], *(time + self._alone(app) for time, app, _ in self.arrivals)])

    def dollars(self) -> float:
        """Return the least dollars of workers that all items cost."""
        return sum(
            count * min(self.seconds[app, tier] * (self._tiers[tier].price or 0.0) for tier in self._counts) / 3600
            for app, count in self.items.items()
        )

    def _alone(self, app: str) -> float:
        """Return the least seconds from an item's arrival to its answer, if it has a worker to itself."""
        if app in self._overlapping:
            return self._overhead[app]  # Some item may be of next to no tokens.
        return self._overhead[app] + min(self.seconds[app, tier] for tier in self._counts)

    def _pooled(self) -> tuple[float, float]:
        """Return the least sum of responses, and the earliest end.

        A second of a worker is worth what it does of the apps' mix there, and an item at least its seconds where they
        are worth least: any prices give a bound, by the duality of linear programs.
        """
        total = sum(self.items.values())
        prices = {
            tier: total / sum(count * self.seconds[app, tier] for app, count in self.items.items())
            for tier in self._counts
        }
        work = {app: min(price * self.seconds[app, tier] for tier, price in prices.items()) for app in self.items}
        return shortest_first(((time, work[app], count) for time, app, count in self.arrivals), self._clock(prices))

    def _clock(self, prices: Mapping[str, float]) -> Clock:
        changes: list[tuple[float, float]] = []
        for tier, steps in self._counts.items():
            before = 0.0
            for time, count in steps:
                rate = min(count, self._tiers[tier].maximum) * prices[tier]
                changes.append((time, rate - before))
                before = rate
        rates: list[tuple[float, float]] = [(0.0, 0.0)]
        for time, change in sorted(changes):
            rates.append((time, max(0.0, rates[-1][1] + change)))
        return Clock(rates)
