"""The best candidate by Equation 2 of FlexTopo, as trying all sets of victims would give, without enumerating them.

It is exact: the best set frees enough in one *domain* (a NUMA node, a socket, the machine). Within one, the score is
the same but for priorities, so the best set is a cheapest cover of what the request lacks there: a knapsack in GPUs and
cores, solved by dynamic programming over states. Priorities count 1 or more, so no cover holds a victim too many. Two
terms of the order are no sums: the highest priority is bounded by allowing only victims up to a limit, the latest start
comes last. Domains are searched from the best bound on (the least limit that suffices, and the fractional knapsack).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

from ctxflow.policies.flextopo.candidates import Fit, Fits, Rank, Scorer
from ctxflow.policies.flextopo.cluster import Domain, Level, Node, Preemptor, Rung

_Item = tuple[int, int, int, float, int]
"""A victim in a domain: the GPUs and cores that it frees there, its priority as it counts, its start, its number."""

_Cover = tuple[int, int, float, tuple[int, ...]]
"""A set of victims: the sum of priorities, how many, minus the earliest start among those at the limit, which."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Search:
    """A domain of a node; no candidate in it ranks before `bound`, and only victims inside the mask `among` count."""

    bound: tuple[float, ...]
    domain: Domain
    among: int


def best_candidate(
    nodes: Sequence[Node], preemptor: Preemptor, fits: Fits, scorer: Scorer
) -> tuple[tuple[Rank, int, tuple[int, ...], Level] | None, int]:
    """Return the best candidate of all nodes.

    :returns: its rank, the position of its node, its victims as positions among the node's instances, and the level
        that they give; None if there is none. And how many covers were searched for.
    """
    bounds = []
    known: dict[tuple[int, int], tuple[float, ...]] = {}
    for position, node in enumerate(nodes):
        rungs = node.rungs(preemptor.priority)
        if rungs and (bound := _node_bound(rungs, fits[node], scorer, known)):
            bounds.append((bound, position, rungs))
    bounds.sort()
    best: tuple[Rank, int, tuple[int, ...], Level] | None = None
    made = 0
    for bound, position, rungs in bounds:
        if best is not None and bound > best[0]:
            break
        node, fit = nodes[position], fits[nodes[position]]
        for search in sorted(_searches(node, rungs, fit, scorer), key=lambda each: each.bound):
            if best is not None and search.bound > best[0]:
                break
            made += 1
            victims = _cover(node, rungs, search, fit, scorer)
            if victims is not None:
                free = node.without(victims)
                level = fit.level(free)
                judged = level if scorer.basis == "allocation" else node.hardware.span(free & ~node.idle)
                candidate = (scorer.rank([node.instances[n] for n in victims], judged), position, victims, level)
                if best is None or candidate[:3] < best[:3]:
                    best = candidate
    return best, made


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


def _searches(node: Node, rungs: Sequence[Rung], fit: Fit, scorer: Scorer) -> Iterable[_Search]:
    """Yield what to search on a node: where room is needed, and among which victims."""
    required = fit.required
    domains = [domain for domain in fit.domains if domain.level >= required]
    everything = node.hardware.everything
    if not scorer.topology_counts:
        pairs = [(Level.MACHINE, domains[-1], everything)]
    elif scorer.basis == "allocation":
        pairs = [(domain.level, domain, everything) for domain in domains]
    else:
        pairs = [(a.level, d, a.gpus | a.groups) for a in node.hardware.domains for d in domains if d.level == required]
    for level, domain, among in pairs:
        for number, rung in enumerate(rungs):
            if fit.fits(rung.free, domain):
                allowed = rungs if scorer.priorities_weigh else rungs[: number + 1]
                yield _Search(_bound(node, allowed, level, domain, rung, fit, scorer), domain, among)
                break


def _bound(
    node: Node, rungs: Sequence[Rung], level: Level, domain: Domain, limit: Rung, fit: Fit, scorer: Scorer
) -> tuple[float, ...]:
    """Return a bound that no cover of a domain ranks before: each of the order's terms at its least.

    The sum is that of the fractional knapsack in GPUs alone, the victims of each priority as wide as their widest.

    :param rungs: of the victims that are allowed.
    :param limit: the rung from which on there is a cover.
    """
    lacks = max(fit.gpus - (node.idle & domain.gpus).bit_count(), 0)
    offers, below, widest = [], node.idle, 1
    for rung in rungs:
        offered = (rung.free & ~below & domain.gpus).bit_count()
        below = rung.free
        if offered:
            offers.append((scorer.lifted(rung.priority) / rung.widest, offered))
            widest = max(widest, rung.widest)
    total, left = 0.0, lacks
    for price, offered in sorted(offers):
        total += min(left, offered) * price
        left -= min(left, offered)
    highest = scorer.lifted(limit.priority)
    # A hair less than the sum of fractions, which are rounded.
    least = max(math.ceil(total - 1e-6), highest)
    score = scorer.score(level, least)
    if scorer.priorities_weigh:
        return (-score,)
    count = max(-(-lacks // widest), 1)
    inside = domain.gpus | domain.groups if lacks else None  # Where nothing lacks, any victim may do.
    return -score, highest, least, count, -_latest(limit, inside, count if len(rungs) == 1 else 1)


def _latest(rung: Rung, inside: int | None, count: int) -> float:
    """Return the latest start that so many victims of a priority can all have, `inside` a mask if that is given."""
    starts = (start for start, mask in rung.members if inside is None or mask & inside)
    return next(itertools.islice(starts, count - 1, None), math.inf)


def _cover(node: Node, rungs: Sequence[Rung], search: _Search, fit: Fit, scorer: Scorer) -> tuple[int, ...] | None:
    """Return the best set of victims in a domain; None if there is none."""
    domain, hardware = search.domain, node.hardware
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
            items.append((frees, frees_cores, scorer.lifted(instance.priority), instance.started, number))
    limit = _least_limit(items, lacks)
    if limit is None:
        return None
    if not scorer.priorities_weigh:
        return _cheapest(items, lacks, limit)[3]
    total = _cheapest(items, lacks, items[-1][2])[0]
    covers = (_cheapest(items, lacks, each) for each in sorted({item[2] for item in items if item[2] >= limit}))
    return next(cover for cover in covers if cover[0] == total)[3]


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
        return min((p, 1, -start if p == limit else late, (n,)) for _, _, p, start, n in items if p <= limit)
    for frees, frees_cores, priority, start, number in items:
        if priority > limit:
            break
        cost = -start if priority == limit else late
        for (has, has_cores), (total, count, earliest, chosen) in list(states.items()):
            state = min(has + frees, gpus), min(has_cores + frees_cores, cores)
            cover = total + priority, count + 1, max(earliest, cost), (*chosen, number)
            if state not in states or cover < states[state]:
                states[state] = cover
    victims = states[lacks]
    return (*victims[:3], tuple(sorted(victims[3])))
