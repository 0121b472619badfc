"""HTCondor's slot ads as machines with GPUs, and what a worker needs of one.

What does not live here: asking for the ads (condor_survey.py) and what to say of them (condor_advice.py).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_GPU_KEYS = ("DeviceName", "Capability", "GlobalMemoryMb", "DriverVersion")
_TOTALS = {"Cpus": "TotalSlotCpus", "Memory": "TotalSlotMemory", "Disk": "TotalSlotDisk", "GPUs": "TotalSlotGPUs"}


@dataclass(frozen=True)
class Gpu:
    """One GPU: its model and its ad; whether nobody uses it."""

    model: str
    ad: Any
    free: bool


@dataclass(frozen=True)
class Machine:
    """A partitionable or a static slot.

    :param whole: its ad, as it would be if nobody used it.
    :param now: its ad.
    :param open: whether it takes jobs at all now: its owner lets it, and if it is static it is unclaimed.
    :param divisible: whether several workers may share it.
    """

    whole: Any
    now: Any
    gpus: tuple[Gpu, ...]
    open: bool
    divisible: bool

    def amount(self, resource: str, now: bool = False) -> float:
        """How much of Cpus, Memory (MiB) or Disk (KiB) it has."""
        found = (self.now if now else self.whole).get(resource, 0)
        return float(found) if isinstance(found, (int, float)) else 0.0


@dataclass(frozen=True)
class Criterion:
    """One condition that machines or GPUs must meet.

    :param source: the key that it comes from.
    """

    source: str
    expression: str


@dataclass(frozen=True)
class Need:
    """What a worker asks of a machine.

    :param memory: MiB.
    :param disk: KiB.
    :param criteria: what the machine must meet, `gpu_criteria` what each of its GPUs must.
    :param job: the worker's job ad, which conditions may look at.
    """

    cores: int
    memory: int
    disk: int
    gpus: int
    criteria: tuple[Criterion, ...]
    gpu_criteria: tuple[Criterion, ...]
    job: Any

    def met_by(self, machine: Machine, now: bool = False) -> bool:
        """Whether a machine will do: as a whole, or with what is free of it now."""
        return (
            all(self.holds(each, machine.now if now else machine.whole) for each in self.criteria)
            and machine.amount("Cpus", now) >= self.cores
            and machine.amount("Memory", now) >= self.memory
            and machine.amount("Disk", now) >= self.disk
            and len(self.gpus_on(machine, now)) >= self.gpus
            and not (now and self._is_refused(machine))
        )

    def holds(self, criterion: Criterion, ad: Any) -> bool:
        """Whether a condition is true of an ad; a name without MY. or TARGET. is the job's first, then the ad's."""
        return _expression(criterion.expression).eval(_joined(ad, self.job), ad) is True

    def gpu_will_do(self, ad: Any) -> bool:
        """Whether one GPU meets all that is asked of GPUs."""
        return all(_expression(each.expression).eval(ad) is True for each in self.gpu_criteria)

    def gpus_on(self, machine: Machine, now: bool = False) -> list[Gpu]:
        """The GPUs of a machine that will do."""
        if not self.gpus:
            return []
        return [gpu for gpu in machine.gpus if (gpu.free or not now) and self.gpu_will_do(gpu.ad)]

    def workers_on(self, machine: Machine) -> int:
        """How many workers fit on a machine that nobody else uses."""
        if not machine.divisible:
            return 1
        shares = [
            machine.amount(resource) // size
            for resource, size in (("Cpus", self.cores), ("Memory", self.memory), ("Disk", self.disk))
            if size
        ]
        if self.gpus:
            shares.append(len(self.gpus_on(machine)) // self.gpus)
        return int(min(shares, default=1))

    def _is_refused(self, machine: Machine) -> bool:
        """Whether the machine's owner refuses this job; what his expression cannot tell yet is no refusal."""
        if "Start" not in machine.now:
            return False
        start: Any = machine.now.lookup("Start")
        return bool(start.eval(machine.now, self.job) is False if hasattr(start, "eval") else start is False)


def machines_of(ads: Sequence[Any]) -> list[Machine]:
    """The machines that slot ads are of."""
    known = _known_gpus(ads)
    return [_machine(ad, known) for ad in ads if ad.get("DynamicSlot") is not True]


def untold_gpus(ads: Sequence[Any]) -> list[str]:
    """The attributes that are the ads of GPUs, of those that no ad at hand tells of.

    A GPU's ad comes with the list of what is available in some slot, and for a moment after a job no slot has it there.
    """
    known = _known_gpus(ads)
    of_machines = [ad for ad in ads if ad.get("DynamicSlot") is not True and "AvailableGPUs" in ad]
    return sorted({name for ad in of_machines for name in _gpu_names(ad) if (_address(ad), name.lower()) not in known})


def _known_gpus(ads: Sequence[Any]) -> dict[tuple[str, str], Any]:
    """The ads of GPUs, by the machine's address and their names."""
    known: dict[tuple[str, str], Any] = {}
    for ad in ads:
        for name in ad:
            if name.lower().startswith("gpus_") and isinstance(value := ad[name], Mapping):
                known.setdefault((_address(ad), name.lower()), value)
    return known


def _gpu_names(ad: Any) -> list[str]:
    """The attributes that are the ads of a slot's GPUs."""
    assigned = [each.strip() for each in str(ad.get("AssignedGPUs") or "").split(",")]
    return [f"GPUs_{each.replace('-', '_')}" for each in assigned if each]


def _machine(ad: Any, known: Mapping[tuple[str, str], Any]) -> Machine:
    divisible = ad.get("PartitionableSlot") is True
    whole = _joined(ad)
    for key, total in _TOTALS.items():
        if isinstance(ad.get(total), (int, float)):
            whole[key] = ad[total]
    state = str(ad.get("State", ""))
    is_open = state == "Unclaimed" if not divisible else state not in ("Owner", "Drained", "Preempting")
    return Machine(whole, ad, tuple(_gpus(ad, whole, known, is_open)), is_open, divisible)


def _gpus(ad: Any, whole: Any, known: Mapping[tuple[str, str], Any], is_open: bool) -> list[Gpu]:
    """A slot's GPUs, by its list of devices; by their number and what they have in common, where there is no list."""
    free = _names_in(ad.lookup("AvailableGPUs")) if "AvailableGPUs" in ad else None
    names = [name.lower() for name in _gpu_names(ad)]
    amount = whole.get("GPUs", 0)
    amount = int(amount) if isinstance(amount, (int, float)) else 0
    common = _common(ad)
    unused = ad.get("GPUs", 0) if free is None else 0
    found = []
    for number in range(max(len(names), amount)):
        name = names[number] if number < len(names) else ""
        of_gpu = known.get((_address(ad), name), common)
        is_free = is_open and (name in free if free is not None else number < unused)
        found.append(Gpu(str(of_gpu.get("DeviceName", "of a model that nobody tells")), of_gpu, is_free))
    return found


def _names_in(references: Any) -> set[str]:
    """The names in a list of references, { GPUs_GPU_1, GPUs_GPU_2 }."""
    if isinstance(references, (list, tuple)):
        return {str(each).strip().lower() for each in references}
    return {each.strip().lower() for each in str(references).strip(" {}\n\t").split(",") if each.strip()}


def _common(ad: Any) -> Any:
    """What all GPUs of a slot have in common, as the ad of one: newer and older names."""
    common = classad().ClassAd()
    for key in _GPU_KEYS:
        for prefix in ("GPUs_", "CUDA"):
            if f"{prefix}{key}" in ad:
                common[key] = ad[f"{prefix}{key}"]
                break
    return common


def _address(ad: Any) -> str:
    return str(ad.get("MyAddress") or ad.get("Machine"))


def _joined(*ads: Any) -> Any:
    """An ad with all attributes of others; of the last, where several have one."""
    joined = classad().ClassAd()
    for ad in ads:
        joined.update(ad)
    return joined


@functools.cache
def _expression(text: str) -> Any:
    return classad().ExprTree(text)


def classad() -> Any:
    """The module classad2, which comes with htcondor2."""
    return importlib.import_module("classad2")
