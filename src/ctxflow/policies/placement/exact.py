"""The exact method: P_DM's MILP on SciPy's HiGHS.

What lives here: solving a `program`, reading its answer, the bound. What does not live here: how it is written down.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np

from ctxflow.policies.placement.allocation import Allocation, Deployment, Route
from ctxflow.policies.placement.arrays import Arrays, Bools, Floats
from ctxflow.policies.placement.program import Program, all_options, build

DROPPED = 1e-9  # Shares under this are rounding, and no routes.


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the solver found.

    :ivar allocation: its best, None if it found none in its time, or if there is none.
    :ivar bound: no allocation costs less than this many dollars; None if there is none at all.
    :ivar closed: whether the allocation was proven to be the best, within the gap asked for.
    """

    allocation: Allocation | None
    bound: float | None
    closed: bool


def exact(
    arrays: Arrays,
    time_limit: float = 600.0,
    gap: float = 1e-4,
    options: Bools | None = None,
    tightened: bool = True,
) -> Outcome:
    """The cheapest allocation, or the best that is found in time, with a bound on how much better there could be.

    :param time_limit: seconds for the solver; the answer is cleaned up after that.
    :param gap: the share of the cost by which the answer may be above the bound and still count as the best.
    :param options: (J, K, C) which configurations may be used; the bound then holds among those only.
    :param tightened: False for the paper's own formulation, with a weaker relaxation: see `program.build`.
    :raises ModuleNotFoundError: without SciPy, saying what to install.

    >>> from ctxflow.policies.placement.instances import draw
    >>> outcome = exact(Arrays.of(draw(0, (3, 3, 3))))
    >>> outcome.closed
    True
    """
    program = build(arrays, all_options(arrays) if options is None else options, tightened)
    found = _solve(program, time_limit, gap, program.lower, program.upper, program.integral)
    bound = getattr(found, "mip_dual_bound", None)
    closed = found.status == 0
    if found.x is None:
        nothing = bound is None or found.status == 2
        return Outcome(None, None if nothing else max(bound * program.unit, 0.0), found.status == 2)
    whole = np.round(found.x)
    fixed = [np.where(program.integral, whole, edge) for edge in (program.lower, program.upper)]
    clean = _solve(program, None, 0.0, fixed[0], fixed[1], np.zeros_like(program.integral))
    values = found.x if clean.x is None else clean.x
    if bound is None:  # No variable was integral: a linear program is its own bound.
        bound = found.fun
    return Outcome(read(arrays, program, values), bound * program.unit, closed)


def _solve(
    program: Program, time_limit: float | None, gap: float, lower: Floats, upper: Floats, integral: Bools
) -> Any:
    milp, linear, bounds = _scipy()
    options: dict[str, float] = {"mip_rel_gap": gap}
    if time_limit is not None:
        options["time_limit"] = max(time_limit, 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # What HiGHS says of options that it passes on.
        return milp(
            program.cost,
            integrality=integral.astype(int),
            bounds=bounds(lower, upper),
            constraints=linear(program.matrix, -np.inf, program.limit),
            options=options,
        )


def _scipy() -> tuple[Any, Any, Any]:
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the exact and improved placement methods need SciPy: pip install 'ctxflow[policies]'"
        ) from None
    return milp, LinearConstraint, Bounds


def relaxed(arrays: Arrays, options: Bools) -> tuple[Program, Floats | None]:
    """The linear relaxation's solution, None if there is none."""
    program = build(arrays, options)
    found = _solve(program, None, 0.0, program.lower, program.upper, np.zeros_like(program.integral))
    return program, found.x


def read(arrays: Arrays, program: Program, values: Floats) -> Allocation:
    """The allocation that a solution stands for."""
    w, _, x, _, _ = program.parts(values, arrays.shape[0])
    chosen = program.options[w > 0.5]
    deployments = tuple(
        Deployment(int(j), int(k), int(arrays.tensor[c]), int(arrays.pipeline[c]), int(arrays.gpus[c]))
        for j, k, c in chosen
    )
    x = np.where(x > DROPPED, x, 0.0)
    x /= np.maximum(x.sum(axis=1, keepdims=True), 1.0)  # A solver's shares may be a rounding above the whole.
    routes = tuple(
        Route(int(i), int(program.pairs[p, 0]), int(program.pairs[p, 1]), float(x[i, p])) for i, p in np.argwhere(x)
    )
    unserved = tuple(float(share) for share in np.maximum(0.0, 1.0 - x.sum(axis=1)))
    return Allocation(deployments, routes, unserved)
