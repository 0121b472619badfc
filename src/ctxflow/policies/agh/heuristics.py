"""GH and AGH, the paper's greedy heuristics (Algorithms 1 and 2), on the state that `draft` keeps.

The two phases of GH; the orderings, relocation and consolidation of AGH; new routes over what runs. GH and AGH know
prices alone: where an answer leaves more unserved than `max_unserved`, they search again with higher prices.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ctxflow.policies.agh.draft import IDLE, NOTHING, Choices, Destinations, Draft, Mechanisms, nearest
from ctxflow.policies.agh.local_search import Exchange
from ctxflow.policies.agh.option_sets import OptionSets
from ctxflow.policies.agh.priced_search import PricedSearch
from ctxflow.policies.agh.problem import Bools, Constants, Floats
from ctxflow.policies.agh.set_program import OptionTable

COVERAGE_BUDGET = 0.8  # beta: the share of the budget up to which Phase 1 deploys.


def greedy(arrays: Constants, mechanisms: Mechanisms | None = None) -> Draft:
    """Return GH's answer: coverage first, then each query type where serving it costs least, the most frequent first.

    Unlike the printed Step 4, which takes a place or leaves it, the share is what all limits leave room for.

    :param mechanisms: M1 to M3, all on by default.

    >>> from ctxflow.policies.agh.problem import Arrays
    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> draft = greedy(Arrays.of(paper_instance()))
    >>> float(draft.unserved.max())
    0.0
    """
    free = mechanisms or Mechanisms()

    def search(priced: Constants) -> Draft:
        return construct(covered(Choices(priced, free)), order_by_rate(priced))

    return keeping_required(arrays, free, search)


def order_by_rate(arrays: Constants) -> list[int]:
    """Return the query types, the most frequent first."""
    return sorted(range(len(arrays.rates)), key=lambda i: -arrays.rates[i])


def covered(choices: Choices) -> Draft:
    """Deploy where the most query types per dollar could go, (10) and (11), until each could go somewhere: Phase 1.

    Stops also when no pair within beta of the budget covers another type.
    """
    arrays, draft = choices.arrays, Draft(choices)
    reach = (choices.config != IDLE) & (arrays.error <= arrays.max_error[:, None, None])
    cap = COVERAGE_BUDGET * arrays.budget
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
    """Serve the query types in this order, each as far as possible: Phase 2; the draft is changed."""
    for i in order:
        serve(draft, i, float(draft.unserved[i]))
    return draft


def serve(draft: Draft, i: int, wanted: float, among: Bools | None = None) -> float:
    """Route a share of a query type where M2 ranks best, and what is left where it ranks next; return what remains.

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


def ranks(draft: Draft, i: int, wanted: float, places: Destinations) -> Floats:
    """Return M2's ranks (J, K), the smallest the best: full coverage first, then the cost (7) per covered share."""
    arrays = draft.arrays
    cost = places.rent + arrays.model_dollars[:, None] + arrays.data_dollars[i] + arrays.delay_dollars[i] * places.delay
    possible = places.share > NOTHING
    if draft.choices.mechanisms.rank:
        cost = cost / np.maximum(places.share, NOTHING)
        partial = places.share < wanted - NOTHING
        cost = cost + partial * (cost[possible].max() + 1.0)
    ranked: Floats = np.where(possible, cost, np.inf)
    return ranked


def keeping_required(
    arrays: Constants,
    mechanisms: Mechanisms,
    search: Callable[[Constants], Draft],
    simpler: Callable[[], Draft] | None = None,
) -> Draft:
    """Return what a heuristic finds; if that leaves more unserved than is allowed, search with prohibitive prices.

    :param simpler: another answer that counts then, so that a heuristic is never above a simpler one.
    """
    first = search(arrays)
    if enough(first):
        return first
    second = search(dataclasses.replace(arrays, unserved_dollars=prohibitive(arrays)))
    second.arrays, second.choices = arrays, Choices(arrays, mechanisms)
    drafts = [second, simpler()] if simpler is not None else [second]
    return min(filter(enough, drafts), key=lambda draft: draft.total, default=first)


def enough(draft: Draft) -> bool:
    """Return whether no more is unserved than is allowed."""
    return bool((draft.unserved <= draft.arrays.max_unserved + NOTHING).all())


def prohibitive(arrays: Constants) -> Floats:
    """Return prices of leaving unserved (I,), above all else that could be paid for types that must be served."""
    types = arrays.shape[0]
    rent = min(arrays.budget, types * float(arrays.rent.max()) * float(arrays.gpus.max()))
    stored = float(arrays.data_dollars.sum()) + types * float(arrays.model_dollars.max())
    most = rent + stored + float(arrays.delay_dollars @ arrays.max_delay) + float(arrays.unserved_dollars.sum())
    return np.where(arrays.max_unserved < 1, arrays.unserved_dollars + most, arrays.unserved_dollars)


PASSES = 3  # L: rounds of relocation.
PATIENCE = 5  # Orderings in a row without improvement, after which it ends.
BETTER = 1e-9


def adaptive(arrays: Constants, mechanisms: Mechanisms | None = None, seed: int = 0, printed: bool = False) -> Draft:
    """Return AGH's answer: GH from eight orderings and some random ones, improved by moves; never above GH.

    The printed moves, of single routes and closed deployments, end 20 % and more above the optimum where storage is
    short or two models serve a query type best. So it also relocates whole deployments (`local_search`).

    :param mechanisms: M1 to M3, all on by default; with one of them off, the moves are the printed ones.
    :param seed: of the random orderings.
    :param printed: only the printed moves.

    >>> from ctxflow.policies.agh.problem import Arrays
    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> arrays = Arrays.of(paper_instance())
    >>> adaptive(arrays).total <= greedy(arrays).total
    True
    """
    free = mechanisms or Mechanisms()
    search = functools.partial(_adaptive, mechanisms=free, seed=seed, printed=printed)
    return keeping_required(arrays, free, search, lambda: greedy(arrays, free))


def _adaptive(arrays: Constants, mechanisms: Mechanisms, seed: int, printed: bool) -> Draft:
    choices = Choices(arrays, mechanisms)
    exchange = None if printed or mechanisms != Mechanisms() else Exchange(arrays, choices)
    start = covered(choices)
    best, idle = None, 0
    for order in orderings(arrays, seed):
        draft = consolidate(relocate(construct(start.copy(), order)))
        if exchange is not None and not exchange.refused:
            draft = exchange.search(draft)
        if best is None or draft.total < best.total - BETTER:
            best, idle = draft, 0
        else:
            idle += 1
        if idle >= PATIENCE:
            break
    assert best is not None, "there is always an ordering"
    if exchange is not None and not exchange.refused and (start_of_two := exchange.pair_start()) is not None:
        best = min(best, exchange.search(start_of_two), key=lambda draft: draft.total)
    if exchange is not None:
        sets = OptionSets(OptionTable(arrays, prohibitive(arrays)))
        known = nearest(best, sets.options.options, sets.options.span)
        for chosen in (known, []) if exchange.refused or not _large(arrays) else (known,):
            found = PricedSearch(sets, sets.work + priced_work(arrays)).search(chosen)
            if found is not None and np.isfinite(found.total):
                best = min(best, sets.draft(found, choices), key=lambda draft: draft.total)
    return best


def orderings(arrays: Constants, seed: int) -> Iterator[list[int]]:
    """Yield the query types by rate (GH's own order), penalty, storage and error limit, down and up; then at random."""
    types = range(len(arrays.rates))
    for key in (arrays.rates, arrays.unserved_dollars, arrays.data_gb, arrays.max_error):
        yield sorted(types, key=lambda i: -key[i])
        yield sorted(types, key=lambda i: key[i])
    generator = random.Random(seed)
    for _ in range(random_starts(arrays)):
        order = list(types)
        generator.shuffle(order)
        yield order


def random_starts(arrays: Constants) -> int:
    """Return R, from N = I J K: the paper's remark 1."""
    types, models, tiers, _ = arrays.shape
    size = types * models * tiers
    return 3 if size > 5000 else 5 if size > 2000 else 10 if size > 500 else 20


def priced_work(arrays: Constants) -> int:
    """Return the work of each priced search, in the unit of `OptionSets.work`."""
    return 30_000 if _large(arrays) else 400_000


def _large(arrays: Constants) -> bool:
    types, models, tiers, _ = arrays.shape
    return types * models * tiers > 2000


def relocate(draft: Draft) -> Draft:
    """Move routes, each whole, to where the total falls the most, until none moves or `PASSES` are over."""
    for _ in range(PASSES):
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
    """Return the draft with a route elsewhere, None if that gains nothing."""
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
    """Return the draft without a deployment, None if that gains nothing."""
    trial = draft.copy()
    sent = [i for i, routes in enumerate(trial.routes) if (j, k) in routes]
    shares = [trial.remove(i, j, k) for i in sent]
    if not sent:
        trial.activate(j, k, -1)
    active = trial.config >= 0
    for i, share in zip(sent, shares, strict=True):
        serve(trial, i, share, active)
    return trial if trial.total < draft.total - BETTER else None


ORDERS = 4  # From how many orderings the routes over what runs are found, besides the previous routes.


def rerouted(empty: Draft, routes: Sequence[tuple[int, int, int, float]]) -> Draft:
    """Return the cheapest routes found over what a draft without routes deploys.

    :param routes: those of before: query type, model, tier and share.
    """
    as_before, worth = empty.copy(), empty.arrays.unserved_dollars
    for route in sorted(routes, key=lambda route: -worth[route[0]]):
        _place(as_before, *route)
    drafts = [_fill(as_before, sorted(range(len(worth)), key=lambda i: -worth[i]))]
    if as_before.unserved.max() > NOTHING or not routes:
        drafts += [_fill(empty.copy(), order) for order in itertools.islice(orderings(empty.arrays, 0), ORDERS)]
    return min(drafts, key=lambda draft: draft.total)


def _place(draft: Draft, i: int, j: int, k: int, share: float) -> None:
    possible = min(share, _room(draft, i, j, k))
    if possible > NOTHING:
        draft.place(i, j, k, int(draft.config[j, k]), possible)


def _fill(draft: Draft, order: list[int]) -> Draft:
    """Serve what is unserved with what runs, where it costs least for its share; the draft is changed."""
    arrays, pairs = draft.arrays, [(int(j), int(k)) for j, k in np.argwhere(draft.config >= 0)]
    for i in order:
        while draft.unserved[i] > NOTHING:
            wanted = float(draft.unserved[i])
            shares = {pair: min(wanted, _room(draft, i, *pair)) for pair in pairs}
            costs = {
                (j, k): arrays.delay_dollars[i] * arrays.delay[i, j, k, draft.config[j, k]]
                + (0.0 if (j, k) in draft.routes[i] else arrays.model_dollars[j] / share)
                for (j, k), share in shares.items()
                if share > NOTHING
            }
            if not costs:
                break
            best = min(costs, key=lambda pair: (shares[pair] < wanted - NOTHING, costs[pair]))
            draft.place(i, *best, int(draft.config[best]), shares[best])
    return draft


def _room(draft: Draft, i: int, j: int, k: int) -> float:
    """Return the share of a query type that an active pair can still take as it is: (5c), (5f) to (5j).

    Its own delay or error may be over the limit, as averages count.
    """
    arrays, config = draft.arrays, int(draft.config[j, k])
    stored = arrays.hours * arrays.storage_price
    weights = 0.0 if (j, k) in draft.routes[i] else float(arrays.weights_gb[j])
    storage = min(
        arrays.storage - draft.stored,
        (arrays.budget - draft.rent - draft.storage_dollars) / stored if stored else np.inf,
    )
    limits = (
        (arrays.max_delay[i] - draft.delay[i], arrays.delay[i, j, k, config]),
        (arrays.max_error[i] - draft.error[i], arrays.error[i, j, k]),
        (arrays.capacity[k] * arrays.gpus[config] - draft.work[j, k], arrays.work[i, j, k]),
        (arrays.spare_gb[j, k, config] - draft.kv[j, k], arrays.kv_gb[i, j, k]),
        (storage - weights, arrays.data_gb[i]),
    )
    if any(left < 0 for left, _ in limits):
        return 0.0
    return min((float(left / each) for left, each in limits if each > 0), default=np.inf)
