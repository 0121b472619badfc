"""A machine's topology as values, and which GPU of it a name means: each batch system has its own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class NumaNode:
    """A NUMA node."""

    id: int
    socket: int | None = None  # None if it belongs to none or to several, or that is not known.


@dataclasses.dataclass(frozen=True, slots=True)
class Core:
    """A CPU as the kernel numbers them."""

    id: int
    used_by: str | None = None  # The name of who uses it; None if it is free.


@dataclasses.dataclass(frozen=True, slots=True)
class CoreGroup:
    """Cores of one NUMA node that are allocated together."""

    id: int
    socket: int | None
    numa: int | None
    cores: tuple[Core, ...]

    @property
    def used_by(self) -> str | None:
        """Who uses some of its cores, by name; None if all are free."""
        return ", ".join(sorted({core.used_by for core in self.cores if core.used_by})) or None


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU."""

    index: int  # Its number on this machine.
    uuid: str | None = None
    model: str | None = None
    memory: int | None = None  # In MB.
    numa: int | None = None  # The NUMA node that it is near; None if that is not known.
    bus: str | None = None  # Its PCI address as the kernel writes it, such as "0000:17:00.0".
    used_by: str | None = None  # The name of who uses it; None if it is free.


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine's topology."""

    name: str
    sockets: tuple[int, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()
    groups: tuple[CoreGroup, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    problems: tuple[str, ...] = ()  # What could not be found out, one sentence each.

    def socket_of(self, numa: int | None) -> int | None:
        """Return the socket that a NUMA node belongs to, where that is known."""
        return next((node.socket for node in self.numa_nodes if node.id == numa), None)


def core_groups(cpus: Iterable[tuple[int, int | None, int | None]], size: int) -> tuple[CoreGroup, ...]:
    """Return groups of `size` cores that share a socket and a NUMA node, of whose last one there may be fewer.

    :param cpus: each one's number, socket and NUMA node, in the order in which they are to be put together.
    :raises ValueError: if a group would be of no cores.

    >>> [len(group.cores) for group in core_groups([(cpu, 0, cpu // 6) for cpu in range(12)], size=4)]
    [4, 2, 4, 2]
    """
    if size < 1:
        raise ValueError(f"a core group of {size} cores is none: give a size of 1 or more")
    together: dict[tuple[int | None, int | None], list[int]] = {}
    for cpu, socket, numa in cpus:
        together.setdefault((socket, numa), []).append(cpu)
    groups: list[CoreGroup] = []
    for (socket, numa), members in together.items():
        for start in range(0, len(members), size):
            cores = tuple(Core(cpu) for cpu in members[start : start + size])
            groups.append(CoreGroup(len(groups), socket, numa, cores))
    return tuple(groups)


def changes(before: Topology, after: Topology) -> list[str]:
    """Return what is different in the hardware, in words; who uses it is no part of that.

    >>> changes(Topology("m", gpus=(Gpu(0, "GPU-1", "NVIDIA A10"),)), Topology("m"))
    ['GPU 0 (NVIDIA A10, GPU-1) is gone']
    """
    found = []
    old, new = ({gpu.uuid or f"number {gpu.index}": gpu for gpu in each.gpus} for each in (before, after))
    for key, gpu in old.items():
        if key not in new:
            found.append(f"{_named(gpu)} is gone")
        elif _hardware(gpu) != _hardware(new[key]):
            found.append(f"{_named(new[key])} has changed: it was {_named(gpu)} near NUMA node {gpu.numa}")
    found += [f"{_named(gpu)} is new" for key, gpu in new.items() if key not in old]
    for what, one, other in (
        ("sockets", before.sockets, after.sockets),
        ("NUMA nodes", before.numa_nodes, after.numa_nodes),
        ("cores", _cores(before.groups), _cores(after.groups)),
    ):
        if one != other:
            counts = f"{len(one)} before and {len(other)} now" if len(one) != len(other) else f"{len(one)} as before"
            found.append(f"the {what} have changed: {counts}")
    if before.problems != after.problems:
        found += [f"now: {problem}" for problem in after.problems if problem not in before.problems]
        found += [f"no longer: {problem}" for problem in before.problems if problem not in after.problems]
    return found


def _named(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({', '.join(filter(None, (gpu.model, gpu.uuid))) or 'of no known model'})"


def _hardware(gpu: Gpu) -> Gpu:
    return dataclasses.replace(gpu, used_by=None)


def _cores(groups: Sequence[CoreGroup]) -> list[tuple[int, int | None, int | None, int]]:
    return [(core.id, group.socket, group.numa, group.id) for group in groups for core in group.cores]


def device_id(gpu: Gpu) -> str:
    """Return the name that a topology has for a GPU: its UUID, where that is known, else its number.

    >>> device_id(Gpu(3, "GPU-0a1b2c3d-4e5f")), device_id(Gpu(3))
    ('GPU-0a1b2c3d-4e5f', '3')
    """
    return gpu.uuid or str(gpu.index)


def position(topology: Topology, name: str) -> int | None:
    """Return the place in `topology.gpus` of the GPU of a name, None if there is none, or several.

    A name is a UUID or its beginning (HTCondor has "GPU-" and eight digits), "CUDA3" or "3".

    >>> machine = Topology("m", gpus=(Gpu(0, "GPU-aa11"), Gpu(1, "GPU-bb22"), Gpu(2)))
    >>> [position(machine, name) for name in ("GPU-bb", "CUDA0", "2", "GPU-", "GPU-cc33")]
    [1, 0, 2, None, None]
    """
    number = name.removeprefix("CUDA")
    if number.isdigit():
        found = [place for place, gpu in enumerate(topology.gpus) if gpu.index == int(number)]
    else:
        found = [place for place, gpu in enumerate(topology.gpus) if name and (gpu.uuid or "").startswith(name)]
    return found[0] if len(found) == 1 else None


def ordered(topology: Topology, names: Iterable[str]) -> list[str]:
    """Return names of GPUs in the order of the topology, neighbours beside each other; unknown ones last, as they come.

    >>> from ctxflow.topology import NumaNode
    >>> nodes = (NumaNode(0, 0), NumaNode(1, 1), NumaNode(2, 0))
    >>> machine = Topology("m", (0, 1), nodes, gpus=(Gpu(0, numa=2), Gpu(1, numa=1), Gpu(2, numa=0)))
    >>> ordered(machine, ["1", "0", "x", "2"])
    ['2', '0', '1', 'x']
    """
    named = list(names)
    places = {name: position(topology, name) for name in named}

    def order(name: str) -> list[float]:
        if (place := places[name]) is None:
            return [math.inf] * 3
        gpu = topology.gpus[place]
        known = (topology.socket_of(gpu.numa), gpu.numa, gpu.index)
        return [math.inf if number is None else number for number in known]

    return sorted(named, key=order)


def of_gpus(topology: Topology, names: Sequence[str]) -> Topology:
    """Return a topology without its cores, that has all GPUs of these names; unknown ones are near no NUMA node.

    >>> [device_id(gpu) for gpu in of_gpus(Topology("m", gpus=(Gpu(0, "GPU-aa11"),)), ["GPU-aa", "GPU-bb"]).gpus]
    ['GPU-aa11', 'GPU-bb']
    """
    unknown = [name for name in names if position(topology, name) is None]
    first = max((gpu.index for gpu in topology.gpus), default=-1) + 1
    more = tuple(Gpu(int(name)) if name.isdigit() else Gpu(first + number, name) for number, name in enumerate(unknown))
    return dataclasses.replace(topology, groups=(), gpus=topology.gpus + more)


def used_by(topology: Topology, users: Mapping[str, str]) -> Topology:
    """Return the topology with who uses which GPU, by the GPU's name."""
    names = {position(topology, device): user for device, user in users.items()}
    gpus = tuple(dataclasses.replace(gpu, used_by=names.get(place)) for place, gpu in enumerate(topology.gpus))
    return dataclasses.replace(topology, gpus=gpus)
