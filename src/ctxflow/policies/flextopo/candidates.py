"""Sets of victims by enumeration, and how they compare: Equation 1 of FlexTopo and the order among equals.

A candidate is a node with a set of victims on it (the paper's C = (N, v_N)). Sets come from the standard selection,
which knows no topology (what Kubernetes and Gödel do), from Incremental Minimal Preemption (Algorithm 2), or are all
that there are; `covering` finds the best one without enumerating. Pure.

Where this is not as printed: the topological score T is that of the best allocation inside what is idle and freed, not
of the victims' own places, since the preemptor may share a socket with idle GPUs (the printed basis is an option); and
both terms are brought to (0, 1] before alpha weighs them, since 1 / sum of priorities is about 0.001 beside a T of 10.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal

from ctxflow.policies.flextopo.alignment import Fit
from ctxflow.policies.flextopo.cluster import Instance, Level, Node, Preemptor

Basis = Literal["allocation", "victims"]
BASES: tuple[Basis, ...] = ("allocation", "victims")
TOPOLOGY_SCORES = (0, 7, 12, 15)
"""T of Equation 1 by level: nothing, low, medium and high."""

Rank = tuple[float, int, int, int, float]
"""What candidates are ordered by, the least first: minus the score, the highest priority among the victims, the sum of
their priorities, their number, and minus the start of the longest-running one of those of the highest priority."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scoring:
    """How much priorities weigh against topology, and what topology is judged on.

    :ivar alpha: 0 for topology alone, 1 for priorities alone.
    :ivar basis: "allocation" for the best set that the preemptor could get, "victims" for the places of the victims.
    :raises ValueError: for an alpha outside [0, 1] or another basis.
    """

    alpha: float = 0.0
    basis: Basis = "allocation"

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"alpha is {self.alpha}: give a number from 0 (topology) to 1 (priorities)")
        if self.basis not in BASES:
            raise ValueError(f"there is no scoring basis {self.basis!r}: choose {' or '.join(BASES)}")


class Scorer:
    """The score and rank of candidates of one decision.

    Priorities count relative to the lowest there is among the possible victims. Where that is under 1 all are lifted
    until it is 1, so that no sum is zero.
    """

    __slots__ = ("_alpha", "_cares", "_lift", "_lowest", "basis")

    def __init__(self, nodes: Iterable[Node], preemptor: Preemptor, scoring: Scoring) -> None:
        lowest = min((node.ladder[0].priority for node in nodes if node.ladder), default=1)
        lowest = min(lowest, preemptor.priority - 1)
        self._lift = max(0, 1 - lowest)
        self._lowest = lowest + self._lift
        self._alpha, self._cares = scoring.alpha, preemptor.affinity is not None
        self.basis = scoring.basis

    @property
    def priorities_weigh(self) -> bool:
        """Return whether priorities enter the score itself, and not only the order among equals."""
        return self._alpha > 0

    @property
    def topology_counts(self) -> bool:
        """Return whether the preemptor cares where it is."""
        return self._cares

    def lifted(self, priority: int) -> int:
        """Return a victim's priority as it counts: 1 or more."""
        return priority + self._lift

    def score(self, level: int, total: int) -> float:
        """Compute Equation 1, of terms in (0, 1].

        :param total: the sum of the victims' priorities as they count.
        """
        topology = TOPOLOGY_SCORES[level] / TOPOLOGY_SCORES[Level.NUMA] if self._cares else 0.0
        return self._alpha * self._lowest / total + (1.0 - self._alpha) * topology

    def rank(self, victims: Sequence[Instance], level: Level) -> Rank:
        """Return the place of a set of victims in the order of candidates."""
        priorities = [victim.priority for victim in victims]
        highest, count = max(priorities), len(priorities)
        total = sum(priorities) + count * self._lift
        start = min(victim.started for victim in victims if victim.priority == highest)
        return -self.score(level, total), highest + self._lift, total, count, -start


def reprieve(node: Node, preemptor: Preemptor, fit: Fit) -> tuple[tuple[int, ...], int] | None:
    """Return the victims on a node, as positions among its instances, and how many feasibility checks were made.

    All of lower priority are dropped. If the preemptor then fits, they are added back one by one, by priority
    descending and then the longest-running first, each of whom stays if the preemptor still fits beside it.

    :returns: None if the preemptor does not fit even then.
    """
    rungs = node.rungs(preemptor.priority)
    if not rungs or fit.level(rungs[-1].free) is Level.NONE:
        return None
    free = rungs[-1].free
    dropped = list(node.order[: rungs[-1].count])
    dropped.sort(key=lambda number: (-node.instances[number].priority, node.instances[number].started))
    victims = []
    for number in dropped:
        if fit.level(free & ~node.masks[number]) is Level.NONE:
            victims.append(number)
        else:
            free &= ~node.masks[number]
    return tuple(sorted(victims)), 1 + len(dropped)


MOST_SETS = 1 << 18
"""More sets than this are not tried on one node: that would take a second."""


def possible_victims(node: Node, preemptor: Preemptor) -> list[int]:
    """Return who could give way at all, as positions among the node's instances.

    V_N are those of strictly lower priority.
    """
    rungs = node.rungs(preemptor.priority)
    return sorted(node.order[: rungs[-1].count]) if rungs else []


def minimal_sets(node: Node, preemptor: Preemptor, fit: Fit) -> tuple[list[tuple[tuple[int, ...], Level]], int]:
    """Return all feasible sets of victims of the least size at which there are any (Algorithm 2).

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
    """Return all feasible sets of victims: the straightforward way to Equation 2, 2^m - 1 checks for m victims.

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
