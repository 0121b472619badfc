"""TORTA's micro layer on a live view: calls in the order of urgency, given to the free workers that suit them best.

Eq. 8 sees the speed of a worker's GPU model, as measured; Eq. 9 what it runs; Eq. 10 what it ran lately, so that work
gathers on few workers, and others rest and may go. What does not live here: the order, and who may take what
(torta.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ctxflow.policies.routing.arrays import Floats
from ctxflow.policies.routing.improving import improve
from ctxflow.policies.routing.matching import NOWHERE, match
from ctxflow.policies.routing.outlook import Outlook
from ctxflow.policies.routing.scores import Weights, fit
from ctxflow.policies.routing.servers import Recent, Servers, Tasks
from ctxflow.policies.views import AppView, WorkerView

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
    """Which worker takes which call; what finds no place is left out.

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
    """The worker of one call alone: the same scores, without the arrays."""
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
    """What each worker holds, by when it was used, and what it had."""
    ran: list[tuple[int, int, float]] = []
    for number, worker in enumerate(workers):
        times = {**recent.get(worker.id, {})}
        for context, held in worker.contexts.items():
            times[context] = max(held.last_used, times.get(context, -math.inf))
        ran += [(number, contexts[context], time) for context, time in times.items() if context in contexts]
    columns = zip(*ran, strict=True) if ran else ((), (), ())
    server, model, time = (list(column) for column in columns)
    return Recent(np.array(server, dtype=np.int64), np.array(model, dtype=np.int64), np.array(time, dtype=np.float64))
