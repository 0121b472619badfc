"""The workloads of FlexTopo's Table 3, and saturated clusters full of them.

The table names GPUs only; cores are one group of eight beside each GPU, as Table 1 has them. It does not say where the
instances are at the start, and the baseline's hit rate depends on that, so there are several layouts, and each figure
names its own.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from ctxflow.policies.flextopo.candidates import Fit, allocate
from ctxflow.policies.flextopo.cluster import Affinity, Hardware, Instance, Node, Preemptor

NODE = Hardware.regular(sockets=2, numa_nodes=8, gpus=8, cores=64)
"""A server with RTX 4090s: 2 sockets, 8 NUMA nodes with 8 cores and a GPU each."""

LAYOUTS = {
    "random": "instances on random nodes, on random GPUs there",
    "aligned": "instances on random nodes, on GPUs as close together as they come",
    "packed": "instances on the first node with room, on GPUs as close together as they come",
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A row of Table 3.

    :ivar share: the share of the cluster's GPUs that its instances hold at the start.
    """

    name: str
    priority: int
    gpus: int
    share: float
    preemptible: bool

    def instance(self, number: int, gpus: tuple[int, ...], started: float) -> Instance:
        """One of its instances, with the core groups beside its GPUs."""
        return Instance(f"{self.name}-{number}", self.priority, gpus, gpus, started, self.preemptible)

    def preemptor(self, affinity: Affinity | None) -> Preemptor:
        """One that is scaled up."""
        return Preemptor(f"{self.name}-new", self.priority, self.gpus, 8 * self.gpus, affinity)


A = Workload("A", 1500, 8, 0.2, False)
B = Workload("B", 1000, 4, 0.2, False)
C = Workload("C", 500, 2, 0.5, True)
D = Workload("D", 200, 1, 0.1, True)
WORKLOADS = (A, B, C, D)


def saturated(nodes: int, layout: str, chance: random.Random) -> list[Node]:
    """A cluster in which every GPU is held, in the proportions of Table 3.

    :param layout: one of `LAYOUTS`.
    :raises ValueError: for another layout.

    >>> cluster = saturated(100, "random", random.Random(0))
    >>> [sum(i.id.startswith(kind) for node in cluster for i in node.instances) for kind in "ABCD"]
    [20, 40, 200, 80]
    """
    if layout not in LAYOUTS:
        raise ValueError(f"there is no layout {layout!r}: choose one of {', '.join(LAYOUTS)}")
    idle = [list(range(8)) for _ in range(nodes)]
    held: list[list[Instance]] = [[] for _ in range(nodes)]
    roomy = list(range(nodes))
    left = 8 * nodes
    for workload in WORKLOADS:
        count = left if workload is D else int(8 * nodes * workload.share) // workload.gpus
        for number in range(count):
            roomy = [node for node in roomy if idle[node]]
            fitting = [node for node in roomy if len(idle[node]) >= workload.gpus]
            node = fitting[0] if layout == "packed" else chance.choice(fitting)
            gpus = _gpus(idle[node], workload.gpus, layout, chance)
            idle[node] = [gpu for gpu in idle[node] if gpu not in gpus]
            held[node].append(workload.instance(number, gpus, chance.uniform(0.0, 3600.0)))
            left -= workload.gpus
    return [Node(f"node-{number}", NODE, tuple(each)) for number, each in enumerate(held)]


_FITS = {workload.gpus: Fit(NODE, workload.gpus, 0) for workload in WORKLOADS}


def _gpus(idle: list[int], count: int, layout: str, chance: random.Random) -> tuple[int, ...]:
    if layout == "random":
        return tuple(sorted(chance.sample(idle, count)))
    got = allocate(_FITS[count], NODE.mask(idle, ()))
    assert got is not None
    return got[0]


def without(node: Node, ids: tuple[str, ...]) -> Node:
    """A node when some of its instances are gone."""
    return Node(node.name, node.hardware, tuple(each for each in node.instances if each.id not in ids))


def beside(node: Node, *instances: Instance) -> Node:
    """A node when some instances have come."""
    return Node(node.name, node.hardware, (*node.instances, *instances))


def cluster_to_json(nodes: Sequence[Node], preemptor: Preemptor | None = None) -> dict[str, Any]:
    """Return the data that `cluster_from_json` takes; kinds of hardware are written once each."""
    kinds: dict[Hardware, str] = {}
    for node in nodes:
        kinds.setdefault(node.hardware, f"kind-{len(kinds)}")
    data: dict[str, Any] = {
        "hardware": {
            name: {
                "gpus": [[place.socket, place.numa] for place in kind.gpus],
                "core_groups": [[p.socket, p.numa, size] for p, size in zip(kind.groups, kind.sizes, strict=True)],
            }
            for kind, name in kinds.items()
        },
        "nodes": [
            {
                "name": node.name,
                "hardware": kinds[node.hardware],
                "instances": [
                    dataclasses.asdict(each) | {"gpus": list(each.gpus), "core_groups": list(each.core_groups)}
                    for each in node.instances
                ],
            }
            for node in nodes
        ],
    }
    return data if preemptor is None else data | {"preemptor": dataclasses.asdict(preemptor)}
