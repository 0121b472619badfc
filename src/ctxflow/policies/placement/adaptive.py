"""AGH, the adaptive greedy heuristic: Algorithm 2.

What lives here: the orderings, relocate, consolidate. What does not live here: GH (`greedy`), and what goes beyond
the paper (`improved`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from ctxflow.policies.placement.arrays import Arrays
from ctxflow.policies.placement.draft import NOTHING, Choices, Draft, Mechanisms
from ctxflow.policies.placement.exchange import Exchange
from ctxflow.policies.placement.greedy import construct, covered, greedy, serve
from ctxflow.policies.placement.required import keeping_required

PASSES = 3
"""L: rounds of relocation."""
PATIENCE = 5
"""Orderings in a row that bring nothing, after which it ends."""
BETTER = 1e-9


def adaptive(arrays: Arrays, mechanisms: Mechanisms | None = None, seed: int = 0, printed: bool = False) -> Draft:
    """AGH: GH from eight orderings and some random ones, each improved by moves; the cheapest. Never above GH.

    As printed, it moves single routes and closes deployments, and ends 20 % and more above the optimum where storage
    is short or a query type is served best by two models. So it also relocates whole deployments (`exchange`).

    :param mechanisms: M1 to M3, all on by default; with one of them off, the moves are the printed ones.
    :param seed: of the random orderings.
    :param printed: only the printed moves.

    >>> from ctxflow.policies.placement.instances import paper_instance
    >>> arrays = Arrays.of(paper_instance())
    >>> adaptive(arrays).total <= greedy(arrays).total
    True
    """
    free = mechanisms or Mechanisms()
    return keeping_required(
        arrays, free, lambda priced: _adaptive(priced, free, seed, printed), lambda: greedy(arrays, free)
    )


def _adaptive(arrays: Arrays, mechanisms: Mechanisms, seed: int, printed: bool) -> Draft:
    choices = Choices(arrays, mechanisms)
    exchange = None if printed or mechanisms != Mechanisms() else Exchange(arrays, choices)
    start = covered(choices)
    best, idle = None, 0
    for order in orderings(arrays, seed):
        draft = consolidate(relocate(construct(start.copy(), order)))
        if exchange is not None:
            draft = exchange.search(draft)
        if best is None or draft.total < best.total - BETTER:
            best, idle = draft, 0
        else:
            idle += 1
        if idle >= PATIENCE:
            break
    assert best is not None, "there is always an ordering"
    if exchange is not None and (start_of_two := exchange.pair_start()) is not None:
        best = min(best, exchange.search(start_of_two), key=lambda draft: draft.total)
    return best


def orderings(arrays: Arrays, seed: int) -> Iterator[list[int]]:
    """The query types by rate, penalty, storage and error limit, down and up each; then at random.

    GH's own is the first. How many are random falls with the problem's size, as the paper's remark 1 has it.
    """
    types = arrays.problem.query_types
    rates = np.array([kind.queries_per_hour for kind in types])
    for key in (rates, arrays.unserved_dollars, arrays.data_gb, arrays.max_error):
        yield sorted(range(len(types)), key=lambda i: -key[i])
        yield sorted(range(len(types)), key=lambda i: key[i])
    generator = random.Random(seed)
    for _ in range(random_starts(arrays)):
        order = list(range(len(types)))
        generator.shuffle(order)
        yield order


def random_starts(arrays: Arrays) -> int:
    """R, from N = I J K."""
    types, models, tiers, _ = arrays.shape
    size = types * models * tiers
    return 3 if size > 5000 else 5 if size > 2000 else 10 if size > 500 else 20


def relocate(draft: Draft, passes: int = PASSES) -> Draft:
    """Move routes, each whole, to where the total falls the most, until nothing moves or the passes are over."""
    for _ in range(passes):
        moved = False
        for i, routes in enumerate(draft.routes):
            for pair in list(routes):
                better = _moved(draft, i, *pair)
                if better is not None:
                    draft, moved = better, True
        if not moved:
            break
    return draft


def _moved(draft: Draft, i: int, j: int, k: int) -> Draft | None:
    """The draft with a route elsewhere, None if that gains nothing."""
    if (j, k) not in draft.routes[i]:
        return None
    trial = draft.copy()
    share = trial.remove(i, j, k)
    places = trial.places(i, share)
    arrays = draft.arrays
    cost = places.rent + arrays.model_dollars[:, None] + arrays.delay_dollars[i] * share * places.delay
    cost = np.where(places.share >= share - NOTHING, cost, np.inf)
    to_j, to_k = (int(part) for part in np.unravel_index(cost.argmin(), cost.shape))
    if (to_j, to_k) == (j, k) or not np.isfinite(cost[to_j, to_k]):
        return None
    trial.place(i, to_j, to_k, int(places.config[to_j, to_k]), share)
    return trial if trial.total < draft.total - BETTER else None


def consolidate(draft: Draft) -> Draft:
    """Close deployments, the least loaded first, where the others can take what they served and the total falls."""
    pairs = np.argwhere(draft.config >= 0)
    load = [float(sum(routes.get((int(j), int(k)), 0.0) for routes in draft.routes)) for j, k in pairs]
    for n in np.argsort(load, kind="stable"):
        better = _closed(draft, int(pairs[n][0]), int(pairs[n][1]))
        draft = better or draft
    return draft


def _closed(draft: Draft, j: int, k: int) -> Draft | None:
    """The draft without a deployment, None if that gains nothing."""
    trial = draft.copy()
    sent = [i for i, routes in enumerate(trial.routes) if (j, k) in routes]
    shares = [trial.remove(i, j, k) for i in sent]
    if not sent:
        trial.activate(j, k, -1)
    active = trial.config >= 0
    for i, share in zip(sent, shares, strict=True):
        serve(trial, i, share, active)
    return trial if trial.total < draft.total - BETTER else None
