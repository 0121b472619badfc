"""What the hosts advertise: GPU models, their numbers (the pervasive-context paper's Table 1), topology.

Pure functions; nothing here touches the machine.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Iterable, Sequence

from .settings import NUMA_CORES, NUMA_NODES, SOCKETS, Settings


@dataclasses.dataclass(frozen=True)
class Model:
    """A GPU model: its number on the paper's campus, what HTCondor is told, its speed beside an A10."""

    name: str
    campus: int
    capability: float
    memory_mb: int
    speed: float


MODELS = (
    Model("NVIDIA Quadro RTX 6000", 106, 7.5, 24576, 1.12),
    Model("NVIDIA A10", 78, 8.6, 24576, 1.00),
    Model("NVIDIA TITAN X (Pascal)", 69, 6.1, 12288, 0.71),
    Model("NVIDIA GeForce GTX 1080 Ti", 63, 6.1, 11264, 0.71),
    Model("NVIDIA RTX 6000 Ada Generation", 36, 8.9, 49152, 1.60),
    Model("NVIDIA GeForce GTX TITAN X", 34, 5.2, 12288, 0.50),
    Model("NVIDIA A40", 26, 8.6, 49152, 1.16),
    Model("NVIDIA H100 80GB HBM3", 15, 9.0, 81920, 5.58),
)
"""Table 1. Speeds are ratios of memory bandwidth, which bounds token generation; TITAN X (Pascal) is
the ratio of the paper's own times per inference (0.2727 s / 0.3846 s), and the two other cards without tensor
cores are scaled by the same 0.71 / 0.80."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One advertised GPU: its model, identity, PCI bus and, on a --numa host, its NUMA node and socket."""

    model: Model
    uuid: str
    bus: str
    numa: int | None = None

    @property
    def short(self) -> str:
        """The name that HTCondor gives it: GPU- and the first eight digits of its UUID."""
        return self.uuid[:12]

    @property
    def socket(self) -> int | None:
        """The socket that its NUMA node belongs to."""
        return None if self.numa is None else self.numa * SOCKETS // NUMA_NODES


def apportion(seats: int) -> list[Model]:
    """Deal `seats` out over the models in the campus's proportions, most frequent models first.

    Huntington and Hill's method: every model gets one before any gets two, if there are seats enough.

    >>> [apportion(12).count(model) for model in MODELS]
    [2, 2, 2, 2, 1, 1, 1, 1]
    """
    counts = dict.fromkeys(MODELS, 0)

    def claim(model: Model) -> float:
        held = counts[model]
        return model.campus / math.sqrt(held * (held + 1)) if held else math.inf

    for _ in range(seats):
        counts[max(MODELS, key=lambda model: (claim(model), model.campus))] += 1
    return [model for model in MODELS for _ in range(counts[model])]


def gpus_of(settings: Settings) -> dict[str, list[Gpu]]:
    """Every execute host's GPUs: a --numa host holds one model, others a cut of the dealt list."""
    hosts = settings.execute_hosts
    if settings.numa:
        models = [model for model in apportion(len(hosts)) for _ in range(NUMA_NODES)]
    else:
        models = apportion(len(hosts) * settings.gpus)
    found: dict[str, list[Gpu]] = {}
    for position, host in enumerate(hosts):
        mine = models[position * settings.gpus : (position + 1) * settings.gpus]
        found[host] = [_gpu(host, number, model, settings.numa) for number, model in enumerate(mine)]
    return found


def _gpu(host: str, number: int, model: Model, numa: bool) -> Gpu:
    identity = f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'gpu{number}.{host}.testbed')}"
    return Gpu(model, identity, f"0000:{0x11 + 0x10 * number:02x}:00.0", number if numa else None)


def inventory(gpus: list[Gpu]) -> str:
    """The text that a host's GPU inventory script prints for HTCondor."""
    if not gpus:
        return 'DetectedGPUs="0"\n'
    lines = [f'DetectedGPUs="{", ".join(gpu.short for gpu in gpus)}"', "Common=[ DriverVersion=12.4; ]"]
    for gpu in gpus:
        place = "" if gpu.numa is None else f"NumaNode={gpu.numa}; Socket={gpu.socket}; "
        lines.append(
            f'{gpu.short.replace("-", "_")}=[ id="{gpu.short}"; DeviceUuid="{gpu.uuid[4:]}"; '
            f'DeviceName="{gpu.model.name}"; DevicePciBusId="{gpu.bus}"; Capability={gpu.model.capability}; '
            f"GlobalMemoryMb={gpu.model.memory_mb}; {place}]"
        )
    return "\n".join(lines) + "\n"


def speeds(gpus: list[Gpu]) -> str:
    """The table that the job wrapper reads: a line for each GPU with its name and its speed."""
    return "".join(f"{gpu.short} {gpu.model.speed:.2f}\n" for gpu in gpus)


def cards(gpus: list[Gpu]) -> str:
    """The table that the host's nvidia-smi reads (nvidia_smi.py)."""
    lines = ["index, uuid, name, memory.total, pci.bus_id"]
    for number, gpu in enumerate(gpus):
        lines.append(f"{number}, {gpu.uuid}, {gpu.model.name}, {gpu.model.memory_mb}, 0000{gpu.bus.upper()}")
    return "\n".join(lines) + "\n"


def topology(gpus: list[Gpu]) -> dict[str, str]:
    """A --numa host's /sys and /proc files by path: CPUs, NUMA nodes and devices as a kernel shows them."""
    cores = NUMA_NODES * NUMA_CORES
    everything = f"0-{cores - 1}"
    files = {f"sys/devices/system/cpu/{name}": everything for name in ("online", "possible", "present")}
    files |= {f"sys/devices/system/node/{name}": f"0-{NUMA_NODES - 1}" for name in ("online", "possible", "has_cpu")}
    for core in range(cores):
        socket, place = core * SOCKETS // cores, f"sys/devices/system/cpu/cpu{core}/topology"
        files |= {f"{place}/physical_package_id": str(socket), f"{place}/core_id": str(core)}
        package = range(socket * cores // SOCKETS, (socket + 1) * cores // SOCKETS)
        for names, members in (
            (("thread_siblings", "core_cpus"), [core]),
            (("core_siblings", "package_cpus"), package),
        ):
            for name in names:
                files[f"{place}/{name}"] = _mask(members)
                files[f"{place}/{name}_list"] = _span(members)
    for node in range(NUMA_NODES):
        place = f"sys/devices/system/node/node{node}"
        members = range(node * NUMA_CORES, (node + 1) * NUMA_CORES)
        files |= {f"{place}/cpulist": _span(members), f"{place}/cpumap": _mask(members)}
        files[f"{place}/distance"] = " ".join(str(_distance(node, other)) for other in range(NUMA_NODES))
    for number, gpu in enumerate(gpus):
        place = f"sys/bus/pci/devices/{gpu.bus}"
        files |= {
            f"{place}/vendor": "0x10de",
            f"{place}/class": "0x030200",
            f"{place}/numa_node": str(gpu.numa),
        }
        files[f"{place}/local_cpulist"] = files[f"sys/devices/system/node/node{gpu.numa}/cpulist"]
        files[f"proc/driver/nvidia/gpus/{gpu.bus}/information"] = (
            f"Model: \t\t {gpu.model.name}\nGPU UUID: \t {gpu.uuid}\n"
            f"Bus Location: \t {gpu.bus}\nDevice Minor: \t {number}"
        )
    return {path: text + "\n" for path, text in files.items()}


def _span(members: Sequence[int]) -> str:
    """The kernel's list of consecutive CPUs."""
    return f"{members[0]}-{members[-1]}" if len(members) > 1 else str(members[0])


def _mask(members: Iterable[int]) -> str:
    """The kernel's map of CPUs: hexadecimal, in groups of 32 bits."""
    digits = f"{sum(1 << member for member in members):016x}"
    return f"{digits[:8]},{digits[8:]}"


def _distance(node: int, other: int) -> int:
    if node == other:
        return 10
    return 12 if node * SOCKETS // NUMA_NODES == other * SOCKETS // NUMA_NODES else 32
