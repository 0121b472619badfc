"""Batches for workers that may be evicted at any moment: the batching policy `opportunistic` (docs/batching.md).

How likely an eviction is. A tier's workers may be evicted at one constant rate, or at rates that differ: if each one's
is drawn from a gamma distribution of shape a and scale 1/b, lifetimes follow Lomax's distribution (K. S. Lomax,
"Business failures", 1954), and a worker that has lived for t is evicted at the rate a / (b + t).

The best batch. n items take c + n t seconds, and an eviction, at the rate h, destroys the batch that runs. By renewal,
the useful items a second are

    U(n) = n h / (exp(h (c + n t)) - 1),

which is greatest where x = n t h solves (1 - x) exp(x) = exp(-h c): Daly's condition for the best interval between
checkpoints (J. Daly, 2006), with a call's cost in the place of a checkpoint's.

The end of the queue. A batch takes at most half of what is left, shared out by speed: factoring (S. F. Hummel,
E. Schonberg, L. E. Flynn, 1992). A worker that then idles runs once more what will take longest, if it would be sooner.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ctxflow.policies.helpers import QueueShares, forget
from ctxflow.policies.protocols import View
from ctxflow.policies.simple import WINDOW, coalesced
from ctxflow.policies.stragglers import Stragglers, beside
from ctxflow.policies.throughput_curves import LEVELS, EvictionRisk
from ctxflow.policies.views import AppView, AttemptView, TierView, WorkerView
from ctxflow.policies.windows import WindowLearner

# --- how likely an eviction is


PRIOR_EVICTIONS = 0.5  # What a tier counts as having lost before anything is known: Jeffreys' half an event,
PRIOR_SECONDS = 1800.0  # in so many seconds of one worker's time: one worker an hour.
FEW_EVICTIONS = 0.1  # The same of the windows: what is in flight is lost at once, so that few evictions must count.
CLEARLY = 3.0  # The logarithm of how much likelier differing rates must be: by chance, one time in a hundred.
MOMENT = 1e-3  # Workers that lived no longer than so many seconds together tell nothing.
SCALES = tuple(4.0**n for n in range(-4, 3))  # The b that are tried, in mean lifetimes.


@dataclasses.dataclass(frozen=True)
class Hazard:
    """Evictions per worker and second at an age: shape / (scale + age), or the constant rate where scale is infinite.

    >>> Hazard(0.001).at(50.0)
    0.001
    >>> Hazard(0.001, shape=0.5, scale=500.0).at(1500.0)
    0.00025
    """

    rate: float
    shape: float = 0.0
    scale: float = math.inf

    def at(self, age: float) -> float:
        """Return the evictions per second at an age in seconds."""
        return self.rate if self.scale == math.inf else self.shape / (self.scale + age)


def fit(lifetimes: Sequence[float], ages: Sequence[float]) -> Hazard:
    """Return the likeliest hazard.

    A constant one has `PRIOR_EVICTIONS` more in `PRIOR_SECONDS` of one worker's time.

    :param lifetimes: seconds that those lived that were evicted.
    :param ages: seconds that those who are there have lived.

    >>> fit([], [])
    Hazard(rate=0.0002777777777777778, shape=0.0, scale=inf)
    """
    ended = np.array(lifetimes, dtype=float)
    lived = np.concatenate([ended, np.array(ages, dtype=float)])
    count, total = len(ended), float(lived.sum())
    rate = (PRIOR_EVICTIONS + count) / (PRIOR_SECONDS + total)
    best = Hazard(rate)
    if not count or total < MOMENT:
        return best
    # The logarithms of the likelihoods, less what is the same in all.
    likelihood = count * math.log(count / total) + CLEARLY
    for scale in (each * total / count for each in SCALES):
        shape = count / float(np.log1p(lived / scale).sum())
        found = count * math.log(shape / scale) - float(np.log1p(ended / scale).sum())
        if found > likelihood:
            best, likelihood = Hazard(rate, shape, scale), found
    return best


# --- batches


SHARE = 2.0  # A batch takes one part in so many of what is left.
FIRST = 3.0  # A worker's first batch is so many times shorter: it may be slower than its kind.
# Batches are longer or shorter than the best by this share, by turns that follow no pattern: what a call costs can only
# be told from batches of different size. Long ones are at least as long as would be best if a call cost its standard
# error more: a cost that was found too small would otherwise lead to batches of one, which can never tell.
SWING = 0.25
KIND_ITEMS = 10  # A worker's speed is mostly that of its kind until it has answered many more items than this.
REFRESH_SECONDS = 1.0  # How long what was added up over all workers is used again.
REFIT = 1.1  # The lifetimes of a tier's workers are looked at again when there are so many times as many.
SHORT_JOB = 256  # As long as nothing is known, so many items of each worker are begun at once if they are all.
MOST_NOTICES = 64  # Of so many workers at most it is kept how long they lived on after their notice.


def best_seconds(call_seconds: float, hazard: float) -> float:
    """Return seconds of items in the batch that gets the most useful items a second.

    :param call_seconds: what a call costs beside its items.
    :param hazard: evictions per worker and second.

    >>> round(best_seconds(1.0, 1 / 120), 2), round(math.sqrt(2 * 1.0 * 120), 2)  # Young's is the first order.
    (14.83, 15.49)
    >>> round(best_seconds(1000.0, 1 / 120))  # Never more than one mean lifetime.
    120
    """
    if hazard <= 0:
        return math.inf
    if call_seconds <= 0:
        return 0.0
    cost = min(hazard * call_seconds, 20.0)  # Beyond, x is 1 to nine digits.
    # Newton on log(1 - x) + x + h c, which is concave and falls: from beyond the root it never leaves its side.
    x = min(math.sqrt(2 * cost), 1 - math.exp(-1 - cost))
    for _ in range(8):
        x += (math.log1p(-x) + x + cost) * (1 - x) / x
    return x / hazard


@dataclasses.dataclass(slots=True)
class _Kind:
    """What workers of one GPU model have shown: items answered, and the seconds that they took."""

    items: int = 0
    seconds: float = 0.0

    @property
    def item_seconds(self) -> float:
        """Return the mean seconds of an item, each worker's weighted by its items."""
        return self.seconds / self.items


@dataclasses.dataclass(slots=True)
class _Known:
    """What was added up over all workers for an app."""

    at: float
    speed: float  # Items a second of all workers that hold the context.
    hazards: dict[str, Hazard]  # Tier -> how likely its workers are evicted.
    kinds: dict[str | None, _Kind]  # GPU model -> what its workers have shown.
    flying: int  # Calls of its context in flight.
    uses: int = 0  # It is made anew after as many as there are workers, so that each costs little.


class Opportunistic:
    """Batches as long as evictions and calls' costs make best on each worker, and ever shorter at the end.

    Nothing has to be tuned: item times, the cost of a call and the rate of evictions are measured as the run goes. The
    first batch of a kind of worker is one item, and none is more than three times as many as that kind has shown; a new
    worker begins with what is known of its GPU model. An app's own `batch_size` is a ceiling.

    Of apps whose calls overlap, each kind of worker gets the smallest window that keeps its engines within 3 % of their
    best useful throughput, found by `windows.WindowLearner`.

    :param most: the most items that a batch may have.
    :param window: items in flight on a worker before anything was measured. By default that is 64, but where too little
        is left to measure anything, all of it.
    :param most_window: the most items in flight on a worker.
    :raises ValueError: for a number below 1.
    """

    linger = 0.0

    def __init__(self, most: int = 100_000, window: int | None = None, most_window: int = LEVELS[-1]) -> None:
        if most < 1:
            raise ValueError("most is the largest number of items in a batch: give 1 or more")
        if (window is not None and window < 1) or most_window < 1:
            raise ValueError("window and most_window are numbers of items in flight on a worker: give 1 or more")
        self._most = most
        self._first_window, self._most_window = min(window or WINDOW, most_window), most_window
        self._short_job = min(SHORT_JOB, most_window) if window is None else 0
        self._learners: dict[tuple[str, str, str | None], WindowLearner] = {}
        self._notices: dict[str, dict[str, float]] = {}  # Tier -> worker -> how long after its notice an item ended.
        self._shares = QueueShares()
        self._known: dict[str, _Known] = {}
        self._shown: dict[str, dict[str | None, _Kind]] = {}
        # Tier -> how many lifetimes were looked at last, and what was found.
        self._fitted: dict[str, tuple[int, Hazard]] = {}
        self._stragglers = Stragglers(self._seconds)

    # --- how many items

    def size(self, view: View, app: AppView, worker: WorkerView) -> int:
        """Return the best batch, if enough is known and enough is left."""
        known = self._look(view, app)
        own = worker.items_done(app.id)
        kind = known.kinds.get(worker.gpu_model)
        shown = max(own, kind.items if kind is not None else 0)
        item_seconds = _item_seconds(worker, app, kind)
        if item_seconds is None:
            return 1
        ceiling = min(app.batch_size or self._most, self._most, 1 + 2 * shown)
        if item_seconds <= 0:
            return ceiling
        left = app.backlog / max(known.speed, 1 / item_seconds)  # Seconds of work.
        cost = app.call_seconds or 0.0
        hazard = known.hazards.get(worker.tier)
        rate = hazard.at(view.now - worker.joined) if hazard is not None else math.inf
        best = best_seconds(cost, rate)
        if not own:
            best /= FIRST
        elif _long_turn(own):
            best = max(best * (1 + SWING), best_seconds(cost + app.call_seconds_error, rate))
        else:
            best *= 1 - SWING
        # A batch shorter than what its call costs could not save as much at the end.
        seconds = min(best, max(left / SHARE, cost))
        return max(1, min(ceiling, round(seconds / item_seconds)))

    def _look(self, view: View, app: AppView) -> _Known:
        known = self._known.get(app.id)
        if known is None or view.now >= known.at + REFRESH_SECONDS or known.uses >= len(view.workers):
            known = self._known[app.id] = self._add_up(view, app)
        known.uses += 1
        return known

    def _add_up(self, view: View, app: AppView) -> _Known:
        """Add up over all workers: their speeds, what each kind has shown, how long they have been there."""
        kinds: dict[str | None, _Kind] = {}
        ages: dict[str, list[float]] = {}
        holders: list[WorkerView] = []
        for worker in view.workers.values():
            ages.setdefault(worker.tier, []).append(view.now - worker.joined)
            seconds = worker.seconds_per_item(app.id)
            if seconds:
                items = worker.items_done(app.id)
                kind = kinds.setdefault(worker.gpu_model, _Kind())
                kind.items += items
                kind.seconds += items * seconds
            held = worker.contexts.get(app.context)
            if seconds or (held is not None and held.state == "ready"):
                holders.append(worker)
        # What workers showed that are gone by now is not forgotten.
        shown = self._shown.setdefault(app.id, {})
        forget(self._shown, view.apps)
        forget(self._known, view.apps)
        for model, kind in kinds.items():
            before = shown.get(model)
            items = max(kind.items, before.items if before is not None else 0)
            shown[model] = _Kind(items, items * kind.item_seconds)
        each = (_item_seconds(worker, app, shown.get(worker.gpu_model)) for worker in holders)
        speed = sum(1 / seconds for seconds in each if seconds)
        hazards = {name: self._hazard(view.tiers.get(name), name, lived) for name, lived in ages.items()}
        flying = sum(worker.in_flight(app.context) for worker in view.workers.values())
        return _Known(view.now, speed, hazards, shown, flying)

    def _hazard(self, tier: TierView | None, name: str, ages: list[float]) -> Hazard:
        """Return how likely a tier's workers are evicted, of which those that are there have lived so long."""
        lifetimes = (tier.lifetimes if tier is not None else None) or ()
        seen, found = self._fitted.get(name, (-1, None))
        if found is None or len(lifetimes) > REFIT * seen:
            found = fit(lifetimes, ages)
            self._fitted[name] = len(lifetimes), found
        if found.scale < math.inf:
            return found
        rate = tier.eviction_rate if tier is not None else None
        gone_seconds = len(lifetimes) / rate if rate else 0.0
        return Hazard((PRIOR_EVICTIONS + len(lifetimes)) / (PRIOR_SECONDS + gone_seconds + sum(ages)))

    # --- how many items in flight

    def window(self, view: View, app: AppView, worker: WorkerView) -> int:
        """Return what was found for such workers, less where what is left does not fill the windows of all."""
        learner = self._learner(view, app, worker)
        window = learner.window
        if window < self._short_job and learner.throughput is None and not learner.changes:
            left = app.backlog + self._look(view, app).flying
            if left <= self._short_job * len(view.workers):
                window = self._short_job
        if app.backlog >= window * len(view.workers):
            return window
        return min(window, self._shares.share(view, app, worker, lambda each: self._throughput(view, app, each)))

    def _throughput(self, view: View, app: AppView, worker: WorkerView) -> float:
        """Return tokens a second of a worker; while that of any kind is not known, the same for all."""
        learners = [learner for key, learner in self._learners.items() if key[0] == app.id]
        if any(learner.throughput is None for learner in learners):
            return 1.0
        return self._learner(view, app, worker).throughput or 1.0

    def finished(self, view: View, app: AppView, worker: WorkerView, seconds: float, tokens: int | None) -> None:
        """Learn what the present window of such workers is worth."""
        tier = view.tiers.get(worker.tier)
        gone = len((tier.lifetimes if tier is not None else None) or ())
        rate = tier.eviction_rate if tier is not None and gone else None
        # Before anything was evicted, as for batches.
        lived = gone / rate if rate else view.now - worker.joined
        rate = (FEW_EVICTIONS + gone) / (FEW_EVICTIONS / PRIOR_EVICTIONS * PRIOR_SECONDS + lived)
        notices = self._notices.setdefault(worker.tier, {})
        if worker.noticed is not None:
            notices[worker.id] = view.now - worker.noticed
            if len(notices) > MOST_NOTICES:
                del notices[next(iter(notices))]
        grace = sum(notices.values()) / len(notices) if notices else 0.0
        evictions = EvictionRisk(rate, grace, min(1.0, len(notices) / max(1, min(gone, MOST_NOTICES))))
        self._learner(view, app, worker).finished(view, app, worker, seconds, tokens, evictions)

    def _learner(self, view: View, app: AppView, worker: WorkerView) -> WindowLearner:
        key = app.id, worker.tier, worker.gpu_model
        learner = self._learners.get(key)
        if learner is None:
            forget(self._learners, view.apps, lambda key: key[0])
            most = min(self._most_window, app.concurrency or self._most_window)
            learner = self._learners[key] = WindowLearner(self._first_window, most)
        return learner

    def coalesced(self, view: View, app: AppView, worker: WorkerView) -> int:
        """Return K as the policy `coalescing` does."""
        return coalesced(app, worker)

    # --- what is run twice

    def duplicate(self, view: View, worker: WorkerView) -> int | None:
        """Return the batch that will take longest, if this worker would be done with it sooner."""
        return self._stragglers.for_worker(view, worker)

    def _seconds(self, view: View, attempt: AttemptView, worker: WorkerView) -> float | None:
        """Return what a batch is expected to take a worker, None if that is not known."""
        app = view.apps[attempt.app]
        each = _item_seconds(worker, app, self._look(view, app).kinds.get(worker.gpu_model))
        if each is None:
            return None
        return (app.call_seconds or 0.0) + len(attempt.items) * each * beside(view, attempt, worker)


def _item_seconds(worker: WorkerView, app: AppView, kind: _Kind | None) -> float | None:
    """Return seconds of an item on a worker: its own mean, drawn towards its kind's while it has answered few."""
    seconds = worker.seconds_per_item(app.id)
    if kind is None or not kind.items:
        return seconds
    if seconds is None:
        return kind.item_seconds
    own = worker.items_done(app.id)
    return (own * seconds + KIND_ITEMS * kind.item_seconds) / (own + KIND_ITEMS)


def _long_turn(done: int) -> bool:
    """Return whether it is the turn of a long batch, by the items answered: the same until the next batch."""
    # Fibonacci hashing: the top bit of a product with 2**32 / the golden ratio.
    return bool(done * 2654435769 & 0x80000000)
