"""TurboServe's placement of sessions on a live run: the functions of `rebalancing` on what was measured."""

from __future__ import annotations

from collections.abc import Mapping

from ctxflow.policies.helpers import loads, seekers
from ctxflow.policies.protocols import View
from ctxflow.policies.turboserve.rebalancing import (
    Curve,
    Gpu,
    MigrationCost,
    MoveCosts,
    PowerCurve,
    Rule,
    Session,
    assign,
    rebalance,
    rebalance_groups,
)
from ctxflow.policies.views import SessionView, WorkerView

_UNMEASURED = PowerCurve(0.0, 1.0)


class TurboServe:
    """New sessions go where chunks stay shortest; sessions move where that makes the longest chunk shorter.

    A worker carries at most K active sessions (`View.capacity`); those beyond wait. Each app's sessions are placed by
    themselves.

    :param weight: mu: seconds of the longest chunk that a second of migration has to gain.
    :param alpha: seconds of any migration, and `bandwidth`, bytes a second of its transfer.
    :param every: seconds between two rebalancings.
    :param rule: "plateau-aware", or "printed" for the paper's (4) as it stands.
    :raises ValueError: for numbers that are no times or speeds.
    """

    def __init__(
        self,
        weight: float = 0.1,
        alpha: float = 0.02,
        bandwidth: float = 1e9,
        every: float = 1.0,
        rule: Rule = "plateau-aware",
    ) -> None:
        if weight < 0 or alpha < 0 or every < 0 or bandwidth <= 0:
            raise ValueError("weight, alpha and every are numbers of 0 or more, bandwidth is bytes a second")
        if rule not in ("plateau-aware", "printed"):
            raise ValueError(f"there is no rule {rule!r}: choose plateau-aware or printed")
        self._weight, self._cost = weight, MigrationCost(alpha, bandwidth)
        self._every, self._rule = every, rule
        self._rebalanced = float("-inf")

    def place(self, view: View) -> Mapping[int, str | None]:
        """Return a worker for each session that needs one and finds room, and the moves that pay."""
        placed: dict[int, str | None] = {}
        waiting: dict[tuple[str, object], list[SessionView]] = {}
        for session in seekers(view):
            waiting.setdefault((session.app, session.failed_on), []).append(session)
        for (app, _), sessions in waiting.items():
            placed.update(self._assigned(view, app, sessions))
        if view.now >= self._rebalanced + self._every:
            self._rebalanced = view.now
            for app in dict.fromkeys(session.app for session in view.sessions.values()):
                placed.update(self._moves(view, app, placed))
        return placed

    def _assigned(self, view: View, app: str, sessions: list[SessionView]) -> dict[int, str | None]:
        """Place sessions, where K is known first on workers that have the context ready, then on any."""
        able = [worker for name in loads(view) if view.can_carry(sessions[0], worker := view.workers[name])]
        able.sort(key=lambda worker: worker.slots_used)  # Of equal ones: a step waits for calls in flight.
        ready = [worker for worker in able if _is_ready(worker, sessions[0].context)]
        placed: dict[int, str | None] = {}
        for workers in (ready if _capacity(view, app, ready) is not None else [], able):
            left = [session.id for session in sessions if session.id not in placed]
            if workers and left:
                residents = _residents(view, app, workers)
                for number, worker_id in placed.items():
                    residents[worker_id].append(number)
                found = assign(left, residents, _curve(view, app, workers), _capacity(view, app, workers))
                placed.update({int(str(session)): str(worker) for session, worker in found.placed.items()})
        return placed

    def _moves(self, view: View, app: str, placed: Mapping[int, str | None]) -> dict[int, str | None]:
        movable = {
            session.id: session
            for session in view.sessions.values()
            if session.app == app and session.state == "placed" and session.target is None and not session.idle
        }
        workers = [
            worker
            for name in loads(view)
            if (worker := view.workers[name]).sessions or any(view.can_carry(s, worker) for s in movable.values())
        ]
        residents = _residents(view, app, workers)
        for session, worker_id in placed.items():
            if worker_id in residents and view.sessions[session].app == app:
                residents[worker_id].append(session)
        seconds: dict[Session, float] = {
            each: self._cost.seconds(session.state_bytes or 0) for each, session in movable.items()
        }
        costs = MoveCosts(seconds, self._weight)
        curve, capacity = _curve(view, app, workers), _capacity(view, app, workers)
        if self._rule == "printed":
            moves = rebalance(residents, curve, costs, capacity, rule="printed")
        else:
            moves = rebalance_groups(residents, curve, costs, capacity)
        wanted = {int(str(move.session)): str(move.target) for move in moves}
        return {each: there for each, there in wanted.items() if each in movable}


def _is_ready(worker: WorkerView, context: str) -> bool:
    held = worker.contexts.get(context)
    return held is not None and held.state == "ready"


def _residents(view: View, app: str, workers: list[WorkerView]) -> dict[Gpu, list[Session]]:
    """Return the active sessions of an app, by the worker that carries them or is about to."""
    residents: dict[Gpu, list[Session]] = {worker.id: [] for worker in workers}
    for session in view.sessions.values():
        place = session.target or session.worker
        if session.app == app and place in residents and not session.idle:
            residents[place].append(session.id)
    return residents


def _curve(view: View, app: str, workers: list[WorkerView]) -> Curve:
    """Return seconds of a chunk by sessions on a worker: a line through what was measured, over all workers."""
    points: dict[int, list[float]] = {}
    for worker in workers:
        for count, seconds in worker.step_seconds(app).items():
            points.setdefault(count, []).append(seconds)
    return fitted({count: sum(each) / len(each) for count, each in points.items()})


def fitted(points: Mapping[int, float]) -> PowerCurve:
    """Return the line through (sessions, seconds) by least squares that rises, and starts at 0 seconds or later.

    >>> fitted({1: 0.3, 2: 0.4, 4: 0.6})
    PowerCurve(fixed=0.2, each=0.1, exponent=1.0)
    >>> fitted({})
    PowerCurve(fixed=0.0, each=1.0, exponent=1.0)
    """
    if not points:
        return _UNMEASURED
    mean_count = sum(points) / len(points)
    mean = sum(points.values()) / len(points)
    spread = sum((count - mean_count) ** 2 for count in points)
    slope = sum((count - mean_count) * (each - mean) for count, each in points.items()) / spread if spread else 0.0
    slope = min(max(slope, 1e-3 * mean), mean / mean_count)
    return PowerCurve(round(max(0.0, mean - slope * mean_count), 9), round(slope, 9))


def _capacity(view: View, app: str, workers: list[WorkerView]) -> int | None:
    known = view.apps.get(app)
    if known is None or known.chunk_target is None:
        return None
    return min((view.capacity(known, worker) for worker in workers), default=None)
