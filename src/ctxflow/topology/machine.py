"""Read this machine's topology, from the kernel's /sys and the NVIDIA driver, and which GPUs a process may use.

GPUs with their PCI addresses come from NVML, else nvidia-smi, else the driver's /proc files.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from ctxflow.topology.hardware import Gpu, NumaNode, Topology, core_groups, of_gpus, ordered, position

GROUP_SIZE = 8
_NVIDIA = "0x10de"
_DISPLAYS = ("0x0300", "0x0302")
_ROOT = Path("/")


def read_machine(group_size: int = GROUP_SIZE) -> Topology:
    """Return the topology of the machine that this runs on.

    What cannot be found out is None, and said in the topology's `problems`.

    :raises ValueError: if `group_size` is no number of cores, or the kernel says nothing of CPUs.
    """
    return read_tree(_ROOT, socket.gethostname(), group_size, installed_nvml(), run_nvidia_smi)


def read_tree(root: Path, name: str, group_size: int, nvml: Any, query: Query | None) -> Topology:
    """Return the topology of a machine whose /sys and /proc are under a folder.

    :param nvml: the module pynvml, None to go without; `query` runs nvidia-smi, None to go without.
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
    placed = [(cpu, sockets[cpu], numa_of.get(cpu)) for cpu in _siblings_together(system, cpus)]
    groups = core_groups(placed, group_size)
    numa_nodes = tuple(NumaNode(node, _only(socket for _, socket, numa in placed if numa == node)) for node in nodes)
    gpus, said = _gpus(root, [node.id for node in numa_nodes], nvml, query)
    return Topology(name, tuple(sorted(set(sockets.values()))), numa_nodes, groups, gpus, tuple(problems + said))


def numbers(text: str) -> list[int]:
    """Return a list of CPUs or nodes as the kernel writes it.

    >>> numbers("0-2,8")
    [0, 1, 2, 8]
    """
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def _numa(folder: Path, cpus: list[int]) -> tuple[dict[int, int], list[int], list[str]]:
    """Return the NUMA node of each CPU, the nodes, and what is wrong. A kernel that reports none has one."""
    online = _read(folder / "online")
    nodes = numbers(online) if online else []
    if not nodes:
        return dict.fromkeys(cpus, 0), [0], []
    found = {cpu: node for node in nodes for cpu in numbers(_read(folder / f"node{node}/cpulist") or "")}
    lost = [cpu for cpu in cpus if cpu not in found]
    problems = [f"the kernel does not say which NUMA node CPU {', '.join(map(str, lost))} belongs to"] if lost else []
    return found, nodes, problems


def _siblings_together(system: Path, cpus: list[int]) -> list[int]:
    """Return CPUs in order, the threads of one core beside each other."""

    def first_thread(cpu: int) -> int:
        siblings = _read(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        return min(numbers(siblings), default=cpu) if siblings else cpu

    return sorted(cpus, key=lambda cpu: (first_thread(cpu), cpu))


def _only(values: Iterable[int]) -> int | None:
    different = set(values)
    return different.pop() if len(different) == 1 else None


def _gpus(root: Path, nodes: list[int], nvml: Any, query: Query | None) -> tuple[tuple[Gpu, ...], list[str]]:
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
        if numa not in nodes:  # The kernel says -1 where the firmware tells nothing.
            numa = nodes[0] if len(nodes) == 1 else None
        if numa is None:
            problems.append(f"the kernel does not say which NUMA node GPU {card.index} ({card.bus}) is near")
        gpus.append(dataclasses.replace(card, numa=numa))
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


Query = Callable[[list[str]], str]
"""Runs a program and gives what it printed; raises OSError or subprocess.SubprocessError if that fails."""


def installed_nvml() -> Any:
    """Return the module pynvml, None if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def cards(root: Path, nvml: Any, query: Query | None) -> tuple[list[Gpu], list[str]]:
    """Return the GPUs, without their NUMA nodes, and what went wrong, one sentence each."""
    problems: list[str] = []
    found, said = _from_nvml(nvml)
    if not found:
        problems += said
        found, said = _from_nvidia_smi(query)
    if found:
        return found, said
    problems += said
    found = _from_proc(root)
    # The driver's own files are the truth: then it does not matter what the tools said.
    return found, [] if found else problems


def run_nvidia_smi(words: list[str]) -> str:
    """Run nvidia-smi, which may hang where a card is broken: 20 s at most."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise FileNotFoundError("nvidia-smi is not installed")
    return subprocess.run([program, *words], capture_output=True, text=True, timeout=20, check=True).stdout


def kernel_address(bus: str) -> str:
    """Return a PCI address as the kernel writes it.

    >>> kernel_address("00000000:3B:00.0")
    '0000:3b:00.0'
    """
    domain, _, rest = bus.strip().lower().partition(":")
    return f"{domain[-4:]:>04}:{rest}"


def _from_nvml(nvml: Any) -> tuple[list[Gpu], list[str]]:
    if nvml is None:
        return [], []
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError) as error:
        return [], [f"NVML does not start: {_text(error)}"]
    found: list[Gpu] = []
    problems: list[str] = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                found.append(_card(nvml, index))
            except nvml.NVMLError as error:
                problems.append(f"GPU {index} does not answer and is left out: {_text(error)}")
    except nvml.NVMLError as error:
        problems.append(f"NVML cannot count the GPUs: {_text(error)}")
    finally:
        nvml.nvmlShutdown()
    return found, problems


def _card(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total) >> 20
    bus = kernel_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    uuid, model = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
    return Gpu(index, uuid, model, memory, bus=bus)


def _text(given: object) -> str:
    return given.decode(errors="replace") if isinstance(given, bytes) else str(given)


_COLUMNS = "index,uuid,name,memory.total,pci.bus_id"


def _from_nvidia_smi(query: Query | None) -> tuple[list[Gpu], list[str]]:
    if query is None:
        return [], []
    try:
        answer = query([f"--query-gpu={_COLUMNS}", "--format=csv,noheader,nounits"])
    except FileNotFoundError:
        return [], []
    except subprocess.CalledProcessError as error:
        said = " ".join(f"{error.stdout or ''} {error.stderr or ''}".split()) or f"exit status {error.returncode}"
        return [], [f"nvidia-smi fails: {said[:200]}"]
    except (OSError, subprocess.SubprocessError) as error:
        return [], [f"nvidia-smi fails: {error}"]
    found: list[Gpu] = []
    problems: list[str] = []
    for line in answer.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 5 and parts[0].isdigit() and parts[1].startswith("GPU-"):
            memory = int(parts[3]) if parts[3].isdigit() else None
            found.append(Gpu(int(parts[0]), parts[1], parts[2], memory, bus=kernel_address(parts[4])))
        elif line.strip() and "No devices were found" not in line:
            problems.append(f"nvidia-smi says what is no GPU: {line.strip()[:200]}")
    return found, problems


def _from_proc(root: Path) -> list[Gpu]:
    found: list[Gpu] = []
    for folder in sorted(root.glob("proc/driver/nvidia/gpus/*")):
        try:
            lines = (folder / "information").read_text(encoding="utf-8").splitlines()
        except OSError:
            continue
        about = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        minor, uuid = about.get("Device Minor", ""), about.get("GPU UUID")
        index = int(minor) if minor.isdigit() else len(found)
        # Without its firmware a card tells question marks for its UUID.
        known = uuid if uuid and "?" not in uuid else None
        found.append(Gpu(index, known, about.get("Model") or None, bus=kernel_address(folder.name)))
    return found


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU that a process may use."""

    id: str  # What CUDA_VISIBLE_DEVICES takes.
    model: str | None = None
    memory: int | None = None  # In bytes.


def cuda_devices(environment: Mapping[str, str] = os.environ) -> list[Device]:
    """Return the GPUs that this process may use: those in CUDA_VISIBLE_DEVICES, else all that the driver knows."""
    visible, cards = environment.get("CUDA_VISIBLE_DEVICES"), _from_nvidia_smi(run_nvidia_smi)[0]
    if visible is None:
        return [_device(str(card.uuid), card) for card in cards]
    names = [name for part in visible.split(",") if (name := part.strip()) not in _NO_DEVICE]
    known = Topology("", gpus=tuple(cards))
    places = [position(known, name) for name in names]
    return [Device(n) if p is None else _device(n, cards[p]) for n, p in zip(names, places, strict=True)]


GPU_MEMORY = "CTXFLOW_GPU_MEMORY"
"""The variable of a library process that says how many bytes of each GPU its context declares."""


def declared_share(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return the share of each of its GPUs' memory that a context declares; None if it declares none, or it is unknown.

    It is rounded down, so that contexts which fit beside each other do so by their shares.
    """
    declared = environment.get(GPU_MEMORY, "")
    sizes = [device.memory for device in cuda_devices(environment)] if declared.isdigit() else []
    known = [size for size in sizes if size]
    if not known or len(known) < len(sizes):
        return None
    return math.floor(int(declared) / min(known) * 1e4) / 1e4


_NO_DEVICE = ("", "-1", "10000")  # The last is what HTCondor gives to jobs without GPUs.


def _device(name: str, card: Gpu) -> Device:
    return Device(name, card.model, None if card.memory is None else card.memory << 20)


def machine_of(names: Sequence[str]) -> Topology | None:
    """Return this machine's topology without cores, with all GPUs of these names; None if unknown, or without GPUs."""
    try:
        return of_gpus(read_machine(), names) if names else None
    except (OSError, ValueError):
        return None


def order_devices(topology: Topology | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have processes that start from now on see the GPUs in the topology's order, neighbours side by side."""
    names = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if topology is not None and len(names) > 1:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(ordered(topology, [name.strip() for name in names]))
