"""Which GPUs this process may use, in which order, and where they are, without loading any framework.

What does not live here: who gets which.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence

from ctxflow.topology import Topology, of_gpus, ordered
from ctxflow.topology.machine import read_machine


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU.

    :ivar id: what CUDA_VISIBLE_DEVICES takes.
    :ivar memory: bytes, None if unknown.
    """

    id: str
    model: str | None = None
    memory: int | None = None


def cuda_devices(environment: Mapping[str, str] = os.environ) -> list[Device]:
    """The GPUs that this process may use: those in CUDA_VISIBLE_DEVICES, else all that the driver knows."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    # The testbed's cards are advertised, not real: it says which one a job was lent.
    advertised = environment.get("CTXFLOW_TESTBED_GPU")
    known = [] if advertised else _nvidia_smi()
    if visible is None:
        return known
    ids = [part.strip() for part in visible.split(",") if part.strip() not in ("", "-1")]
    by_id = {device.id: device for device in known} | {str(n): device for n, device in enumerate(known)}
    return [dataclasses.replace(by_id.get(i, Device(i, advertised)), id=i) for i in ids]


def machine_of(names: Sequence[str]) -> Topology | None:
    """This machine's topology, with the GPUs of these names whether the driver tells of them or not; without cores.

    None without GPUs, and where the kernel says nothing.
    """
    try:
        return of_gpus(read_machine(), names) if names else None
    except (OSError, ValueError):
        return None


def order_devices(topology: Topology | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have processes that start from now on see the GPUs in the topology's order, neighbours side by side."""
    names = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if topology is not None and len(names) > 1:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(ordered(topology, [name.strip() for name in names]))


def _nvidia_smi() -> list[Device]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    devices = []
    for line in answer.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3 and parts[0].startswith("GPU-"):
            devices.append(Device(parts[0], parts[1], int(parts[2]) << 20 if parts[2].isdigit() else None))
    return devices
