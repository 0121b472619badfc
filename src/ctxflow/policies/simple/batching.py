"""Batches of a fixed size (`fixed`), and steps of as many sessions as meet a chunk target (`coalescing`)."""

from __future__ import annotations

from collections.abc import Mapping

from ctxflow.policies.protocols import View
from ctxflow.policies.views import AppView, WorkerView

GROWTH = 2
"""A step serves at most so many times as many sessions as a step that met the target did."""

MOST_SESSIONS = 64
"""A step serves at most so many sessions where nobody says otherwise."""


class Fixed:
    """Batches of `size` items, or of what the app asks for.

    A short queue is shared out evenly, so that no worker idles while another holds a full batch, unless
    `share` is off. Nothing waits for a batch to fill, unless `linger` says for how long.

    :param size: items a batch where the app does not say.
    :param linger: seconds that a queue shorter than a batch may wait for more.
    :param share: whether a short queue is divided by the workers connected.
    :raises ValueError: for a size below 1 or a negative linger.
    """

    def __init__(self, size: int = 100, linger: float = 0.0, share: bool = True) -> None:
        if size < 1:
            raise ValueError("size is the number of items in a batch: give 1 or more")
        if linger < 0:
            raise ValueError("linger is a number of seconds: give 0 or more")
        self._size = size
        self.linger = linger
        self._share = share
        self._most = MOST_SESSIONS

    def size(self, view: View, app: AppView, worker: WorkerView) -> int:
        """Return the fixed size, less where the queue is short."""
        wish = app.batch_size or self._size
        since = app.waiting_since
        if self.linger and app.backlog < wish and since is not None and view.now < since + self.linger:
            return 0
        if not self._share:
            return wish
        # -(-a // b) is the ceiling of a / b.
        return min(wish, -(-app.backlog // len(view.workers)))

    def duplicate(self, view: View, worker: WorkerView) -> int | None:
        """Return None: nothing is run twice."""
        return None

    def coalesced(self, view: View, app: AppView, worker: WorkerView) -> int:
        """Return K, as steps of the worker were measured to take."""
        return coalesced(app, worker, self._most)


class Coalescing(Fixed):
    """Steps of as many sessions as the chunk target allows; batches of items as `fixed` makes them.

    K, the most sessions of a step, is measured: the largest number with which steps were seen to meet the target, and
    up to twice that where the time of a step promises that they will. An app without a chunk target has all its ready
    sessions in one step, up to `most`.

    Other batching policies coalesce sessions so too, with the defaults.

    :param most: sessions of a step, at most.
    :raises ValueError: for a number below 1.
    """

    def __init__(self, most: int = MOST_SESSIONS, size: int = 100, linger: float = 0.0, share: bool = True) -> None:
        super().__init__(size, linger, share)
        if most < 1:
            raise ValueError("most is the number of sessions that a step may serve: give 1 or more")
        self._most = most


def coalesced(app: AppView, worker: WorkerView, most: int = MOST_SESSIONS) -> int:
    """Return K of an app on a worker: all its ready sessions, up to `most`, where the app has no chunk target."""
    if app.chunk_target is None:
        return most
    return min(most, measured(worker.step_seconds(app.id), app.chunk_target))


def measured(seconds: Mapping[int, float], target: float) -> int:
    """Return K by the measured seconds of steps with so many sessions.

    >>> measured({}, 0.2), measured({1: 0.15}, 0.2), measured({1: 0.05, 2: 0.06}, 0.2)
    (1, 1, 4)
    >>> measured({1: 0.05, 4: 0.16, 5: 0.21}, 0.2)
    4
    >>> measured({1: 0.3}, 0.2)
    1
    """
    met = [count for count, each in seconds.items() if each <= target]
    if not met:
        return 1
    largest = max(met)
    missed = [count for count, each in seconds.items() if each > target and count > largest]
    # A step with twice the sessions takes at most twice as long, or no longer than the line through two says.
    smaller = [count for count in seconds if count < largest]
    each = seconds[largest] / largest
    if smaller:
        other = max(smaller)
        each = max(1e-9, (seconds[largest] - seconds[other]) / (largest - other))
    promised = largest + int((target - seconds[largest]) / each + 1e-9)
    limit = min([GROWTH * largest, *(count - 1 for count in missed)])
    return max(largest, min(promised, limit))
