"""The cluster as preemption sees it: nodes, what they are made of, what runs on them, and who wants to come in.

A *node* is a machine of the cluster and an *instance* whatever holds resources on it and may have to give way: a
worker of ours, or another scheduler's pod. The preemptor is the one that finds no room. GPUs and core groups of a node
are the bits of one integer, GPUs first, so that what a set of victims frees is a union of masks.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
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
    """Where a GPU or a core group sits; None where nobody knows."""

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
    :ivar groups: the place of each core group; none if nothing is known of the cores, which are then no constraint.
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
            raise ValueError(
                "hardware needs a socket or more, a NUMA node or more in each, and groups of a core or more"
            )
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
        """Return what a machine's topology comes to."""
        return cls(
            tuple(Location(topology.socket_of(gpu.numa), gpu.numa) for gpu in topology.gpus),
            tuple(Location(group.socket, group.numa) for group in topology.groups),
            tuple(len(group.cores) for group in topology.groups),
        )

    def mask(self, gpus: Iterable[int], groups: Iterable[int]) -> int:
        """Return the bits of some GPUs and core groups.

        :raises ValueError: if there is no such GPU or core group.
        """
        bits = 0
        for kind, chosen, count, shift in (
            ("GPU", gpus, len(self.gpus), 0),
            ("core group", groups, len(self.groups), len(self.gpus)),
        ):
            for number in chosen:
                if not 0 <= number < count:
                    raise ValueError(f"there is no {kind} {number} on a node with {count} of them")
                bits |= 1 << number + shift
        return bits

    @property
    def everything(self) -> int:
        """Return a mask of everything."""
        return (1 << len(self.gpus) + len(self.groups)) - 1

    def cores(self, mask: int) -> int:
        """Return the cores of the groups in a mask."""
        bits = mask >> len(self.gpus)
        return sum(size for number, size in enumerate(self.sizes) if bits >> number & 1)

    def span(self, mask: int) -> Level:
        """Return the closest level at which all of a set is together.

        >>> hardware = Hardware.regular(sockets=2, numa_nodes=8, gpus=8)
        >>> hardware.span(0b0011).name, hardware.span(0b10001).name
        ('SOCKET', 'MACHINE')
        """
        return next(domain.level for domain in self.domains if mask & ~(domain.gpus | domain.groups) == 0)


def _domains(hardware: Hardware) -> Iterable[Domain]:
    """Return sets by level; a NUMA node that spreads over sockets, as with NUMA turned off, is none."""
    places = hardware.gpus + hardware.groups
    gpus = (1 << len(hardware.gpus)) - 1
    sockets_of: dict[int, set[int | None]] = {}
    for place in places:
        if place.numa is not None:
            sockets_of.setdefault(place.numa, set()).add(place.socket)
    sets: list[tuple[Level, int]] = []
    for numa in sorted(numa for numa, sockets in sockets_of.items() if len(sockets) == 1):
        sets.append((Level.NUMA, sum(1 << bit for bit, place in enumerate(places) if place.numa == numa)))
    for socket in sorted({place.socket for place in places if place.socket is not None}):
        sets.append((Level.SOCKET, sum(1 << bit for bit, place in enumerate(places) if place.socket == socket)))
    sets.append((Level.MACHINE, hardware.everything))
    return [Domain(level, mask & gpus, mask & ~gpus) for level, mask in sets]


@dataclasses.dataclass(frozen=True, slots=True)
class Instance:
    """What holds resources of a node.

    :ivar gpus: the numbers of its GPUs.
    :ivar core_groups: the numbers of its core groups.
    :ivar started: when, in seconds.
    :ivar preemptible: whether it may be asked to give way at all.
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


@dataclasses.dataclass(frozen=True)
class Node:
    """A machine with what runs on it.

    :ivar masks: what each instance holds (derived).
    :ivar idle: what nobody holds (derived).
    :ivar order: the positions of the preemptible instances, by priority (derived).
    :ivar ladder: a rung for each of their priorities, the lowest first (derived).
    :raises ValueError: if two instances hold the same GPU or core group, or one that is not there.
    """

    name: str
    hardware: Hardware
    instances: tuple[Instance, ...] = ()
    masks: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)
    idle: int = dataclasses.field(init=False, repr=False, compare=False)
    order: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)
    ladder: tuple[Rung, ...] = dataclasses.field(init=False, repr=False, compare=False)

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
        order = [number for number, each in enumerate(self.instances) if each.preemptible]
        order.sort(key=lambda number: (self.instances[number].priority, number))
        object.__setattr__(self, "order", tuple(order))
        object.__setattr__(self, "ladder", tuple(_rungs(self, order)))

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
    """Who wants in.

    :ivar priority: only instances of lower priority give way to it.
    :ivar gpus: how many GPUs it needs.
    :ivar cores: how many cores.
    :ivar affinity: "guaranteed" if it takes nothing less than the closest that the hardware allows, "best-effort" if
        the closer the better, None if it does not care.
    :raises ValueError: for an affinity that there is not, or a request for nothing.
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
            raise ValueError(
                f"{self.id} asks for {counted(self.gpus, 'GPU')} and {counted(self.cores, 'core')}: ask for one or more"
            )
