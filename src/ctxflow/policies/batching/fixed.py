"""The fixed batch size, the simple default."""

from __future__ import annotations

from ctxflow.policies.protocols import View
from ctxflow.policies.views import AppView, WorkerView


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

    def size(self, view: View, app: AppView, worker: WorkerView) -> int:
        """The fixed size, less where the queue is short."""
        wish = app.batch_size or self._size
        since = app.waiting_since
        if self.linger and app.backlog < wish and since is not None and view.now < since + self.linger:
            return 0
        if not self._share:
            return wish
        # -(-a // b) is the ceiling of a / b.
        return min(wish, -(-app.backlog // len(view.workers)))

    def duplicate(self, view: View, worker: WorkerView) -> int | None:
        """Nothing is run twice."""
        return None
