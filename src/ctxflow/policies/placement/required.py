"""How much of a query type has to be served, for the heuristics, which know prices alone.

What lives here: a second search where the first leaves more unserved than `max_unserved` allows, since that is cheaper.
What does not live here: the heuristics (`greedy`, `adaptive`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ctxflow.policies.placement.arrays import Arrays, Floats
from ctxflow.policies.placement.draft import NOTHING, Choices, Draft, Mechanisms


def keeping_required(
    arrays: Arrays,
    mechanisms: Mechanisms,
    search: Callable[[Arrays], Draft],
    simpler: Callable[[], Draft] | None = None,
) -> Draft:
    """What a heuristic finds; if it leaves more unserved than is allowed, the cheapest that does not, as far as found.

    The second search is with a price on what has to be served that no way of serving it can reach.

    :param simpler: gives another answer that counts then, so that a heuristic is never above a simpler one.
    """
    first = search(arrays)
    if enough(first):
        return first
    second = search(dataclasses.replace(arrays, unserved_dollars=_dear(arrays)))
    second.arrays, second.choices = arrays, Choices(arrays, mechanisms)
    drafts = [second, simpler()] if simpler is not None else [second]
    return min(filter(enough, drafts), key=lambda draft: draft.total, default=first)


def enough(draft: Draft) -> bool:
    """Whether all is served that has to be."""
    return bool((draft.unserved <= draft.arrays.max_unserved + NOTHING).all())


def _dear(arrays: Arrays) -> Floats:
    """Prices of leaving unserved (I,): above all else that could be paid, for types of which some has to be served."""
    types = arrays.shape[0]
    rent = min(arrays.problem.budget_dollars, types * float(arrays.rent.max()) * float(arrays.gpus.max()))
    stored = float(arrays.data_dollars.sum()) + types * float(arrays.model_dollars.max())
    most = rent + stored + float(arrays.delay_dollars @ arrays.max_delay) + float(arrays.unserved_dollars.sum())
    return np.where(arrays.max_unserved < 1, arrays.unserved_dollars + most, arrays.unserved_dollars)
