"""Where things go, at its simplest: contexts `everywhere`, sessions to the `least-loaded` worker, nobody gives way.

The last are the preemption policy and the health policy `none`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ctxflow.policies.helpers import loads, seekers
from ctxflow.policies.protocols import PlaceRequest, Plan, Trial, Verdict, View
from ctxflow.policies.views import AppView, SessionView, WorkerView


class Everywhere:
    """Every context may be loaded on every tier, within the site's bounds."""

    def plan(self, view: View) -> Plan:
        """Return the plan without limits."""
        return Plan()


class LeastLoadedSessions:
    """A session goes to the worker with the fewest sessions that have something to do, at equal numbers to one that
    has its context, and stays there. It moves only where its worker is about to go, or may not carry it any more.

    >>> LeastLoadedSessions().__class__.__name__
    'LeastLoadedSessions'
    """

    def place(self, view: View) -> Mapping[int, str | None]:
        """Return a worker for each session that needs one."""
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


class NoPreemption:
    """Nobody gives way."""

    reserves = False
    patience = grace = idle = 0.0

    def victims(self, view: View, request: PlaceRequest) -> None:
        """Return nobody."""
        return


class NoQuarantine:
    """Every host is trusted, whatever happens there."""

    probation = 0.0

    def observe(self, view: View, trial: Trial) -> None:
        """Keep nothing."""

    def doubts(self, view: View, worker: WorkerView, app: AppView) -> bool:
        """Return False, always."""
        return False

    def judge(self, view: View) -> Sequence[Verdict]:
        """Return nobody."""
        return ()
