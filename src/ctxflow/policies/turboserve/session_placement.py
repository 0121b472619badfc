"""TurboServe's placement of sessions on a live run: the functions of `session_weights` on what was measured."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence

from ctxflow.policies.helpers import forget, is_ready, loads, seekers
from ctxflow.policies.protocols import View
from ctxflow.policies.turboserve.rebalancing import (
    Gpu,
    MigrationCost,
    Move,
    MoveCosts,
    PowerCurve,
    Rule,
    Session,
    balanced_groups,
    most_sessions,
    rebalance,
)
from ctxflow.policies.turboserve.session_weights import assign_by_weight, longest_chunk, rebalance_by_weight
from ctxflow.policies.turboserve.weighed_fleet import ALIKE, SessionWeights
from ctxflow.policies.views import AppView, SessionView, WorkerView

_UNMEASURED = PowerCurve(0.0, 1.0)
_STEP = 0.25
"""SessionWeights are multiples of this, of the average session's: closer than that they are not known."""
_GAIN, _MORE, _HALVED = 0.05, 0.03, 300.0
"""How much shorter the longest chunk must get for moves that rest on estimates; how much more after each time that they
were made, so that nobody moves for ever in search of what estimates promise; and seconds in which that is halved."""
_PROMISED = 0.9
"""The share of the chunk target that a worker which made no step yet is filled to."""
_IDLE = 30.0
"""Seconds without a chunk after which an idle session leaves its worker: it returns where chunks are shortest then, not
where they were when it was placed. Whoever returns sooner is spared the way of the state."""
_GROUP = 64
"""Workers that are balanced as one where sessions weigh unlike."""


class TurboServe:
    """New sessions go where chunks stay shortest; sessions move where that makes the longest chunk shorter.

    Sessions count by what they add to a step, as far as that is known, and workers by the pace of their GPU model. A
    worker carries at most K active sessions (`View.capacity`), and no more than it has memory for their states; those
    beyond wait. A session that has been idle for half a minute leaves its worker, and is placed anew when it has
    something to do. Each app's sessions are placed by themselves.

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
        self._doubts: dict[str, _Doubt] = {}

    def place(self, view: View) -> Mapping[int, str | None]:
        """Return workers for sessions that need one and find room, moves that pay, and None for those that leave."""
        placed: dict[int, str | None] = dict.fromkeys(_long_idle(view))
        waiting: dict[tuple[str, object], list[SessionView]] = {}
        for session in seekers(view):
            waiting.setdefault((session.app, session.failed_on), []).append(session)
        for (app, _), sessions in waiting.items():
            placed.update(self._assigned(view, app, sessions))
        if view.now >= self._rebalanced + self._every:
            self._rebalanced = view.now
            forget(self._doubts, view.apps)
            for app in dict.fromkeys(session.app for session in view.sessions.values()):
                placed.update(self._moves(view, app, placed))
        return placed

    def _assigned(self, view: View, app: str, sessions: list[SessionView]) -> dict[int, str | None]:
        """Place sessions, where K is known first on workers that have the context ready, then on any."""
        able = [worker for name in loads(view) if view.can_carry(sessions[0], worker := view.workers[name])]
        able.sort(key=lambda worker: worker.slots_used)  # Of equal ones: a step waits for calls in flight.
        ready = [worker for worker in able if is_ready(worker, sessions[0].context)]
        known = _measured(view, app, able)
        placed: dict[int, str | None] = {}
        for workers in (ready if known.capacity is not None else [], able):
            left = [session.id for session in sessions if session.id not in placed]
            if workers and left:
                residents = _residents(view, app, workers, {**dict.fromkeys(left), **placed})
                found = assign_by_weight(left, residents, known.curve, known.capacity, known.speeds, known.weights)
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
        residents = _residents(view, app, workers, placed)
        seconds: dict[Session, float] = {
            each: self._cost.seconds(session.state_bytes or 0) for each, session in movable.items()
        }
        costs = MoveCosts(seconds, self._weight)
        fixed = {each for there in residents.values() for each in there if each not in movable}
        known = _measured(view, app, workers)
        if self._rule == "printed":
            moves = rebalance(residents, known.curve, costs, known.capacity, rule="printed", fixed=fixed)
        else:
            doubt = self._doubts.setdefault(app, _Doubt())
            moves, estimated = known.moves(residents, costs, fixed, doubt.gain(view.now))
            if estimated:
                doubt.moved(view.now)
        return {int(str(move.session)): str(move.target) for move in moves}


@dataclasses.dataclass
class _Doubt:
    """What moves that rest on estimates must gain."""

    level: float = 0.0
    since: float = 0.0

    def gain(self, now: float) -> float:
        """Return the share by which the longest chunk must get shorter."""
        return _GAIN + self.level * math.exp2((self.since - now) / _HALVED)

    def moved(self, now: float) -> None:
        """Note that such moves were made."""
        self.level, self.since = self.gain(now) - _GAIN + _MORE, now


def _long_idle(view: View) -> list[int]:
    """Return the sessions that have been idle for a while, where they may return to another worker."""
    if len(loads(view)) < 2:
        return []
    return [
        session.id
        for session in view.sessions.values()
        if session.idle
        and session.state == "placed"
        and session.last_chunk_at is not None
        and view.now >= session.last_chunk_at + _IDLE
    ]


def _residents(
    view: View, app: str, workers: Sequence[WorkerView], placed: Mapping[int, str | None]
) -> dict[Gpu, list[Session]]:
    """Return the active sessions of an app, by the worker that carries them or is about to; `placed` are there now."""
    residents: dict[Gpu, list[Session]] = {worker.id: [] for worker in workers}
    for session in view.sessions.values():
        place = placed.get(session.id, session.target or session.worker)
        if session.app == app and place in residents and not (session.idle and session.id not in placed):
            residents[place].append(session.id)
    return residents


@dataclasses.dataclass(frozen=True)
class _Measured:
    """What is known of an app's sessions, and of workers for them.

    :ivar curve: seconds of a chunk by how many average sessions' weight is on a worker of the reference GPU model.
    :ivar capacity: K by worker, None without a chunk target. :ivar speeds: of workers whose GPUs are of another pace.
    """

    curve: PowerCurve
    capacity: Mapping[Gpu, int] | None
    speeds: Mapping[Gpu, float]
    weights: SessionWeights

    def moves(
        self, residents: Mapping[Gpu, list[Session]], costs: MoveCosts, fixed: Collection[Session], gain: float
    ) -> tuple[list[Move], bool]:
        """Return the moves that pay, and whether any rest on estimates alone: those must gain so much."""
        load = self.weights.load

        def weight(sessions: Collection[Session]) -> float:
            return sum(load.get(session, 1.0) for session in sessions)

        alike = self.weights.common([session for there in residents.values() for session in there]) is not None
        groups = (
            balanced_groups(residents, load=weight) if alike else balanced_groups(residents, _GROUP, _GROUP, weight)
        )
        found, estimated = [], False
        for group in groups:
            moves = rebalance_by_weight(group, self.curve, costs, self.capacity, self.speeds, fixed, self.weights)
            if not moves:
                continue
            sure = not self.speeds and (alike or self._shorter(group, moves, ALIKE) < 1)
            if sure or self._shorter(group, moves, self.weights) < 1 - gain or self._too_full(group):
                found += moves
                estimated = estimated or not sure
        return found, estimated

    def _shorter(
        self, residents: Mapping[Gpu, Collection[Session]], moves: Sequence[Move], by: SessionWeights
    ) -> float:
        """Return the longest chunk after moves, as a share of what it is before."""
        after = {gpu: set(there) for gpu, there in residents.items()}
        for move in moves:
            after[move.source].discard(move.session)
            after[move.target].add(move.session)
        before = longest_chunk(residents, self.curve, self.speeds, by)
        return longest_chunk(after, self.curve, self.speeds, by) / before if before else 1.0

    def _too_full(self, residents: Mapping[Gpu, Collection[Session]]) -> bool:
        """Return whether states exceed the memory of a worker, which moves relieve."""
        return any(self.weights.too_many(gpu, residents[gpu]) for gpu in residents)


def _measured(view: View, app_id: str, workers: Sequence[WorkerView]) -> _Measured:
    sessions = [session for session in view.sessions.values() if session.app == app_id]
    app = view.apps.get(app_id)
    own = {session.id: session.own_seconds for session in sessions if session.own_seconds is not None}
    if app is None or not own:
        return _Measured(_UNMEASURED, _capacity(view, app, workers, None), {}, _with_states(view, app, workers, {}))
    shared, average = app.shared_seconds or 0.0, statistics.fmean(own.values())
    curve = PowerCurve(shared, max(average, 1e-3 * (shared + average), 1e-9))
    load: dict[Session, float] = {
        number: max(_STEP, round(seconds / curve.each / _STEP) * _STEP) for number, seconds in own.items()
    }
    if all(
        abs(each - 1.0) <= _STEP for each in load.values()
    ):  # Estimates of sessions that are alike are that far off.
        load = dict.fromkeys(load, 1.0)
    paces = {worker.id: app.step_pace(worker.gpu_model) for worker in workers}
    speeds: dict[Gpu, float] = {name: float(f"{1 / pace:.2g}") for name, pace in paces.items() if pace > 0}
    speeds = {name: speed for name, speed in speeds.items() if speed != 1.0}
    weights = _with_states(view, app, workers, load)
    if len({load.get(session.id, 1.0) for session in sessions}) > 1 and app.chunk_target is not None:
        weights = dataclasses.replace(weights, longest=app.chunk_target)
    return _Measured(curve, _capacity(view, app, workers, curve), speeds, weights)


def _capacity(
    view: View, app: AppView | None, workers: Sequence[WorkerView], curve: PowerCurve | None
) -> dict[Gpu, int] | None:
    """Return K by worker; of one that made no step yet, what other workers' steps promise."""
    if app is None or app.chunk_target is None:
        return None
    found: dict[Gpu, int] = {}
    for worker in workers:
        found[worker.id] = view.capacity(app, worker)
        if curve is not None and not worker.step_seconds(app.id):
            target = _PROMISED * app.chunk_target / max(app.step_pace(worker.gpu_model), 1e-9)
            found[worker.id] = max(found[worker.id], most_sessions(curve, target))
    return found


def _with_states(
    view: View, app: AppView | None, workers: Sequence[WorkerView], load: Mapping[Session, float]
) -> SessionWeights:
    """Return the weights with what states take, and where there is room for how much of them.

    A worker without active sessions may be given one whatever its state takes, as else nobody could ever carry it.
    """
    rooms: dict[Gpu, int] = {}
    for worker in workers if app is not None else ():
        if app is not None and (room := view.state_room(app, worker)) is not None:
            rooms[worker.id] = room
    if app is None or not rooms:
        return SessionWeights(load)
    sizes = {each.id: each.state_bytes for each in view.sessions.values() if each.state_bytes is not None}
    mine = [session for session in view.sessions.values() if session.app == app.id]
    known = [sizes[session.id] for session in mine if session.id in sizes]
    usual = statistics.fmean(known) if known else 0.0
    states: dict[Session, float] = {session.id: float(sizes.get(session.id, usual)) for session in mine}
    busy = set()
    for session in view.sessions.values():
        place = session.target or session.worker
        if place in rooms and session.app == app.id and not session.idle:
            busy.add(place)
        elif place in rooms:  # It has nothing to do, or is another app's; its state is there nevertheless.
            rooms[place] = max(0, rooms[place] - sizes.get(session.id, 0))
    largest = max(states.values(), default=0.0)
    free: dict[Gpu, float] = {name: room if name in busy else max(room, largest) for name, room in rooms.items()}
    return SessionWeights(load, states, free)
