"""Calls that are queued or running, and sessions that have something to do, by app.

What does not live here: how many workers they want.
"""

from __future__ import annotations

import collections
import math

from ctxflow.policies.protocols import View
from ctxflow.policies.views import AppView, SessionView

SESSIONS = 4
"""Sessions of a worker, as long as nothing was measured."""


def outstanding(view: View, batch_size: int) -> dict[str, int]:
    """Calls of each app: its running batches, and its queue in batches of the size that it would get now.

    :param batch_size: items of a call of an app that states none, while no worker is there to size one for.
    """
    calls = {
        app.id: math.ceil(app.backlog / _items_of_call(view, app, batch_size)) if app.backlog else 0
        for app in view.apps.values()
    }
    for attempt in view.attempts.values():
        calls[attempt.app] += bool(attempt.items)  # The steps of sessions have none.
    return calls


def active(view: View) -> dict[str, list[SessionView]]:
    """The sessions of each app that have something to do, wherever they are."""
    found: dict[str, list[SessionView]] = {}
    for session in view.sessions.values():
        if not session.idle and not session.by_user:
            found.setdefault(session.app, []).append(session)
    return found


def idle(view: View) -> dict[str, int]:
    """The number of sessions of each app that have nothing to do, and may at any time."""
    waiting = (session for session in view.sessions.values() if session.idle and not session.by_user)
    return collections.Counter(session.app for session in waiting)


def sessions_of_worker(view: View, app: AppView, unmeasured: int) -> int:
    """K as it was measured: the most sessions of an app that any worker serves within the app's chunk target.

    :param unmeasured: what it is as long as nothing was measured.
    """
    known = [view.capacity(app, worker) for worker in view.workers.values() if worker.step_seconds(app.id)]
    return max(known, default=unmeasured)


def _items_of_call(view: View, app: AppView, batch_size: int) -> int:
    """The items of a batch that an app would get now, on the worker that is connected longest."""
    first = next(iter(view.workers.values()), None)
    if first is None:
        return app.batch_size or batch_size
    return view.batch_size(app, first) or max(1, app.backlog)  # 0: it waits to become one batch.
