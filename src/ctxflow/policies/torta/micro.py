"""TORTA's micro layer: which task goes to which server of a region (section V-C2 and Algorithm 1).

Greedy matching: tasks are taken in the order of urgency; each goes to the server of the highest score (`scores`) that
has a place left, and that server's load is counted up. A task that finds no place waits in the buffer. Then local
search (section IV), by moves of one task and exchanges of two, which makes one number larger, `objective`: the sum of
the tasks' fits, and of each server's load the integral of Eq. 9, so that the gain of one more task is the load term
that the greedy matching saw.

And both on a live view: Eq. 8 sees the speed of a worker's GPU model, as measured; Eq. 9 what it runs; Eq. 10 what it
ran lately, so that work gathers on few workers, and others rest and may go.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ctxflow.policies.torta.outlook import Outlook
from ctxflow.policies.torta.quantities import Bools, Floats, Ints, Recent, Servers, Tasks, amounts
from ctxflow.policies.torta.scores import Weights, fit, load
from ctxflow.policies.views import AppView, WorkerView

NOWHERE = -1
"""In a matching: the task found no place."""


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

    Guarantees: no server gets more tasks than it has places, nor one that it is not allowed; a task waits only if
    no server that it is allowed on had a place left when its turn came.

    :param fit: (N, S) `scores.fit`; what is not a number is the worst there can be, and still a place.
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
    """Return what the local search makes larger, for a matching.

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
    """Return a matching that is at least as good; what waits still waits.

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
        """Return the integral of the load term from no load to this one, in loads of a mean task."""
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
        """Return the most promising exchange and move of each server, the best ones first.

        Each is (from, to, whether both ways).
        """
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


CROWDED = 0.1
"""What each context that a worker holds counts against loading another there: it may have to go."""


@dataclasses.dataclass(frozen=True)
class Wish:
    """A call that waits.

    :ivar where: the workers that may take it, at least one.
    """

    app: AppView
    where: Sequence[WorkerView]


def given_out(
    wishes: Sequence[Wish], now: float, outlook: Outlook, recent: Mapping[str, Mapping[str, float]], search: int
) -> list[tuple[Wish, WorkerView]]:
    """Return which worker takes which call; what finds no place is left out.

    Guarantees: a worker takes no more calls than it has free slots, and only such as may go there.

    :param wishes: in the order of urgency.
    :param recent: worker -> context -> when a call of it was last given there.
    :param search: rounds of local search.
    """
    if len(wishes) == 1:
        return [(wishes[0], _best(wishes[0], now, outlook, recent))]
    groups = {id(wish.where): wish.where for wish in wishes}
    workers = list({worker.id: worker for where in groups.values() for worker in where}.values())
    if not workers:
        return []
    column = {worker.id: number for number, worker in enumerate(workers)}
    contexts = {context: number for number, context in enumerate({wish.app.context: None for wish in wishes})}
    allowed = np.zeros((len(wishes), len(workers)), dtype=bool)
    columns = {key: [column[worker.id] for worker in where] for key, where in groups.items()}
    for row, wish in enumerate(wishes):
        allowed[row, columns[id(wish.where)]] = True
    tasks, servers = _tasks(wishes, contexts), _servers(workers, outlook)
    score = fit(tasks, servers, _recent(workers, contexts, recent), now)
    score -= CROWDED * np.array([[len(worker.contexts) for worker in workers]])
    where = match(score, tasks, servers, allowed=allowed)
    where = improve(score, where, tasks, servers, allowed=allowed, rounds=search)
    return [(wish, workers[number]) for wish, number in zip(wishes, where.tolist(), strict=True) if number != NOWHERE]


def _best(wish: Wish, now: float, outlook: Outlook, recent: Mapping[str, Mapping[str, float]]) -> WorkerView:
    """Return the worker of one call alone: the same scores, without the arrays."""
    weights, context = Weights(), wish.app.context

    def score(worker: WorkerView) -> float:
        held, had = worker.contexts.get(context), recent.get(worker.id, {}).get(context, -math.inf)
        had = had if held is None else max(had, held.last_used)
        locality = weights.same_model * math.exp(-weights.forgetting * max(0.0, now - had))
        free = math.exp(-(worker.slots - worker.free_slots) / worker.slots)
        hardware = weights.hardware * outlook.speed(worker.gpu_model)
        return hardware + weights.load * free + weights.locality * locality - CROWDED * len(worker.contexts)

    return max(wish.where, key=score)


def _tasks(wishes: Sequence[Wish], contexts: Mapping[str, int]) -> Tasks:
    count = len(wishes)
    model = np.array([contexts[wish.app.context] for wish in wishes], dtype=np.int64)
    # Each asks for the fastest GPU; how urgent it is, is its place.
    nothing, place = np.zeros(count), np.arange(count, dtype=np.float64)
    return Tasks(np.ones(count), nothing, np.zeros(count, dtype=np.int64), model, place, nothing)


def _servers(workers: Sequence[WorkerView], outlook: Outlook) -> Servers:
    def each(values: Sequence[float]) -> Floats:
        return np.array(values, dtype=np.float64)

    return Servers(
        compute=each([outlook.speed(worker.gpu_model) for worker in workers]),
        memory=np.zeros(len(workers)),
        capacity=each([worker.slots for worker in workers]),
        used=each([worker.slots - worker.free_slots for worker in workers]),
        queue=np.zeros(len(workers)),
        places=np.array([worker.free_slots for worker in workers], dtype=np.int64),
        suits=np.ones((len(workers), 1), dtype=bool),
    )


def _recent(
    workers: Sequence[WorkerView], contexts: Mapping[str, int], recent: Mapping[str, Mapping[str, float]]
) -> Recent:
    """Return what each worker holds, by when it was used, and what it had."""
    ran: list[tuple[int, int, float]] = []
    for number, worker in enumerate(workers):
        times = {**recent.get(worker.id, {})}
        for context, held in worker.contexts.items():
            times[context] = max(held.last_used, times.get(context, -math.inf))
        ran += [(number, contexts[context], time) for context, time in times.items() if context in contexts]
    columns = zip(*ran, strict=True) if ran else ((), (), ())
    server, model, time = (list(column) for column in columns)
    return Recent(np.array(server, dtype=np.int64), np.array(model, dtype=np.int64), np.array(time, dtype=np.float64))
