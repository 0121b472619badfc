"""A fixed number of workers (`fixed`), and workers in proportion to what is outstanding (`queue-proportional`).

How `queue-proportional` counts, and where that is simpler than the truth:

- *Calls.* An app's queue is divided by the size of the batch that the worker connected longest would get now; its
  running batches are a call each. What a short queue is shared out into therefore counts as calls.
- *Speed.* All workers count alike, whatever their GPU: `calls_per_worker` is the only knob.
- *Who may run what.* Calls of apps that the same tiers may run are counted together (`helpers.divided`).
- *Prices* order the tiers, and are not weighed against waiting: a tier without a price comes after those with one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ctxflow.policies.helpers import SESSIONS, Peak, active, divided, outstanding, sessions_of_worker, tiers_for
from ctxflow.policies.protocols import View


class FixedWorkers:
    """As many workers of every tier, all the time.

    :param workers: workers a tier, within its bounds; None for the most that the site allows.
    :raises ValueError: for a negative number.
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 0:
            raise ValueError("workers is how many to hold: give 0 or more")
        self._workers = workers

    def target(self, view: View) -> Mapping[str, int]:
        """Return the same number whatever the load."""
        wish = self._workers
        return {
            name: tier.maximum if wish is None else max(tier.minimum, min(tier.maximum, wish))
            for name, tier in view.tiers.items()
        }


class QueueProportional:
    """One worker for every so many calls that are queued or running, asked for everywhere at once.

    Sessions that have something to do want a worker for every so many that one was measured to serve.

    An opportunistic tier may never give its workers, so every tier that can run the calls is asked for all that is
    not connected yet, and takes its place as soon as it gives: what comes first counts, and the other tiers are
    asked for so many fewer. When less is wanted than is connected, the cheapest tiers are kept. Each tier stays
    between its minimum and its maximum. A worker that holds work is never given back (the scheduler sees to it).

    Guarantees, for given workers: a longer queue never lowers what any tier is asked for, as far as batches do not
    shrink with it; without anything outstanding each tier is asked for its minimum once `linger` seconds are over.

    :param calls_per_worker: calls, queued or running, for which one worker is held.
    :param linger: seconds for which fewer workers must be wanted before any is given back, so that a pause between
        two bursts does not cost the contexts that the workers hold.
    :param batch_size: items of a call of an app that states no batch size, while no worker is there for which the
        batching policy could say.
    :raises ValueError: for a number that makes no sense.
    """

    def __init__(self, calls_per_worker: float = 4, linger: float = 60.0, batch_size: int = 100) -> None:
        if not (math.isfinite(calls_per_worker) and calls_per_worker > 0):
            raise ValueError("calls_per_worker is how many calls a worker is held for: give more than 0")
        if not linger >= 0:
            raise ValueError("linger is a number of seconds: give 0 or more")
        if batch_size < 1:
            raise ValueError("batch_size is the number of items in a call: give 1 or more")
        self._calls_per_worker = calls_per_worker
        self._linger = linger
        self._batch_size = batch_size
        self._peaks: dict[frozenset[str], Peak] = {}

    def target(self, view: View) -> Mapping[str, int]:
        """Return what each tier is asked for: what is used of its workers, and all that nobody has given yet."""
        return divided(view, self._lingering(view))

    def _lingering(self, view: View) -> dict[frozenset[str], float]:
        """Return workers wanted by the tiers that will do, at their most over the last `linger` seconds."""
        now: dict[frozenset[str], float] = {}
        sessions = active(view)
        for app, calls in outstanding(view, self._batch_size).items():
            group = tiers_for(view, view.apps[app])
            wanted = calls / self._calls_per_worker
            if app in sessions:
                wanted += len(sessions[app]) / sessions_of_worker(view, view.apps[app], SESSIONS)
            now[group] = now.get(group, 0.0) + wanted
        # What other tiers may run since there is another plan is counted there.
        self._peaks = {group: self._peaks.get(group) or Peak() for group in now}
        return {group: self._peaks[group].over(wanted, view.now, self._linger) for group, wanted in now.items()}
