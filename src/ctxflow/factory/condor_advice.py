"""Why no machine of an HTCondor pool will do for a worker: the requirement that excludes them, and what there is.

Pure. What does not live here: deciding that none does (condor_survey.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ctxflow.factory.condor_machines import Criterion, Machine, Need
from ctxflow.sites.classad_text import attributes
from ctxflow.sites.problem import suggestion

_GPU_ATTRIBUTES = (
    "DeviceName", "Capability", "GlobalMemoryMb", "DriverVersion", "DeviceUuid", "DevicePciBusId",
    "MaxSupportedVersion", "CoresPerCU", "ComputeUnits", "ClockMhz", "ECCEnabled",
)  # fmt: skip
_MACHINE_ATTRIBUTES = (
    "Machine", "Name", "Arch", "OpSys", "OpSysAndVer", "OpSysMajorVer", "Microarch", "Memory", "Disk", "Cpus", "GPUs",
    "TotalSlotMemory", "TotalSlotCpus", "HasContainer", "HasSingularity", "HasFileTransfer", "FileSystemDomain",
    "UidDomain", "KFlops", "UtsnameRelease",
)  # fmt: skip
_EQUALS = re.compile(r'\(?\s*(?:TARGET\.)?(\w+)\s*(?:==|=\?=)\s*"([^"]*)"\s*\)?')
_TOLD = 8  # Values of an attribute that are listed.


@dataclass(frozen=True)
class _Test:
    """One thing that is asked of machines.

    :param what: in words, for a sentence about those that meet everything else.
    :param alone: why no machine passes, if none does.
    """

    what: str
    passes: Callable[[Machine], bool]
    alone: Callable[[], str]


def why_none(machines: Sequence[Machine], need: Need) -> Iterator[str]:
    """Sentences on what excludes all machines: each requirement that none meets; else the one that most depends on."""
    if not machines:
        yield "the pool has no machine: condor_status lists them; write pool where you meant another"
        return
    tests = list(_tests(machines, need))
    impossible = [test for test in tests if not any(map(test.passes, machines))]
    if impossible:
        yield from (test.alone() for test in impossible)
        return
    left: Counter[int] = Counter()
    for machine in machines:
        failed = [number for number, test in enumerate(tests) if not test.passes(machine)]
        if len(failed) == 1:
            left[failed[0]] += 1
    passing = [(test.what, sum(map(test.passes, machines))) for test in tests]
    parts = ", ".join(f"{what} by {count}" for what, count in passing if count < len(machines))
    begin = f"no machine meets all that is asked: of {len(machines)}, {parts}"
    if left:
        number, count = left.most_common(1)[0]
        yield f"{begin}; without {tests[number].what} there would be {count}"
    else:
        yield f"{begin}; ask for less"


def _tests(machines: Sequence[Machine], need: Need) -> Iterator[_Test]:
    for criterion in need.criteria:
        yield _criterion_test(criterion, machines, need)
    for resource, key, size, shown in (
        ("Cpus", "cores", need.cores, _cores),
        ("Memory", "memory_gb", need.memory, _mebibytes),
        ("Disk", "disk_gb", need.disk, _kibibytes),
    ):
        yield _size_test(resource, key, size, shown, machines)
    if need.gpus:
        yield from _gpu_tests(machines, need)


def _criterion_test(criterion: Criterion, machines: Sequence[Machine], need: Need) -> _Test:
    def alone() -> str:
        if criterion.source == "image":
            return f"no machine runs such containers ({criterion.expression}): leave image out, or write another"
        if criterion.source == "excluded":
            return "the run asks for no worker on any of the machines, since it took them for bad"
        if criterion.source == "implied":
            return f"no machine meets what HTCondor asks by itself, {criterion.expression}: {_values(criterion, whole)}"
        return f"no machine meets {criterion.expression} in requirements: {_values(criterion, whole)}"

    whole = [machine.whole for machine in machines]
    return _Test(criterion.expression, lambda machine: need.holds(criterion, machine.whole), alone)


def _size_test(resource: str, key: str, size: int, shown: Callable[[float], str], machines: Sequence[Machine]) -> _Test:
    def alone() -> str:
        most = shown(max(machine.amount(resource) for machine in machines))
        return f"no machine has {shown(size)} {_UNIT[key]}: the most is {most}; write {key} = {most} or less"

    return _Test(f"{shown(size)} {_UNIT[key]}", lambda machine: machine.amount(resource) >= size, alone)


_UNIT = {"cores": "cores", "memory_gb": "GB of memory", "disk_gb": "GB of disk"}


def _cores(amount: float) -> str:
    return f"{amount:g}"


def _mebibytes(amount: float) -> str:
    """In GB, rounded down, so that what is written fits."""
    return f"{int(amount * 2**20 / 1e8) / 10:g}"


def _kibibytes(amount: float) -> str:
    return f"{int(amount * 2**10 / 1e8) / 10:g}"


def _gpu_tests(machines: Sequence[Machine], need: Need) -> Iterator[_Test]:
    most = max(len(machine.gpus) for machine in machines)
    count = f"{need.gpus} GPU{'s' * (need.gpus > 1)}"

    def too_few() -> str:
        if not most:
            return "no machine has a GPU: write gpus = 0, or pool where you meant another"
        return f"no machine has {count}: the most is {most}; write gpus = {most} or less"

    yield _Test(count, lambda machine: len(machine.gpus) >= need.gpus, too_few)
    if most < need.gpus:
        return
    every = [gpu.ad for machine in machines for gpu in machine.gpus]
    missing = [each for each in need.gpu_criteria if not any(_alone(need, each).gpu_will_do(ad) for ad in every)]
    for each in missing:
        yield _Test(each.expression, lambda machine: False, lambda each=each: _no_gpu(each, every))  # type: ignore[misc]
    if not missing:
        best = max(len(need.gpus_on(machine)) for machine in machines)
        text = " && ".join(each.expression for each in need.gpu_criteria)
        some = f"the most is {best}" if best else "each condition is met by some GPU, and no GPU meets all"
        yield _Test(
            f"{count} with {text}",
            lambda machine: len(need.gpus_on(machine)) >= need.gpus,
            lambda: f"no machine has {count} with {text}: {some}",
        )


def _alone(need: Need, criterion: Criterion) -> Need:
    return Need(need.cores, need.memory, need.disk, need.gpus, (), (criterion,), need.job)


def _no_gpu(criterion: Criterion, gpus: Sequence[Any]) -> str:
    models = Counter(str(ad.get("DeviceName")) for ad in gpus if ad.get("DeviceName"))
    match = _EQUALS.fullmatch(criterion.expression)
    if match and match[1].lower() == "devicename" and models:
        close = suggestion(match[2], models, "")
        told = ", ".join(f"{count} {model}" for model, count in models.most_common())
        return f"no GPU is an '{match[2]}': the pool has {told}" + (f"; {close}" if close else "")
    return f"no GPU meets {criterion.expression} in require_gpus: {_values(criterion, gpus, _GPU_ATTRIBUTES)}"


def _values(criterion: Criterion, ads: Sequence[Any], names: Iterable[str] = _MACHINE_ATTRIBUTES) -> str:
    """What there is of the attributes that a condition looks at."""
    told = []
    for name in attributes(criterion.expression):
        found = [value for ad in ads if isinstance(value := ad.get(name), (bool, int, float, str))]
        if found:
            told.append(f"{name} is {_span(found)}")
        else:
            told.append(
                f"nothing is said of {name}: {suggestion(name, set(names) - {name}, 'see condor_status -long')}"
            )
    return "; ".join(told) or "it is never true: correct it, or leave it out"


def _span(values: Sequence[Any]) -> str:
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        low, high = min(values), max(values)
        return f"{low:g}" if low == high else f"from {low:g} to {high:g}"
    counted = Counter(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    often = sorted(counted.items(), key=lambda entry: (-entry[1], entry[0]))
    listed = ", ".join(value for value, _ in often[:_TOLD])
    return f"{listed}, and {len(counted) - _TOLD} others" if len(counted) > _TOLD else listed
