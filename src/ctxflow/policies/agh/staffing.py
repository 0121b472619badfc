"""Live AGH in its own units: contexts with work, and the workers of each tier that are to hold them.

A tier is divided into blocks of 1, 2, 4, ... workers, each of which one context has, or none: any number of workers is
a sum of blocks. Work is in seconds of a worker in an hour, a price is a worker's for an hour, and a change of plan
costs the seconds of loading. GH and AGH (`heuristics`) choose the blocks; nothing is stored.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ctxflow.policies.agh.draft import Choices, Draft, Mechanisms
from ctxflow.policies.agh.heuristics import adaptive, greedy, rerouted
from ctxflow.policies.agh.problem import MOST, Constants

UTILIZATION = 0.9  # Of a worker's time.
SERVED = 1e-3  # The share of the demand that may be unserved: less than the room in the utilization.
NEVER = 1e12  # How many times its limit the delay is on workers that cannot serve.
_LESS = 0.9  # By how much demand is scaled down at a time until the site can serve it.
_ANY_DELAY = 1e6
_LEAST_LOAD = 1e-3
_DEAR = 1e3  # What it costs to leave all unserved, in rents of the whole site.

Mixes = Mapping[str, Mapping[str, float]]
"""App -> context -> the share of the app's items that it answers."""


class Margin(NamedTuple):
    """Shares by which items are planned to take longer than is known: in workers' time, and in what has a limit."""

    work: float = 0.0
    delay: float = 0.0


@dataclasses.dataclass(frozen=True)
class ContextOption:
    """A context that may answer an app's items, the seconds of one by tier (one at least), its error, and margins.

    :ivar seconds: of a worker's time. :ivar beside: how many items share that, by tier; one where none is named.
    :ivar measured: the tiers on which the seconds were measured, and not taken from other tiers or apps.
    """

    context: str
    seconds: dict[str, float]
    load_seconds: float
    error: float = 0.0
    margins: Mapping[str, Margin] = dataclasses.field(default_factory=dict)
    measured: frozenset[str] = frozenset()
    beside: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def delay(self, tier: str) -> float:
        """Return the seconds until a worker of a tier has answered an item, with their margin."""
        return self.seconds[tier] * self.beside.get(tier, 1.0) * (1 + self.margins.get(tier, Margin()).delay)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The items of one app that should be answered in an hour; of active sessions, one each second.

    :ivar candidates: the contexts that may answer, the app's own first; there is one at least.
    :ivar max_delay: seconds, None for no limit; `max_error` likewise, a share.
    :ivar queued: the items that wait now.
    """

    app: str
    per_hour: float
    candidates: tuple[ContextOption, ...]
    max_delay: float | None = None
    max_error: float | None = None
    queued: float = 0.0


@dataclasses.dataclass(frozen=True)
class Offer:
    """A tier of the site: how many workers are available, and the price of one, an hour."""

    name: str
    workers: int
    price: float


class Block(NamedTuple):
    """Some workers of a tier, which hold one context or none; the first three identify it from problem to problem.

    :ivar place: its place among all blocks of a problem; `offer`: its tier's among the offers.
    """

    tier: str
    place: int
    workers: int
    offer: int


def blocks(workers: int) -> list[int]:
    """Return sizes that sum up to the workers, and to any smaller number.

    >>> blocks(8), blocks(5), blocks(0)
    ([1, 1, 2, 4], [1, 2, 2], [])
    """
    sizes: list[int] = []
    while workers > 0:
        sizes.append(min(2 ** len(sizes), workers))
        workers -= sizes[-1]
    return sorted(sizes)


def workers_needed(
    held: Iterable[tuple[tuple[int, int], int]], busy: Mapping[tuple[int, int], float], utilization: float
) -> dict[tuple[int, int], int]:
    """Return how many workers each pair of a model (or context) and a tier needs, never more than its blocks have.

    :param held: the pair and the workers of each block that holds a model.
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


@dataclasses.dataclass
class ContextWork:
    """What a context has to do: items in an hour, and the worker's seconds that they take, by tier.

    :ivar urgent: the items in an hour of apps with a limit on the delay; `urgent_work`: the seconds until all of them
        are answered, one after the other.
    :ivar queued: the items that wait now.
    :ivar measured: the tiers on which some app's seconds were measured.
    """

    context: str
    load_seconds: float
    per_hour: float = 0.0
    max_delay: float | None = None
    work: Counter[str] = dataclasses.field(default_factory=Counter)
    urgent: float = 0.0
    urgent_work: Counter[str] = dataclasses.field(default_factory=Counter)
    queued: float = 0.0
    measured: set[str] = dataclasses.field(default_factory=set)

    @property
    def workers(self) -> float:
        """Return how many it would keep busy where it is fastest."""
        return min(self.work.values()) / 3600

    def item_seconds(self, tier: str) -> float:
        """Return seconds of a mean item on a worker of a tier that can run it."""
        return self.work[tier] / self.per_hour

    def delay(self, tier: str) -> float:
        """Return seconds until a mean urgent item is answered; 0 where none is."""
        return self.urgent_work[tier] / self.urgent if self.urgent else 0.0


@dataclasses.dataclass(frozen=True)
class Crew:
    """A block of workers that holds a context, and the share of the context's items that it answers."""

    context: str
    block: Block
    share: float


@dataclasses.dataclass(frozen=True)
class Staffing:
    """Which blocks hold which contexts, and the share of each context's items that is not served."""

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

    @functools.cached_property
    def blocks(self) -> list[Block]:
        """Return all blocks of all tiers."""
        sizes = [(number, size) for number, offer in enumerate(self.offers) for size in blocks(offer.workers)]
        return [Block(self.offers[number].name, place, size, number) for place, (number, size) in enumerate(sizes, 1)]

    def possible(self) -> float:
        """Return a share of the demand beyond which no plan can go."""
        needed = sum(task.workers for task in self.tasks)
        return min(1.0, UTILIZATION * sum(offer.workers for offer in self.offers) / needed) if needed else 1.0

    def constants(self, share: float) -> Constants:
        """Return what GH and AGH compute on: a context is a query type and its only model, a block is a tier."""
        tasks, all_blocks = self.tasks, self.blocks
        count, width = len(tasks), len(all_blocks)
        none, sizes = np.zeros((count, count, width)), np.array([block.workers for block in all_blocks], dtype=float)
        rates = np.array([share * task.per_hour for task in tasks])
        limits = np.array([_ANY_DELAY if task.max_delay is None else task.max_delay for task in tasks])
        delay = np.broadcast_to(NEVER * limits[:, None, None], none.shape).copy()
        work = none.copy()
        for i, task in enumerate(tasks):
            for k, block in enumerate(all_blocks):
                if block.tier in task.work:
                    delay[i, i, k] = task.delay(block.tier)
                    # Rounded as it was when it was items in thousands: replays of earlier logs make the same plans.
                    work[i, i, k] = 1e3 * task.item_seconds(block.tier) * (rates[i] / 1e3)
        one, every = np.ones(1, dtype=np.int64), np.ones(count)
        rent = sum(offer.price * offer.workers for offer in self.offers)
        return Constants(
            tensor=one, pipeline=one, gpus=one, allowed=np.ones((width, 1), dtype=bool),
            fits=np.ones((count, width, 1), dtype=bool), spare_gb=np.full((count, width, 1), MOST), kv_gb=none,
            rates=rates, delay=delay[..., None], error=none, max_delay=limits, max_error=every,
            unserved_dollars=_DEAR * (rent + 1.0) * every, max_unserved=every, work=work,
            capacity=UTILIZATION * 3600.0 * sizes, weights_gb=0.0 * every,
            rent=np.array([block.workers * self.offers[block.offer].price for block in all_blocks]),
            model_dollars=0.0 * every, data_gb=0.0 * every, data_dollars=0.0 * every, delay_dollars=0.0 * every,
            stock=np.ones(width), hours=1.0, budget=rent + 1.0, storage=MOST, storage_price=0.0,
        )  # fmt: skip

    def fitting(self, share: float) -> float:
        """Return the share of the demand, scaled down for all alike until GH can serve it."""
        for _ in range(49):
            if not self._staffing(greedy(self.constants(share))).short:
                break
            share *= _LESS
        return share

    def solve(self, share: float = 1.0) -> Staffing:
        """Return AGH's answer with so much of the demand."""
        return self._staffing(adaptive(self.constants(share)))

    def dollars(self, staffing: Staffing) -> float:
        """Return what a staffing costs in an hour, with a high price on what is unserved."""
        rent = sum(offer.price * offer.workers for offer in self.offers)
        held = sum(each.block.workers * self.offers[each.block.offer].price for each in staffing.crews)
        return held + sum(_DEAR * (rent + 1.0) * share for share in staffing.unserved)

    def revised(self, share: float, before: Staffing, hold_hours: float, least_gain: float) -> Staffing:
        """Return what runs, with new routes, or a new plan where that pays for its change.

        A block with another context than before loads it, and is paid for meanwhile. `hold_hours` and `least_gain` are
        those of `Moment`.
        """
        constants = self.constants(share)
        runs = self._carried(before)
        kept, new = self._kept(constants, runs), self._staffing(adaptive(constants))
        loads = {task.context: max(_LEAST_LOAD, task.load_seconds) for task in self.tasks}
        there = {(each.context, each.block) for each in runs}
        price = sum(
            loads[each.context] * (each.block.workers * self.offers[each.block.offer].price)
            for each in new.crews
            if (each.context, each.block) not in there
        )
        kept_dollars = self.dollars(kept)
        saved = (kept_dollars - self.dollars(new)) * hold_hours
        return new if saved > price / 3600 + least_gain * kept_dollars * hold_hours + 1e-9 else kept

    def counts(self, share: float, staffing: Staffing) -> dict[tuple[str, str], int]:
        """Return the workers that a staffing needs, by context and tier."""
        order = {task.context: number for number, task in enumerate(self.tasks)}
        held = [((order[each.context], each.block.offer), each.block.workers) for each in staffing.crews]
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

    def _staffing(self, draft: Draft) -> Staffing:
        """Return what was built, the crews in the order of contexts and blocks."""
        all_blocks = self.blocks
        crews = tuple(
            Crew(self.tasks[j].context, all_blocks[k], draft.routes[j].get((j, k), 0.0))
            for j, k in np.argwhere(draft.config >= 0).tolist()
        )
        return Staffing(crews, tuple(1.0 - min(1.0, sum(each.values())) for each in draft.routes))

    def _carried(self, before: Staffing) -> list[Crew]:
        """Return the crews that are still possible, in the terms of this problem."""
        contexts = {task.context for task in self.tasks}
        here = {block[:3]: block for block in self.blocks}
        there = [each for each in before.crews if each.context in contexts and each.block[:3] in here]
        return [dataclasses.replace(each, block=here[each.block[:3]]) for each in there]

    def _kept(self, constants: Constants, runs: Sequence[Crew]) -> Staffing:
        """Return the crews as they are, with the best shares found for them."""
        number = {task.context: n for n, task in enumerate(self.tasks)}
        draft = Draft(Choices(constants, Mechanisms()))
        places = [(number[each.context], each.block.place - 1, each.share) for each in runs]
        for task, block, _ in places:
            draft.activate(task, block, 0)
        return self._staffing(rerouted(draft, [(task, task, block, share) for task, block, share in places if share]))
