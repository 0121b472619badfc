"""Which task goes to which server: the paper's greedy matching (TORTA, section V-C2 and Algorithm 1).

Tasks are taken in the order of urgency; each goes to the server of the highest score that has a place left, and that
server's load is counted up. A task that finds no place waits in the buffer (activation.py says when that starts
servers). What does not live here: the scores (scores.py), the local search that improves a matching (improving.py).
"""

from __future__ import annotations

import math

import numpy as np

from ctxflow.policies.routing.arrays import Bools, Floats, Ints, amounts
from ctxflow.policies.routing.scores import load
from ctxflow.policies.routing.servers import Servers, Tasks

NOWHERE = -1
"""In a matching: the task found no place."""


def by_urgency(tasks: Tasks) -> Ints:
    """The tasks' numbers, earliest deadline first; of equal ones, those that compute the most.

    >>> two = np.array([1.0, 2.0])
    >>> by_urgency(Tasks(two, two, np.zeros(2, int), np.zeros(2, int), np.array([9.0, 9.0]), two)).tolist()
    [1, 0]
    """
    deadline = np.where(np.isnan(tasks.deadline), np.inf, tasks.deadline)
    return np.asarray(np.lexsort((-amounts(tasks.compute), deadline)), dtype=np.int64)


def match(fit: Floats, tasks: Tasks, servers: Servers, load_weight: float = 1.0, allowed: Bools | None = None) -> Ints:
    """(N,) the server of each task, `NOWHERE` for those that wait.

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
    """(N,) what each task adds to the load of its server: its work, and itself in the queue (Algorithm 1)."""
    return amounts(tasks.work) + 1.0


def usable(fit: Floats, allowed: Bools | None) -> Floats:
    """The fit with minus infinity where a task may not run, and nothing else that is not finite."""
    known = np.isfinite(fit)
    if not known.all():
        fit = np.where(known, fit, (fit[known].min() if known.any() else 0.0) - 1.0)
    return fit if allowed is None else np.where(allowed, fit, -np.inf)
