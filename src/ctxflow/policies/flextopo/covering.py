"""The best candidate by Equation 2 of FlexTopo, as trying all sets of victims would give, without enumerating them.

It is exact: the best set frees enough in one *domain* (a NUMA node, a socket, the machine). Within one, the score is
the same but for priorities, so the best set is a cheapest cover of what the request lacks there: a knapsack in GPUs and
cores, solved by dynamic programming over states. Priorities count 1 or more, so no cover holds a victim too many. Two
terms of the order are no sums: the highest priority is bounded by allowing only victims up to a limit, the latest start
comes last. Domains are searched from the best bound on (the least limit that suffices, and the fractional knapsack).

Among candidates of equal score, a later preemptor that is left without a place (`later`) counts as one more victim.
That is no sum either: beside a domain's cheapest cover those are tried that are cheapest if each victim also costs the
part of those places that it holds, and each is judged by what it leaves.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ctxflow.policies.flextopo.candidates import Fit, Fits, Scorer, given
from ctxflow.policies.flextopo.cluster import Domain, Level, Node, Preemptor, Rung, Shape
from ctxflow.policies.flextopo.later import Kind, LaterPreemptors

Order = tuple[float, int, int, int, int, float]
"""What the candidates of the exact search are ordered by, the least first: as `Rank`, later preemptors that are left
without a place counted as victims, and before the start the number of whole blocks that are broken."""

_Item = tuple[int, int, int, float, int, float]
"""A victim in a domain: the GPUs and cores that it frees there, its priority as it counts, its start, its number, and
what it costs."""

_Cover = tuple[float, int, float, tuple[int, ...]]
"""A set of victims: the sum of costs, how many, minus the earliest start among those at the limit, which."""

_Candidate = tuple[Order, int, tuple[int, ...], Level]
"""A candidate's order, the position of its node, its victims as positions there, and the level that they give."""


_Latest = tuple[int, int | None, int]
"""What bounds the start: the number of the limit's rung, a mask inside which its victims are, and how many they are."""


class _Search(NamedTuple):
    """A domain of a node; no candidate in it ranks before `bound`, and only victims inside the mask `among` count."""

    bound: tuple[float, ...]
    latest: _Latest | None
    domain: Domain
    among: int


def best_candidate(
    nodes: Sequence[Node], preemptor: Preemptor, fits: Fits, scorer: Scorer, later: LaterPreemptors
) -> tuple[_Candidate | None, int]:
    """Return the best candidate of all nodes.

    :returns: its order, the position of its node, its victims as positions among the node's instances, and the level
        that they give; None if there is none. And how many domains were searched.
    """
    best: _Candidate | None = None
    made = 0
    left: list[tuple[tuple[float, ...], int, Sequence[int], _Search | None]]
    left = [
        (bound, number, alike, None) for number, (bound, alike) in enumerate(_grouped(nodes, preemptor, fits, scorer))
    ]
    heapq.heapify(left)
    numbers = itertools.count(len(left))
    while left and (best is None or left[0][0] <= best[0]):
        _, _, alike, search = heapq.heappop(left)
        node = nodes[alike[0]]
        rungs, fit = node.rungs(preemptor.priority), fits[node]
        if search is None:
            for each in _searches(node, rungs, fit, scorer, later):
                for position in alike:
                    heapq.heappush(left, (_from(each, nodes[position]), next(numbers), (position,), each))
            continue
        made += 1
        for order, victims, level in _covers(node, rungs, search, fit, scorer, later):
            candidate = order, alike[0], victims, level
            if best is None or candidate[:3] < best[:3]:
                best = candidate
    return best, made


def _grouped(
    nodes: Sequence[Node], preemptor: Preemptor, fits: Fits, scorer: Scorer
) -> list[tuple[tuple[float, ...], list[int]]]:
    """Return the positions of nodes on which there are candidates, those alike but for starts together, by bound."""
    alike: dict[tuple[int, Shape], list[int]] = {}
    for position, node in enumerate(nodes):
        alike.setdefault((id(node.hardware), node.shape), []).append(position)
    known: dict[tuple[int, int], tuple[float, ...]] = {}
    found = []
    for positions in alike.values():
        node = nodes[positions[0]]
        rungs = node.rungs(preemptor.priority)
        if rungs and (bound := _node_bound(rungs, fits[node], scorer, known)):
            found.append((bound, positions))
    return found


def _from(search: _Search, node: Node) -> tuple[float, ...]:
    """Return the bound of a search on one of the nodes that are alike but for starts."""
    if search.latest is None:
        return search.bound
    limit, inside, count = search.latest
    return *search.bound, -_latest(node.ladder[limit], inside, count)


def _node_bound(
    rungs: Sequence[Rung], fit: Fit, scorer: Scorer, known: dict[tuple[int, int], tuple[float, ...]]
) -> tuple[float, ...] | None:
    """Return a bound that no candidate on a node ranks before; None if there is no candidate on it.

    :param known: the bounds of earlier nodes, by the best level and the least highest priority that they allow.
    """
    level = int(fit.level(rungs[-1].free))
    aim = int(fit.required)
    if level < aim:
        return None
    if scorer.topology_counts and scorer.basis == "allocation" and not scorer.priorities_weigh:
        aim = level
    rung = next(rung for rung in rungs if fit.level(rung.free) >= aim)
    key = level, rung.priority
    bound = known.get(key)
    if bound is None:
        limit = scorer.lifted(rung.priority)
        score = scorer.score(level if scorer.basis == "allocation" else Level.NUMA, limit)
        bound = known[key] = (-score,) if scorer.priorities_weigh else (-score, limit)
    return bound


def _searches(node: Node, rungs: Sequence[Rung], fit: Fit, scorer: Scorer, later: LaterPreemptors) -> Iterable[_Search]:
    """Yield what to search on a node: where room is needed, and among which victims."""
    everything = node.hardware.everything
    pairs: Iterable[tuple[Level, Domain, int]]
    if not scorer.topology_counts:
        pairs = [(Level.MACHINE, fit.domains[-1], everything)]
    elif scorer.basis == "victims":
        pairs = [
            (span.level, domain, span.gpus | span.groups)
            for span in node.hardware.domains
            for domain in fit.domains
            if domain.level == fit.required
        ]
    elif scorer.priorities_weigh:
        pairs = [(domain.level, domain, everything) for domain in fit.domains if domain.level >= fit.required]
    else:  # No other level can be as good as the closest.
        closest = fit.level(rungs[-1].free)
        pairs = [(closest, domain, everything) for domain in fit.domains if domain.level == closest]
    exposed = () if scorer.priorities_weigh else later.exposed(node)
    for level, domain, among in pairs:
        for number, rung in enumerate(rungs):
            if fit.fits(rung.free, domain):
                bound = _bound(node, rungs, number, level, domain, fit, scorer, later, exposed)
                yield _Search(*bound, domain, among)
                break


def _bound(
    node: Node,
    rungs: Sequence[Rung],
    limit: int,
    level: Level,
    domain: Domain,
    fit: Fit,
    scorer: Scorer,
    later: LaterPreemptors,
    exposed: Sequence[tuple[Kind, int]],
) -> tuple[tuple[float, ...], _Latest | None]:
    """Return a bound that no cover of a domain ranks before: each of the order's terms at its least, but for the start.

    :param limit: the number of the rung from which on there is a cover.
    :param exposed: the kinds of later preemptors who have places on the node, and what is free for them.
    """
    lacks = max(fit.gpus - (node.idle & domain.gpus).bit_count(), 0)
    highest = worst = scorer.lifted(rungs[limit].priority)
    if scorer.priorities_weigh:
        return (-scorer.score(level, max(_least(rungs, domain.gpus, lacks, scorer)[0], 1)),), None
    owed = more = 0
    for kind, free in exposed:
        if lost := kind.fewest_left_out(node, domain, free, rungs[-1].free, fit.gpus):
            priority = scorer.counted(kind.wanted.priority)
            worst, owed, more = max(worst, priority), owed + lost * priority, more + lost
    # If the highest of the order is one of theirs, it is no limit to the victims.
    least, count = _least(rungs if worst > highest else rungs[: limit + 1], domain.gpus, lacks, scorer)
    latest = None
    if worst == highest:  # Where nothing lacks, any victim may do.
        latest = limit, domain.gpus | domain.groups if lacks else None, count if limit == 0 else 1
    broken = later.least_broken(node, domain.gpus, rungs[-1].free)
    return (-scorer.score(level, 1), worst, max(least, highest) + owed, count + more, broken), latest


def _least(rungs: Sequence[Rung], gpus: int, lacks: int, scorer: Scorer) -> tuple[int, int]:
    """Return a bound on the sum of a cover's priorities, the fractional knapsack in GPUs alone, and on its number."""
    offers, widest = [], 1
    for rung in rungs:
        price = scorer.lifted(rung.priority)
        for _, mask in rung.members:
            if mask & gpus:
                frees = (mask & gpus).bit_count()
                offers.append((price / frees, frees))
                widest = max(widest, frees)
    offers.sort()
    total, left = 0.0, lacks
    for price_of_one, frees in offers:
        if left <= frees:
            total += left * price_of_one
            break
        total += frees * price_of_one
        left -= frees
    # A hair less than the sum of fractions, which are rounded.
    return math.ceil(total - 1e-6), max(-(-lacks // widest), 1)


def _latest(rung: Rung, inside: int | None, count: int) -> float:
    """Return the latest start that so many victims of a priority can all have, `inside` a mask if that is given."""
    starts = (start for start, mask in rung.members if inside is None or mask & inside)
    return next(itertools.islice(starts, count - 1, None), math.inf)


def _covers(
    node: Node, rungs: Sequence[Rung], search: _Search, fit: Fit, scorer: Scorer, later: LaterPreemptors
) -> Iterator[tuple[Order, tuple[int, ...], Level]]:
    """Yield the best set of victims in a domain if there is one, and such as leave fewer without a place if it does."""
    hardware, domain = node.hardware, search.domain
    gpus = max(fit.gpus - (node.idle & domain.gpus).bit_count(), 0)
    cores = max(fit.cores - hardware.cores(node.idle & domain.groups), 0) if fit.cores else 0
    lacks = gpus, cores
    items: list[_Item] = []
    for number in node.order[: rungs[-1].count]:
        mask, instance = node.masks[number], node.instances[number]
        if mask & ~search.among:
            continue
        frees = (mask & domain.gpus).bit_count() if gpus else 0
        frees_cores = hardware.cores(mask & domain.groups) if cores else 0
        if frees or frees_cores or lacks == (0, 0):
            price = scorer.lifted(instance.priority)
            items.append((frees, frees_cores, price, instance.started, number, price))
    limit = _least_limit(items, lacks)
    if limit is None:
        return
    limits = sorted({item[2] for item in items if item[2] >= limit})
    if scorer.priorities_weigh:
        total = _cheapest(items, lacks, limits[-1])[0]
        covers = (_cheapest(items, lacks, each) for each in limits)
        yield _judged(node, next(cover for cover in covers if cover[0] == total)[3], fit, scorer, later)[0]
        return
    cheapest = _cheapest(items, lacks, limit)[3]
    judged, left_out = _judged(node, cheapest, fit, scorer, later)
    yield judged
    if left_out:
        items = [_priced(node, item, left_out, scorer) for item in items]
        for victims in {_cheapest(items, lacks, each)[3]: None for each in limits}:
            if victims != cheapest:
                yield _judged(node, victims, fit, scorer, later)[0]


def _priced(node: Node, item: _Item, left_out: Iterable[Kind], scorer: Scorer) -> _Item:
    """Add to what a victim costs the parts that it holds of places of others, as their priorities."""
    priority = node.instances[item[4]].priority
    shares = (
        scorer.counted(kind.wanted.priority) * kind.share(*item[:2])
        for kind in left_out
        if priority < kind.wanted.priority
    )
    return *item[:5], item[5] + sum(shares)


def _judged(
    node: Node, victims: tuple[int, ...], fit: Fit, scorer: Scorer, later: LaterPreemptors
) -> tuple[tuple[Order, tuple[int, ...], Level], list[Kind]]:
    """Return a set of victims with its order and the level that it gives, and who is left without a place."""
    free = node.without(victims)
    level = fit.level(free)
    judged = level if scorer.basis == "allocation" else node.hardware.span(free & ~node.idle)
    score, highest, total, count, start = scorer.rank([node.instances[n] for n in victims], judged)
    taken = given(fit, free)
    left_out = later.left_out(node, taken)
    for kind, more in left_out:
        priority = scorer.counted(kind.wanted.priority)
        highest, total, count = max(highest, priority), total + more * priority, count + more
    order = score, highest, total, count, later.broken(node, taken), start
    return (order, victims, level), [kind for kind, _ in left_out]


def _least_limit(items: Sequence[_Item], lacks: tuple[int, int]) -> int | None:
    """Return the least priority up to which victims suffice; items come by priority."""
    gpus, cores = lacks
    for item in items:
        gpus -= item[0]
        cores -= item[1]
        if gpus <= 0 and cores <= 0:
            return item[2]
    return None


def _cheapest(items: Sequence[_Item], lacks: tuple[int, int], limit: int) -> _Cover:
    """Return the cheapest cover by victims up to a priority, fewest victims and then latest start first among equals.

    There is one. A set of no victims is no cover, even where nothing lacks: then it is the cheapest single one.
    """
    gpus, cores = lacks
    late = float("-inf")
    states: dict[tuple[int, int], _Cover] = {(0, 0): (0, 0, late, ())}
    if lacks == (0, 0):
        return min((cost, 1, -start if p == limit else late, (n,)) for _, _, p, start, n, cost in items if p <= limit)
    for frees, frees_cores, priority, start, number, price in items:
        if priority > limit:
            break
        cost = -start if priority == limit else late
        for (has, has_cores), (total, count, earliest, chosen) in list(states.items()):
            state = min(has + frees, gpus), min(has_cores + frees_cores, cores)
            cover = total + price, count + 1, max(earliest, cost), (*chosen, number)
            if state not in states or cover < states[state]:
                states[state] = cover
    victims = states[lacks]
    return *victims[:3], tuple(sorted(victims[3]))
