"""Write and read a topology as FlexTopo's graph (JSON, and Kubernetes' custom resource), and draw it as text.

Edges are *host* (socket to core group), *contain* (core group to core, socket to NUMA node), *localized* (core group to
NUMA node) and *nearby* (GPU to NUMA node), as in Table 2 of FlexTopo. In the custom resources that its agent writes all
edges are "contains", from sockets over NUMA nodes down to cores. Both are read; the table's form is written.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ctxflow.topology.hardware import Core, CoreGroup, Gpu, NumaNode, Topology

_TYPES = ("Socket", "NUMANode", "CoreGroup", "CPUCore", "GPU")
_KINDS = {"Socket": "socket", "NUMANode": "numa", "CoreGroup": "group"}
_EDGES = ("host", "hosts", "contain", "contains", "localized", "nearby")


def to_graph(topology: Topology) -> dict[str, Any]:
    """Return the graph as data.

    :returns: {"name", "nodes": [{"id", "type", "attributes"}], "edges": [{"source", "target", "type"}], "problems"}.

    >>> graph = to_graph(Topology("m", (0,), (NumaNode(0, 0),), (), (Gpu(0, numa=0),)))
    >>> [(edge["source"], edge["type"], edge["target"]) for edge in graph["edges"]]
    [('socket-0', 'contain', 'numa-0'), ('gpu-0', 'nearby', 'numa-0')]
    """
    nodes = [_node(f"socket-{socket}", "Socket", {}) for socket in topology.sockets]
    edges: list[dict[str, str]] = []
    for numa in topology.numa_nodes:
        nodes.append(_node(f"numa-{numa.id}", "NUMANode", {}))
        if numa.socket is not None:
            edges.append(_edge(f"socket-{numa.socket}", f"numa-{numa.id}", "contain"))
    for group in topology.groups:
        name = f"coregroup-{group.id}"
        nodes.append(_node(name, "CoreGroup", _used(group.used_by)))
        if group.socket is not None:
            edges.append(_edge(f"socket-{group.socket}", name, "host"))
        if group.numa is not None:
            edges.append(_edge(name, f"numa-{group.numa}", "localized"))
        for core in group.cores:
            nodes.append(_node(f"core-{core.id}", "CPUCore", _used(core.used_by)))
            edges.append(_edge(name, f"core-{core.id}", "contain"))
    for gpu in topology.gpus:
        about = {"uuid": gpu.uuid, "name": gpu.model, "memoryTotal": gpu.memory, "busID": gpu.bus}
        known = {key: value for key, value in about.items() if value is not None}
        nodes.append(_node(f"gpu-{gpu.index}", "GPU", known | _used(gpu.used_by)))
        if gpu.numa is not None:
            edges.append(_edge(f"gpu-{gpu.index}", f"numa-{gpu.numa}", "nearby"))
    return {"name": topology.name, "nodes": nodes, "edges": edges, "problems": list(topology.problems)}


def from_graph(data: Mapping[str, Any]) -> Topology:
    """Return the topology of a graph, or of a custom resource.

    :param data: what `to_graph` wrote, or what Kubernetes gives for a FlexTopo resource.
    :raises ValueError: if it is no such thing, or an edge leads nowhere, saying which.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"a topology is an object with nodes and edges, not {data!r}")
    spec, name, problems = data, data.get("name"), data.get("problems") or ()
    if "spec" in data:
        about = data.get("metadata")
        spec, name = data["spec"] or {}, about.get("name") if isinstance(about, Mapping) else None
    if not isinstance(spec, Mapping):
        raise ValueError(f"a topology's spec is an object with nodes and edges, not {spec!r}")
    if not {"nodes", "edges"} <= set(spec):
        raise ValueError("a topology has nodes and edges: this has " + (", ".join(map(str, spec)) or "nothing"))
    for what, given in (("nodes", spec["nodes"]), ("edges", spec["edges"]), ("problems", problems)):
        if not isinstance(given or [], list | tuple):
            raise ValueError(f"the {what} of a topology are a list, not {given!r}")
    nodes = _nodes(spec["nodes"] or ())
    links = _links(spec["edges"] or (), nodes)
    sockets = tuple(sorted(_number(each) for each, (kind, _) in nodes.items() if kind == "Socket"))
    names = [each for each, (kind, _) in nodes.items() if kind == "NUMANode"]
    numa = sorted((NumaNode(_number(each), _linked(links, each, "socket")) for each in names), key=lambda node: node.id)
    groups = sorted(_groups(nodes, links, {node.id: node.socket for node in numa}), key=lambda group: group.id)
    gpus = sorted(_gpus(nodes, links), key=lambda gpu: gpu.index)
    known = tuple(str(problem) for problem in problems)
    made = Topology(str(name or "unnamed"), sockets, tuple(numa), tuple(groups), tuple(gpus), known)
    lost = ", ".join(str(gpu.index) for gpu in gpus if gpu.numa is None)
    if "problems" in data or not lost or not numa:
        return made
    where = f"the NUMA node of GPU {lost} of {made.name} is not known: no edge leads from it to one"
    return dataclasses.replace(made, problems=(where,))


def _nodes(given: Any) -> dict[str, tuple[str, Mapping[str, Any]]]:
    nodes: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for each in given:
        if not isinstance(each, Mapping) or not {"id", "type"} <= set(each):
            raise ValueError(f"a node of a topology has an id and a type, unlike {each!r}")
        if each["type"] not in _TYPES:
            raise ValueError(f"{each['id']} is of type {each['type']!r}: there are {', '.join(_TYPES)}")
        name, about = str(each["id"]), each.get("attributes") or {}
        if name in nodes:
            raise ValueError(f"two nodes of the topology are called {name}")
        if not isinstance(about, Mapping):
            raise ValueError(f"the attributes of {name} are an object, not {about!r}")
        nodes[name] = (str(each["type"]), about)
    return nodes


def _links(edges: Any, nodes: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return what each node is linked to, by kind: the edges' directions do not matter, only what they join."""
    links: dict[str, dict[str, str]] = {}
    for edge in edges:
        if not isinstance(edge, Mapping) or not {"source", "target", "type"} <= set(edge):
            raise ValueError(f"an edge of a topology has a source, a target and a type, unlike {edge!r}")
        ends = str(edge["source"]), str(edge["target"])
        if edge["type"] not in _EDGES:
            kinds = ", ".join(_EDGES)
            raise ValueError(f"the edge from {ends[0]} to {ends[1]} is of type {edge['type']!r}: there are {kinds}")
        for end in ends:
            if end not in nodes:
                raise ValueError(f"the edge from {ends[0]} to {ends[1]} leads nowhere: there is no {end}")
        for one, other in (ends, ends[::-1]):
            links.setdefault(one, {})[_KINDS.get(nodes[other][0], "")] = other
    return links


def _linked(links: Mapping[str, Mapping[str, str]], name: str, kind: str) -> int | None:
    other = links.get(name, {}).get(kind)
    return None if other is None else _number(other)


def _groups(
    nodes: Mapping[str, tuple[str, Mapping[str, Any]]],
    links: Mapping[str, Mapping[str, str]],
    socket_of: Mapping[int, int | None],
) -> Iterable[CoreGroup]:
    cores: dict[str | None, list[Core]] = {}
    for name, (kind, about) in nodes.items():
        if kind == "CPUCore":
            cores.setdefault(links.get(name, {}).get("group"), []).append(Core(_number(name), _user(about)))
    if None in cores:
        raise ValueError(f"core-{cores[None][0].id} is in no core group: give it an edge from one")
    for name, (kind, about) in nodes.items():
        if kind == "CoreGroup":
            numa = _linked(links, name, "numa")
            socket = _linked(links, name, "socket")
            socket = socket_of.get(numa) if socket is None and numa is not None else socket
            members = tuple(sorted(cores.get(name, ()), key=lambda core: core.id))
            yield CoreGroup(_whole(about.get("groupIndex", _number(name)), name), socket, numa, members)


def _gpus(nodes: Mapping[str, tuple[str, Mapping[str, Any]]], links: Mapping[str, Mapping[str, str]]) -> Iterable[Gpu]:
    for name, (kind, about) in nodes.items():
        if kind == "GPU":
            memory = None if about.get("memoryTotal") is None else _whole(about["memoryTotal"], name)
            numa = _linked(links, name, "numa")
            yield Gpu(
                _number(name), about.get("uuid"), about.get("name"), memory, numa, about.get("busID"), _user(about)
            )


def _whole(value: Any, name: str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"an attribute of {name} is to be a whole number, not {value!r}") from None


def _user(about: Mapping[str, Any]) -> str | None:
    if about.get("usedBy"):
        return str(about["usedBy"])
    return None if about.get("status", "free") == "free" else "unknown"


def _used(name: str | None) -> dict[str, str]:
    return {"status": "free"} if name is None else {"status": "allocated", "usedBy": name}


def _number(name: str) -> int:
    found = re.search(r"(\d+)$", name)
    if not found:
        raise ValueError(f"{name} has no number: nodes of a topology are called socket-0, numa-0, gpu-0 and so on")
    return int(found[1])


def _node(name: str, kind: str, attributes: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "type": kind, "attributes": attributes}


def _edge(source: str, target: str, kind: str) -> dict[str, str]:
    return {"source": source, "target": target, "type": kind}


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
    branches: list[tuple[str, int | None]] = [(f"socket {socket}", socket) for socket in topology.sockets]
    if any(node.socket is None for node in topology.numa_nodes):
        branches.append(("in no socket", None))
    trees: list[tuple[str, list[tuple[str, list[str]]]]] = [
        (title, [(f"NUMA {n.id}", _inside(topology, n.id)) for n in topology.numa_nodes if n.socket == socket])
        for title, socket in branches
    ]
    if lost := _inside(topology, None):
        trees.append(("near no known NUMA node", [(text, []) for text in lost]))
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


def _inside(topology: Topology, numa: int | None) -> list[str]:
    """Return a line for each core group and each GPU of a NUMA node."""
    lines = []
    for group in topology.groups:
        if group.numa == numa:
            cores = ranges([core.id for core in group.cores])
            lines.append((f"core group {group.id}  cores {cores}", group.used_by))
    for gpu in topology.gpus:
        if gpu.numa == numa:
            memory = "" if gpu.memory is None else f", {gpu.memory / 1024:.1f} GiB"
            lines.append((f"GPU {gpu.index}  {gpu.model or 'unknown model'}{memory}", gpu.used_by))
    return [text + (f", used by {name}" if name else ", free") for text, name in lines]


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
