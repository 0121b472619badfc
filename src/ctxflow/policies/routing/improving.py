"""Local search: a matching made better by moves of one task and exchanges of two (TORTA, section IV).

What is made better is one number, `objective`: the sum of the tasks' fits, and of each server's load the integral of
Eq. 9, so that the gain of one more task is the load term that the greedy matching saw. Off with `rounds=0`.
"""

from __future__ import annotations

import numpy as np

from ctxflow.policies.routing.arrays import Bools, Floats, Ints, amounts
from ctxflow.policies.routing.matching import NOWHERE, added, usable
from ctxflow.policies.routing.scores import load
from ctxflow.policies.routing.servers import Servers, Tasks

WORTHWHILE = 1e-9  # Gains under this are rounding.


def objective(fit: Floats, where: Ints, tasks: Tasks, servers: Servers, load_weight: float = 1.0) -> float:
    """What the local search makes larger, for a matching.

    >>> one = np.ones(1)
    >>> servers = Servers(one, one, one, 0 * one, 0 * one, np.array([1]), np.ones((1, 1), bool))
    >>> tasks = Tasks(one, one, np.zeros(1, int), np.zeros(1, int), one, 0 * one)
    >>> round(objective(np.array([[2.0]]), np.array([0]), tasks, servers), 3)
    2.632
    """
    return _Search(usable(fit, None), where, tasks, servers, load_weight).total()


def improve(
    fit: Floats,
    where: Ints,
    tasks: Tasks,
    servers: Servers,
    load_weight: float = 1.0,
    allowed: Bools | None = None,
    rounds: int = 4,
) -> Ints:
    """A matching that is at least as good; what waits still waits.

    Guarantees: `objective` is not lower; no server gets more tasks than it has places, if none did before, nor a
    task that it is not allowed. In a round each server takes part in one move or exchange at most.

    :param where: (N,) the matching, of `matching.match`; it is not changed.
    :param rounds: at most so many; 0 gives the matching back.

    >>> one, two = np.ones(1), np.ones(2)
    >>> servers = Servers(two, two, two, 0 * two, 0 * two, np.array([1, 1]), np.ones((2, 1), bool))
    >>> tasks = Tasks(two, two, np.zeros(2, int), np.zeros(2, int), two, 0 * two)
    >>> improve(np.array([[1.0, 0.9], [1.0, 0.0]]), np.array([0, 1]), tasks, servers).tolist()
    [1, 0]
    """
    search = _Search(usable(fit, allowed), where, tasks, servers, load_weight)
    for _ in range(rounds):
        if not search.round():
            break
    return search.where


class _Search:
    """A matching with what each server holds, changed in place."""

    def __init__(self, fit: Floats, where: Ints, tasks: Tasks, servers: Servers, load_weight: float) -> None:
        self.fit, self.weight = fit, load_weight
        self.where: Ints = where.copy()
        self.sizes = added(tasks)
        self.unit = float(self.sizes.mean()) if len(self.sizes) else 1.0
        self.capacity = amounts(servers.capacity)
        placed = self.where != NOWHERE
        count = len(self.capacity)
        self.held = amounts(servers.used) + amounts(servers.queue)
        self.held += np.bincount(self.where[placed], self.sizes[placed], minlength=count)
        self.left = np.maximum(servers.places, 0) - np.bincount(self.where[placed], minlength=count)

    def total(self) -> float:
        placed = np.flatnonzero(self.where != NOWHERE)
        fits = float(self.fit[placed, self.where[placed]].sum())
        return fits + float(self._worth(np.arange(len(self.capacity)), self.held).sum())

    def _worth(self, servers: Ints, held: Floats) -> Floats:
        """The integral of the load term from no load to this one, in loads of a mean task."""
        room = self.capacity[servers]
        return np.asarray(self.weight * room * (1 - load(held, room)) / self.unit, dtype=np.float64)

    def round(self) -> bool:
        """One round; whether anything was made better."""
        placed = np.flatnonzero(self.where != NOWHERE)
        if not len(placed) or len(self.capacity) < 2:
            return False
        placed = placed[np.argsort(self.where[placed], kind="stable")]
        present, starts = np.unique(self.where[placed], return_index=True)
        gains = self.fit[placed] - self.fit[placed, self.where[placed]][:, None]
        best = np.maximum.reduceat(gains, starts, axis=0)
        groups = dict(zip(present.tolist(), np.split(placed, starts[1:]), strict=True))
        touched: set[int] = set()
        for source, target, exchange in self._candidates(best, present):
            if source in touched or target in touched:
                continue
            there = self._best_task(groups[source], source, target)
            back = self._best_task(groups[target], target, source) if exchange else None
            if self._change(source, target, there, back):
                touched |= {source, target}
        return bool(touched)

    def _candidates(self, best: Floats, present: Ints) -> list[tuple[int, int, bool]]:
        """The most promising exchange and move of each server, the best ones first: (from, to, whether both ways)."""
        row = np.arange(len(present))
        steps: list[tuple[float, int, int, bool]] = []
        slope = self.weight * load(self.held, self.capacity)
        moves = best + slope[None, :] - slope[present][:, None]
        moves[:, self.left <= 0] = -np.inf
        moves[row, present] = -np.inf
        exchanges = best[:, present] + best[:, present].T
        exchanges[row, row] = -np.inf
        for gains, targets, both in ((moves, np.arange(len(self.capacity)), False), (exchanges, present, True)):
            choice = gains.argmax(axis=1)
            gain = gains[row, choice]
            for index in np.flatnonzero(gain > WORTHWHILE).tolist():
                steps.append((float(gain[index]), int(present[index]), int(targets[choice[index]]), both))
        return [step[1:] for step in sorted(steps, key=lambda step: -step[0])]

    def _best_task(self, group: Ints, source: int, target: int) -> int:
        return int(group[(self.fit[group, target] - self.fit[group, source]).argmax()])

    def _change(self, source: int, target: int, there: int, back: int | None) -> bool:
        """Do it if the objective gains; whether it did."""
        moved = self.sizes[there] - (self.sizes[back] if back is not None else 0.0)
        gain = self.fit[there, target] - self.fit[there, source]
        if back is not None:
            gain += self.fit[back, source] - self.fit[back, target]
        both = np.array([source, target])
        after = self.held[both] + np.array([-moved, moved])
        gain += float((self._worth(both, after) - self._worth(both, self.held[both])).sum())
        if not gain > WORTHWHILE:
            return False
        self.held[both] = after
        self.where[there] = target
        if back is None:
            self.left[both] += np.array([1, -1])
        else:
            self.where[back] = source
        return True
