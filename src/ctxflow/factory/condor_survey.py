"""What an HTCondor pool has for a worker: which of its machines and GPUs will do, and why none does.

`survey_of` is a pure function on machine ads; `ask` makes the one query that fetches them. What does not live here:
submitting workers (condor.py), and the advice for a pool that has none (condor_advice.py).
"""

from __future__ import annotations

import getpass
import importlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ctxflow.factory.condor_advice import why_none
from ctxflow.factory.condor_description import excluded_text
from ctxflow.factory.condor_machines import Criterion, Need, machines_of, untold_gpus
from ctxflow.factory.condor_places import places_of
from ctxflow.factory.provider import Survey, WorkerJob
from ctxflow.sites.classad_text import attributes, conditions
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


def survey_of(ads: Sequence[Any], job: WorkerJob, implied: Sequence[str] = ()) -> Survey:
    """What machines that advertise these ads have for a job. Pure, but for HTCondor's parser.

    A partitionable slot is a machine with all that it has, whoever uses it; a static slot is one too. Dynamic slots
    only tell which GPUs a busy machine has.

    :param ads: slot ads, with dynamic ones.
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
    return Survey(
        machines=len(fitting),
        free=len(free),
        gpu_models=dict(models) if job.gpus else {},
        advice=advice,
        workers=sum(need.workers_on(machine) for machine in fitting),
    )


def need_of(job: WorkerJob, implied: Sequence[str] = ()) -> Need:
    """What a job asks of a machine, in HTCondor's units."""
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
    """What requirements may look at of the job."""
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
            except Exception:  # condor_submit will say so, of the job.
                continue
    return ad


def ask(job: WorkerJob, htcondor: Any, schedd: str | None, pool: str | None) -> Survey:
    """Survey a pool: one query for machines, another if a GPU is in no list just then, and a word with the schedd.

    :param htcondor: the module htcondor2.
    :raises Exception: the bindings' own, if the pool does not answer.
    """
    collector = htcondor.Collector(pool) if pool else htcondor.Collector()
    implied = _implied(htcondor)
    found = survey_of(_slots(job, htcondor, collector, implied), job, implied)
    refusal = refusal_of(htcondor, collector, schedd, pool)
    if refusal is None:
        return found
    return Survey(
        found.machines, found.free, found.gpu_models, may_submit=False, advice=(refusal, *found.advice),
        workers=found.workers,
    )  # fmt: skip


def driver_refusal(htcondor: Any) -> str | None:
    """Why no driver can be submitted on this machine, None if it can."""
    try:
        here = htcondor.Collector().locate(htcondor.DaemonType.Schedd)
    except (htcondor.HTCondorException, OSError, ValueError):
        here = None
    if here is None:
        return "this machine has no schedd that could take the driver: give the command where people call condor_submit"
    return refusal_of(htcondor, None, None, None)


def ask_for_places(job: WorkerJob, htcondor: Any, pool: str | None) -> list[Topology]:
    """The machines that a worker may be on, with who uses their GPUs.

    :raises Exception: the bindings' own, if the pool does not answer.
    """
    collector = htcondor.Collector(pool) if pool else htcondor.Collector()
    implied = _implied(htcondor)
    return places_of(_slots(job, htcondor, collector, implied, _PLACES), need_of(job, implied))


def _implied(htcondor: Any) -> list[str]:
    """What condor_submit requires of machines by itself."""
    return [f'Arch == "{htcondor.param.get("ARCH", "X86_64")}"', 'OpSys == "LINUX"', "HasFileTransfer"]


def _slots(
    job: WorkerJob, htcondor: Any, collector: Any, implied: Sequence[str], more: Sequence[str] = ()
) -> Sequence[Any]:
    """The ads of all slots, with what a job's requirements look at."""
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
    """Why the schedd takes no jobs of this user, None if it does, by its own word: nothing is submitted."""
    lost = "condor_status -schedd lists their names: write one as schedd, or run this where people call condor_submit"
    try:
        anywhere = htcondor.DaemonType.Schedd
        ad = collector.locate(anywhere, schedd) if schedd or pool else htcondor.Collector().locate(anywhere)
    except (htcondor.HTCondorException, OSError, ValueError):
        ad = None
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
    if name in ("root", "condor"):  # Root is told to be HTCondor's own user.
        return "HTCondor takes no jobs of root, nor of its own user condor: be another user"
    return None
