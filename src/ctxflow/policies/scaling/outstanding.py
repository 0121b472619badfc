"""Calls that are queued or running, by app.

What does not live here: how many workers they want.
"""

from __future__ import annotations

import math

from ctxflow.policies.protocols import AppView, View, WorkerView


def outstanding(view: View, batch_size: int) -> dict[str, int]:
    """Calls of each app: its running batches, and its queue in batches of the size that it would get now.

    :param batch_size: items of a call of an app that states none, while no worker is there to size one for.
    """
    first = next(iter(view.workers.values()), None)
    calls = {app.id: _queued(view, app, first, batch_size) for app in view.apps.values()}
    for attempt in view.attempts.values():
        calls[attempt.app] += 1
    return calls


def _queued(view: View, app: AppView, worker: WorkerView | None, batch_size: int) -> int:
    if not app.backlog:
        return 0
    size = app.batch_size or batch_size
    if worker is not None:
        size = view.batch_size(app, worker) or app.backlog  # 0: it waits to become one batch.
    return math.ceil(app.backlog / size)
