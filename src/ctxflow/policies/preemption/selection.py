"""One decision: where a preemptor goes, who gives way for it there, and what exactly it gets.

The pipeline of FlexTopo (Algorithm 1): candidates are sourced on every node, scored, and the best one is taken. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ctxflow.policies.preemption.cluster import Level, Node, Preemptor
from ctxflow.policies.preemption.exact import best_candidate
from ctxflow.policies.preemption.fitting import Fits, allocate
from ctxflow.policies.preemption.imp import feasible_sets, minimal_sets
from ctxflow.policies.preemption.scoring import Rank, Scorer, Scoring
from ctxflow.policies.preemption.standard import reprieve

METHODS = ("standard", "imp", "exhaustive", "exact")


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What was decided.

    :ivar node: where the preemptor goes.
    :ivar victims: the ids of who gives way; none if there was room.
    :ivar level: how close together the preemptor's resources will be.
    :ivar target: the closest that the node's hardware allows.
    :ivar score: Equation 1, None without victims.
    :ivar gpus: the numbers of the GPUs that it gets, neighbours beside each other.
    :ivar core_groups: the numbers of its core groups.
    :ivar checks: how many feasibility checks were made; by the exact method, searches for a cover.
    """

    node: str
    victims: tuple[str, ...]
    level: Level
    target: Level
    score: float | None
    gpus: tuple[int, ...]
    core_groups: tuple[int, ...]
    checks: int

    @property
    def hit(self) -> bool:
        """Whether it is as close together as the hardware allows."""
        return self.level == self.target

    def to_json(self) -> dict[str, Any]:
        """The decision as data."""
        data = dataclasses.asdict(self) | {"hit": self.hit}
        return data | {"level": self.level.name.lower(), "target": self.target.name.lower()}


def decide(
    nodes: Sequence[Node], preemptor: Preemptor, method: str = "exact", scoring: Scoring | None = None
) -> Decision | None:
    """Find the place for a preemptor that costs least.

    Where there is room without victims, that is taken: for "guaranteed" only as close together as the hardware
    allows, for others the closest that there is. The standard method takes the first room, whatever its topology.

    :param method: "standard" (knows no topology), "imp" (the smallest feasible sets of each node), "exhaustive" (all
        feasible sets) or "exact" (the best of all feasible sets, without trying them all).
    :param scoring: alpha and what topology is judged on; not asked by the standard method.
    :returns: None if it fits nowhere, whoever gives way.
    :raises ValueError: for an unknown method, or if too many sets would have to be tried.

    >>> from ctxflow.policies.preemption.cluster import Hardware, Instance, Preemptor
    >>> kind = Hardware.regular(sockets=2, numa_nodes=2, gpus=4)
    >>> busy = [Instance(f"c{gpu}", 200, gpus=(gpu,), started=gpu) for gpu in range(4)]
    >>> node = Node("machine-1", kind, tuple(busy))
    >>> wanted = Preemptor("b", 1000, gpus=2, affinity="guaranteed")
    >>> decide([node], wanted).victims, decide([node], wanted, "standard").victims
    (('c2', 'c3'), ('c2', 'c3'))
    """
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r}: choose one of {', '.join(METHODS)}")
    fits = Fits(preemptor)
    room = _room(nodes, preemptor, fits, method)
    if room is not None:
        return _decision(nodes[room], fits, (), None, 0)
    scorer = Scorer(nodes, preemptor, Scoring() if scoring is None or method == "standard" else scoring)
    if method == "exact":
        best, checks = best_candidate(nodes, preemptor, fits, scorer)
    else:
        best, checks = _enumerated(nodes, preemptor, method, fits, scorer)
    if best is None:
        return None
    rank, position, victims, _ = best
    return _decision(nodes[position], fits, victims, None if method == "standard" else -rank[0], checks)


def _room(nodes: Sequence[Node], preemptor: Preemptor, fits: Fits, method: str) -> int | None:
    """The position of the node with room for the preemptor as it is, the fullest of equally good ones."""
    best: tuple[int, int, int] | None = None
    for position, node in enumerate(nodes):
        fit = fits[node]
        level = fit.level(node.idle)
        if method == "standard":
            if level > Level.NONE:
                return position
        elif level >= fit.required:
            found = -level if preemptor.affinity else 0, node.idle.bit_count(), position
            best = found if best is None else min(best, found)
    return best[2] if best else None


def _enumerated(
    nodes: Sequence[Node], preemptor: Preemptor, method: str, fits: Fits, scorer: Scorer
) -> tuple[tuple[Rank, int, tuple[int, ...], Level] | None, int]:
    """The best candidate among those of each node."""
    best: tuple[Rank, int, tuple[int, ...], Level] | None = None
    checks = 0
    for position, node in enumerate(nodes):
        fit = fits[node]
        if method == "standard":
            reprieved = reprieve(node, preemptor, fit)
            sets, made = ([(reprieved[0], Level.NONE)], reprieved[1]) if reprieved else ([], 1)
        else:
            sets, made = (minimal_sets if method == "imp" else feasible_sets)(node, preemptor, fit)
        checks += made
        for victims, level in sets:
            judged = level
            if scorer.basis == "victims":
                freed = 0
                for number in victims:
                    freed |= node.masks[number]
                judged = node.hardware.span(freed)
            candidate = (scorer.rank([node.instances[n] for n in victims], judged), position, victims, level)
            if best is None or candidate[:3] < best[:3]:
                best = candidate
    return best, checks


def _decision(node: Node, fits: Fits, victims: Sequence[int], score: float | None, checks: int) -> Decision:
    fit, free = fits[node], node.idle
    for number in victims:
        free |= node.masks[number]
    got = allocate(fit, free)
    assert got is not None, "a set of victims was chosen that makes no room"
    names = tuple(node.instances[number].id for number in victims)
    return Decision(node.name, names, fit.level(free), fit.target, score, *got, checks)
