"""Query Slurm for what Parsl does not ask, and interpret the answers."""

from __future__ import annotations

import getpass
import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ctxflow.errors import counted
from ctxflow.factory.parsl_script import JobReport
from ctxflow.factory.provider import FoundJob, PoolSurvey, ProviderError, WorkerJob

Ask = Callable[[str], str]
"""Runs a command line and gives what it wrote, or raises a ProviderError."""

_TAKEN = {"CANCELLED", "PREEMPTED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "REVOKED"}
_FAILED = {"COMPLETED", "FAILED", "OUT_OF_MEMORY", "SPECIAL_EXIT", "LAUNCH_FAILED", "RECONFIG_FAIL"}
_SUSPENDED = {"SUSPENDED", "STOPPED"}
# Reasons for which a job waits until somebody does something about it.
_HOPELESS = re.compile(
    r"JobHeld|held|BadConstraints|PartitionTimeLimit|PartitionNodeLimit|InvalidAccount|InvalidQOS"
    r"|not in group permitted|Account.*NotAllowed|QOSNotAllowed"
)
_JOB_WIDTHS = {"JobID": 40, "Name": 200, "State": 30, "Reason": 120, "exit_code": 20, "RestartCnt": 12, "NodeList": 200}
_REPORTED = ("State", "Reason", "exit_code", "RestartCnt", "NodeList")
_NODE_WIDTHS = {
    "NodeHost": 100,
    "Partition": 100,
    "StateCompact": 20,
    "CPUsState": 40,
    "Memory": 20,
    "AllocMem": 20,
    "Gres": 400,
    "GresUsed": 400,
    "Features": 400,
}
_BEGAN = re.compile(r"no longer pending|already finished|invalid job id", re.IGNORECASE)
_NAME = re.compile(r"ctxflow\.(?P<run>[\w.-]+)\.(?P<tier>[A-Za-z0-9-]+)\.\d+\.\d+")


@dataclass(frozen=True)
class QueueEntry:
    """A job, as squeue lists it."""

    id: str
    name: str
    report: JobReport

    @property
    def run(self) -> str | None:
        """The run that it is a worker of, None if it is something else."""
        found = _NAME.fullmatch(self.name)
        return found["run"] if found else None


def squeue(ask: Ask, clusters: str | None = None) -> dict[str, QueueEntry]:
    """Return all jobs of this user, also those that ended lately, by their ids."""
    command = f"squeue --noheader --states=all --user={shlex.quote(getpass.getuser())}"
    rows = _rows(ask(f"{command} --Format={_format(_JOB_WIDTHS)}{_clusters(clusters)}"), _JOB_WIDTHS)
    return {
        row["JobID"]: QueueEntry(row["JobID"], row["Name"], report_of(*(row[name] for name in _REPORTED)))
        for row in rows
    }


def scancel(ask: Ask, ids: Sequence[str], clusters: str | None = None) -> None:
    """Cancel jobs; a ProviderError may say that one of them is gone."""
    if ids:
        ask(f"scancel{_clusters(clusters)} {' '.join(map(shlex.quote, ids))}")


def exclude(ask: Ask, ids: Sequence[str], nodes: Sequence[str], clusters: str | None = None) -> None:
    """Keep pending jobs from these nodes, and from no others; those that begin meanwhile are left alone."""
    if not ids:
        return
    change = f"scontrol update{_clusters(clusters)} JobId={{}} ExcNodeList={shlex.quote(','.join(nodes))}"
    try:
        ask(change.format(shlex.quote(",".join(ids))))
        return
    except ProviderError as error:
        if not _BEGAN.search(str(error)):
            raise
    for each in ids:  # One that began may keep others from being changed.
        try:
            ask(change.format(shlex.quote(each)))
        except ProviderError as error:
            if not _BEGAN.search(str(error)):
                raise


def found_jobs(lines: Mapping[str, QueueEntry]) -> list[FoundJob]:
    """Return the jobs that are workers of some run and have not ended."""
    return [
        FoundJob(line.id, line.run, line.report.state, line.report.host)
        for line in lines.values()
        if line.run is not None and line.report.state != "ended"
    ]


def report_of(state: str, reason: str, exit_code: str = "0:0", restarts: str = "0", nodes: str = "") -> JobReport:
    """Return what a job's state means for a worker.

    >>> report_of("PENDING", "JobHeldUser").state, report_of("NODE_FAIL", "None").taken
    ('held', True)
    >>> report_of("FAILED", "NonZeroExitCode", "3:0").reason
    'it ended with status 3'
    """
    count, host = int(restarts) if restarts.isdigit() else None, nodes or None
    state = state.split(maxsplit=1)[0].rstrip("+") if state else ""
    why = "" if reason in ("None", "") else f": {reason}"
    if state in _TAKEN:
        return JobReport("ended", f"Slurm says {state}{why}", True, host, count)
    if state in _FAILED:
        return JobReport("ended", _how(state, exit_code), False, host, count)
    if state in _SUSPENDED:
        return JobReport("evicted", f"Slurm suspended it{why}", host=host, restarts=count)
    if state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "CONFIGURING", "RESV_DEL_HOLD"):
        hopeless = "HOLD" in state or _HOPELESS.search(reason)
        return JobReport(
            "held" if hopeless else "queued", f"Slurm does not run it{why}" if hopeless else reason, False, None, count
        )
    return JobReport("running", "", False, host, count)


def survey(
    ask: Ask, trial: str, job: WorkerJob, partition: str | None, gres: str | None, constraint: str | None
) -> PoolSurvey:
    """Return what a partition has for such a worker.

    :param trial: what `sbatch --test-only` said of it, "" if it may be submitted; `gres`: resources beside the job's.
    """
    where = f" --partition={shlex.quote(partition)}" if partition else ""
    rows = _rows(ask(f"sinfo --noheader --Node{where} --Format={_format(_NODE_WIDTHS)}"), _NODE_WIDTHS)
    if partition is None:
        rows = [row for row in rows if row["Partition"].endswith("*")]
    nodes = [_Node.of(row) for row in rows if row["NodeHost"] not in job.excluded]
    wanted = _Need.of(job, gres, constraint)
    fitting = [node for node in nodes if node.up and not wanted.lacks(node)]
    models: Counter[str] = Counter()
    for node in fitting:
        models.update(node.gpus)
    free = sum(not wanted.lacks(node.unused()) for node in fitting)
    said = " ".join(trial.replace("sbatch: error: ", "").split()).removeprefix("allocation failure: ")
    if not said and partition and _is_hidden(ask, partition):  # Slurm may take such jobs, and never run them.
        said = f"partition {partition} is not for you"
    nobody_fits = "node configuration is not available" in said
    advice = [] if fitting else _what_excludes(wanted, nodes, partition)
    if said and not nobody_fits:
        advice.append(
            f"Slurm takes no such jobs of yours ({said}): ask for another partition or account in the tier's options"
        )
    return PoolSurvey(len(fitting), free, dict(models), not said or nobody_fits, tuple(advice))


def _is_hidden(ask: Ask, partition: str) -> bool:
    """Return whether Slurm shows a partition that it has to others only."""
    try:
        ask(f"scontrol show partition {shlex.quote(partition)}")
    except ProviderError as error:
        return "not found" in str(error)
    return False


@dataclass(frozen=True)
class _Node:
    up: bool
    cores: int
    memory: int  # MiB
    gpus: Mapping[str, int]
    features: frozenset[str]
    used: tuple[int, int, Mapping[str, int]] = (0, 0, {})

    @classmethod
    def of(cls, row: Mapping[str, str]) -> _Node:
        allocated, _, _, total = (int(part) for part in row["CPUsState"].split("/"))
        up = not re.search(r"down|drain|drng|fail|unk|no_respond|maint|\*$", row["StateCompact"])
        return cls(
            up, total, int(row["Memory"]), _gpus(row["Gres"]), frozenset(row["Features"].split(",")),
            (allocated, int(row["AllocMem"]), _gpus(row["GresUsed"])),
        )  # fmt: skip

    def unused(self) -> _Node:
        """Return what is left of it."""
        cores, memory, gpus = self.used
        left = {model: count - gpus.get(model, 0) for model, count in self.gpus.items()}
        return _Node(self.up, self.cores - cores, self.memory - memory, left, self.features)


@dataclass(frozen=True)
class _Need:
    """What a worker requires of a node."""

    cores: int
    memory: int  # MiB
    gpus: int
    model: str | None
    features: tuple[str, ...]

    @classmethod
    def of(cls, job: WorkerJob, gres: str | None, constraint: str | None) -> _Need:
        found = re.search(r"\bgpu(?::([^:,=]*[^:,=\d][^:,=]*))?(?:[:=](\d+))?(?=,|$)", gres or "")
        gpus, model = (int(found[2] or 1), found[1]) if found else (job.gpus, None)
        # What combines features is left to Slurm's own trial.
        features = constraint.split("&") if constraint and re.fullmatch(r"[\w.&-]+", constraint) else []
        return cls(job.cores, math.ceil(job.memory / 2**20), gpus, model, tuple(features))

    def lacks(self, node: _Node) -> str:
        """Return what a node has too little of, "" if nothing."""
        if node.cores < self.cores:
            return counted(self.cores, "core")
        if node.memory < self.memory:
            return f"{self.memory} MiB of memory"
        if self.model is not None and node.gpus.get(self.model, 0) < self.gpus:
            return f"{counted(self.gpus, 'GPU')} of the model {self.model}"
        if sum(node.gpus.values()) < self.gpus:
            return counted(self.gpus, "GPU")
        missing = [feature for feature in self.features if feature not in node.features]
        return f"the feature {missing[0]}" if missing else ""


def _what_excludes(wanted: _Need, nodes: Sequence[_Node], partition: str | None) -> list[str]:
    where = f"partition {partition}" if partition else "the default partition"
    if not nodes:
        return [f"{where} has no nodes: `sinfo` lists the partitions, and options.partition names one"]
    if all(not node.up for node in nodes):
        return [f"no node of {where} is up: see `sinfo --list-reasons`"]
    cores, gpus = max(node.cores for node in nodes), max(sum(node.gpus.values()) for node in nodes)
    memory = max(node.memory for node in nodes)
    most = f"the most are {counted(cores, 'core')}, {memory} MiB of memory and {counted(gpus, 'GPU')}"
    models = sorted({model for node in nodes for model in node.gpus})
    lacking = sorted({wanted.lacks(node) for node in nodes if node.up})
    return [f"no node of {where} has {' or '.join(lacking)}: {most}, of the models {', '.join(models) or 'none'}"]


def _gpus(gres: str) -> dict[str, int]:
    """Return the GPUs by model in a list of generic resources.

    >>> _gpus("gpu:a10:2(IDX:0-1),gpu:h100:1(S:0),fs:2"), _gpus("gpu:4"), _gpus("(null)")
    ({'a10': 2, 'h100': 1}, {'gpu': 4}, {})
    """
    found: Counter[str] = Counter()
    for model, count in re.findall(r"\bgpu(?::([^:,()]*[^:,()\d][^:,()]*))?:(\d+)", gres):
        found[model or "gpu"] += int(count)
    return dict(found)


def _how(state: str, exit_code: str) -> str:
    status, _, number = exit_code.partition(":")
    if state == "OUT_OF_MEMORY":
        return "Slurm killed it, since it used more memory than memory_gb"
    if number == "53":  # It could not change into its directory, or open its output.
        return "Slurm could not start it: start the run in a directory that all nodes share"
    return f"it ended with status {status}" if number in ("", "0") else f"it was killed by signal {number}"


def _format(widths: Mapping[str, int]) -> str:
    return ",".join(f"{name}:{width}" for name, width in widths.items())


def _rows(text: str, widths: Mapping[str, int]) -> list[dict[str, str]]:
    """Return what a command wrote in columns of these widths; other lines, such as a cluster's name, are left out."""
    rows = []
    for line in text.splitlines():
        if len(line) < sum(widths.values()) - list(widths.values())[-1]:
            continue
        ends = itertools.accumulate(widths.values())
        rows.append({name: line[end - widths[name] : end].strip() for name, end in zip(widths, ends, strict=True)})
    return rows


def _clusters(clusters: str | None) -> str:
    """Return the option of Slurm's commands that names clusters of a federation."""
    return f" --clusters={shlex.quote(clusters)}" if clusters else ""
