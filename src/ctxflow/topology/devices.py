"""Which GPU of a topology a name means: batch systems, CUDA and the driver each have names of their own.

What does not live here: which devices this process may use (ctxflow.host.devices).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from ctxflow.topology.model import Gpu, Topology


def device_id(gpu: Gpu) -> str:
    """The name that a topology has for a GPU: its UUID, where that is known, else its number.

    >>> device_id(Gpu(3, "GPU-0a1b2c3d-4e5f")), device_id(Gpu(3))
    ('GPU-0a1b2c3d-4e5f', '3')
    """
    return gpu.uuid or str(gpu.index)


def position(topology: Topology, name: str) -> int | None:
    """The place in `topology.gpus` of the GPU of a name, None if there is none, or several.

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
    """Names of GPUs in the order of the topology, neighbours beside each other; unknown ones last, as they come.

    >>> from ctxflow.topology import NumaNode
    >>> nodes = (NumaNode(0, 0), NumaNode(1, 1), NumaNode(2, 0))
    >>> machine = Topology("m", (0, 1), nodes, gpus=(Gpu(0, numa=2), Gpu(1, numa=1), Gpu(2, numa=0)))
    >>> ordered(machine, ["1", "0", "x", "2"])
    ['2', '0', '1', 'x']
    """
    named = list(names)
    places = {name: position(topology, name) for name in named}

    def order(name: str) -> tuple[float, float, float]:
        place = places[name]
        if place is None:
            return float("inf"), float("inf"), float("inf")
        gpu = topology.gpus[place]
        return _known(topology.socket_of(gpu.numa)), _known(gpu.numa), gpu.index

    return sorted(named, key=order)


def of_gpus(topology: Topology, names: Sequence[str]) -> Topology:
    """A topology without its cores, that has all GPUs of these names; those that nobody knows are near no NUMA node.

    >>> [device_id(gpu) for gpu in of_gpus(Topology("m", gpus=(Gpu(0, "GPU-aa11"),)), ["GPU-aa", "GPU-bb"]).gpus]
    ['GPU-aa11', 'GPU-bb']
    """
    unknown = [name for name in names if position(topology, name) is None]
    first = max((gpu.index for gpu in topology.gpus), default=-1) + 1
    more = tuple(Gpu(int(name)) if name.isdigit() else Gpu(first + number, name) for number, name in enumerate(unknown))
    return dataclasses.replace(topology, groups=(), gpus=topology.gpus + more)


def used_by(topology: Topology, users: Mapping[str, str]) -> Topology:
    """The topology with who uses which GPU.

    :param users: by the GPU's name.
    """
    names = {position(topology, device): user for device, user in users.items()}
    gpus = tuple(dataclasses.replace(gpu, used_by=names.get(place)) for place, gpu in enumerate(topology.gpus))
    return dataclasses.replace(topology, gpus=gpus)


def _known(number: int | None) -> float:
    return float("inf") if number is None else number
