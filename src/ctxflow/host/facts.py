"""What a worker tells about itself when it joins, its GPUs and where they are among it, without loading a framework."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence

from ctxflow.host.library_process import interpreter
from ctxflow.host.processes import descendants, listening_ports, machine_memory
from ctxflow.host.vine_messages import WorkerFacts
from ctxflow.installing import __version__
from ctxflow.topology import Topology, of_gpus, ordered, to_graph
from ctxflow.topology.machine import read_machine


def facts(worker: int, cores: int, cache: str) -> WorkerFacts:
    """Return what a worker tells; `problem` says why a fact is missing that matters.

    From then on this process, and those that it starts, see their GPUs in the order of the machine's topology.

    :param worker: the vine_worker's process.
    :param cores: those that TaskVine gave the host, 0 if it gave none.
    :param cache: the host's cache.
    """
    topology = machine_of([device.id for device in cuda_devices()])
    order_devices(topology)
    devices = cuda_devices()
    first = devices[0] if devices else None
    version, problem = _python_version()
    with contextlib.suppress(OSError):
        os.makedirs(cache, exist_ok=True)
    place = None
    try:
        place = os.stat(cache).st_dev
    except OSError as error:
        problem = problem or f"the worker's directory cannot be written: {error}"
    return WorkerFacts(
        host=socket.gethostname(),
        ctxflow=__version__,
        problem=problem,
        pid=os.getpid(),
        worker=os.environ.get("CTXFLOW_WORKER_NAME"),
        python=version,
        cores=cores or len(os.sched_getaffinity(0)),
        memory=_memory(),
        gpus=len(devices),
        gpu_model=first.model if first else None,
        gpu_memory=first.memory if first else None,
        scratch=os.path.dirname(cache),
        cache=cache,
        device=place,
        port=_transfer_port(worker),
        tier=os.environ.get("CTXFLOW_TIER"),
        region=os.environ.get("CTXFLOW_REGION"),
        job=os.environ.get("CTXFLOW_JOB"),
        machine=_machine(),
        devices=[device.id for device in devices],
        topology=to_graph(topology) if topology is not None else None,
        pin=_number(os.environ.get("CTXFLOW_PIN")),
    )


def _machine() -> str | None:
    """Return what HTCondor (in the ad that it gives every job), Slurm or Kubernetes calls the machine."""
    with contextlib.suppress(OSError, KeyError), open(os.environ["_CONDOR_MACHINE_AD"]) as file:
        for line in file:
            name, _, value = line.partition("=")
            if name.strip().lower() == "machine":
                return value.strip().strip('"')
    return os.environ.get("CTXFLOW_MACHINE") or os.environ.get("SLURMD_NODENAME")


def _transfer_port(worker: int) -> int | None:
    """Return where the vine_worker serves files to its peers: a process of its own does, which names itself so."""
    for each in descendants(worker):
        with contextlib.suppress(OSError), open(f"/proc/{each}/cmdline", "rb") as file:
            if file.read().startswith(b"vine_worker [transfer"):
                return next(iter(listening_ports(each)), None)
    return None


def _python_version() -> tuple[str | None, str | None]:
    """Return the version of the Python that library processes run, and what is wrong with it."""
    program = interpreter()
    if program == sys.executable:
        return platform.python_version(), None
    command = [program, "-c", "import platform; print(platform.python_version())"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"the Python that CTXFLOW_PYTHON names does not start: {error}"
    return done.stdout.strip(), None


def _memory() -> int:
    """Return the memory in bytes that the vine_worker gave its library, else the machine's."""
    given = _number(os.environ.get("MEMORY"))  # In MB.
    return int(given) << 20 if given else machine_memory()


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


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
    """Return the GPUs that this process may use: those in CUDA_VISIBLE_DEVICES, else all that the driver knows."""
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
