"""The cluster as preemption sees it: nodes, instances on them, and the preemptor that finds no room.

An *instance* is whatever holds resources of a *node* and may be preempted: a worker of ours, or another scheduler's
pod. GPUs and core groups of a node are the bits of one integer, GPUs first: what victims free is a union of masks.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from ctxflow.errors import counted
from ctxflow.topology import Topology

Affinity = Literal["guaranteed", "best-effort"]
AFFINITIES: tuple[Affinity, ...] = ("guaranteed", "best-effort")
GROUP_SIZE = 8


class Level(enum.IntEnum):
    """How close together a set of GPUs and core groups is: the larger, the closer."""

    NONE = 0
    MACHINE = 1
    SOCKET = 2
    NUMA = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """Where a GPU or a core group sits; None where it is unknown."""

    socket: int | None = None
    numa: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Domain:
    """Resources that are together at a level, as masks."""

    level: Level
    gpus: int
    groups: int


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What a kind of node is made of.

    :ivar gpus: the place of each GPU.
    :ivar groups: the place of each core group; none if the cores are unknown, which are then no constraint.
    :ivar sizes: the cores in each core group.
    :ivar domains: the NUMA nodes, the sockets and the machine, the closest first (derived).

    >>> [domain.level.name for domain in Hardware.regular(sockets=2, numa_nodes=2, gpus=4, cores=16).domains]
    ['NUMA', 'NUMA', 'SOCKET', 'SOCKET', 'MACHINE']
    """

    gpus: tuple[Location, ...]
    groups: tuple[Location, ...] = ()
    sizes: tuple[int, ...] = ()
    domains: tuple[Domain, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.groups) != len(self.sizes):
            raise ValueError(f"hardware has {len(self.groups)} core groups, but sizes of {len(self.sizes)}")
        object.__setattr__(self, "domains", tuple(_domains(self)))

    @classmethod
    def regular(
        cls, *, sockets: int, numa_nodes: int, gpus: int, cores: int = 0, group_size: int = GROUP_SIZE
    ) -> Hardware:
        """Return a machine whose GPUs, cores and NUMA nodes are spread evenly, numbered socket by socket.

        :raises ValueError: if there are fewer NUMA nodes than sockets, or a group is no cores.
        """
        if not 1 <= sockets <= numa_nodes or group_size < 1 or min(gpus, cores) < 0:
            raise ValueError("hardware needs a socket or more, a NUMA node or more in each, groups of a core or more")
        sizes, groups = [], []
        for numa in range(numa_nodes):
            mine = (numa + 1) * cores // numa_nodes - numa * cores // numa_nodes
            for start in range(0, mine, group_size):
                sizes.append(min(group_size, mine - start))
                groups.append(Location(numa * sockets // numa_nodes, numa))
        numas = [gpu * numa_nodes // gpus for gpu in range(gpus)]
        places = tuple(Location(numa * sockets // numa_nodes, numa) for numa in numas)
        return cls(places, tuple(groups), tuple(sizes))

    @classmethod
    def of(cls, topology: Topology) -> Hardware:
        """Return the hardware of a machine's topology."""
        return cls(
            tuple(Location(topology.socket_of(gpu.numa), gpu.numa) for gpu in topology.gpus),
            tuple(Location(group.socket, group.numa) for group in topology.groups),
            tuple(len(group.cores) for group in topology.groups),
        )

    def mask(self, gpus: Iterable[int], groups: Iterable[int]) -> int:
        """Return the bits of some GPUs and core groups.

        :raises ValueError: if there is no such GPU or core group.
        """
        bits, cards = 0, len(self.gpus)
        for kind, chosen, count, shift in (("GPU", gpus, cards, 0), ("core group", groups, len(self.groups), cards)):
            for number in chosen:
                if not 0 <= number < count:
                    raise ValueError(f"there is no {kind} {number} on a node with {count} of them")
                bits |= 1 << number + shift
        return bits

    @functools.cached_property
    def everything(self) -> int:
        """Return a mask of everything."""
        return (1 << len(self.gpus) + len(self.groups)) - 1

    @functools.cached_property
    def blocks(self) -> tuple[tuple[int, int], ...]:
        """Where 2, 4, 8 and so on GPUs are together as closely as the hardware allows: a domain's mask, and how many.

        >>> [(bin(mask), count) for mask, count in Hardware.regular(sockets=2, numa_nodes=2, gpus=4).blocks]
        [('0b11', 2), ('0b1100', 2), ('0b1111', 4)]
        """
        found = []
        count = 2
        while count <= len(self.gpus):
            level = next(domain.level for domain in self.domains if domain.gpus.bit_count() >= count)
            found += [(domain.gpus, count) for domain in self.domains if domain.level == level]
            count *= 2
        return tuple(found)

    def around(self, gpus: int) -> tuple[tuple[int, int], ...]:
        """Return the blocks that all of these GPUs are in."""
        found = self._around.get(gpus)
        if found is None:
            found = self._around[gpus] = tuple(block for block in self.blocks if not gpus & ~block[0])
        return found

    @functools.cached_property
    def _around(self) -> dict[int, tuple[tuple[int, int], ...]]:
        return {}

    @functools.cached_property
    def _even(self) -> int:
        """The cores of each group if they are alike, else 0."""
        return self.sizes[0] if len(set(self.sizes)) == 1 else 0

    def cores(self, mask: int) -> int:
        """Return the cores of the groups in a mask."""
        bits = mask >> len(self.gpus)
        if self._even:
            return bits.bit_count() * self._even
        return sum(size for number, size in enumerate(self.sizes) if bits >> number & 1)

    def span(self, mask: int) -> Level:
        """Return the closest level at which all of a set is together.

        >>> hardware = Hardware.regular(sockets=2, numa_nodes=8, gpus=8)
        >>> hardware.span(0b0011).name, hardware.span(0b10001).name
        ('SOCKET', 'MACHINE')
        """
        return next(domain.level for domain in self.domains if mask & ~(domain.gpus | domain.groups) == 0)


def _domains(hardware: Hardware) -> Iterable[Domain]:
    """Return sets by level, without NUMA nodes that spread over sockets, as with NUMA turned off."""
    places = hardware.gpus + hardware.groups
    gpus = (1 << len(hardware.gpus)) - 1
    pairs = {(place.numa, place.socket) for place in places}
    spread = {numa for numa, count in Counter(numa for numa, _ in pairs).items() if count > 1}
    sets: list[tuple[Level, int]] = []
    for level, kind, left_out in ((Level.NUMA, "numa", {None, *spread}), (Level.SOCKET, "socket", {None})):
        for number in sorted({getattr(place, kind) for place in places} - left_out):
            sets.append((level, sum(1 << bit for bit, place in enumerate(places) if getattr(place, kind) == number)))
    sets.append((Level.MACHINE, hardware.everything))
    return [Domain(level, mask & gpus, mask & ~gpus) for level, mask in sets]


@dataclasses.dataclass(frozen=True, slots=True)
class Instance:
    """What holds resources of a node.

    :ivar gpus, core_groups: their numbers.
    :ivar started: when, in seconds.
    :ivar preemptible: whether it may be preempted at all.
    """

    id: str
    priority: int
    gpus: tuple[int, ...] = ()
    core_groups: tuple[int, ...] = ()
    started: float = 0.0
    preemptible: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Rung:
    """What a node has free once all preemptible instances up to a priority are gone.

    :ivar count: how many those are: the first so many of the node's `order`.
    :ivar free: a mask.
    :ivar widest: the most GPUs that one instance of exactly this priority holds.
    :ivar members: the start and the mask of each instance of exactly this priority, the latest start first.
    """

    priority: int
    count: int
    free: int
    widest: int
    members: tuple[tuple[float, int], ...]


Shape = tuple[int, tuple[tuple[int, tuple[int, ...]], ...]]
"""What is idle, and the preemptible instances' masks by priority, all that matters of a node but their starts."""


@dataclasses.dataclass(frozen=True)
class Node:
    """A machine with what runs on it.

    :ivar masks: what each instance holds (derived).
    :ivar idle: what no instance holds (derived).
    :ivar held: the priority, GPUs and cores of instances of several GPUs, and how many are alike in that (derived).
    :ivar order: the positions of the preemptible instances, by priority (derived).
    :ivar ladder: a rung for each of their priorities, the lowest first (derived).
    :ivar shape: it all but for names and starts, by which nodes that are alike are told (derived).
    :raises ValueError: if two instances hold the same GPU or core group, or one that is not there.
    """

    name: str
    hardware: Hardware
    instances: tuple[Instance, ...] = ()
    masks: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)
    idle: int = dataclasses.field(init=False, repr=False, compare=False)
    held: tuple[tuple[tuple[int, int, int], int], ...] = dataclasses.field(init=False, repr=False, compare=False)
    order: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)
    ladder: tuple[Rung, ...] = dataclasses.field(init=False, repr=False, compare=False)
    shape: Shape = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        idle, masks = self.hardware.everything, []
        for instance in self.instances:
            try:
                mask = self.hardware.mask(instance.gpus, instance.core_groups)
            except ValueError as error:
                raise ValueError(f"{instance.id} on {self.name}: {error}") from None
            if mask & ~idle:
                raise ValueError(f"{instance.id} on {self.name} holds a GPU or core group that another instance holds")
            idle &= ~mask
            masks.append(mask)
        object.__setattr__(self, "masks", tuple(masks))
        object.__setattr__(self, "idle", idle)
        held: dict[tuple[int, int, int], int] = {}
        for instance, mask in zip(self.instances, masks, strict=True):
            if len(instance.gpus) > 1:
                alike = instance.priority, len(instance.gpus), self.hardware.cores(mask)
                held[alike] = held.get(alike, 0) + 1
        object.__setattr__(self, "held", tuple(held.items()))
        order = [number for number, each in enumerate(self.instances) if each.preemptible]
        order.sort(key=lambda number: self.instances[number].priority)
        object.__setattr__(self, "order", tuple(order))
        object.__setattr__(self, "ladder", tuple(_rungs(self, order)))
        masks_by_priority = ((rung.priority, tuple(sorted(mask for _, mask in rung.members))) for rung in self.ladder)
        object.__setattr__(self, "shape", (idle, tuple(masks_by_priority)))

    def without(self, victims: Iterable[int]) -> int:
        """Return a mask of what is free once some instances, given by their positions, are gone."""
        free = self.idle
        for number in victims:
            free |= self.masks[number]
        return free

    def below(self, priority: int) -> int:
        """Return a mask of what is idle or held by preemptible instances of lower priority."""
        free = self.idle
        for rung in self.ladder:
            if rung.priority >= priority:
                break
            free = rung.free
        return free

    def rungs(self, priority: int) -> tuple[Rung, ...]:
        """Return the ladder up to below a priority: what a preemptor of that priority can free."""
        ladder, count = self.ladder, len(self.ladder)
        while count and ladder[count - 1].priority >= priority:
            count -= 1
        return ladder[:count]


def _rungs(node: Node, order: Sequence[int]) -> Iterable[Rung]:
    free, count = node.idle, 0
    for priority, members in itertools.groupby(order, key=lambda number: node.instances[number].priority):
        numbers = list(members)
        count += len(numbers)
        for number in numbers:
            free |= node.masks[number]
        widest = max(len(node.instances[number].gpus) for number in numbers)
        held = sorted(((node.instances[n].started, node.masks[n]) for n in numbers), reverse=True)
        yield Rung(priority, count, free, widest, tuple(held))


@dataclasses.dataclass(frozen=True, slots=True)
class Preemptor:
    """A request for resources.

    :ivar priority: only instances of lower priority are preempted for it.
    :ivar gpus, cores: how many it needs.
    :ivar affinity: "guaranteed" for nothing less than the closest that the hardware allows, "best-effort" for the
        closest there is, None if topology does not matter.
    :raises ValueError: for an unknown affinity, or a request for nothing.
    """

    id: str
    priority: int
    gpus: int
    cores: int = 0
    affinity: Affinity | None = None

    def __post_init__(self) -> None:
        if self.affinity not in (None, *AFFINITIES):
            raise ValueError(f"there is no affinity {self.affinity!r}: write {', '.join(AFFINITIES)} or leave it out")
        if min(self.gpus, self.cores) < 0 or self.gpus + self.cores == 0:
            asked = f"{counted(self.gpus, 'GPU')} and {counted(self.cores, 'core')}"
            raise ValueError(f"{self.id} asks for {asked}: ask for one or more")
