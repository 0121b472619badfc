"""Whether a run ends earlier without a slow host: it does work all the same, but may hold its last batch for long.

What does not live here: who is slow (sequential.py).
"""

from __future__ import annotations

from ctxflow.policies.protocols import View

TOLERANCE = 1.05  # The share of the remaining time that certainty about its end is worth.


def gains(view: View, app_id: str, host: str, worker_id: str = "") -> bool:
    """Whether what is left of an app is done as early without a host, or one worker of it, or nearly so.

    Without it the others do all. With it all are busy until the end, or until what its next batch takes there.
    """
    app = view.apps.get(app_id)
    if app is None:
        return True
    all_speed = slow_speed = next_batch = 0.0
    for worker in view.workers.values():
        seconds = worker.seconds_per_item(app_id)
        if seconds is None or seconds <= 0 or worker.draining or worker.noticed is not None:
            continue
        all_speed += worker.slots / seconds
        if worker.host == host and worker_id in ("", worker.id):
            slow_speed += worker.slots / seconds
            next_batch = max(next_batch, seconds * max(1, view.batch_size(app, worker)))
    left = app.backlog + sum(len(each.items) for each in view.attempts.values() if each.app == app_id)
    if all_speed <= slow_speed:
        return False
    return left / (all_speed - slow_speed) <= TOLERANCE * max(left / all_speed, next_batch)
