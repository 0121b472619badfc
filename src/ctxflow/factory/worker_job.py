"""From a tier of a site to the job that is one worker of a run. Pure.

What does not live here: submitting it (the providers), and what the worker does (host/worker.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ctxflow.factory.provider import WorkerJob
from ctxflow.sites.tier import Tier


@dataclass(frozen=True)
class Lead:
    """What a worker must know to join a run.

    :param address: where the run's manager listens, with `port`.
    :param program: the path of the workers' program on this machine; likewise the password's file.
    :param python: what starts the program on the worker's machine.
    """

    address: str
    port: int
    program: str
    password_file: str
    python: str = "python3"
    ssl: bool = False


def python_of(environment: str | None) -> str:
    """What starts a worker where a site names this environment; an archive is unpacked only later.

    >>> python_of("/shared/envs/ctxflow"), python_of(None)
    ('/shared/envs/ctxflow/bin/python', 'python3')
    """
    if environment is None or environment.endswith((".tar.gz", ".tgz")):
        return "python3"
    return os.path.join(environment, "bin", "python")


def worker_command(tier: Tier, lead: Lead) -> list[str]:
    """The words that start a worker where the program and the password have the paths of the lead.

    >>> print(*worker_command(Tier(name="a10", disk_gb=9), Lead("n1", 9123, "ctxflow.pyz", "password")))
    python3 ctxflow.pyz worker n1:9123 --password password --tier a10 --cores 2 --memory 10000 --disk 9000 --gpus 0
    """
    words = [lead.python, lead.program, "worker", f"{lead.address}:{lead.port}", "--password", lead.password_file]
    words += ["--tier", tier.name, "--cores", str(tier.cores), "--memory", str(tier.memory // 10**6)]
    words += [] if tier.disk is None else ["--disk", str(tier.disk // 10**6)]
    words += ["--gpus", "0"]  # TaskVine need not deal out GPUs: the batch system has, and one host uses them all.
    return [*words, "--ssl"] if lead.ssl else words


def worker_job(tier: Tier, lead: Lead) -> WorkerJob:
    """What a provider is asked for: program and password travel with the job.

    >>> worker_job(Tier(name="a10"), Lead("10.0.0.1", 9123, "/run/ctxflow.pyz", "/run/password")).command[:2]
    ['python3', 'ctxflow.pyz']
    """
    program, password = os.path.basename(lead.program), os.path.basename(lead.password_file)
    there = Lead(lead.address, lead.port, program, password, lead.python, lead.ssl)
    words = [*worker_command(tier, there), "--remove-password"]
    return job_of(tier, words, [lead.program, lead.password_file])


def job_of(tier: Tier, words: Sequence[str], files: Sequence[str]) -> WorkerJob:
    """A job of a tier's size and wishes that runs some words, with these files beside it."""
    return WorkerJob(
        tier.name,
        words,
        files=files,
        environment=tier.variables,
        cores=tier.cores,
        memory=tier.memory,
        disk=tier.disk or 0,
        gpus=tier.gpus,
        options=tier.wishes,
    )
