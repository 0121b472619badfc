"""Write and read topologies in HTCondor's machine ads: what `ctxflow topo --classad` publishes, and what any ads tell.

A startd cron job (site-configs/htcondor-topology.conf) publishes a machine's attributes. Where nothing was published,
GPUs are taken from the records that HTCondor makes of them (`GPUs_...`). ClassAds are read as text: literals, lists and
records; an expression is not evaluated, and is None here. `read_topologies` reads a file in any form.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ctxflow.installing import how_to_install_package
from ctxflow.topology.graph import from_graph, ranges
from ctxflow.topology.hardware import Core, CoreGroup, Gpu, NumaNode, Topology
from ctxflow.topology.machine import numbers

_PREFIX = "Ctxflow"
Ad = Mapping[str, Any]


def to_classad(topology: Topology) -> str:
    """Return the attributes that a startd cron job prints, one a line; the line "-" ends them.

    >>> print(to_classad(Topology("m", (0,), (NumaNode(0, 0),))))
    CtxflowSockets = { 0 }
    CtxflowNumaNodes = { [ Id = 0; Socket = 0 ] }
    CtxflowCoreGroups = { }
    CtxflowGpus = { }
    CtxflowTopologyProblems = { }
    -
    """
    attributes = {
        "Sockets": topology.sockets,
        "NumaNodes": [{"Id": node.id, "Socket": node.socket} for node in topology.numa_nodes],
        "CoreGroups": [
            {"Id": g.id, "Socket": g.socket, "Numa": g.numa, "Cores": ranges([core.id for core in g.cores])}
            for g in topology.groups
        ],
        "Gpus": [
            {"Index": gpu.index, "Id": gpu.uuid, "Model": gpu.model, "MemoryMb": gpu.memory}
            | {"Numa": gpu.numa, "Socket": topology.socket_of(gpu.numa), "Bus": gpu.bus}
            for gpu in topology.gpus
        ],
        "TopologyProblems": topology.problems,
    }
    return "\n".join([*(f"{_PREFIX}{name} = {write_value(value)}" for name, value in attributes.items()), "-"])


def from_ads(ads: Iterable[Ad]) -> list[Topology]:
    """Return the topology of each machine that some slots' ads are of, with who uses its GPUs.

    :param ads: as `condor_status -json` has them, as htcondor2 gives them, or as `parse_ads` reads them; all slots of a
        machine belong to one topology. Ads of no machine are one machine's.
    :raises ValueError: if there are none.
    """
    machines: dict[str, list[dict[str, Any]]] = {}
    for ad in ads:
        plain = {str(name).lower(): _plain(value) for name, value in ad.items()}
        machines.setdefault(str(plain.get("machine") or plain.get("name") or "unnamed"), []).append(plain)
    if not machines:
        raise ValueError("there are no machine ads: give those of condor_status -long or -json")
    return [_of_machine(name, slots) for name, slots in machines.items()]


def _plain(value: Any) -> Any:
    """Return a value as plain data: JSON has expressions as "/Expr(...)/"; htcondor2 has its own types of records."""
    if isinstance(value, str) and value.startswith("/Expr(") and value.endswith(")/"):
        return _plain(parse_value(value[6:-2]))
    if isinstance(value, Mapping):
        return {str(name).lower(): _plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(each) for each in value]
    return value


def _of_machine(name: str, slots: Sequence[dict[str, Any]]) -> Topology:
    published = next((slot for slot in slots if slot.get("ctxflowgpus") is not None), None)
    try:
        topology = _published(name, published) if published else _discovered(name, slots)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the ads of {name} tell a topology that cannot be read: {error!r}") from None
    users = dict(_users(slots))
    gpus = tuple(dataclasses.replace(gpu, used_by=_user_of(gpu, users)) for gpu in topology.gpus)
    return dataclasses.replace(topology, gpus=gpus)


def _published(name: str, ad: Ad) -> Topology:
    groups = [
        CoreGroup(int(g["id"]), g["socket"], g["numa"], tuple(Core(core) for core in numbers(g["cores"])))
        for g in ad.get("ctxflowcoregroups") or ()
    ]
    gpus = [
        Gpu(int(gpu["index"]), gpu["id"], gpu["model"], gpu["memorymb"], gpu["numa"], gpu["bus"])
        for gpu in ad["ctxflowgpus"]
    ]
    nodes = tuple(NumaNode(int(node["id"]), node["socket"]) for node in ad.get("ctxflownumanodes") or ())
    sockets = tuple(int(socket) for socket in ad.get("ctxflowsockets") or ())
    problems = tuple(str(problem) for problem in ad.get("ctxflowtopologyproblems") or ())
    return Topology(name, sockets, nodes, tuple(groups), tuple(gpus), problems)


def _discovered(name: str, slots: Sequence[Ad]) -> Topology:
    cards: dict[str, Ad] = {}
    for slot in slots:
        for key, value in slot.items():
            if key.startswith("gpus_") and isinstance(value, Mapping) and (value.get("id") or value.get("deviceuuid")):
                cards.setdefault(str(value.get("id") or value["deviceuuid"]), value)
    ordered = sorted(cards.values(), key=lambda card: (str(card.get("devicepcibusid") or ""), str(card.get("id"))))
    gpus = tuple(_discovered_gpu(index, card) for index, card in enumerate(ordered))
    sockets_of: dict[int, set[int | None]] = {}
    for card in ordered:
        if card.get("numanode") is not None:
            sockets_of.setdefault(int(card["numanode"]), set()).add(card.get("socket"))
    known = sorted(sockets_of.items())
    nodes = tuple(NumaNode(numa, next(iter(sockets)) if len(sockets) == 1 else None) for numa, sockets in known)
    sockets = tuple(sorted({node.socket for node in nodes if node.socket is not None}))
    problems = [f"the ads of {name} tell nothing of its cores: publish them with `ctxflow topo --classad`"]
    lost = [str(gpu.index) for gpu in gpus if gpu.numa is None]
    if lost:
        problems.append(f"the ads of {name} do not say which NUMA node GPU {', '.join(lost)} is near")
    return Topology(name, sockets, nodes, (), gpus, tuple(problems))


def _discovered_gpu(index: int, card: Ad) -> Gpu:
    uuid = str(card.get("deviceuuid") or card.get("id"))
    memory, numa = card.get("globalmemorymb"), card.get("numanode")
    return Gpu(
        index,
        uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}",
        card.get("devicename"),
        None if memory is None else int(memory),
        None if numa is None else int(numa),
        card.get("devicepcibusid"),
    )


def _users(slots: Iterable[Ad]) -> Iterable[tuple[str, str]]:
    """Yield which job holds each assigned GPU."""
    for slot in slots:
        if slot.get("state") == "Claimed" and isinstance(slot.get("assignedgpus"), str):
            who = " ".join(str(slot[key]) for key in ("remoteowner", "jobid") if slot.get(key))
            for gpu in slot["assignedgpus"].split(","):
                yield gpu.strip(), who or str(slot.get("name", "unknown"))


def _user_of(gpu: Gpu, users: Mapping[str, str]) -> str | None:
    """Return who uses a GPU, which HTCondor names by the beginning of its UUID."""
    uuid, name = gpu.uuid or "", f"CUDA{gpu.index}"
    return next((user for held, user in users.items() if held and (uuid.startswith(held) or held == name)), None)


_TOKEN = re.compile(
    r'\s*(?:("(?:[^"\\]|\\.)*")|([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)(?![\w.])|([A-Za-z_]\w*)|(.))', re.S
)
_LINE = re.compile(r"\s*([A-Za-z_][\w.]*)\s*=(?!=)\s*(.*)$", re.S)
_WORDS = {"true": True, "false": False, "undefined": None, "error": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def parse_ads(text: str) -> list[dict[str, Any]]:
    """Return the ads of `condor_status -long`: an attribute a line, empty lines (or "-", of cron jobs) between ads.

    :raises ValueError: for a line that is no attribute, saying which.

    >>> parse_ads('Machine = "m"\\nGPUs_1 = [ Id = "GPU-1"; NumaNode = 3 ]\\nStart = (Owner == "bob")\\n')
    [{'Machine': 'm', 'GPUs_1': {'Id': 'GPU-1', 'NumaNode': 3}, 'Start': None}]
    """
    ads: list[dict[str, Any]] = [{}]
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("-"):
            ads.append({})
            continue
        found = _LINE.match(line)
        if not found:
            raise ValueError(f"line {number} is no attribute of a machine ad: {line.strip()[:80]}")
        ads[-1][found[1]] = parse_value(found[2])
    return [ad for ad in ads if ad]


def parse_value(text: str) -> Any:
    """Return a literal, a list or a record; None for anything else.

    >>> parse_value('{ 1, 2.5, [ a = true; b = "x\\\\"y" ] }')
    [1, 2.5, {'a': True, 'b': 'x"y'}]
    >>> parse_value("1 + 1") is None
    True
    """
    tokens = [match.groups() for match in _TOKEN.finditer(text) if match[0].strip()]
    try:
        value, rest = _value(tokens, 0)
    except (ValueError, IndexError):
        return None
    return value if rest == len(tokens) else None


def _value(tokens: Sequence[tuple[str | None, ...]], at: int) -> tuple[Any, int]:
    string, number, word, sign = tokens[at]
    if string is not None:
        return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), string[1:-1], flags=re.S), at + 1
    if number is not None:
        return (float(number) if re.search("[.eE]", number) else int(number)), at + 1
    if word is not None and word.lower() in _WORDS:
        return _WORDS[word.lower()], at + 1
    if sign == "{":
        return _list(tokens, at + 1)
    if sign == "[":
        return _record(tokens, at + 1)
    raise ValueError("an expression")


def _list(tokens: Sequence[tuple[str | None, ...]], at: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    while tokens[at][3] != "}":
        value, at = _value(tokens, at)
        found.append(value)
        if tokens[at][3] == ",":
            at += 1
        elif tokens[at][3] != "}":
            raise ValueError("an expression")
    return found, at + 1


def _record(tokens: Sequence[tuple[str | None, ...]], at: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    while tokens[at][3] != "]":
        name = tokens[at][2]
        if name is None or tokens[at + 1][3] != "=":
            raise ValueError("no record")
        try:
            found[name], at = _value(tokens, at + 2)
            ended = tokens[at][3] in (";", "]")
        except ValueError:
            ended = False
        if not ended:
            # An expression inside a record: it alone is None.
            found[name] = None
            at = _skip(tokens, at)
        if tokens[at][3] == ";":
            at += 1
    return found, at + 1


def _skip(tokens: Sequence[tuple[str | None, ...]], at: int) -> int:
    depth = 0
    while depth or tokens[at][3] not in (";", "]"):
        depth += {"[": 1, "{": 1, "(": 1, "]": -1, "}": -1, ")": -1}.get(tokens[at][3] or "", 0)
        at += 1
    return at


def write_value(value: Any) -> str:
    """Return a value as an expression on one line.

    :raises TypeError: for what has no such form.

    >>> write_value([{"Id": "GPU-1", "Numa": None}, 2, True])
    '{ [ Id = "GPU-1"; Numa = undefined ], 2, true }'
    """
    if value is None:
        return "undefined"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    if isinstance(value, Mapping):
        return f"[ {'; '.join(f'{name} = {write_value(each)}' for name, each in value.items())} ]"
    if isinstance(value, list | tuple):
        return f"{{ {', '.join(map(write_value, value))} }}" if value else "{ }"
    raise TypeError(f"a machine ad cannot hold {value!r}")


def read_topologies(text: str, name: str) -> list[Topology]:
    """Return the topologies of all machines in a file.

    :param text: JSON of `ctxflow topo --json`, FlexTopo resources of Kubernetes as YAML or JSON (one, or a list), or
        machine ads of HTCondor (`condor_status -long` or `-json`).
    :param name: of the file, for messages.
    :raises ValueError: if it is none of these, or is wrong in itself, in one sentence.
    """
    try:
        data = _data(text)
        if data is None:
            return from_ads(parse_ads(text))
        items = data.get("items", [data]) if isinstance(data, dict) else data
        if not isinstance(items, list) or not items or not all(isinstance(each, dict) for each in items):
            raise ValueError("it holds no topology")
        if not any({"nodes", "spec"} & set(each) for each in items):
            return from_ads(items)
        return [from_graph(each) for each in items]
    except RecursionError:
        raise ValueError(f"{name}: it is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"{name}: {' '.join(str(error).split())}") from None


def _data(text: str) -> Any:
    """Return JSON's or YAML's data; None if the text is neither."""
    if text.lstrip().startswith(("{", "[")):
        return json.loads(text)
    if not any(line.startswith("apiVersion:") for line in text.splitlines()):
        return None
    try:
        import yaml
    except ImportError:
        advice = how_to_install_package("PyYAML")
        raise ValueError(f"YAML needs PyYAML: {advice}, or give JSON (kubectl get -o json)") from None
    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {error}") from None
