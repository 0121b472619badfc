"""The improved method: AGH, then the exact MILP over the configurations around its answer.

What lives here: a large neighbourhood, solved to its optimum. What does not live here: choosing it (`exchange`).
"""

from __future__ import annotations

from ctxflow.policies.placement.adaptive import adaptive
from ctxflow.policies.placement.allocation import Allocation
from ctxflow.policies.placement.arrays import Arrays
from ctxflow.policies.placement.check import check
from ctxflow.policies.placement.draft import Choices, Mechanisms
from ctxflow.policies.placement.exact import exact
from ctxflow.policies.placement.exchange import Exchange
from ctxflow.policies.placement.required import enough

AROUND = 24
"""Configurations in the neighbourhood besides those of AGH's own pairs."""


def improved(arrays: Arrays, seed: int = 0, time_limit: float = 2.0) -> Allocation:
    """The best allocation among the configurations that look most promising around AGH's answer; never above AGH.

    :param seed: of AGH's random orderings.
    :param time_limit: seconds for the solver; AGH's answer stands if it finds nothing better.
    :raises ModuleNotFoundError: without SciPy, saying what to install.

    >>> from ctxflow.policies.placement.instances import paper_instance
    >>> arrays = Arrays.of(paper_instance())
    >>> improved(arrays).costs(arrays.problem).total <= adaptive(arrays).total + 1e-6
    True
    """
    draft = adaptive(arrays, seed=seed)
    found = draft.allocation()
    # Where AGH leaves more unserved than is allowed, what is near its answer is no better: all of it then.
    near = Exchange(arrays, Choices(arrays, Mechanisms())).pool(draft, AROUND) if enough(draft) else None
    if near is not None and not near.any():
        return found
    better = exact(arrays, time_limit, options=near).allocation
    if better is None or check(arrays.problem, better):
        return found
    return better if not enough(draft) or better.costs(arrays.problem).total < draft.total else found
