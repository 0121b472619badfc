"""What Slurm's words mean, and what its partitions have. Slurm itself: tests/cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from ctxflow.factory import ProviderError, WorkerJob
from ctxflow.factory.slurm import _JOB_WIDTHS, _NODE_WIDTHS, exclude, found_jobs, report_of, squeue, survey


def columns(widths: dict[str, int], rows: Sequence[Sequence[str]]) -> str:
    return "".join("".join(f"{cell:<{w}}" for cell, w in zip(row, widths.values(), strict=True)) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("state", "reason", "wanted"),
    [
        ("PENDING", "Priority", ("queued", False)),
        ("PENDING", "BeginTime", ("queued", False)),
        ("PENDING", "JobHeldUser", ("held", False)),
        ("PENDING", "PartitionTimeLimit", ("held", False)),
        ("PENDING", "job requeued in held state", ("held", False)),
        ("PENDING", "uid 1000 not in group permitted to use this partition", ("held", False)),
        ("RUNNING", "None", ("running", False)),
        ("COMPLETING", "None", ("running", False)),
        ("SUSPENDED", "None", ("evicted", False)),
        ("COMPLETED", "None", ("ended", False)),
        ("FAILED", "NonZeroExitCode", ("ended", False)),
        ("OUT_OF_MEMORY", "OutOfMemory", ("ended", False)),
        ("CANCELLED by 0", "None", ("ended", True)),
        ("PREEMPTED", "None", ("ended", True)),
        ("TIMEOUT", "TimeLimit", ("ended", True)),
        ("NODE_FAIL", "NodeDown", ("ended", True)),
    ],
)
def test_what_states_mean(state: str, reason: str, wanted: tuple[str, bool]) -> None:
    word = report_of(state, reason)
    assert (word.state, word.taken) == wanted


def test_ends_say_how() -> None:
    assert report_of("FAILED", "NonZeroExitCode", "0:9").reason == "it was killed by signal 9"
    assert "all nodes share" in report_of("FAILED", "RaisedSignal:53", "0:53").reason
    assert "memory_gb" in report_of("OUT_OF_MEMORY", "None").reason


def test_workers_are_known_by_their_names() -> None:
    rows = [
        ["7", "ctxflow.4f2a.a10.1795251579.029228", "RUNNING", "None", "0:0", "1", "n1"],
        ["8", "ctxflow.4f2a.a10.1795251579.129228", "COMPLETED", "None", "0:0", "0", "n1"],
        ["9", "simulation", "RUNNING", "None", "0:0", "0", "n2"],
    ]
    commands = []

    def ask(command: str) -> str:
        commands.append(command)
        return "CLUSTER: north\n" + columns(_JOB_WIDTHS, rows)

    lines = squeue(ask, clusters="north")
    assert "--clusters=north" in commands[0]
    assert list(lines) == ["7", "8", "9"] and lines["7"].report.restarts == 1
    assert [(job.job, job.run, job.host) for job in found_jobs(lines)] == [("7", "4f2a", "n1")]


def test_jobs_that_began_do_not_keep_those_that_wait_from_being_changed() -> None:
    began = {"7": "Job is no longer pending execution for job 7", "8": "Job has already finished for job 8"}
    changed = {}

    def ask(command: str) -> str:
        """As scontrol does, which stops at the first that it does not change."""
        *_, jobs, nodes = command.split()
        for job in jobs.partition("=")[2].split(","):
            if job in began:
                raise ProviderError(f"slurm does not answer: {began[job]}")
            changed[job] = nodes
        return ""

    exclude(ask, [], ["n1"])
    exclude(ask, ["5", "6"], ["n1", "n2"])
    assert changed == dict.fromkeys(["5", "6"], "ExcNodeList=n1,n2")
    exclude(ask, ["7", "8", "9"], ["n1"])
    assert changed["9"] == "ExcNodeList=n1"
    exclude(ask, ["9"], [])
    assert changed["9"].startswith("ExcNodeList=") and "n1" not in changed["9"]
    began["9"] = "Unable to contact slurm controller"
    with pytest.raises(ProviderError, match="controller"):
        exclude(ask, ["9"], ["n1"])


NODES = [
    ["n1", "gpu*", "mix", "4/12/0/16", "64000", "60000", "gpu:a100:4(S:0-1)", "gpu:a100:1(IDX:0)", "ib,fast"],
    ["n2", "gpu*", "idle", "0/16/0/16", "64000", "0", "gpu:a100:4(S:0-1)", "gpu:a100:0(IDX:N/A)", "ib"],
    ["n3", "gpu*", "drain", "0/0/16/16", "64000", "0", "gpu:a100:4", "gpu:a100:0", "ib"],
    ["n4", "gpu*", "idle", "0/8/0/8", "32000", "0", "gpu:2", "gpu:0", "(null)"],
    ["n5", "cpu", "idle", "0/64/0/64", "64000", "0", "(null)", "gpu:0", "(null)"],
]


def asked(job: WorkerJob, trial: str = "", partition: str | None = None, gres: str = "", constraint: str = ""):
    def ask(command: str) -> str:
        if command.startswith("scontrol"):
            raise ProviderError("slurm does not answer: Partition cpu not found")
        rows = [row for row in NODES if partition is None or row[1].rstrip("*") == partition]
        return columns(_NODE_WIDTHS, rows)

    return survey(ask, trial, job, partition, gres, constraint)


def test_nodes_that_would_do_are_counted_and_those_that_are_free() -> None:
    job = WorkerJob("any", ["true"], cores=8, memory=10**10, gpus=2)
    found = asked(job)
    assert (found.machines, found.free, found.gpu_models) == (3, 2, {"a100": 8, "gpu": 2})
    assert asked(job, gres="gpu:a100:2").machines == 2
    assert asked(job, constraint="fast&ib").machines == 1
    assert asked(job, constraint="[fast|slow]").machines == 3
    assert asked(dataclasses.replace(job, excluded=("n1", "n9"))).machines == 2


@pytest.mark.parametrize(
    ("job", "more", "may", "advice"),
    [
        (
            {"gpus": 8},
            {},
            True,
            "has 8 GPUs: the most are 16 cores, 64000 MiB of memory and 4 GPUs, of the models a100, gpu",
        ),
        ({"gpus": 1}, {"gres": "gpu:h100:1"}, True, "1 GPU of the model h100"),
        ({"cores": 99}, {}, True, "99 cores"),
        ({}, {"constraint": "quick"}, True, "the feature quick"),
        ({}, {"trial": "sbatch: error: Invalid account"}, False, "takes no such jobs of yours (Invalid account)"),
        ({}, {"partition": "nowhere"}, False, "partition nowhere has no nodes"),
        ({}, {"partition": "cpu"}, False, "partition cpu is not for you"),
    ],
)
def test_advice_says_what_to_change(job: dict[str, int], more: dict[str, str], may: bool, advice: str) -> None:
    found = asked(WorkerJob("any", ["true"], **job), **more)
    assert any(advice in each for each in found.advice), found
    assert found.may_submit is may
