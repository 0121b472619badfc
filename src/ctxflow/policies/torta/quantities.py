"""What TORTA's layers decide on: amounts and prices, servers and tasks, the demand forecast, what a run has shown.

A region is a row or a column; times are seconds. *Server* and *task* are the paper's words for a worker and for a call
that waits for one. Compute and memory are in any units that are the same for both, such as TFLOP/s and GB.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ctxflow.policies.helpers import forget, paces, serving, tier_costs
from ctxflow.policies.protocols import View
from ctxflow.policies.views import AppView, WorkerView

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

LARGEST = 1e100  # Beyond it counts as infinite, and below its inverse as zero, so that no ratio of two overflows.


def amounts(values: npt.ArrayLike) -> Floats:
    """Return amounts with zero for what is negative, infinite or not a number.

    >>> amounts([2, -1, float("nan"), float("inf")])
    array([2., 0., 0., 0.])
    """
    given = np.asarray(values, dtype=np.float64)
    return np.where((given >= 1 / LARGEST) & (given <= LARGEST), given, 0.0)


def prices(values: npt.ArrayLike) -> Floats:
    """Return costs that can be compared: one that is unknown or infinite is above all the others together.

    >>> prices([1.0, -2.0, float("nan")])
    array([ 1., -2.,  4.])
    """
    given = np.asarray(values, dtype=np.float64)
    known = np.abs(given) <= LARGEST
    if known.all():
        return given
    return np.where(known, given, 1.0 + np.abs(np.where(known, given, 0.0)).sum())


def shares_of(flows: npt.ArrayLike, otherwise: npt.ArrayLike) -> Floats:
    """Return each row's flows as shares of the row, on the simplex.

    :param flows: (R, R) from row to column.
    :param otherwise: (R,) the column that gets all of a row from which nothing flows.

    >>> shares_of([[1.0, 3.0], [0.0, 0.0]], [0, 1])
    array([[0.25, 0.75],
           [0.  , 1.  ]])
    """
    known = amounts(flows)
    largest = known.max(axis=1, keepdims=True, initial=0.0)
    scaled = np.divide(known, largest, out=np.zeros_like(known), where=largest > 0)
    empty = np.flatnonzero(largest[:, 0] <= 0)
    scaled[empty, np.asarray(otherwise, dtype=np.int64)[empty]] = 1.0
    return np.asarray(scaled / scaled.sum(axis=1, keepdims=True), dtype=np.float64)


@dataclasses.dataclass(frozen=True)
class Servers:
    """S servers of one region.

    :ivar compute, memory: (S,) of its GPU.
    :ivar capacity: (S,) tasks that it is made for, running and waiting.
    :ivar used: (S,) its work in flight, in tasks. :ivar queue: (S,) tasks that wait on it.
    :ivar places: (S,) tasks that it may still be given.
    :ivar suits: (S, K) whether its architecture is the right one for a type of task.
    """

    compute: Floats
    memory: Floats
    capacity: Floats
    used: Floats
    queue: Floats
    places: Ints
    suits: Bools


@dataclasses.dataclass(frozen=True)
class Tasks:
    """N tasks.

    :ivar compute, memory: (N,) what each asks of a GPU.
    :ivar kind: (N,) its type, a column of `Servers.suits`. :ivar model: (N,) the number of its model, or context.
    :ivar deadline: (N,) when its result is wanted; infinite for never.
    :ivar work: (N,) what it adds to the work of a server, in tasks.
    :ivar embedding: (N, D) of its input, None if the app gives none.
    """

    compute: Floats
    memory: Floats
    kind: Ints
    model: Ints
    deadline: Floats
    work: Floats
    embedding: Floats | None = None


@dataclasses.dataclass(frozen=True)
class Recent:
    """M tasks that ran lately.

    :ivar server, model, time: (M,) where, of which model, and when, in seconds.
    :ivar embedding: (M, D) of their inputs, None if they had none.
    """

    server: Ints
    model: Ints
    time: Floats
    embedding: Floats | None = None


MEMORY = 0.5
"""The weight of the newest slot in level, trend and shares: less is steadier, more follows a surge sooner."""
DAMPING = 0.5  # What is left of the trend from one slot to the next.


def forecast(arrivals: npt.ArrayLike, horizon: int = 1, memory: float = MEMORY, damping: float = DAMPING) -> Floats:
    """Predict what will arrive in the next slots, by a plain predictor that needs no training (section V-B2).

    The total follows its damped trend, and is shared out by the regions' smoothed shares; the paper trains a network.
    Guarantees: (horizon, R), finite and not negative; a region that was not seen to have demand has none.

    :param arrivals: (K, R) tasks of the last slots, oldest first; what is negative or not a number counts as none.
    :param horizon: slots to look ahead.
    :raises ValueError: for a history that is not a table, or a weight that is not in its range.

    >>> forecast([[10, 30]] * 3, horizon=2).round(6).tolist()
    [[10.0, 30.0], [10.0, 30.0]]
    >>> bool(forecast([[10], [20], [30]])[0, 0] > 20)
    True
    """
    history = amounts(arrivals)
    if history.ndim != 2 or horizon < 1:
        raise ValueError("a forecast needs a table of slots and regions, and at least one slot to look ahead")
    if not (0 < memory <= 1 and 0 <= damping < 1):
        raise ValueError("memory is above 0 and at most 1, damping at least 0 and below 1")
    slots, regions = history.shape
    if not slots or not history.any():
        return np.zeros((horizon, regions))
    weights = (1 - memory) ** np.arange(slots - 1, -1, -1)
    smoothed = weights @ (history / history.max())
    level, trend = _holt(history.sum(axis=1), memory, damping)
    ahead = level + trend * np.cumsum(damping ** np.arange(1, horizon + 1))
    return np.asarray(np.maximum(ahead, 0.0)[:, None] * (smoothed / smoothed.sum())[None, :], dtype=np.float64)


def _holt(totals: Floats, memory: float, damping: float) -> tuple[float, float]:
    """Return the level and the trend of exponential smoothing with a damped trend."""
    level, trend = float(totals[0]), 0.0
    for total in totals[1:]:
        before, expected = level, level + damping * trend
        level = memory * float(total) + (1 - memory) * expected
        trend = memory * (level - before) + (1 - memory) * damping * trend
    return level, trend


EVERY_SECONDS = 1.0  # How old an outlook may be: its time is in proportion to the workers.
SAMPLE = 100  # Workers whose speeds the means are over.
PAIRS = 300  # Of apps and workers, whose speeds are looked at in a second: with more of them speeds are older.
MOST_ITEMS = 20  # Of an app on a worker that count: its mean is a moving one.
ALIKE = 0.9  # GPU models that are so near to the fastest are as fast: the rest is chance.


class Outlook:
    """What a run's view shows of all its workers, at most a second old. What was not measured is None.

    :ivar slots: region -> slots of the workers that stay and serve any app.
    :ivar holders: (context, region) -> workers that stay and hold or load it.
    :ivar speeds: GPU model -> items a second, as a share of the fastest model's.
    :ivar prices: tier -> what a worker costs (`helpers.tier_costs`), as a share of the dearest; empty if none is known.
    :ivar priced: whether a tier has a price of its own.
    """

    def __init__(self) -> None:
        self.at = -math.inf
        self.slots: Counter[str] = Counter()
        self.holders: Counter[tuple[str, str]] = Counter()
        self.speeds: dict[str | None, float] = {}
        self.prices: dict[str, float] = {}
        self.priced = False
        self._ways: dict[str, dict[str, float]] = {}
        self._measured = -math.inf
        self._items: dict[str, float] = {}
        self._usual: dict[str, float] = {}  # Context -> the mean of its apps.
        self._loads: dict[tuple[str, str | None], float] = {}
        self._longest: dict[str, float] = {}

    def look(self, view: View) -> bool:
        """Gather it again if it is too old; return whether it was."""
        if self.at <= view.now < self.at + EVERY_SECONDS:
            return False
        self.at = view.now
        staying = [w for w in view.workers.values() if w.noticed is None and not w.draining]
        self.holders = Counter((context, worker.region) for worker in staying for context in worker.contexts)
        self.slots = Counter()
        for worker in serving(staying):
            self.slots[worker.region] += worker.slots
        self.priced = any(tier.price is not None for tier in view.tiers.values())
        self.prices, self._ways = _shares(tier_costs(view)), {}
        apps = [app for app in view.apps.values() if app.arrived]
        if self._measured <= view.now < self._measured + len(apps) * min(len(staying), SAMPLE) / PAIRS:
            return True
        self._measured = view.now
        some = list(itertools.islice(staying, 0, None, max(1, len(staying) // SAMPLE)))
        items, speeds = _paces(some, [app.id for app in apps])
        # Measurements of workers that are gone hold until others replace them.
        self._items.update(items)
        self.speeds.update(speeds)
        self._loads.update(_loads(some, {app.context for app in apps}))
        contexts = {app.context for app in view.apps.values()}
        forget(self._items, view.apps)
        by_context = defaultdict(list)
        for app in apps:
            if app.context and app.id in self._items:
                by_context[app.context].append(self._items[app.id])
        self._usual = {context: _mean(each) for context, each in by_context.items()}
        forget(self._loads, contexts, lambda key: key[0])
        self._longest = {}
        for (context, _), seconds in self._loads.items():
            self._longest[context] = max(seconds, self.longest_load(context))
        return True

    def item_seconds(self, app: AppView) -> float | None:
        """Return the mean seconds of an item over workers; of an app that was not measured, those of its context's."""
        return self._items.get(app.id) or self._usual.get(app.context)

    def load_seconds(self, context: str, region: str) -> float | None:
        """Return the seconds from deciding a load until the context is ready, in the region, else anywhere."""
        found = self._loads.get((context, region))
        return self._loads.get((context, None)) if found is None else found

    def longest_load(self, context: str) -> float:
        """Return the seconds of a load in the region where it takes longest, 0 if it was not measured."""
        return self._longest.get(context, 0.0)

    def ways(self, view: View, origin: str) -> Mapping[str, float]:
        """Return region -> seconds of a call's way there and back, 0 where the site does not say it.

        :param origin: where the call comes from; "" for the home region.
        """
        if origin not in self._ways:
            start = view.regions.get(origin) or next((each for each in view.regions.values() if each.home), None)
            found = {} if start is None else {name: 2 * seconds for name, seconds in start.latency.items()}
            self._ways[origin] = {} if start is None else {**found, start.name: 0.0}
        return self._ways[origin]

    def price(self, tier: str) -> float:
        """Return what a worker of the tier costs, 0 where no price is known."""
        return self.prices.get(tier, 0.0)

    def speed(self, gpu_model: str | None) -> float:
        """Return the model's speed, 1 if it was not measured."""
        return self.speeds.get(gpu_model, 1.0)


def _shares(costs: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return tier -> its cost as a share of the dearest known, 1 where it is unknown."""
    known = [cost for cost, _ in costs.values() if math.isfinite(cost)]
    dearest = max(known, default=0.0)
    return {name: cost / dearest if cost < dearest else 1.0 for name, (cost, _) in costs.items()} if dearest > 0 else {}


def _paces(workers: Sequence[WorkerView], apps: Iterable[str]) -> tuple[dict[str, float], dict[str | None, float]]:
    """Return mean seconds of an item by app, and speeds of models as shares of the fastest one's.

    A model's speed is what its items would have taken at the mean of all models, over what they took: sums of all apps,
    since a mean of ratios favours models that few items were measured on.
    """
    items: dict[str, float] = {}
    usual: dict[str | None, float] = defaultdict(float)
    took: dict[str | None, float] = defaultdict(float)
    for app in apps:
        found = [
            (worker.gpu_model, seconds, max(1, min(MOST_ITEMS, worker.items_done(app))))
            for worker, seconds in paces(workers, app)
            if seconds > 0
        ]
        if not found:
            continue
        items[app] = _mean([seconds for _, seconds, _ in found])
        mean = sum(seconds * count for _, seconds, count in found) / sum(count for _, _, count in found)
        for model, seconds, count in found:
            usual[model] += mean * count
            took[model] += seconds * count
    speeds = {model: usual[model] / seconds for model, seconds in took.items()}
    best = max(speeds.values(), default=1.0)
    return items, {model: 1.0 if speed >= ALIKE * best else speed / best for model, speed in speeds.items()}


def _loads(workers: Sequence[WorkerView], contexts: Iterable[str]) -> dict[tuple[str, str | None], float]:
    """Return mean seconds of staging and loading by context and region, and by context over all regions."""
    found: dict[tuple[str, str | None], list[float]] = defaultdict(list)
    for context in contexts:
        for worker in workers:
            seconds = worker.load_seconds(context)
            if seconds is not None:
                whole = seconds + (worker.stage_seconds(context) or 0.0)
                found[context, worker.region].append(whole)
                found[context, None].append(whole)
    return {key: _mean(values) for key, values in found.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
