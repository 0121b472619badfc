"""What no policy can be below, of the power that a run takes: least costs of the tasks' own seconds.

Each type's tasks are divided among the servers that suit it, as if they could be split and be done at any time of what
is measured, by who knows them all; nothing is loaded, started or sent anywhere.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

from ctxflow.policies.torta.quantities import Floats, Ints
from ctxflow_papers.torta.demand import Tasks
from ctxflow_papers.torta.runs import price_of, rates_of
from ctxflow_papers.torta.settings import GPUS, IDLE_WATTS, KINDS, WORKING_WATTS
from ctxflow_papers.torta.world import World


def least_power(place: World, tasks: Tasks, begin: float, seconds: float) -> float:
    """Return dollars below which no policy can be that answers all tasks within so long.

    :param begin: the time from which on is measured. :param seconds: from `begin` on, at least what the run to be
        bounded lasts.
    """
    rates, suits = _servers(place, len(tasks.starts) - 1)
    total = 0.0
    for kind, work in enumerate(_work(tasks, begin)):
        order = np.sort(rates[suits == kind])
        done = np.diff(np.minimum(np.cumsum(np.full(len(order), seconds)), work), prepend=0.0)
        total += float(WORKING_WATTS * order @ done)
    return total


def least_power_active(place: World, tasks: Tasks, begin: float, seconds: float) -> float:
    """Return dollars below which no policy can be that has all servers active all the time.

    Each of them is idle or works until the last task is answered. When that is, is chosen as well: not before the
    last task could be answered, nor after `seconds`. A linear program (SciPy's HiGHS).

    :param begin: the time from which on is measured; all servers have started by then.
    :param seconds: from `begin` on, at least what the run to be bounded lasts.
    """
    rates, suits = _servers(place, len(tasks.starts) - 1)
    count, work = len(rates), _work(tasks, begin)
    # A variable for each server's seconds of work, and one for how long all lasts.
    cost = np.append((WORKING_WATTS - IDLE_WATTS) * rates, IDLE_WATTS * rates.sum())
    shortest = float((tasks.time + tasks.seconds).max()) - begin
    found = linprog(
        cost,
        A_ub=np.column_stack([np.eye(count), -np.ones(count)]), b_ub=np.zeros(count),
        A_eq=np.column_stack([suits == np.arange(len(KINDS))[:, None], np.zeros(len(KINDS))]), b_eq=work,
        bounds=[(0, None)] * count + [(shortest, max(shortest, seconds))],
    )  # fmt: skip
    if found.status:
        raise ValueError(f"the servers cannot do these tasks in {seconds:.0f} s: {found.message}")
    return float(found.fun)


def _servers(place: World, slots: int) -> tuple[Floats, Ints]:
    """Return (S,) dollars for a second at full power, and the type of task that each server suits."""
    prices = [price_of(place, region, slots) for region in range(place.regions)]
    return rates_of(place, prices), np.array([GPUS[gpu].suits for gpu in place.gpu])


def _work(tasks: Tasks, begin: float) -> Floats:
    """Return (K,) seconds of each type to be worked from `begin` on: what came before has had its time until then."""
    left = np.clip(tasks.time + tasks.seconds - begin, 0.0, tasks.seconds)
    return np.bincount(tasks.kind, left, minlength=len(KINDS)).astype(np.float64)
