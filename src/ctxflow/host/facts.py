"""What a worker tells about itself when it joins.

What does not live here: what follows from it (executors/).
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import subprocess
import sys

from ctxflow.host.devices import cuda_devices, machine_of, order_devices
from ctxflow.host.process import interpreter
from ctxflow.host.processes import descendants, listening_ports, machine_memory
from ctxflow.host.vine_messages import WorkerFacts
from ctxflow.topology import to_graph
from ctxflow.version import __version__


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
    """What the batch system calls the machine: HTCondor, in the ad that it gives every job; Slurm and Kubernetes."""
    with contextlib.suppress(OSError, KeyError), open(os.environ["_CONDOR_MACHINE_AD"]) as file:
        for line in file:
            name, _, value = line.partition("=")
            if name.strip().lower() == "machine":
                return value.strip().strip('"')
    return os.environ.get("CTXFLOW_MACHINE") or os.environ.get("SLURMD_NODENAME")


def _transfer_port(worker: int) -> int | None:
    """Where the vine_worker serves files to its peers: a process of its own does, which names itself so."""
    for each in descendants(worker):
        with contextlib.suppress(OSError), open(f"/proc/{each}/cmdline", "rb") as file:
            if file.read().startswith(b"vine_worker [transfer"):
                return next(iter(listening_ports(each)), None)
    return None


def _python_version() -> tuple[str | None, str | None]:
    """The version of the Python that library processes run, and what is wrong with it."""
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
    """The memory in bytes that the vine_worker gave its library, else the machine's."""
    given = _number(os.environ.get("MEMORY"))  # In MB.
    return int(given) << 20 if given else machine_memory()


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
