"""Sets of victims by enumeration: Incremental Minimal Preemption (Algorithm 2 of FlexTopo), and all there are.

Pure. What does not live here: which of the sets is best (scoring.py), the search that need not enumerate (exact.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ctxflow.policies.preemption.cluster import Level, Node, Preemptor
from ctxflow.policies.preemption.fitting import Fit

MOST_SETS = 1 << 18
"""More sets than this are not tried on one node: that would take a second."""


def possible_victims(node: Node, preemptor: Preemptor) -> list[int]:
    """Who could give way at all, as positions among the node's instances: V_N, those of strictly lower priority."""
    rungs = node.rungs(preemptor.priority)
    return sorted(node.order[: rungs[-1].count]) if rungs else []


def minimal_sets(node: Node, preemptor: Preemptor, fit: Fit) -> tuple[list[tuple[tuple[int, ...], Level]], int]:
    """All feasible sets of victims of the least size at which there are any (Algorithm 2).

    Feasible is what S(P, N without the set) says: for a guaranteed preemptor with its topology, for others by numbers
    alone. The union of the printed algorithm is of the set as one member, and all victims together are a candidate too.

    :returns: each set as positions among the node's instances with the level that it gives, and how many feasibility
        checks were made.
    :raises ValueError: if there are too many sets to try.
    """
    victims = possible_victims(node, preemptor)
    required = fit.required
    if not victims or fit.level(_free(node, victims)) < required:
        return [], bool(victims)
    checks = 1
    for size in range(1, len(victims) + 1):
        checks += math.comb(len(victims), size)
        _check(node, checks)
        found = _feasible(node, victims, size, fit, required)
        if found:
            return found, checks
    raise AssertionError("all victims together were feasible a moment ago")


def feasible_sets(node: Node, preemptor: Preemptor, fit: Fit) -> tuple[list[tuple[tuple[int, ...], Level]], int]:
    """All feasible sets of victims: the straightforward way to Equation 2, 2^m - 1 checks for m victims.

    :returns: as `minimal_sets`.
    :raises ValueError: if there are too many sets to try.
    """
    victims = possible_victims(node, preemptor)
    required = fit.required
    if not victims or fit.level(_free(node, victims)) < required:
        return [], bool(victims)
    _check(node, 2 ** len(victims))
    found = []
    for size in range(1, len(victims) + 1):
        found += _feasible(node, victims, size, fit, required)
    return found, 2 ** len(victims)


def _check(node: Node, sets: int) -> None:
    if sets > MOST_SETS:
        raise ValueError(f"{node.name} has too many possible victims to try their sets one by one: choose exact")


def _feasible(
    node: Node, victims: Sequence[int], size: int, fit: Fit, required: Level
) -> list[tuple[tuple[int, ...], Level]]:
    masks, idle, level_of = node.masks, node.idle, fit.level
    found = []
    for chosen in itertools.combinations(victims, size):
        free = idle
        for number in chosen:
            free |= masks[number]
        level = level_of(free)
        if level >= required:
            found.append((chosen, level))
    return found


def _free(node: Node, victims: Sequence[int]) -> int:
    free = node.idle
    for number in victims:
        free |= node.masks[number]
    return free
