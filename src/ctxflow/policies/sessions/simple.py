"""The simple placement of sessions, and what all placements share.

What does not live here: moving sessions to make chunks shorter (turboserve.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from ctxflow.policies.protocols import View
from ctxflow.policies.views import SessionView, WorkerView


def seekers(view: View) -> list[SessionView]:
    """The sessions that need a worker now, longest open first: they have something to do, or must leave theirs.

    One whose next worker is named already is none of them.
    """
    found = []
    stays: dict[tuple[object, ...], bool] = {}  # Sessions may be many: each worker is looked at once.
    for session in view.sessions.values():
        if session.state == "waiting":
            if not session.idle:
                found.append(session)
        elif session.state == "placed" and session.target is None:
            worker = view.workers.get(session.worker or "")
            key = (session.worker, session.context, session.failed_on)
            if worker is not None and key not in stays:
                stays[key] = view.can_carry(session, worker)
            if worker is not None and not stays[key]:
                found.append(session)
    return found


def loads(view: View) -> dict[str, int]:
    """Worker -> its sessions that have something to do, those included that are on their way to it."""
    counts = {worker.id: 0 for worker in view.workers.values() if worker.noticed is None and not worker.draining}
    for session in view.sessions.values():
        place = session.target or session.worker
        if place in counts and not session.idle:
            counts[place] += 1
    return counts


class LeastLoadedSessions:
    """A session goes to the worker with the fewest sessions that have something to do, at equal numbers to one that
    has its context, and stays there. It moves only where its worker is about to go, or may not carry it any more.

    >>> LeastLoadedSessions().__class__.__name__
    'LeastLoadedSessions'
    """

    def place(self, view: View) -> Mapping[int, str | None]:
        """A worker for each session that needs one."""
        waiting = seekers(view)
        if not waiting:
            return {}
        counts = loads(view)
        placed: dict[int, str | None] = {}
        for session in waiting:
            able = [worker for name in counts if view.can_carry(session, worker := view.workers[name])]
            if able:
                best = min(able, key=lambda worker: (counts[worker.id], _unready(session, worker)))
                counts[best.id] += 1
                placed[session.id] = best.id
        return placed


def _unready(session: SessionView, worker: WorkerView) -> bool:
    held = worker.contexts.get(session.context)
    return held is None or held.state != "ready"
