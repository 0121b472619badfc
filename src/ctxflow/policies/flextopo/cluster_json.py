"""A cluster and its preemptor from JSON (docs/preemption.md has the form)."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ctxflow.policies.flextopo.cluster import Hardware, Instance, Location, Node, Preemptor
from ctxflow.topology import from_graph

MOST = 1 << 14
"""Sockets, NUMA nodes, GPUs or cores of one node: more than this is a typing error."""


def cluster_from_json(data: Mapping[str, Any]) -> tuple[tuple[Node, ...], Preemptor | None]:
    """Return nodes, and the preemptor if the data names one.

    :param data: {"hardware": {NAME: HARDWARE}, "nodes": [{"name", "hardware": NAME | HARDWARE | "topology": FLEXTOPO,
        "instances": [{"id", "priority", "gpus": [0], "core_groups": [0], "started", "preemptible"}]}], "preemptor":
        {"id", "priority", "gpus": 4, "cores": 32, "affinity"}}, where HARDWARE is {"sockets", "numa_nodes", "gpus",
        "cores", "group_size"}, all numbers, or {"gpus": [[SOCKET, NUMA], ...], "core_groups": [[SOCKET, NUMA, CORES],
        ...]}.
    :raises ValueError: if something is missing, unknown or contradicts itself, saying what and where.
    """
    _check(data, "the cluster", {"nodes"}, {"hardware", "preemptor"})
    described = data.get("hardware", {})
    if not isinstance(described, Mapping):
        raise ValueError(f"the cluster's hardware is an object with a name for each kind, not {described!r}")
    kinds = {name: _hardware(each, f"hardware {name!r}") for name, each in described.items()}
    nodes = tuple(_node(each, number, kinds) for number, each in enumerate(_list(data["nodes"], "the cluster's nodes")))
    counts = Counter(node.name for node in nodes)
    if twice := next((name for name, count in counts.items() if count > 1), None):
        raise ValueError(f"two nodes are named {twice!r}: give each a name of its own")
    wanted = data.get("preemptor")
    return nodes, None if wanted is None else _made(Preemptor, wanted, "the preemptor")


def _node(data: Any, number: int, kinds: Mapping[str, Hardware]) -> Node:
    where = f"node {number}"
    _check(data, where, {"name"}, {"hardware", "topology", "instances"})
    if ("hardware" in data) == ("topology" in data):
        raise ValueError(f"{where} needs either hardware or a topology")
    _name(data["name"], "name", where)
    kind = data.get("hardware")
    if "topology" in data:
        hardware = Hardware.of(from_graph(data["topology"]))
    elif not isinstance(kind, str):
        hardware = _hardware(kind, f"the hardware of {where}")
    elif kind in kinds:
        hardware = kinds[kind]
    else:
        raise ValueError(f"{where} is of hardware {kind!r}, which the cluster does not describe")
    made = [_made(Instance, each, f"an instance of {where}") for each in _list(data.get("instances", []), where)]
    if len({each.id for each in made}) < len(made):
        raise ValueError(f"two instances of {where} have the same id: give each one of its own")
    return Node(str(data["name"]), hardware, tuple(made))


def _hardware(data: Any, where: str) -> Hardware:
    if isinstance(data, Mapping) and "sockets" in data:
        _check(data, where, {"sockets", "numa_nodes", "gpus"}, {"cores", "group_size"})
        for name, value in data.items():
            if not _whole(value) or value > MOST:
                raise ValueError(f"the {name} of {where} is a whole number up to {MOST}, not {value!r}")
        try:
            return Hardware.regular(**data)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    _check(data, where, {"gpus"}, {"core_groups"})
    gpus, groups = _list(data["gpus"], where), _list(data.get("core_groups", []), where)
    sized = all(_is_place(each, 3) and _whole(each[2]) and each[2] > 0 for each in groups)
    if not sized or not all(_is_place(each, 2) for each in gpus):
        raise ValueError(
            f"{where} needs GPUs as [socket, NUMA node] and groups as [socket, NUMA node, cores], "
            "in whole numbers, null where nobody knows the place"
        )
    return Hardware(
        tuple(Location(*each) for each in gpus),
        tuple(Location(*each[:2]) for each in groups),
        tuple(each[2] for each in groups),
    )


def _made(kind: type[Any], data: Any, where: str) -> Any:
    fields = dataclasses.fields(kind)
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    _check(data, where, needed, {field.name for field in fields} - needed)
    found = dict(data)
    for name in ("priority", "gpus", "cores") if kind is Preemptor else ("priority",):
        if name in found and not _whole(found[name]):
            raise ValueError(f"the {name} of {where} is a whole number, not {found[name]!r}")
    _name(found["id"], "id", where)
    if kind is Instance:
        started = found.get("started", 0.0)
        if isinstance(started, bool) or not isinstance(started, int | float) or not math.isfinite(started):
            raise ValueError(f"the start of {where} is a number of seconds, not {started!r}")
        if not isinstance(found.get("preemptible", True), bool):
            raise ValueError(f"preemptible of {where} is true or false, not {found['preemptible']!r}")
        for name in ("gpus", "core_groups"):
            numbers = _list(found.get(name, []), where)
            if not all(_whole(each) for each in numbers) or len(set(numbers)) < len(numbers):
                raise ValueError(f"the {name} of {where} are a list of numbers, each once, not {numbers!r}")
            found[name] = tuple(numbers)
    return kind(**found)


def _check(data: Any, where: str, needed: set[str], allowed: set[str]) -> None:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where} is an object with {', '.join(sorted(needed))}, not {data!r}")
    if missing := sorted(needed - set(data)):
        raise ValueError(f"{where} has no {missing[0]!r}")
    if unknown := sorted(set(data) - needed - allowed):
        raise ValueError(f"{where} has no use for {unknown[0]!r}: it takes {', '.join(sorted(needed | allowed))}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_place(data: Any, length: int) -> bool:
    return isinstance(data, list | tuple) and len(data) == length and all(p is None or _whole(p) for p in data[:2])


def _name(value: Any, field: str, where: str) -> None:
    if not isinstance(value, str) and not _whole(value):
        raise ValueError(f"the {field} of {where} is a text, not {value!r}")


def _list(data: Any, where: str) -> list[Any]:
    if not isinstance(data, list | tuple):
        raise ValueError(f"{where} is to be a list, not {data!r}")
    return list(data)
