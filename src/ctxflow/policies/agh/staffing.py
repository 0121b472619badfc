"""Live placement in its own units: contexts with work, and the workers of each tier that are to hold them.

Work is in seconds of a worker in an hour, a price is a worker's for an hour, and a change of plan costs the seconds of
loading. With one model for each context and nothing stored, the problem P_DM is so small a MILP (whole numbers of
workers, and shares) that it is solved as such, with a limit on work that hardly any run reaches.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ctxflow.policies.agh.live_work import LEAST_LOAD, UTILIZATION, ContextWork, Margin, Offer, Wanted
from ctxflow.policies.agh.problem import Floats, Ints
from ctxflow.policies.agh.staffing_program import StaffingProgram, unserved_price

SERVED = 1e-3  # The share of the demand that may be unserved: less than the room in the utilization.

Mixes = Mapping[str, Mapping[str, float]]
"""App -> context -> the share of the app's items that it answers."""


def workers_needed(
    held: Iterable[tuple[tuple[int, int], int]], busy: Mapping[tuple[int, int], float], utilization: float
) -> dict[tuple[int, int], int]:
    """Return how many workers each pair of a model (or context) and a tier needs, never more than hold it.

    :param held: pairs, and workers that hold the model; a pair may be there more than once.
    :param busy: by pair, workers whose whole time is taken by what is routed there; a pair that has any needs one.

    >>> workers_needed([((0, 0), 1), ((0, 0), 4), ((1, 0), 2)], {(0, 0): 1.9}, utilization=0.9)
    {(0, 0): 3}
    """
    most: Counter[tuple[int, int]] = Counter()
    for pair, workers in held:
        most[pair] += workers
    return {
        pair: min(number, max(1, math.ceil(busy[pair] / utilization - 1e-9)))
        for pair, number in sorted(most.items())
        if pair in busy
    }


@dataclasses.dataclass(frozen=True)
class Crew:
    """Workers of a tier that hold a context, and the share of the context's items that they answer."""

    context: str
    tier: str
    workers: int
    share: float


@dataclasses.dataclass(frozen=True)
class Staffing:
    """Which workers hold which contexts, and the share of each context's items that is not served."""

    crews: tuple[Crew, ...]
    unserved: tuple[float, ...]

    @property
    def short(self) -> bool:
        """Return whether more is unserved than may be."""
        return max(self.unserved) > SERVED


@dataclasses.dataclass(frozen=True)
class StaffingProblem:
    """The contexts with something to do, and the tiers whose workers may do it."""

    tasks: Sequence[ContextWork]
    offers: Sequence[Offer]

    @classmethod
    def of(cls, wanted: Sequence[Wanted], mixes: Mixes, offers: Sequence[Offer]) -> StaffingProblem:
        """Return the problem of these apps, their items divided so; raise ValueError if no worker is available."""
        tasks: dict[str, ContextWork] = {}
        for each in wanted:
            for option in each.candidates:
                rate = mixes[each.app].get(option.context, 0.0) * each.per_hour
                if rate <= 0:
                    continue
                task = tasks.setdefault(option.context, ContextWork(option.context, option.load_seconds))
                task.per_hour += rate
                task.measured |= option.measured
                task.queued += mixes[each.app][option.context] * each.queued
                task.work.update(
                    {
                        tier: rate * seconds * (1 + option.margins.get(tier, Margin()).work)
                        for tier, seconds in option.seconds.items()
                    }
                )
                if each.max_delay is not None:
                    task.max_delay = min((d for d in (task.max_delay, each.max_delay) if d is not None), default=None)
                    task.urgent += rate
                    task.urgent_work.update({tier: rate * option.delay(tier) for tier in option.seconds})
        if not any(offer.workers for offer in offers):
            raise ValueError("there is no worker to be had on any tier")
        return cls(list(tasks.values()), offers)

    def possible(self) -> float:
        """Return a share of the demand beyond which no plan can go."""
        needed = sum(task.workers for task in self.tasks)
        return min(1.0, UTILIZATION * sum(offer.workers for offer in self.offers) / needed) if needed else 1.0

    def fitting(self, share: float) -> float:
        """Return the share of the demand, scaled down for all alike as far as the workers serve it."""
        return StaffingProgram(self.tasks, self.offers, share).most() * share

    def solve(self, share: float = 1.0) -> Staffing:
        """Return the cheapest staffing with so much of the demand."""
        return self._staffing(StaffingProgram(self.tasks, self.offers, share).cheapest())

    def dollars(self, staffing: Staffing) -> float:
        """Return what a staffing costs in an hour, with a high price on what is unserved."""
        prices = {offer.name: offer.price for offer in self.offers}
        held = sum(each.workers * prices[each.tier] for each in staffing.crews)
        return held + unserved_price(self.offers) * sum(staffing.unserved)

    def revised(self, share: float, before: Staffing, hold_hours: float, least_gain: float) -> Staffing:
        """Return what runs, with new routes, or a new plan where that pays for its change.

        Workers that a context has more of than before load it, and are paid for meanwhile. `hold_hours` and
        `least_gain` are those of `Moment`.
        """
        runs = self._carried(before)
        program = StaffingProgram(self.tasks, self.offers, share)
        kept = self._staffing(program.kept(runs))
        new = self._staffing(program.cheapest(runs, hold_hours))
        loads = {task.context: max(LEAST_LOAD, task.load_seconds) for task in self.tasks}
        prices = {offer.name: offer.price for offer in self.offers}
        there = {(each.context, each.tier): each.workers for each in kept.crews}
        more = [(each, each.workers - there.get((each.context, each.tier), 0)) for each in new.crews]
        price = sum(loads[each.context] * prices[each.tier] * max(0, added) for each, added in more)
        kept_dollars = self.dollars(kept)
        saved = (kept_dollars - self.dollars(new)) * hold_hours
        return new if saved > price / 3600 + least_gain * kept_dollars * hold_hours + 1e-9 else kept

    def counts(self, share: float, staffing: Staffing) -> dict[tuple[str, str], int]:
        """Return the workers that a staffing needs, by context and tier."""
        order = {task.context: number for number, task in enumerate(self.tasks)}
        place = {offer.name: number for number, offer in enumerate(self.offers)}
        held = [((order[each.context], place[each.tier]), each.workers) for each in staffing.crews]
        shares: dict[tuple[int, int], float] = {}
        for (pair, _), each in zip(held, staffing.crews, strict=True):
            shares[pair] = shares.get(pair, 0.0) + each.share
        busy = {}
        for (number, offer), routed in shares.items():
            task, name = self.tasks[number], self.offers[offer].name
            seconds = task.item_seconds(name) if name in task.work else 0.0
            if routed:
                busy[number, offer] = routed * (share * task.per_hour) * seconds / 3600
        needed = workers_needed(held, busy, UTILIZATION)
        return {(self.tasks[i].context, self.offers[offer].name): workers for (i, offer), workers in needed.items()}

    def preferred(self, counts: Mapping[tuple[str, str], int]) -> tuple[str, ...]:
        """Return the tiers with workers, those first on which work costs least above where it is cheapest."""
        prices = {offer.name: offer.price for offer in self.offers}
        dearer: dict[str, list[float]] = {}
        tasks = {task.context: task for task in self.tasks}
        for (context, tier), workers in counts.items():
            work = tasks[context].work if context in tasks else {}
            least = min((prices[name] * seconds for name, seconds in work.items()), default=0.0)
            dearer.setdefault(tier, []).extend([prices[tier] * work[tier] / least if least else 1.0] * workers)
        return tuple(sorted(dearer, key=lambda tier: (sum(dearer[tier]) / len(dearer[tier]), prices[tier], tier)))

    def fill(self, counts: dict[tuple[str, str], int]) -> None:
        """Give each worker that is left to the context with the most work for a worker."""
        total = Counter({task.context: 0 for task in self.tasks})
        for (context, _), workers in counts.items():
            total[context] += workers
        for offer in self.offers:
            able = [task for task in self.tasks if offer.name in task.work]
            left = offer.workers - sum(n for (_, tier), n in counts.items() if tier == offer.name)
            for _ in range(left if able else 0):
                context = max(able, key=lambda task: task.workers / (total[task.context] + 1)).context
                counts[context, offer.name] = counts.get((context, offer.name), 0) + 1
                total[context] += 1

    def _staffing(self, found: tuple[Floats, Ints, Floats]) -> Staffing:
        """Return what a program found, shares and workers (I, K) and what is unserved (I,), as crews."""
        shares, workers, unserved = found
        crews = tuple(
            Crew(self.tasks[i].context, self.offers[k].name, int(workers[i, k]), float(shares[i, k]))
            for i, k in np.argwhere(workers > 0)
        )
        return Staffing(crews, tuple(unserved.tolist()))

    def _carried(self, before: Staffing) -> Ints:
        """Return the workers (I, K) that are still possible, in the terms of this problem."""
        tasks = {task.context: number for number, task in enumerate(self.tasks)}
        tiers = {offer.name: number for number, offer in enumerate(self.offers)}
        runs = np.zeros((len(self.tasks), len(self.offers)), dtype=np.int64)
        for each in before.crews:
            if each.context in tasks and each.tier in tiers and each.tier in self.tasks[tasks[each.context]].work:
                i, k = tasks[each.context], tiers[each.tier]
                runs[i, k] = min(each.workers, self.offers[k].workers - int(runs[:, k].sum()))
        return runs
