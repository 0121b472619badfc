"""The NVIDIA GPUs of this machine with their PCI addresses: from NVML, else nvidia-smi, else the driver's /proc files.

What does not live here: which NUMA node a PCI address is near (machine.py), which GPUs a process may use
(ctxflow.host.devices).
"""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

Query = Callable[[list[str]], str]
"""Runs a program and gives what it printed; raises OSError or subprocess.SubprocessError if that fails."""


@dataclasses.dataclass(frozen=True, slots=True)
class Card:
    """A GPU as the driver knows it.

    :ivar bus: its PCI address as the kernel writes it, such as "0000:17:00.0".
    :ivar memory: in MB.
    """

    index: int
    uuid: str | None = None
    model: str | None = None
    memory: int | None = None
    bus: str | None = None


class Nvml(Protocol):
    """What is used of the module pynvml (of nvidia-ml-py)."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> Any:
        """Open the library."""

    def nvmlShutdown(self) -> Any:
        """Close it."""

    def nvmlDeviceGetCount(self) -> int:
        """How many GPUs there are."""

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        """A handle of one."""

    def nvmlDeviceGetUUID(self, handle: Any) -> str | bytes:
        """Its UUID."""

    def nvmlDeviceGetName(self, handle: Any) -> str | bytes:
        """Its model."""

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        """Its memory, in bytes."""

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        """Its place on the PCI bus."""


def installed_nvml() -> Nvml | None:
    """The module pynvml, None if it is not installed."""
    try:
        module: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    return module  # type: ignore[no-any-return]


def cards(root: Path, nvml: Nvml | None, query: Query | None) -> tuple[list[Card], list[str]]:
    """The GPUs, and what went wrong, one sentence each.

    :param root: the folder that holds proc/.
    :param nvml: the module pynvml, None to go without.
    :param query: runs nvidia-smi, None to go without.
    """
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
    """A PCI address as the kernel writes it.

    >>> kernel_address("00000000:3B:00.0")
    '0000:3b:00.0'
    """
    domain, _, rest = bus.strip().lower().partition(":")
    return f"{domain[-4:]:>04}:{rest}"


def _from_nvml(nvml: Nvml | None) -> tuple[list[Card], list[str]]:
    if nvml is None:
        return [], []
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError) as error:
        return [], [f"NVML does not start: {_text(error)}"]
    found: list[Card] = []
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


def _card(nvml: Nvml, index: int) -> Card:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total) >> 20
    bus = kernel_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    return Card(index, _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle)), memory, bus)


def _text(given: object) -> str:
    return given.decode(errors="replace") if isinstance(given, bytes) else str(given)


_COLUMNS = "index,uuid,name,memory.total,pci.bus_id"


def _from_nvidia_smi(query: Query | None) -> tuple[list[Card], list[str]]:
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
    found: list[Card] = []
    problems: list[str] = []
    for line in answer.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 5 and parts[0].isdigit() and parts[1].startswith("GPU-"):
            memory = int(parts[3]) if parts[3].isdigit() else None
            found.append(Card(int(parts[0]), parts[1], parts[2], memory, kernel_address(parts[4])))
        elif line.strip() and "No devices were found" not in line:
            problems.append(f"nvidia-smi says what is no GPU: {line.strip()[:200]}")
    return found, problems


def _from_proc(root: Path) -> list[Card]:
    found: list[Card] = []
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
        found.append(Card(index, known, about.get("Model") or None, None, kernel_address(folder.name)))
    return found
