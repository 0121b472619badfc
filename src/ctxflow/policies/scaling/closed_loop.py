"""TurboServe's autoscaling controller on a live run: the scaling policy `closed-loop`.

Calls that are queued or running count as sessions of batch work; K is `calls_per_worker`. Where it differs from the
paper's loop: volatility is measured in workers' loads, so that levels suit workloads of any size; a share is taken for
all volatilities unless levels are given, since a queue can wait and the paper's Table 6 is for viewers, who cannot;
growth is not anticipated, for the same reason; a worker for each call is the most that is ever wanted.

What does not live here: the rule for the target (autoscaling.py), the levels (volatility.py, profiling.py), which
worker goes (the scheduler), and where sessions go (the session policies).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ctxflow.policies.protocols import AppView, View
from ctxflow.policies.scaling.autoscaling import Parameters, decide
from ctxflow.policies.scaling.division import Peak, divided
from ctxflow.policies.scaling.outstanding import outstanding
from ctxflow.policies.scaling.volatility import Epochs, Levels, constant


class ClosedLoop:
    """As many workers as bring their load to a share of what they can carry that falls with the load's volatility.

    More are asked for at once when the load is over that share by more than `tolerance`; fewer are held when it has
    been under it by more than that for as long as a worker takes to boot. In between nothing changes, so that the
    number does not flap. Tiers that can run the same work are counted together, and divided as `queue-proportional`
    divides them.

    :param calls_per_worker: K: calls, queued or running, that load a worker fully.
    :param levels: [volatility up to which it holds, share] pairs, ascending, and [share] for all above;
        `ctxflow profile-scaling` finds them. [[0.8]] unless given.
    :param tolerance: how far the load may be from the share before anything is done.
    :param boot_seconds: what a worker takes from being asked for to joining, for tiers of which the site does not
        say it.
    :param batch_size: items of a call of an app that states no batch size, while no worker is there to size one for.
    :raises ValueError: for a number that makes no sense.

    >>> ClosedLoop(levels=[[1.0, 0.8], [0.5]]).levels.at(2.0).utilization
    0.5
    """

    def __init__(
        self,
        calls_per_worker: float = 4,
        levels: Sequence[Sequence[float]] | None = None,
        tolerance: float = 0.1,
        boot_seconds: float = 30.0,
        batch_size: int = 100,
    ) -> None:
        if not (math.isfinite(calls_per_worker) and calls_per_worker > 0):
            raise ValueError("calls_per_worker is how many calls load a worker fully: give more than 0")
        if not (math.isfinite(boot_seconds) and boot_seconds >= 0):
            raise ValueError("boot_seconds is a number of seconds: give 0 or more")
        if batch_size < 1:
            raise ValueError("batch_size is the number of items in a call: give 1 or more")
        self.levels = _levels(levels, tolerance)
        self._calls_per_worker = calls_per_worker
        self._boot_seconds = boot_seconds
        self._batch_size = batch_size
        self._loops: dict[frozenset[str], _Loop] = {}
        self._arrived: dict[str, int] = {}

    def target(self, view: View) -> Mapping[str, int]:
        """What each tier is asked for: what the loops of the work that it can run hold."""
        work: dict[frozenset[str], _Work] = {}
        for app, calls in outstanding(view, self._batch_size).items():
            group = frozenset(name for name, tier in view.tiers.items() if view.permits(view.apps[app], tier))
            work.setdefault(group, _Work()).add(calls, self._came(view.apps[app]))
        self._loops = {group: self._loops.get(group) or _Loop(self.levels) for group in work}
        return divided(view, {group: self._workers(view, group, found) for group, found in work.items()})

    def _came(self, app: AppView) -> float:
        """Calls that came since the last look, in batches of full size: how a short queue is shared says nothing."""
        new = app.arrived - self._arrived.get(app.id, 0)
        self._arrived[app.id] = app.arrived
        return new / (app.batch_size or self._batch_size)

    def _workers(self, view: View, group: frozenset[str], work: _Work) -> float:
        tiers = [view.tiers[name] for name in group]
        there = sum(w.tier in group and w.noticed is None and not w.draining for w in view.workers.values())
        boot = max((self._boot_seconds if t.boot_seconds is None else t.boot_seconds for t in tiers), default=0.0)
        loop = self._loops[group]
        loop.came(view.now, work.came / self._calls_per_worker)
        most = sum(tier.maximum for tier in tiers)
        return loop.workers(view.now, work.calls / self._calls_per_worker, there, min(most, work.calls), boot)


@dataclasses.dataclass
class _Work:
    """:ivar calls: queued or running. :ivar came: calls that came since the last look."""

    calls: int = 0
    came: float = 0.0

    def add(self, calls: int, came: float) -> None:
        self.calls += calls
        self.came += came


class _Loop:
    """The controller of the work that the same tiers can run. Loads are in workers that are fully loaded."""

    def __init__(self, levels: Levels) -> None:
        self._levels = levels
        self._held = 0
        self._epochs = Epochs()
        self._peak = Peak()

    def came(self, now: float, load: float) -> None:
        """Work has come."""
        self._epochs.add(now, load)

    def workers(self, now: float, load: float, there: int, most: int, boot_seconds: float) -> int:
        """The workers to hold, from a load, the workers that carry it, and how many could be of use at most."""
        parameters = self._levels.at(self._epochs.volatility)
        carried = load / there if there else math.inf if load else 0.0
        wish = min(most, decide(carried, load, self._held, 1, parameters, most, least=0))
        self._held = int(self._peak.over(wish, now, boot_seconds))
        return self._held


def _levels(given: Sequence[Sequence[float]] | None, tolerance: float) -> Levels:
    """The levels from what a site says, by volatility per K."""
    if given is None:
        return constant(Parameters(tolerance=tolerance))
    rows = [list(row) for row in given]
    if not rows or any(len(row) != 2 for row in rows[:-1]) or len(rows[-1]) != 1:
        raise ValueError("levels is a list of [volatility, share] pairs that ends with a [share] alone")
    return Levels(tuple(row[0] for row in rows[:-1]), tuple(Parameters(row[-1], tolerance) for row in rows))
