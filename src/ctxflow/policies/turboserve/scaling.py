"""TurboServe's autoscaling controller on a live run: the scaling policy `closed-loop`.

Queued and running calls count as sessions do in the paper, with `calls_per_worker` as K; the K of sessions is measured.
Differences: volatility is in workers' loads; one share holds for all unless levels are given, as Table 6 is of the
paper's model and GPUs; sessions are anticipated, calls are not; at most a worker for each call and session is wanted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ctxflow.policies.helpers import (
    SESSIONS,
    Peak,
    active,
    divided,
    forget,
    idle,
    outstanding,
    serving,
    sessions_of_worker,
    slot_items,
    tiers_for,
)
from ctxflow.policies.protocols import View
from ctxflow.policies.turboserve.autoscaling import (
    SPARE,
    Anticipated,
    Epochs,
    Levels,
    Parameters,
    Turnover,
    constant,
    decide,
    decide_ahead,
)
from ctxflow.policies.turboserve.rises import RESERVE
from ctxflow.policies.views import AppView, SessionView


class ClosedLoop:
    """As many workers as bring their load to a share of what they can carry that falls with the load's volatility.

    More are requested at once when the load is over that share by more than `tolerance`; fewer are held when it has
    been under it by more than that for as long as a worker takes to boot. In between nothing changes. With sessions,
    which are anticipated, a worker more is requested as soon as those expected want it, and released when there is
    room for a few more. Tiers that can run the same work are counted together, and divided as `queue-proportional`
    divides them.

    :param calls_per_worker: calls, queued or running, that load a worker fully.
    :param sessions_per_worker: sessions that load a worker fully: of an app with a chunk target until that is measured,
        of others always. By default 4, and with others as many as a step serves.
    :param levels: [volatility up to which it holds, share] pairs, ascending, and [share] for all above;
        `ctxflow profile-scaling` finds them. [[0.8]] unless given.
    :param tolerance: how far the load of calls may be from the share before anything is done.
    :param boot_seconds: what a worker takes from its request to joining, for tiers of which the site does not
        say it.
    :param batch_size: items of a call of an app that states no batch size, while no worker is there to size one for.
    :param reserve: for how many boot times rises of sessions that came faster than a boot are remembered: there is room
        for the second largest of them, also while nobody is active. 0 for none.
    :param anticipates: whether sessions are; without it they are scaled as calls are, by the paper's loop.
    :raises ValueError: for a number that makes no sense.

    >>> ClosedLoop(levels=[[1.0, 0.8], [0.5]]).levels.at(2.0).utilization
    0.5
    """

    releases_idle = True

    def __init__(
        self,
        calls_per_worker: float = 4,
        sessions_per_worker: int | None = None,
        levels: Sequence[Sequence[float]] | None = None,
        tolerance: float = 0.1,
        boot_seconds: float = 30.0,
        batch_size: int = 100,
        reserve: float = RESERVE,
        anticipates: bool = True,
    ) -> None:
        if not (math.isfinite(calls_per_worker) and calls_per_worker > 0):
            raise ValueError("calls_per_worker is how many calls load a worker fully: give more than 0")
        if sessions_per_worker is not None and sessions_per_worker < 1:
            raise ValueError("sessions_per_worker is how many sessions load a worker fully: give 1 or more")
        if not (math.isfinite(boot_seconds) and boot_seconds >= 0):
            raise ValueError("boot_seconds is a number of seconds: give 0 or more")
        if batch_size < 1:
            raise ValueError("batch_size is the number of items in a call: give 1 or more")
        if not (math.isfinite(reserve) and reserve >= 0):
            raise ValueError("reserve is for how many boot times rises are remembered: give 0 or more")
        self.levels = _levels(levels, tolerance)
        self.reserve = reserve
        self._calls_per_worker = calls_per_worker
        self._sessions_per_worker = sessions_per_worker
        self._boot_seconds = boot_seconds
        self._batch_size = batch_size
        self.anticipates = anticipates
        self._loops: dict[frozenset[str], _Loop] = {}
        self._arrived: dict[str, int] = {}
        self._active: set[int] = set()

    def target(self, view: View) -> Mapping[str, int]:
        """Return the workers of each tier: what the loops of the work that it can run hold."""
        work: dict[frozenset[str], _Work] = {}
        sessions, waiting = active(view), idle(view)
        for app, calls in outstanding(view, self._batch_size).items():
            group = tiers_for(view, view.apps[app])
            found = work.setdefault(group, _Work())
            found.most += calls
            found.queue += calls / self._calls_per_worker
            found.came += self._came(view, view.apps[app]) / self._calls_per_worker
            found.idle += waiting.get(app, 0)
            if app in sessions:
                self._add_sessions(found, view, view.apps[app], sessions[app])
        forget(self._arrived, view.apps)
        self._active = {session.id for each in sessions.values() for session in each}
        self._loops = {group: self._loops.get(group) or _Loop(self) for group in work}
        return divided(view, {group: self._workers(view, group, found) for group, found in work.items()})

    def _came(self, view: View, app: AppView) -> float:
        """Return the calls that came since the last look, in batches of full size, or in windows."""
        new = max(0, app.arrived - self._arrived.get(app.id, 0))  # One that was forgotten counts anew.
        self._arrived[app.id] = app.arrived
        return new / slot_items(view, app, self._batch_size) if new else 0.0

    def _add_sessions(self, work: _Work, view: View, app: AppView, sessions: Sequence[SessionView]) -> None:
        given = self._sessions_per_worker
        known = given if given is not None and app.chunk_target is None else None
        share = 1 / (known or sessions_of_worker(view, app, given or SESSIONS))
        work.most += len(sessions)
        work.sessions.update(session.id for session in sessions)
        work.streams += share * len(sessions)
        work.came += share * sum(session.id not in self._active for session in sessions)

    def _workers(self, view: View, group: frozenset[str], work: _Work) -> float:
        tiers = [view.tiers[name] for name in group]
        there = len(serving(view.workers.values(), group))
        boot = max((self._boot_seconds if t.boot_seconds is None else t.boot_seconds for t in tiers), default=0.0)
        return self._loops[group].workers(view.now, work, there, boot, sum(tier.maximum for tier in tiers))


@dataclasses.dataclass
class _Work:
    """What the same tiers can run, in workers that it loads fully: queued calls, active sessions, what came lately.

    :ivar most: workers that could be of use. :ivar sessions: their ids. :ivar idle: sessions of the same apps.
    """

    queue: float = 0.0
    streams: float = 0.0
    came: float = 0.0
    most: int = 0
    sessions: set[int] = dataclasses.field(default_factory=set)
    idle: int = 0


class _Loop:
    """The controller of the work that the same tiers can run."""

    def __init__(self, policy: ClosedLoop) -> None:
        self._policy = policy
        self._held = 0
        self._epochs = Epochs()
        self._peak = Peak()
        self._turnover: Turnover | None = None
        self._sessions: set[int] = set()  # At the last look.
        self._each = 0.0  # Of a worker, that a session loads; when there was one last.

    def workers(self, now: float, work: _Work, there: int, boot_seconds: float, maximum: int) -> int:
        """Return the workers to hold, at most so many; `there` carry the work now."""
        self._epochs.add(now, work.came)
        parameters = self._policy.levels.at(self._epochs.volatility)
        ahead = self._ahead(now, work, boot_seconds)
        anticipates = self._policy.anticipates
        reserved = max(0, math.ceil(ahead.reserved) - len(work.sessions)) if anticipates else 0
        most = min(maximum, work.most + reserved)
        if work.sessions:
            self._each = work.streams / len(work.sessions)
        if anticipates and (work.sessions or reserved):
            load, spare = work.queue + self._each * ahead.sessions, SPARE * self._each * ahead.deviation
            room = work.queue + self._each * ahead.reserved
            wish = decide_ahead(load, self._held, 1, parameters.utilization, most, 0, spare, room)
        else:
            load = work.queue + work.streams
            carried = load / there if there else math.inf if load else 0.0
            wish = min(most, decide(carried, load, self._held, 1, parameters, most, least=0))
        self._held = int(self._peak.over(wish, now, boot_seconds))
        return self._held

    def _ahead(self, now: float, work: _Work, seconds: float) -> Anticipated:
        """Return the sessions to be ready for so many seconds from now."""
        sessions = work.sessions
        if self._turnover is None:  # Those that are there at the first look did not come just now.
            self._turnover, self._sessions = Turnover(now, self._policy.reserve), sessions
        self._turnover.add(now, len(sessions - self._sessions), len(self._sessions - sessions))
        self._sessions = sessions
        return self._turnover.anticipated(now, len(sessions), seconds, work.idle)


def _levels(given: Sequence[Sequence[float]] | None, tolerance: float) -> Levels:
    """Return the levels from what a site says, by volatility per K."""
    if given is None:
        return constant(Parameters(tolerance=tolerance))
    rows = [list(row) for row in given]
    if not rows or any(len(row) != 2 for row in rows[:-1]) or len(rows[-1]) != 1:
        raise ValueError("levels is a list of [volatility, share] pairs that ends with a [share] alone")
    return Levels(tuple(row[0] for row in rows[:-1]), tuple(Parameters(row[-1], tolerance) for row in rows))
