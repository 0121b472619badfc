"""This machine's topology, from the kernel's /sys and the NVIDIA driver.

What does not live here: who uses what (the batch system knows), how it is written or drawn.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path

from ctxflow.topology.model import Gpu, NumaNode, Topology, core_groups
from ctxflow.topology.nvidia import Nvml, Query, cards, installed_nvml, run_nvidia_smi

GROUP_SIZE = 8
_NVIDIA = "0x10de"
_DISPLAYS = ("0x0300", "0x0302")
_ROOT = Path("/")


def read_machine(group_size: int = GROUP_SIZE) -> Topology:
    """The topology of the machine that this runs on.

    What cannot be found out is None, and said in the topology's `problems`.

    :param group_size: the cores of a core group.
    :raises ValueError: if that is no number of cores, or the kernel says nothing of CPUs.
    """
    return read_tree(_ROOT, socket.gethostname(), group_size, installed_nvml(), run_nvidia_smi)


def read_tree(root: Path, name: str, group_size: int, nvml: Nvml | None, query: Query | None) -> Topology:
    """The topology of a machine whose /sys and /proc are under a folder.

    :param name: the machine's name.
    :param nvml: the module pynvml, None to go without.
    :param query: runs nvidia-smi, None to go without.
    """
    system = root / "sys/devices/system"
    online = _read(system / "cpu/online")
    if online is None:
        raise ValueError(f"{system}/cpu/online cannot be read: topology is read from Linux's /sys")
    cpus = sorted(numbers(online))
    numa_of, nodes, problems = _numa(system / "node", cpus)
    socket_of = {cpu: _number(system / f"cpu/cpu{cpu}/topology/physical_package_id") for cpu in cpus}
    # Where the firmware tells no sockets, as on some virtual machines, there is one.
    sockets = {cpu: 0 if number is None or number < 0 else number for cpu, number in socket_of.items()}
    groups = core_groups(
        ((cpu, sockets[cpu], numa_of.get(cpu)) for cpu in _siblings_together(system, cpus)), group_size
    )
    numa_nodes = tuple(
        NumaNode(node, _only(sockets[cpu] for cpu in cpus if numa_of.get(cpu) == node)) for node in nodes
    )
    gpus, said = _gpus(root, [node.id for node in numa_nodes], nvml, query)
    return Topology(name, tuple(sorted(set(sockets.values()))), numa_nodes, groups, gpus, tuple(problems + said))


def numbers(text: str) -> list[int]:
    """A list of CPUs or nodes as the kernel writes it.

    >>> numbers("0-2,8")
    [0, 1, 2, 8]
    """
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def _numa(folder: Path, cpus: list[int]) -> tuple[dict[int, int], list[int], list[str]]:
    """The NUMA node of each CPU, the nodes, and what is wrong. A kernel that knows none has one."""
    online = _read(folder / "online")
    nodes = numbers(online) if online else []
    if not nodes:
        return dict.fromkeys(cpus, 0), [0], []
    found = {cpu: node for node in nodes for cpu in numbers(_read(folder / f"node{node}/cpulist") or "")}
    lost = [cpu for cpu in cpus if cpu not in found]
    problems = [f"the kernel does not say which NUMA node CPU {', '.join(map(str, lost))} belongs to"] if lost else []
    return found, nodes, problems


def _siblings_together(system: Path, cpus: list[int]) -> list[int]:
    """CPUs in order, the threads of one core beside each other."""

    def first_thread(cpu: int) -> int:
        siblings = _read(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        return min(numbers(siblings), default=cpu) if siblings else cpu

    return sorted(cpus, key=lambda cpu: (first_thread(cpu), cpu))


def _only(values: Iterable[int]) -> int | None:
    different = set(values)
    return different.pop() if len(different) == 1 else None


def _gpus(root: Path, nodes: list[int], nvml: Nvml | None, query: Query | None) -> tuple[tuple[Gpu, ...], list[str]]:
    found, problems = cards(root, nvml, query)
    buses = _nvidia_devices(root)
    if not found:
        if not buses:
            return (), []
        why = "; ".join(problems) or "no driver is loaded"
        count = f"{len(buses)} NVIDIA GPU{'s are' if len(buses) > 1 else ' is'}"
        return (), [f"{count} on the PCI bus ({', '.join(buses)}), but none can be used: {why}"]
    gpus = []
    for card in found:
        numa = _number(root / f"sys/bus/pci/devices/{card.bus}/numa_node")
        if numa is None or numa not in nodes:
            # The kernel says -1 where the firmware tells nothing; with one NUMA node there is nothing to tell.
            numa = nodes[0] if len(nodes) == 1 else None
        if numa is None:
            problems.append(f"the kernel does not say which NUMA node GPU {card.index} ({card.bus}) is near")
        gpus.append(Gpu(card.index, card.uuid, card.model, card.memory, numa, card.bus))
    return tuple(gpus), problems


def _nvidia_devices(root: Path) -> list[str]:
    found = []
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        vendor, kind = _read(device / "vendor"), _read(device / "class")
        if vendor == _NVIDIA and kind is not None and kind.startswith(_DISPLAYS):
            found.append(device.name)
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None
