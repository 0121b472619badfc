"""GH, the greedy heuristic: Algorithm 1.

What lives here: the two phases. What does not live here: where a query type could go (`draft`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ctxflow.policies.placement.arrays import Arrays, Bools, Floats
from ctxflow.policies.placement.draft import IDLE, NOTHING, Choices, Draft, Mechanisms, Places
from ctxflow.policies.placement.required import keeping_required

COVERAGE_BUDGET = 0.8
"""beta: the share of the budget up to which Phase 1 deploys."""


def greedy(arrays: Arrays, mechanisms: Mechanisms | None = None) -> Draft:
    """GH: coverage first, then each query type where serving it costs least, the most frequent type first.

    As printed, Step 4 takes a place or leaves it; here the share is what all limits leave room for, so that a type is
    not left out whole where the storage holds most of it. O(I J K) array operations in I steps.

    :param mechanisms: M1 to M3, all on by default.

    >>> from ctxflow.policies.placement.instances import paper_instance
    >>> draft = greedy(Arrays.of(paper_instance()))
    >>> float(draft.unserved.max())
    0.0
    """
    free = mechanisms or Mechanisms()

    def search(priced: Arrays) -> Draft:
        return construct(covered(Choices(priced, free)), order_by_rate(priced))

    return keeping_required(arrays, free, search)


def order_by_rate(arrays: Arrays) -> list[int]:
    """The query types, the most frequent first."""
    rates = [kind.queries_per_hour for kind in arrays.problem.query_types]
    return sorted(range(len(rates)), key=lambda i: -rates[i])


def covered(choices: Choices) -> Draft:
    """Phase 1: deploy where the most query types per dollar could go, (10) and (11), until each could go somewhere.

    Stops also when no pair that beta of the budget can still pay covers another type.
    """
    arrays, draft = choices.arrays, Draft(choices)
    reach = (choices.config != IDLE) & (arrays.error <= arrays.max_error[:, None, None])
    cap = COVERAGE_BUDGET * arrays.problem.budget_dollars
    uncovered = np.ones(arrays.shape[0], dtype=bool)
    while uncovered.any():
        covers = reach & uncovered[:, None, None]
        config = np.where(covers, choices.config, IDLE).max(axis=0)
        gpus = arrays.gpus[np.maximum(config, 0)]
        count, cost = covers.sum(axis=0), arrays.rent * gpus
        usable = (count > 0) & (draft.config == IDLE) & (draft.rent + cost <= cap)
        usable &= gpus <= arrays.stock - draft.used
        if not usable.any():
            break
        best = np.where(usable, count / np.maximum(cost, 1e-12), -1.0).argmax()
        j, k = np.unravel_index(best, cost.shape)
        draft.activate(int(j), int(k), int(config[j, k]))
        uncovered &= ~reach[:, j, k]
    return draft


def construct(draft: Draft, order: Sequence[int]) -> Draft:
    """Phase 2: serve the query types one after the other, each as far as it goes; the draft is changed.

    :param order: the query types.
    """
    for i in order:
        serve(draft, i, float(draft.unserved[i]))
    return draft


def serve(draft: Draft, i: int, wanted: float, among: Bools | None = None) -> float:
    """Send a share of a query type where M2 ranks best, and what is left where it ranks next; what stays unserved.

    :param among: (J, K) the pairs that may be used; all by default.
    """
    while wanted > NOTHING:
        places = draft.places(i, wanted)
        if among is not None:
            places.share[~among] = 0.0
        if not (places.share > NOTHING).any():
            break
        j, k = np.unravel_index(ranks(draft, i, wanted, places).argmin(), places.share.shape)
        share = float(places.share[j, k])
        draft.place(i, int(j), int(k), int(places.config[j, k]), share)
        wanted -= share
    return wanted


def ranks(draft: Draft, i: int, wanted: float, places: Places) -> Floats:
    """(J, K) M2: smaller is better; full coverage before partial, then the cost (7) per covered share."""
    arrays = draft.arrays
    cost = places.rent + arrays.model_dollars[:, None] + arrays.data_dollars[i] + arrays.delay_dollars[i] * places.delay
    possible = places.share > NOTHING
    if draft.choices.mechanisms.rank:
        cost = cost / np.maximum(places.share, NOTHING)
        partial = places.share < wanted - NOTHING
        cost = cost + partial * (cost[possible].max() + 1.0)
    ranked: Floats = np.where(possible, cost, np.inf)
    return ranked
