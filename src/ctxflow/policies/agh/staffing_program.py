"""The MILP of live placement: how many workers of each tier hold each context, and their share of its items."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ctxflow.policies.agh.linear_programs import Effort, Program, Solved, Solver
from ctxflow.policies.agh.live_work import LEAST_LOAD, UTILIZATION, ContextWork, Offer
from ctxflow.policies.agh.problem import Floats, Ints

EFFORT = Effort(nodes=200)
_DEAR = 1e3  # What it costs to leave all unserved, in rents of the whole site.


def unserved_price(offers: Sequence[Offer]) -> float:
    """Return the dollars an hour of leaving all items of a context unserved: above all that serving them could cost."""
    return _DEAR * (sum(offer.price * offer.workers for offer in offers) + 1.0)


class StaffingProgram:
    """The MILP of I contexts and K tiers.

    Variables, in this order: shares x and whole workers n (I, K), workers more than before (I, K), what is unserved
    (I,), and the share of the demand that there is.

    :param share: of the demand.
    """

    def __init__(self, tasks: Sequence[ContextWork], offers: Sequence[Offer], share: float) -> None:
        self.tasks, self.offers = tasks, offers
        size = (len(tasks), len(offers))
        able = np.array([[offer.name in task.work and offer.workers > 0 for offer in offers] for task in tasks])
        self.able = able.reshape(size)  # Also within the limit on the delay, which each tier in use has to keep.
        self.x: Ints = np.arange(self.able.size).reshape(size)
        self.n, self.more = self.x + self.able.size, self.x + 2 * self.able.size
        self.left = 3 * self.able.size + np.arange(len(tasks))
        self.part = 3 * self.able.size + len(tasks)
        self.prices = np.array([offer.price for offer in offers])
        self.workers = np.array([float(offer.workers) for offer in offers])
        self.busy = np.zeros(size)  # Workers whose whole time all of a context's items take.
        for i, task in enumerate(tasks):
            for k, offer in enumerate(offers):
                if self.able[i, k]:
                    self.busy[i, k] = share * task.per_hour * task.item_seconds(offer.name) / 3600
                    self.able[i, k] = task.max_delay is None or task.delay(offer.name) <= task.max_delay

    def cheapest(self, runs: Ints | None = None, hold_hours: float = 1.0) -> tuple[Floats, Ints, Floats]:
        """Return the cheapest shares and workers (I, K), and what is unserved (I,).

        :param runs: (I, K) workers that hold the contexts now; each one more is paid for while it loads, of the hours
            for which the plan holds.
        """
        before = np.zeros(self.x.shape, dtype=np.int64) if runs is None else runs
        loads = np.array([max(LEAST_LOAD, task.load_seconds) for task in self.tasks]) / 3600 / max(hold_hours, 1e-9)
        program = self._program(before, np.zeros_like(before), self.workers)
        if runs is not None:
            program.cost[self.more] = loads[:, None] * self.prices
        return self._read(Solver(presolve=True).solve(program, EFFORT))

    def kept(self, runs: Ints) -> tuple[Floats, Ints, Floats]:
        """Return the best shares with the workers (I, K) as they are, and what is unserved (I,)."""
        return self._read(Solver(presolve=True).solve(self._program(runs, runs, runs)))

    def most(self) -> float:
        """Return the largest share of every context's items that the workers can answer, the same of all."""
        none = np.zeros(self.x.shape, dtype=np.int64)
        program = self._program(none, none, self.workers)
        program.cost[:] = 0.0
        program.cost[self.part] = -1.0
        program.lower[self.part] = program.upper[self.left] = 0.0
        found = Solver(presolve=True).solve(program, EFFORT)
        return 0.0 if found.values is None else max(0.0, float(found.values[self.part]) * (1 - 1e-6))

    def _program(self, before: Ints, fewest: Ints | Floats, most: Ints | Floats) -> Program:
        (types, tiers), able = self.x.shape, self.able
        i, k = np.nonzero(able)
        x, n, more = self.x[able], self.n[able], self.more[able]
        number, every = np.arange(len(x)), np.arange(types)
        serving, stock, work = 0, types, types + tiers
        change = work + len(x)
        parts = [
            (serving + i, x, -np.ones(len(x))), (serving + every, self.left, -np.ones(types)),
            (serving + every, np.full(types, self.part), np.ones(types)),
            (stock + k, n, np.ones(len(x))),
            (work + number, x, self.busy[able]), (work + number, n, np.full(len(x), -UTILIZATION)),
            (change + number, n, np.ones(len(x))), (change + number, more, -np.ones(len(x))),
        ]  # fmt: skip
        rows, columns, values = (np.concatenate([part[place] for part in parts]) for place in range(3))
        limit = np.concatenate([np.zeros(types), self.workers, np.zeros(len(x)), before[able]])
        cost, size = np.zeros(self.part + 1), self.part + 1
        cost[self.n], cost[self.left] = self.prices, unserved_price(self.offers)
        lower, upper = np.zeros(size), np.ones(size)
        lower[self.n], upper[self.n] = fewest, np.where(able, most, 0)
        upper[self.x], upper[self.more], lower[self.part] = able, np.where(able, self.workers, 0), 1.0
        integral = np.zeros(size, dtype=bool)
        integral[n] = True
        return Program(cost, rows, columns, values, limit, lower, upper, integral)

    def _read(self, found: Solved) -> tuple[Floats, Ints, Floats]:
        if found.values is None:
            return np.zeros(self.x.shape), np.zeros(self.x.shape, dtype=np.int64), np.ones(len(self.tasks))
        values = found.values
        workers = np.round(values[self.n]).astype(np.int64)
        shares = np.where((values[self.x] > 1e-9) & (workers > 0), values[self.x], 0.0)
        shares /= np.maximum(shares.sum(axis=1, keepdims=True), 1.0)
        return shares, workers, np.maximum(0.0, 1 - shares.sum(axis=1))
