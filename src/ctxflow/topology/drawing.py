"""Draw a topology as text, for a terminal of 80 columns. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from ctxflow.topology.hardware import CoreGroup, Gpu, Topology

_Item = TypeVar("_Item")


def draw(topology: Topology) -> str:
    """Return the drawing: sockets with their NUMA nodes, and for each its core groups and GPUs.

    >>> from ctxflow.topology.hardware import NumaNode
    >>> print(draw(Topology("m", (0,), (NumaNode(0, 0),), (), (Gpu(0, None, "NVIDIA A10", 23028, 0, used_by="bob"),))))
    m: 1 socket, 1 NUMA node, 0 cores, 1 GPU (NVIDIA A10)
    └─ socket 0
       └─ NUMA 0
          └─ GPU 0  NVIDIA A10, 22.5 GiB, used by bob
    """
    lines = [summary(topology)]
    branches = [
        (f"socket {socket}", [n.id for n in topology.numa_nodes if n.socket == socket]) for socket in topology.sockets
    ]
    stray = [node.id for node in topology.numa_nodes if node.socket is None]
    if stray:
        branches.append(("in no socket", stray))
    lost_groups = [group for group in topology.groups if group.numa is None]
    lost_gpus = [gpu for gpu in topology.gpus if gpu.numa is None]
    trees: list[tuple[str, list[tuple[str, list[str]]]]] = [
        (title, [(f"NUMA {numa}", _inside(topology, numa)) for numa in numas]) for title, numas in branches
    ]
    if lost_groups or lost_gpus:
        leaves = [(text, list[str]()) for text in [*_groups(lost_groups), *map(_gpu, lost_gpus)]]
        trees.append(("near no known NUMA node", leaves))
    for last, (title, subtrees) in _marked(trees):
        lines.append(("└─ " if last else "├─ ") + title)
        stem = "   " if last else "│  "
        for last_sub, (name, leaves_of) in _marked(subtrees):
            lines.append(stem + ("└─ " if last_sub else "├─ ") + name)
            inner = stem + ("   " if last_sub else "│  ")
            lines += [inner + ("└─ " if last_leaf else "├─ ") + leaf for last_leaf, leaf in _marked(leaves_of)]
    lines += [f"! {problem}" for problem in topology.problems]
    return "\n".join(lines)


def summary(topology: Topology) -> str:
    """Return the machine in a line."""
    cores = sum(len(group.cores) for group in topology.groups)
    models = Counter(gpu.model or "unknown model" for gpu in topology.gpus)
    several = [f"{count} {model}" for model, count in models.items()] if len(models) > 1 else list(models)
    counts = [
        _count(len(topology.sockets), "socket"),
        _count(len(topology.numa_nodes), "NUMA node"),
        _count(cores, "core"),
        _count(len(topology.gpus), "GPU") + (f" ({', '.join(several)})" if several else ""),
    ]
    return f"{topology.name}: {', '.join(counts)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _inside(topology: Topology, numa: int) -> list[str]:
    groups = [group for group in topology.groups if group.numa == numa]
    return [*_groups(groups), *(_gpu(gpu) for gpu in topology.gpus if gpu.numa == numa)]


def _groups(groups: Iterable[CoreGroup]) -> list[str]:
    return [
        f"core group {group.id}  cores {ranges([core.id for core in group.cores])}{_use(group.used_by)}"
        for group in groups
    ]


def _gpu(gpu: Gpu) -> str:
    about = [gpu.model or "unknown model"]
    if gpu.memory is not None:
        about.append(f"{gpu.memory / 1024:.1f} GiB")
    return f"GPU {gpu.index}  {', '.join(about)}{_use(gpu.used_by)}"


def _use(name: str | None) -> str:
    return f", used by {name}" if name else ", free"


def ranges(cores: Sequence[int]) -> str:
    """Return runs of consecutive numbers, as the kernel writes lists of CPUs.

    >>> ranges([0, 1, 2, 8])
    '0-2,8'
    """
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _marked(items: Sequence[_Item]) -> Iterable[tuple[bool, _Item]]:
    return ((number == len(items) - 1, item) for number, item in enumerate(items))
