"""Query an HTCondor pool for what it has for a worker: which machines and GPUs will do, and why none does.

`survey_of` and `why_none` are pure functions on machine ads; `ask` makes the query that fetches them.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ctxflow.factory.condor_jobs import excluded_text
from ctxflow.factory.condor_machines import Criterion, Need, PoolMachine, machines_of, places_of, untold_gpus
from ctxflow.factory.provider import PoolSurvey, WorkerJob
from ctxflow.sites.provider_keys import attributes, conditions
from ctxflow.sites.site_problems import suggestion
from ctxflow.topology import Topology

_PROJECTION = (
    "Name", "Machine", "MyAddress", "SlotType", "PartitionableSlot", "DynamicSlot", "State", "Start",
    "Cpus", "Memory", "Disk", "GPUs", "TotalSlotCpus", "TotalSlotMemory", "TotalSlotDisk", "TotalSlotGPUs",
    # The collector sends the ads of the single GPUs along with the list that refers to them.
    "AvailableGPUs", "AssignedGPUs", "GPUs_DeviceName", "GPUs_Capability", "GPUs_GlobalMemoryMb", "GPUs_DriverVersion",
    "CUDADeviceName", "CUDACapability", "CUDAGlobalMemoryMb", "CUDADriverVersion",
)  # fmt: skip
_PLACES = (
    "RemoteOwner", "JobId", "CtxflowSockets", "CtxflowNumaNodes", "CtxflowCoreGroups", "CtxflowGpus",
    "CtxflowTopologyProblems",
)  # fmt: skip


def survey_of(ads: Sequence[Any], job: WorkerJob, implied: Sequence[str] = ()) -> PoolSurvey:
    """Return what machines that advertise these slot ads have for a job. Pure, but for HTCondor's parser.

    A partitionable slot is a machine with all that it has, whoever uses it; a static slot is one too. Dynamic slots
    only show which GPUs a busy machine has.

    :param implied: requirements that condor_submit adds by itself.
    """
    machines = machines_of(ads)
    need = need_of(job, implied)
    fitting = [machine for machine in machines if need.met_by(machine)]
    free = [machine for machine in fitting if machine.open and need.met_by(machine, now=True)]
    models = Counter(gpu.model for machine in fitting for gpu in machine.gpus if need.gpu_will_do(gpu.ad))
    advice: tuple[str, ...] = ()
    if not fitting:
        advice = tuple(why_none(machines, need))
    elif not free:
        who = f"all {len(fitting)} machines that will do are" if len(fitting) > 1 else "the one machine that will do is"
        advice = (f"{who} busy now: workers wait until others end",)
    workers = sum(need.workers_on(machine) for machine in fitting)
    gpu_models = dict(models) if job.gpus else {}
    return PoolSurvey(len(fitting), len(free), gpu_models, advice=advice, workers=workers)


def need_of(job: WorkerJob, implied: Sequence[str] = ()) -> Need:
    """Return what a job requires of a machine, in HTCondor's units."""
    own = _conditions(job, "requirements")
    image = str(job.options.get("image") or "")
    container = ["HasContainer"] if image else []
    if image.startswith("docker://"):
        container.append("HasDockerURL")
    elif image.endswith(".sif"):
        container.append("HasSIF")
    criteria = [Criterion("requirements", each) for each in own]
    criteria += [Criterion("image", each) for each in container]
    if job.excluded:
        criteria.append(Criterion("excluded", f"!stringListIMember(Machine, {excluded_text(job.excluded)})"))
    mentioned = {name.lower() for each in own for name in attributes(each)}
    for each in implied:  # As condor_submit does: what the author speaks of himself is left to him.
        if not mentioned & {name.lower() for name in attributes(each)}:
            criteria.append(Criterion("implied", each))
    return Need(
        cores=job.cores,
        memory=math.ceil(job.memory / 2**20),
        disk=math.ceil(job.disk / 2**10),
        gpus=job.gpus,
        criteria=tuple(criteria),
        gpu_criteria=tuple(Criterion("require_gpus", each) for each in _conditions(job, "require_gpus")),
        job=_job_ad(job),
    )


def _conditions(job: WorkerJob, option: str) -> list[str]:
    expression = job.options.get(option)
    return conditions(str(expression)) if expression else []


def _job_ad(job: WorkerJob) -> Any:
    """Return the job's attributes that requirements may look at."""
    classad = importlib.import_module("classad2")
    ad = classad.ClassAd()
    ad["Owner"] = getpass.getuser()
    ad["RequestCpus"] = job.cores
    ad["RequestMemory"] = math.ceil(job.memory / 2**20)
    ad["RequestDisk"] = math.ceil(job.disk / 2**10)
    if job.gpus:
        ad["RequestGPUs"] = job.gpus
    for key, value in dict(job.options.get("submit", {})).items():
        if str(key).startswith("+"):
            try:
                ad[str(key)[1:]] = classad.ExprTree(str(value))
            except Exception:  # condor_submit will refuse the job.
                continue
    return ad


def ask(job: WorkerJob, htcondor: Any, schedd: str | None, pool: str | None) -> PoolSurvey:
    """Survey a pool, with the module htcondor2: query machines, GPUs that are in no list just then, and the schedd."""
    collector = htcondor.Collector(pool) if pool else htcondor.Collector()
    implied = _implied(htcondor)
    found = survey_of(_slots(job, htcondor, collector, implied), job, implied)
    refusal = refusal_of(htcondor, collector, schedd, pool)
    return found if refusal is None else replace(found, may_submit=False, advice=(refusal, *found.advice))


def driver_refusal(htcondor: Any) -> str | None:
    """Return why no driver can be submitted on this machine, None if it can."""
    here = None
    with contextlib.suppress(htcondor.HTCondorException, OSError, ValueError):
        here = htcondor.Collector().locate(htcondor.DaemonType.Schedd)
    if here is None:
        return "this machine has no schedd that could take the driver: give the command where people call condor_submit"
    return refusal_of(htcondor, None, None, None)


def ask_for_places(job: WorkerJob, htcondor: Any, pool: str | None) -> list[Topology]:
    """Return the machines that a worker may be on, with who uses their GPUs."""
    collector = htcondor.Collector(pool) if pool else htcondor.Collector()
    implied = _implied(htcondor)
    return places_of(_slots(job, htcondor, collector, implied, _PLACES), need_of(job, implied))


def _implied(htcondor: Any) -> list[str]:
    """Return what condor_submit requires of machines by itself."""
    return [f'Arch == "{htcondor.param.get("ARCH", "X86_64")}"', 'OpSys == "LINUX"', "HasFileTransfer"]


def _slots(
    job: WorkerJob, htcondor: Any, collector: Any, implied: Sequence[str], more: Sequence[str] = ()
) -> Sequence[Any]:
    """Return the ads of all slots, with what a job's requirements look at."""
    need = need_of(job, implied)
    wanted = {name.lower(): name for each in need.criteria for name in attributes(each.expression)}
    ads: Sequence[Any] = collector.query(htcondor.AdType.Slot, projection=[*_PROJECTION, *more, *wanted.values()])
    if untold := untold_gpus(ads):
        theirs = collector.query(htcondor.AdType.Slot, "DynamicSlot =!= true", ["Name", *untold])
        by_name = {ad["Name"]: ad for ad in theirs}
        for ad in ads:
            if ad.get("Name") in by_name:
                ad.update(by_name[ad["Name"]])
    return ads


def refusal_of(htcondor: Any, collector: Any, schedd: str | None, pool: str | None) -> str | None:
    """Return why the schedd takes no jobs of this user, None if it does; nothing is submitted."""
    lost = "condor_status -schedd lists their names: write one as schedd, or run this where people call condor_submit"
    kind = htcondor.DaemonType.Schedd
    ad = None
    with contextlib.suppress(htcondor.HTCondorException, OSError, ValueError):
        ad = collector.locate(kind, schedd) if schedd or pool else htcondor.Collector().locate(kind)
    if ad is None:
        return f"there is no schedd {schedd!r} in the pool: {lost}" if schedd else f"this machine has no schedd: {lost}"
    try:
        answer = htcondor.ping(ad, "WRITE")
    except (htcondor.HTCondorException, OSError, ValueError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        return f"the schedd {ad.get('Name')} does not answer ({why}): see whether condor_q works on this machine"
    user = str(answer.get("MyRemoteUserName", ""))
    name = user.partition("@")[0]
    if answer.get("AuthorizationSucceeded") is False or name == "unauthenticated":
        return (
            f"the schedd {ad.get('Name')} takes no jobs of {user or 'yours'}: ask its administrator, or run this on a "
            "machine where you may call condor_submit"
        )
    if name in ("root", "condor"):  # Root is reported as HTCondor's own user.
        return "HTCondor takes no jobs of root, nor of its own user condor: be another user"
    return None


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
    """One requirement, in words, and why no machine passes, if none does."""

    what: str
    passes: Callable[[PoolMachine], bool]
    alone: Callable[[], str]


def why_none(machines: Sequence[PoolMachine], need: Need) -> Iterator[str]:
    """Yield what excludes all machines: each requirement that none meets; else the one that most depends on."""
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
    hint = "ask for less"
    if left:
        number, count = left.most_common(1)[0]
        hint = f"without {tests[number].what} there would be {count}"
    yield f"no machine meets all that is asked: of {len(machines)}, {parts}; {hint}"


def _tests(machines: Sequence[PoolMachine], need: Need) -> Iterator[_Test]:
    for criterion in need.criteria:
        yield _criterion_test(criterion, machines, need)
    yield _size_test("Cpus", "cores", "cores", need.cores, 0, machines)
    yield _size_test("Memory", "memory_gb", "GB of memory", need.memory, 2**20, machines)
    yield _size_test("Disk", "disk_gb", "GB of disk", need.disk, 2**10, machines)
    if need.gpus:
        yield from _gpu_tests(machines, need)


def _criterion_test(criterion: Criterion, machines: Sequence[PoolMachine], need: Need) -> _Test:
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


def _size_test(
    resource: str, key: str, unit: str, size: int, bytes_of_one: int, machines: Sequence[PoolMachine]
) -> _Test:
    def shown(amount: float) -> str:
        """Return an amount in GB if it is one of bytes, rounded down, so that what is written fits."""
        return f"{int(amount * bytes_of_one / 1e8) / 10 if bytes_of_one else amount:g}"

    def alone() -> str:
        most = shown(max(machine.amount(resource) for machine in machines))
        return f"no machine has {shown(size)} {unit}: the most is {most}; write {key} = {most} or less"

    return _Test(f"{shown(size)} {unit}", lambda machine: machine.amount(resource) >= size, alone)


def _gpu_tests(machines: Sequence[PoolMachine], need: Need) -> Iterator[_Test]:
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
    missing = [each for each in need.gpu_criteria if not any(each.met_by_gpu(ad) for ad in every)]
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


def _no_gpu(criterion: Criterion, gpus: Sequence[Any]) -> str:
    models = Counter(str(ad.get("DeviceName")) for ad in gpus if ad.get("DeviceName"))
    match = _EQUALS.fullmatch(criterion.expression)
    if match and match[1].lower() == "devicename" and models:
        close = suggestion(match[2], models, "")
        told = ", ".join(f"{count} {model}" for model, count in models.most_common())
        return f"no GPU is an '{match[2]}': the pool has {told}" + (f"; {close}" if close else "")
    return f"no GPU meets {criterion.expression} in require_gpus: {_values(criterion, gpus, _GPU_ATTRIBUTES)}"


def _values(criterion: Criterion, ads: Sequence[Any], names: Iterable[str] = _MACHINE_ATTRIBUTES) -> str:
    """Return what there is of the attributes that a condition looks at."""
    told = []
    for name in attributes(criterion.expression):
        found = [value for ad in ads if isinstance(value := ad.get(name), (bool, int, float, str))]
        hint = suggestion(name, set(names) - {name}, "see condor_status -long")
        told.append(f"{name} is {_span(found)}" if found else f"nothing is said of {name}: {hint}")
    return "; ".join(told) or "it is never true: correct it, or leave it out"


def _span(values: Sequence[Any]) -> str:
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        low, high = min(values), max(values)
        return f"{low:g}" if low == high else f"from {low:g} to {high:g}"
    counted = Counter(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    often = sorted(counted.items(), key=lambda entry: (-entry[1], entry[0]))
    listed = ", ".join(value for value, _ in often[:_TOLD])
    return f"{listed}, and {len(counted) - _TOLD} others" if len(counted) > _TOLD else listed
