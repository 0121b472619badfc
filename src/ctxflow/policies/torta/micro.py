"""TORTA's micro layer: which task goes to which server of a region (section V-C2, Algorithm 1), on arrays.

First the scores of tasks on servers (Eqs. 7 to 10); then greedy matching, each task in the order of urgency to the
server of the highest score with a place left; then local search (section IV) by moves and exchanges.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ctxflow.policies.torta.quantities import Bools, Floats, Ints, Recent, Servers, Tasks, amounts

MISMATCH = 0.5  # Eq. 8's Type_match where the architecture is not the right one.


@dataclasses.dataclass(frozen=True)
class Weights:
    """The weights of Eqs. 7 and 10. The paper prints none of them; these are ours.

    :ivar hardware, load, locality: w1, w2, w3.
    :ivar same_model: w_m, of the same model. :ivar similar_input: w_c, of the cosine of two inputs.
    :ivar forgetting: lambda, per second.
    """

    hardware: float = 1.0
    load: float = 1.0
    locality: float = 1.0
    same_model: float = 1.0
    similar_input: float = 0.0
    forgetting: float = 1 / 300


def fit(tasks: Tasks, servers: Servers, recent: Recent | None, now: float, weights: Weights | None = None) -> Floats:
    """Compute Eq. 7, w1 * hardware + w2 * load + w3 * locality, without its load term: (N, S), finite.

    The load term alone changes while tasks are assigned.

    :param recent: None if nothing has run yet.
    :param now: seconds, on the clock of `recent`.
    """
    chosen = weights or Weights()
    score = chosen.hardware * hardware(tasks, servers)
    if recent is not None and len(recent.server) and chosen.locality:
        score += chosen.locality * locality(tasks, recent, len(servers.compute), now, chosen)
    return score


def hardware(tasks: Tasks, servers: Servers) -> Floats:
    """Compute Eq. 8: (N, S) between 0 and 1; 1 for a task that asks for nothing.

    >>> figures = (np.array([x]) for x in (50.0, 24.0, 4.0, 0.0, 0.0))
    >>> servers = Servers(*figures, np.array([4]), np.array([[True, False]]))
    >>> asked = np.array([100.0, 25.0])
    >>> tasks = Tasks(asked, np.array([12.0, 48.0]), np.array([0, 1]), np.zeros(2, int), asked, asked)
    >>> hardware(tasks, servers).tolist()
    [[0.5], [0.25]]
    """
    score = _covered(servers.compute, tasks.compute) * _covered(servers.memory, tasks.memory)
    score *= np.where(servers.suits.T[tasks.kind], 1.0, MISMATCH)
    return score


def _covered(offered: Floats, asked: Floats) -> Floats:
    """Return min(1, offered / asked) for each pair."""
    there, wanted = amounts(offered)[None, :], amounts(asked)[:, None]
    enough = there >= wanted
    return np.asarray(np.where(enough, 1.0, there / np.where(enough, 1.0, wanted)), dtype=np.float64)


def load(held: Floats, capacity: Floats) -> Floats:
    """Compute Eq. 9: exp(-(utilisation + queue) / capacity), with both in tasks; a server without capacity scores 0.

    :param held: (S,) work under way and tasks that wait.

    >>> load(np.array([0.0, 1.0, 1.0]), np.array([2.0, 2.0, 0.0])).round(3).tolist()
    [1.0, 0.607, 0.0]
    """
    room = amounts(capacity)
    ratio = np.divide(amounts(held), room, out=np.full(len(room), np.inf), where=room > 0)
    return np.asarray(np.exp(-ratio), dtype=np.float64)


def locality(tasks: Tasks, recent: Recent, servers: int, now: float, weights: Weights | None = None) -> Floats:
    """Compute Eq. 10: (N, S), the similarity of each task to what each server ran lately, by age.

    As printed it is a sum, so what counts as recent is the caller's choice; a time in the future counts as now.
    Similarity is linear in an input of length one, so a server's inputs are summed before they are compared.

    :param servers: how many there are.

    >>> recent = Recent(np.array([1, 1]), np.array([7, 8]), np.array([0.0, 0.0]))
    >>> one = np.ones(1)
    >>> locality(Tasks(one, one, np.array([0]), np.array([7]), one, one), recent, 2, 0.0).tolist()
    [[0.0, 1.0]]
    """
    chosen = weights or Weights()
    fresh = np.exp(-chosen.forgetting * amounts(now - recent.time))
    models, number = np.unique(np.concatenate([recent.model, tasks.model]), return_inverse=True)
    held = np.zeros((len(models), servers))
    np.add.at(held, (number[: len(recent.model)], recent.server), fresh)
    score = chosen.same_model * held[number[len(recent.model) :]]
    if chosen.similar_input and tasks.embedding is not None and recent.embedding is not None:
        inputs = np.zeros((servers, recent.embedding.shape[1]))
        np.add.at(inputs, recent.server, _unit(recent.embedding) * fresh[:, None])
        score += chosen.similar_input * (_unit(tasks.embedding) @ inputs.T)
    return np.asarray(score, dtype=np.float64)


def _unit(vectors: Floats) -> Floats:
    """Return the vectors with length one each; zero for those that are zero or not finite."""
    known = np.where(np.isfinite(vectors).all(axis=1, keepdims=True), vectors, 0.0)
    largest = np.abs(known).max(axis=1, keepdims=True, initial=0.0)
    scaled = np.divide(known, largest, out=np.zeros_like(known), where=largest > 0)
    length = np.linalg.norm(scaled, axis=1, keepdims=True)
    return np.asarray(np.divide(scaled, length, out=scaled, where=length > 0), dtype=np.float64)


NOWHERE = -1  # In a matching: the task waits.


def by_urgency(tasks: Tasks) -> Ints:
    """Return the tasks' numbers, earliest deadline first; of equal ones, those that compute the most.

    >>> two = np.array([1.0, 2.0])
    >>> by_urgency(Tasks(two, two, np.zeros(2, int), np.zeros(2, int), np.array([9.0, 9.0]), two)).tolist()
    [1, 0]
    """
    deadline = np.where(np.isnan(tasks.deadline), np.inf, tasks.deadline)
    return np.asarray(np.lexsort((-amounts(tasks.compute), deadline)), dtype=np.int64)


def match(fit: Floats, tasks: Tasks, servers: Servers, load_weight: float = 1.0, allowed: Bools | None = None) -> Ints:
    """Return (N,) the server of each task, `NOWHERE` for those that wait.

    Guarantees: no server gets more tasks than it has places, nor one that is not allowed there; a task waits only if
    no server where it is allowed had a place left at its turn.

    :param fit: (N, S) of `fit`; what is not a number ranks last.
    :param load_weight: w2 of Eq. 7.
    :param allowed: (N, S) where a task may run at all, None for anywhere.

    >>> one = np.ones(2)
    >>> servers = Servers(one, one, 4 * one, 0 * one, 0 * one, np.array([1, 3]), np.ones((2, 1), bool))
    >>> tasks = Tasks(np.ones(3), np.ones(3), np.zeros(3, int), np.zeros(3, int), np.array([3.0, 1, 2]), np.ones(3))
    >>> match(np.array([[1.0, 0.0]] * 3), tasks, servers).tolist()
    [1, 0, 1]
    """
    scores = usable(fit, allowed)
    left = np.maximum(servers.places, 0).tolist()
    held = (amounts(servers.used) + amounts(servers.queue)).tolist()
    capacity = amounts(servers.capacity).tolist()
    sizes = added(tasks).tolist()
    term = load_weight * load(np.array(held), servers.capacity)
    term[np.array(left, dtype=np.int64) <= 0] = -np.inf
    where = np.full(len(scores), NOWHERE, dtype=np.int64)
    if not len(term):
        return where
    total = np.empty(len(term))
    for task in by_urgency(tasks).tolist():
        np.add(scores[task], term, out=total)
        best = int(total.argmax())
        if total[best] == -math.inf:
            continue
        where[task] = best
        left[best] -= 1
        held[best] += sizes[task]
        room = capacity[best]
        term[best] = load_weight * math.exp(-held[best] / room) if room > 0 else 0.0
        if left[best] <= 0:
            term[best] = -math.inf
    return where


def added(tasks: Tasks) -> Floats:
    """Return (N,) what each task adds to the load of its server: its work, and itself in the queue (Algorithm 1)."""
    return amounts(tasks.work) + 1.0


def usable(fit: Floats, allowed: Bools | None) -> Floats:
    """Return the fit with minus infinity where a task may not run, and nothing else that is not finite."""
    known = np.isfinite(fit)
    if not known.all():
        fit = np.where(known, fit, (fit[known].min() if known.any() else 0.0) - 1.0)
    return fit if allowed is None else np.where(allowed, fit, -np.inf)


WORTHWHILE = 1e-9  # Gains under this are rounding.


def objective(fit: Floats, where: Ints, tasks: Tasks, servers: Servers, load_weight: float = 1.0) -> float:
    """Compute what the local search maximizes for a matching.

    It is the sum of the tasks' fits and, for each server, the integral of Eq. 9 over its load, so that the gain of one
    more task is the load term of the greedy matching.

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
    """Return a matching that is at least as good; tasks that wait still wait.

    Guarantees: `objective` is not lower; no server gets more tasks than it has places, if none did before, nor a
    task that is not allowed there. In a round each server takes part in one move or exchange at most.

    :param where: (N,) the matching, of `match`; it is not changed.
    :param rounds: the most; 0 returns the matching as it is.

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
        """Return the integral of the load term from no load to this, in loads of a mean task."""
        room = self.capacity[servers]
        return np.asarray(self.weight * room * (1 - load(held, room)) / self.unit, dtype=np.float64)

    def round(self) -> bool:
        """Make one round; return whether anything was made better."""
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
        """Return the most promising move and exchange of each server, best first: (from, to, whether both ways)."""
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
        """Carry out a move or exchange if the objective gains; return whether it did."""
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
