"""Candidates: whether a request fits (S(P, N) of FlexTopo), sets of victims by enumeration, and Equation 1's order.

A candidate is a node with a set of victims on it (the paper's C = (N, v_N)): of the standard selection (Kubernetes,
Gödel), of Incremental Minimal Preemption (Algorithm 2), or any; `covering` finds the best without enumerating.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from ctxflow.policies.flextopo.cluster import Affinity, Domain, Hardware, Instance, Level, Location, Node, Preemptor


class Fit:
    """How closely one request fits into one kind of hardware, and how closely it must; answers are cached.

    :ivar target: the closest level that the *empty* hardware allows; to get it is a hit. Four GPUs cannot be in one
        NUMA node of an eight-GPU machine with eight, so there it is the socket (as in the paper's Figure 3).
    :ivar domains: those in which the request fits if they are empty, the closest first.
    :ivar required: the level below which a place is none: the target if affinity is guaranteed.

    >>> from ctxflow.policies.flextopo.cluster import Hardware
    >>> fit = Fit(Hardware.regular(sockets=2, numa_nodes=8, gpus=8), gpus=2, cores=0)
    >>> fit.target.name, fit.level(0b00011).name, fit.level(0b10001).name, fit.level(0b1).name
    ('SOCKET', 'SOCKET', 'MACHINE', 'NONE')
    """

    __slots__ = ("_levels", "cores", "domains", "gpus", "hardware", "required", "target")

    def __init__(self, hardware: Hardware, gpus: int, cores: int, affinity: Affinity | None = None) -> None:
        self.hardware, self.gpus = hardware, gpus
        self.cores = cores if hardware.groups else 0
        self._levels: dict[int, Level] = {}
        self.domains = hardware.domains
        self.target = self.level(hardware.everything)
        self.required = max(self.target, Level.MACHINE) if affinity == "guaranteed" else Level.MACHINE
        self.domains = tuple(domain for domain in hardware.domains if self.fits(hardware.everything, domain))

    def level(self, free: int) -> Level:
        """Return the closest level at which the request fits into what is free; NONE if it does not."""
        found = self._levels.get(free)
        if found is None:
            fitting = (domain.level for domain in self.domains if self.fits(free, domain))
            found = self._levels[free] = next(fitting, Level.NONE)
        return found

    def fits(self, free: int, domain: Domain) -> bool:
        """Return whether the request fits into what is free of one domain."""
        if (free & domain.gpus).bit_count() < self.gpus:
            return False
        return not self.cores or self.hardware.cores(free & domain.groups) >= self.cores


class Fits:
    """The fits of one request, for every kind of hardware that it meets."""

    def __init__(self, preemptor: Preemptor) -> None:
        self._request = preemptor.gpus, preemptor.cores, preemptor.affinity
        self._found: dict[int, Fit] = {}

    def __getitem__(self, node: Node) -> Fit:
        fit = self._found.get(id(node.hardware))
        if fit is None:
            fit = self._found[id(node.hardware)] = Fit(node.hardware, *self._request)
        return fit


def allocate(fit: Fit, free: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return what a request gets of what is free: the numbers of GPUs and of core groups, neighbours beside each other.

    It is as close together as it can be; of equally close domains the one is taken that it fills best; in it, as few
    NUMA nodes as possible, and the core groups near the GPUs first.

    >>> from ctxflow.policies.flextopo.cluster import Hardware
    >>> allocate(Fit(Hardware.regular(sockets=2, numa_nodes=8, gpus=8), gpus=2, cores=0), 0b11101001)
    ((0, 3), ())
    """
    level = fit.level(free)
    if level is Level.NONE:
        return None
    hardware, chosen = fit.hardware, _fullest(fit, free, level)
    gpus = _nearest(_numbers(free & chosen.gpus), hardware.gpus)[: fit.gpus]
    near = {hardware.gpus[number].numa for number in gpus}
    sockets = {hardware.gpus[number].socket for number in gpus}
    groups, cores = [], 0
    numbers = _nearest(_numbers((free & chosen.groups) >> len(hardware.gpus)), hardware.groups)
    numbers.sort(key=lambda n: (hardware.groups[n].numa not in near, hardware.groups[n].socket not in sockets))
    for number in numbers:
        if cores >= fit.cores:
            break
        groups.append(number)
        cores += hardware.sizes[number]
    return tuple(_in_order(gpus, hardware.gpus)), tuple(_in_order(groups, hardware.groups))


def given(fit: Fit, free: int) -> int:
    """Return a mask of what `allocate` gives a request of what is free, in which it fits."""
    domain = _fullest(fit, free, fit.level(free))
    gpus, groups = free & domain.gpus, free & domain.groups
    enough = not fit.cores or fit.hardware.cores(groups) == fit.cores
    if gpus.bit_count() == fit.gpus and enough:  # No choice.
        return gpus | groups if fit.cores else gpus
    got = allocate(fit, free)
    assert got is not None, "it fits"
    return fit.hardware.mask(*got)


def _fullest(fit: Fit, free: int, level: Level) -> Domain:
    """Return the domain of a level at which a request fits into what is free that it fills best."""
    fitting = [domain for domain in fit.domains if domain.level == level and fit.fits(free, domain)]
    return min(fitting, key=lambda domain: (free & domain.gpus).bit_count())


def _numbers(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


def _nearest(numbers: list[int], places: Sequence[Location]) -> list[int]:
    """Sort socket by socket and NUMA node by NUMA node, those with most to give first."""
    in_socket = Counter(places[number].socket for number in numbers)
    in_numa = Counter(places[number] for number in numbers)

    def order(number: int) -> tuple[int, int, int, int, int]:
        place = places[number]
        return -in_socket[place.socket], _known(place.socket), -in_numa[place], _known(place.numa), number

    return sorted(numbers, key=order)


def _in_order(numbers: Sequence[int], places: Sequence[Location]) -> list[int]:
    return sorted(numbers, key=lambda n: (_known(places[n].socket), _known(places[n].numa), n))


def _known(number: int | None) -> int:
    """Return a key by which unknown numbers come last."""
    return 1 << 30 if number is None else number


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

    Differences from the paper: the topological score T is that of the best allocation inside what is idle and freed
    (the preemptor may share a socket with idle GPUs), not of the victims' places, unless `basis` says so; and both
    terms are in (0, 1] before alpha weighs them, as 1 / sum of priorities is about 0.001 beside a T of 10. Priorities
    are relative to the lowest of the possible victims, all lifted until that is at least 1, so that no sum is zero.
    """

    __slots__ = ("_alpha", "_lift", "_lowest", "basis", "priorities_weigh", "topology_counts")

    def __init__(self, nodes: Iterable[Node], preemptor: Preemptor, scoring: Scoring) -> None:
        lowest = min((node.ladder[0].priority for node in nodes if node.ladder), default=1)
        lowest = min(lowest, preemptor.priority - 1)
        self._lift = max(0, 1 - lowest)
        self._lowest = lowest + self._lift
        self._alpha, self.basis = scoring.alpha, scoring.basis
        self.priorities_weigh = scoring.alpha > 0  # In the score itself, and not only in the order among equals.
        self.topology_counts = preemptor.affinity is not None

    def lifted(self, priority: int) -> int:
        """Return a victim's priority as it counts: 1 or more."""
        return priority + self._lift

    def counted(self, priority: int) -> int:
        """Return the priority of a later preemptor as it counts: like a victim's."""
        return max(priority + self._lift, 1)

    def score(self, level: int, total: int) -> float:
        """Compute Equation 1, of terms in (0, 1].

        :param total: the sum of the victims' priorities as they count.
        """
        topology = TOPOLOGY_SCORES[level] / TOPOLOGY_SCORES[Level.NUMA] if self.topology_counts else 0.0
        return self._alpha * self._lowest / total + (1.0 - self._alpha) * topology

    def rank(self, victims: Sequence[Instance], level: Level) -> Rank:
        """Return the place of a set of victims in the order of candidates."""
        priorities = [victim.priority for victim in victims]
        highest, count = max(priorities), len(priorities)
        total = sum(priorities) + count * self._lift
        start = min(victim.started for victim in victims if victim.priority == highest)
        return -self.score(level, total), highest + self._lift, total, count, -start


def reprieve(node: Node, preemptor: Preemptor, fit: Fit) -> tuple[tuple[int, ...], int] | None:
    """Return the standard selection's victims on a node, as positions, and how many feasibility checks were made.

    All of lower priority are dropped. If the preemptor then fits (else the answer is None), they are added back one by
    one, by priority descending and then the longest-running first; each stays if the preemptor still fits beside it.
    """
    rungs = node.rungs(preemptor.priority)
    if not rungs or fit.level(rungs[-1].free) is Level.NONE:
        return None
    free = rungs[-1].free
    lowered = node.order[: rungs[-1].count]
    dropped = sorted(lowered, key=lambda number: (-node.instances[number].priority, node.instances[number].started))
    victims = []
    for number in dropped:
        if fit.level(free & ~node.masks[number]) is Level.NONE:
            victims.append(number)
        else:
            free &= ~node.masks[number]
    return tuple(sorted(victims)), 1 + len(dropped)


MOST_SETS = 1 << 18
"""More sets than this are not tried on one node: that would take a second."""


def _possible_victims(node: Node, preemptor: Preemptor, fit: Fit) -> tuple[list[int], int]:
    """Return V_N, those of strictly lower priority, or none if all together are not feasible; and the checks made."""
    rungs = node.rungs(preemptor.priority)
    if not rungs or fit.level(rungs[-1].free) < fit.required:
        return [], len(rungs[:1])
    return sorted(node.order[: rungs[-1].count]), 1


def minimal_sets(node: Node, preemptor: Preemptor, fit: Fit) -> tuple[list[tuple[tuple[int, ...], Level]], int]:
    """Return all feasible sets of victims of the least size at which there are any (Algorithm 2).

    A guaranteed preemptor is feasible with its topology, others by numbers alone. The union of the printed algorithm
    is of the set as one member, and all victims together are a candidate too.

    :returns: each set as positions among the node's instances with the level that it gives, and how many feasibility
        checks were made.
    :raises ValueError: if there are too many sets to try.
    """
    victims, checks = _possible_victims(node, preemptor, fit)
    for size in range(1, len(victims) + 1):
        checks += math.comb(len(victims), size)
        _check(node, checks)
        if found := _feasible(node, victims, size, fit):
            return found, checks
    return [], checks


def feasible_sets(node: Node, preemptor: Preemptor, fit: Fit) -> tuple[list[tuple[tuple[int, ...], Level]], int]:
    """Return all feasible sets of victims: the straightforward way to Equation 2, 2^m - 1 checks for m victims.

    :returns: as `minimal_sets`.
    :raises ValueError: if there are too many sets to try.
    """
    victims, checks = _possible_victims(node, preemptor, fit)
    if not victims:
        return [], checks
    _check(node, 2 ** len(victims))
    found = [each for size in range(1, len(victims) + 1) for each in _feasible(node, victims, size, fit)]
    return found, 2 ** len(victims)


def _check(node: Node, sets: int) -> None:
    if sets > MOST_SETS:
        raise ValueError(f"{node.name} has too many possible victims to try their sets one by one: choose exact")


def _feasible(node: Node, victims: Sequence[int], size: int, fit: Fit) -> list[tuple[tuple[int, ...], Level]]:
    masks, idle, level_of, required = node.masks, node.idle, fit.level, fit.required
    found = []
    for chosen in itertools.combinations(victims, size):
        free = idle
        for number in chosen:
            free |= masks[number]
        level = level_of(free)
        if level >= required:
            found.append((chosen, level))
    return found
