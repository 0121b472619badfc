"""What is known of a run as a whole, gathered from its view now and then: who holds what where, how fast all is."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from ctxflow.policies.helpers import forget, serving
from ctxflow.policies.protocols import View
from ctxflow.policies.views import WorkerView

EVERY_SECONDS = 1.0
"""How old it may be: to look at all workers takes time in proportion to their number."""
SAMPLE = 100
"""Workers that are asked for their speed: a mean over more would hardly be better."""


class Outlook:
    """Means over workers, at most a second old. What nobody measured is None.

    :ivar slots: region -> slots of the workers that stay and serve whoever needs them.
    :ivar holders: (context, region) -> workers that stay and hold or load it.
    :ivar speeds: GPU model -> items a second, as a share of the fastest model's.
    """

    def __init__(self) -> None:
        self.at = -math.inf
        self.slots: Counter[str] = Counter()
        self.holders: Counter[tuple[str, str]] = Counter()
        self.speeds: dict[str | None, float] = {}
        self._items: dict[str, float] = {}
        self._loads: dict[tuple[str, str | None], float] = {}
        self._longest: dict[str, float] = {}

    def look(self, view: View) -> bool:
        """Gather it if it is too old; whether it was."""
        if self.at <= view.now < self.at + EVERY_SECONDS:
            return False
        self.at = view.now
        staying = [w for w in view.workers.values() if w.noticed is None and not w.draining]
        self.slots = Counter()
        self.holders = Counter()
        for worker in serving(staying):
            self.slots[worker.region] += worker.slots
        for worker in staying:
            for context in worker.contexts:
                self.holders[context, worker.region] += 1
        some = list(itertools.islice(staying, 0, None, max(1, len(staying) // SAMPLE)))
        items, speeds = _paces(some, [app.id for app in view.apps.values() if app.arrived])
        # What workers told that are gone still holds, until others tell.
        self._items.update(items)
        self.speeds.update(speeds)
        self._loads.update(_loads(some, {app.context for app in view.apps.values() if app.arrived}))
        contexts = {app.context for app in view.apps.values()}
        forget(self._items, view.apps)
        forget(self._loads, contexts, lambda key: key[0])
        self._longest = {}
        for (context, _), seconds in self._loads.items():
            self._longest[context] = max(seconds, self._longest.get(context, 0.0))
        return True

    def item_seconds(self, app: str) -> float | None:
        """Return the seconds of an item on the mean worker, None where nobody measured it."""
        return self._items.get(app)

    def load_seconds(self, context: str, region: str) -> float | None:
        """Return the seconds from deciding a load until the context is ready, in the region, else anywhere."""
        found = self._loads.get((context, region))
        return self._loads.get((context, None)) if found is None else found

    def longest_load(self, context: str) -> float:
        """Return the seconds of a load in the region where it takes longest, 0 if nobody measured it."""
        return self._longest.get(context, 0.0)

    def speed(self, gpu_model: str | None) -> float:
        """Return the model's speed, 1 if nobody measured it."""
        return self.speeds.get(gpu_model, 1.0)


def _paces(workers: Sequence[WorkerView], apps: Iterable[str]) -> tuple[dict[str, float], dict[str | None, float]]:
    """Return mean seconds of an item by app, and speeds of models as shares of the fastest one's."""
    items: dict[str, float] = {}
    shares: dict[str | None, list[float]] = defaultdict(list)
    for app in apps:
        by_model: dict[str | None, list[float]] = defaultdict(list)
        for worker in workers:
            seconds = worker.seconds_per_item(app)
            if seconds is not None and seconds > 0:
                by_model[worker.gpu_model].append(seconds)
        if not by_model:
            continue
        means = {model: _mean(found) for model, found in by_model.items()}
        items[app] = _mean([seconds for found in by_model.values() for seconds in found])
        fastest = min(means.values())
        for model, mean in means.items():
            shares[model].append(fastest / mean)
    return items, {model: _mean(found) for model, found in shares.items()}


def _loads(workers: Sequence[WorkerView], contexts: Iterable[str]) -> dict[tuple[str, str | None], float]:
    """Return mean seconds of staging and loading by context and region, and by context over all regions."""
    found: dict[tuple[str, str | None], list[float]] = defaultdict(list)
    for context in contexts:
        for worker in workers:
            seconds = worker.load_seconds(context)
            if seconds is not None:
                # Files that come once are not fetched again, but other workers have to fetch them.
                whole = seconds + (worker.stage_seconds(context) or 0.0)
                found[context, worker.region].append(whole)
                found[context, None].append(whole)
    return {key: _mean(values) for key, values in found.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
