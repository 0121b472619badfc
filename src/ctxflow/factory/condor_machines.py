"""HTCondor's slot ads as machines with GPUs, what a worker needs of one, and workers pinned to certain GPUs."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ctxflow.factory.provider import Provider, ProviderError, WorkerJob
from ctxflow.sites.site_model import Tier
from ctxflow.topology import Topology, to_graph
from ctxflow.topology.machine_ads import from_ads

_GPU_KEYS = ("DeviceName", "Capability", "GlobalMemoryMb", "DriverVersion")
_TOTALS = {"Cpus": "TotalSlotCpus", "Memory": "TotalSlotMemory", "Disk": "TotalSlotDisk", "GPUs": "TotalSlotGPUs"}


@dataclass(frozen=True)
class SlotGpu:
    """A GPU of a slot: its model and its ad, and whether it is free."""

    model: str
    ad: Any
    free: bool


@dataclass(frozen=True)
class PoolMachine:
    """A partitionable or a static slot.

    :param whole: its ad, as it would be if nobody used it; `now`, its ad.
    :param open: whether it takes jobs at all now: its owner lets it, and if it is static it is unclaimed.
    :param divisible: whether several workers may share it.
    """

    whole: Any
    now: Any
    gpus: tuple[SlotGpu, ...]
    open: bool
    divisible: bool

    def amount(self, resource: str, now: bool = False) -> float:
        """Return how much of Cpus, Memory (MiB) or Disk (KiB) it has."""
        found = (self.now if now else self.whole).get(resource, 0)
        return float(found) if isinstance(found, (int, float)) else 0.0


@dataclass(frozen=True)
class Criterion:
    """One condition that machines or GPUs must meet, and the key that it comes from."""

    source: str
    expression: str

    def met_by_gpu(self, ad: Any) -> bool:
        """Return whether it is true of a GPU's ad."""
        return _expression(self.expression).eval(ad) is True


@dataclass(frozen=True)
class Need:
    """What a worker requires of a machine: memory in MiB, disk in KiB, conditions, and the job ad that they look at."""

    cores: int
    memory: int
    disk: int
    gpus: int
    criteria: tuple[Criterion, ...]
    gpu_criteria: tuple[Criterion, ...]
    job: Any

    def met_by(self, machine: PoolMachine, now: bool = False) -> bool:
        """Return whether a machine will do: as a whole, or with what is free of it now."""
        return (
            all(self.holds(each, machine.now if now else machine.whole) for each in self.criteria)
            and machine.amount("Cpus", now) >= self.cores
            and machine.amount("Memory", now) >= self.memory
            and machine.amount("Disk", now) >= self.disk
            and len(self.gpus_on(machine, now)) >= self.gpus
            and not (now and self._is_refused(machine))
        )

    def holds(self, criterion: Criterion, ad: Any) -> bool:
        """Return whether a condition is true of an ad; a bare name is the job's first, then the ad's."""
        return _expression(criterion.expression).eval(_joined(ad, self.job), ad) is True

    def gpu_will_do(self, ad: Any) -> bool:
        """Return whether one GPU meets all that is asked of GPUs."""
        return all(each.met_by_gpu(ad) for each in self.gpu_criteria)

    def gpus_on(self, machine: PoolMachine, now: bool = False) -> list[SlotGpu]:
        """Return the GPUs of a machine that will do."""
        return [gpu for gpu in machine.gpus if self.gpus and (gpu.free or not now) and self.gpu_will_do(gpu.ad)]

    def workers_on(self, machine: PoolMachine) -> int:
        """Return how many workers fit on a machine that nobody else uses."""
        if not machine.divisible:
            return 1
        sizes = {"Cpus": self.cores, "Memory": self.memory, "Disk": self.disk}
        shares = [machine.amount(resource) // size for resource, size in sizes.items() if size]
        if self.gpus:
            shares.append(len(self.gpus_on(machine)) // self.gpus)
        return int(min(shares, default=1))

    def _is_refused(self, machine: PoolMachine) -> bool:
        """Return whether the machine's owner refuses this job; an undefined expression is no refusal."""
        if "Start" not in machine.now:
            return False
        start: Any = machine.now.lookup("Start")
        return bool(start.eval(machine.now, self.job) is False if hasattr(start, "eval") else start is False)


def machines_of(ads: Sequence[Any]) -> list[PoolMachine]:
    """Return the machines that slot ads are of."""
    known = _known_gpus(ads)
    return [_machine(ad, known) for ad in ads if ad.get("DynamicSlot") is not True]


def untold_gpus(ads: Sequence[Any]) -> list[str]:
    """Return the names of GPUs that slots refer to and no ad at hand lists, as for a moment after a job."""
    known = _known_gpus(ads)
    of_machines = [ad for ad in ads if ad.get("DynamicSlot") is not True and "AvailableGPUs" in ad]
    return sorted({name for ad in of_machines for name in _gpu_names(ad) if (_address(ad), name.lower()) not in known})


def _known_gpus(ads: Sequence[Any]) -> dict[tuple[str, str], Any]:
    """Return the ads of GPUs, by the machine's address and their names."""
    known: dict[tuple[str, str], Any] = {}
    for ad in ads:
        for name in ad:
            if name.lower().startswith("gpus_") and isinstance(value := ad[name], Mapping):
                known.setdefault((_address(ad), name.lower()), value)
    return known


def _gpu_names(ad: Any) -> list[str]:
    """Return the attributes that are the ads of a slot's GPUs."""
    assigned = [each.strip() for each in str(ad.get("AssignedGPUs") or "").split(",")]
    return [f"GPUs_{each.replace('-', '_')}" for each in assigned if each]


def _machine(ad: Any, known: Mapping[tuple[str, str], Any]) -> PoolMachine:
    divisible = ad.get("PartitionableSlot") is True
    whole = _joined(ad)
    for key, total in _TOTALS.items():
        if isinstance(ad.get(total), (int, float)):
            whole[key] = ad[total]
    state = str(ad.get("State", ""))
    is_open = state == "Unclaimed" if not divisible else state not in ("Owner", "Drained", "Preempting")
    return PoolMachine(whole, ad, tuple(_gpus(ad, whole, known, is_open)), is_open, divisible)


def _gpus(ad: Any, whole: Any, known: Mapping[tuple[str, str], Any], is_open: bool) -> list[SlotGpu]:
    """Return a slot's GPUs, by its list of devices, or by their number and common properties if it has none."""
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
        found.append(SlotGpu(str(of_gpu.get("DeviceName", "of a model that nobody tells")), of_gpu, is_free))
    return found


def _names_in(references: Any) -> set[str]:
    """Return the names in a list of references, { GPUs_GPU_1, GPUs_GPU_2 }."""
    if isinstance(references, (list, tuple)):
        return {str(each).strip().lower() for each in references}
    return {each.strip().lower() for each in str(references).strip(" {}\n\t").split(",") if each.strip()}


def _common(ad: Any) -> Any:
    """Return what all GPUs of a slot have in common, as the ad of one: newer and older names."""
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
    """Return an ad with all attributes of others; of the last, where several have one."""
    joined = classad().ClassAd()
    for ad in ads:
        joined.update(ad)
    return joined


@functools.cache
def _expression(text: str) -> Any:
    return classad().ExprTree(text)


def classad() -> Any:
    """Return the module classad2, which comes with htcondor2."""
    return importlib.import_module("classad2")


PRIORITY = 10
"""How much more urgent such a job is than others of its tier, which must not take the GPUs that were made free."""


def pinned(tier: Tier, pin: int, machine: str, devices: Sequence[str]) -> Tier:
    """Return a tier whose one worker is on this machine, with these GPUs and a proportional part of the rest.

    :param pin: the number by which the worker says what it was requested for; `devices`: UUIDs.

    >>> there = pinned(Tier(cores=2, require_gpus="Capability > 7"), 3, "n1.pool", ["GPU-0a1b2c3d-4e", "GPU-5f"])
    >>> there.gpus, there.cores, there.requirements
    (2, 4, '(Machine == "n1.pool")')
    """
    share = -(-len(devices) // max(1, tier.gpus))
    return tier.model_copy(
        update={
            "gpus": len(devices),
            "cores": tier.cores * share,
            "memory_gb": tier.memory_gb * share,
            "disk_gb": None if tier.disk is None else tier.disk * share / 1e9,
            "requirements": _both(tier.requirements, f'Machine == "{machine}"'),
            "require_gpus": _both(tier.require_gpus, these_gpus(devices)),
            "priority": (tier.priority or 0) + PRIORITY,
            "env": {**tier.env, "CTXFLOW_PIN": str(pin)},
        }
    )


def unpinned(tier: Tier) -> Tier:
    """Return a tier whose workers keep off the place that a worker with more GPUs has had.

    HTCondor gives the claim of a job that has ended to the next that fits: one with a single GPU would keep all of it.

    >>> unpinned(Tier(machine_gpus=8)).requirements
    '(DynamicSlot =!= true || TARGET.GPUs <= MY.RequestGPUs)'
    """
    if not tier.machine_gpus or not tier.gpus:
        return tier
    alone = _both(tier.requirements, "DynamicSlot =!= true || TARGET.GPUs <= MY.RequestGPUs")
    return tier.model_copy(update={"requirements": alone})


def these_gpus(devices: Sequence[str]) -> str:
    """Return the condition that a GPU is one of these, by UUID: with "GPU-" or without, as HTCondor has them.

    Its `Id` will not do: the negotiator knows it, but not the startd when it binds devices, which then refuses the job.

    >>> print(these_gpus(["GPU-0a1b2c3d-4e5f"]))
    DeviceUuid =?= "GPU-0a1b2c3d-4e5f" || DeviceUuid =?= "0a1b2c3d-4e5f"
    """
    names = [name for device in devices for name in (device, device.removeprefix("GPU-"))]
    return " || ".join(f'DeviceUuid =?= "{name}"' for name in names)


def _both(one: str | None, other: str) -> str:
    return f"({one}) && ({other})" if one else f"({other})"


def places_of(ads: Sequence[Any], need: Need) -> list[Topology]:
    """Return the topologies of the machines, among those of the slot ads, that such a worker may be on.

    GPUs are left out that are in no ad just now (for a moment after a job), will not do, or have no UUID.
    """
    fitting = [each for each in machines_of(ads) if all(need.holds(one, each.whole) for one in need.criteria)]
    names = {str(machine.now.get("Machine")) for machine in fitting}
    unfit = [_uuid(gpu.ad) for machine in fitting for gpu in machine.gpus if not need.gpu_will_do(gpu.ad)]
    found = from_ads([ad for ad in ads if ad.get("Machine") in names]) if names else []
    kept = [
        tuple(gpu for gpu in each.gpus if gpu.uuid is not None and not gpu.uuid.startswith(tuple(filter(None, unfit))))
        for each in found
    ]
    return [dataclasses.replace(each, groups=(), gpus=gpus) for each, gpus in zip(found, kept, strict=True)]


def _uuid(gpu: Any) -> str:
    """Return the beginning of a GPU's UUID, as topologies have it; "" if its ad has none."""
    told = str(gpu.get("DeviceUuid") or gpu.get("Id") or "")
    return told if not told or told.startswith(("GPU-", "MIG-")) else f"GPU-{told}"


@runtime_checkable
class Surveying(Protocol):
    """A provider that can list its machines."""

    def machines(self, job: WorkerJob) -> list[Topology]:
        """Return the machines that a worker may be on, with who uses their GPUs; raise ProviderError on failure."""


def located_by(provider: Provider, job: WorkerJob) -> tuple[dict[str, Any], str]:
    """Return the machines that a worker may be on, their graphs by name, and why there are none."""
    if not isinstance(provider, Surveying):
        return {}, "its batch system does not tell which machines it has: leave machine_gpus out"
    try:
        found = provider.machines(job)
    except ProviderError as error:
        return {}, str(error)
    return {each.name: to_graph(dataclasses.replace(each, groups=())) for each in found}, ""


@dataclasses.dataclass
class Places:
    """A tier's jobs that are pinned to machines, by number; the caller holds the lock.

    :ivar wanted: those that are still to be submitted; `asked`: whether the machines are to be surveyed.

    >>> places = Places()
    >>> places.submitted(1, ["7.0"]), places.pin_of("7.0"), places.forgo(1), places.pin_of("7.0")
    ([], 1, ['7.0'], None)
    """

    wanted: dict[int, WorkerJob] = dataclasses.field(default_factory=dict)
    jobs: dict[int, str] = dataclasses.field(default_factory=dict)
    asked: bool = False
    _forgone: set[int] = dataclasses.field(default_factory=set)

    @property
    def due(self) -> bool:
        """Whether there is something to do."""
        return self.asked or bool(self.wanted)

    def submitted(self, pin: int, jobs: list[str]) -> list[str]:
        """Record the jobs of a pinned worker; return those that are not wanted any more."""
        if pin in self._forgone:
            return jobs
        self.jobs.update((pin, job) for job in jobs)
        return []

    def forgo(self, pin: int) -> list[str]:
        """Withdraw a pinned worker; return the jobs to remove."""
        self._forgone.add(pin)
        if self.wanted.pop(pin, None) is not None or pin not in self.jobs:
            return []
        return [self.jobs.pop(pin)]

    def pin_of(self, job: str) -> int | None:
        """Return the number of the worker that a job was submitted for, None if it is none of these."""
        return next((pin for pin, name in self.jobs.items() if name == job), None)
