"""Turn a tier of a site into its provider and into the job that is one worker of a run.

What the worker does: host/worker.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ctxflow.factory.condor_provider import CondorProvider
from ctxflow.factory.local import LocalProvider
from ctxflow.factory.provider import Provider, ProviderError, WorkerJob
from ctxflow.sites.site_model import Tier


def source_of(tier: Tier) -> tuple[object, ...]:
    """Return what distinguishes the batch system of one tier from that of another.

    >>> source_of(Tier(name="a10")) == source_of(Tier(name="a40")) != source_of(Tier(schedd="other"))
    True
    """
    return tier.provider, tier.schedd, tier.pool, str(sorted(tier.options.items()))


def queue_of(tier: Tier) -> tuple[object, ...]:
    """Return what distinguishes the queues in which tiers' jobs are found: Slurm's is one for all partitions.

    >>> queue_of(Tier(provider="slurm", options={"partition": "a"})) == queue_of(Tier(provider="slurm"))
    True
    """
    if tier.provider == "slurm":
        return tier.provider, tier.options.get("clusters")
    return source_of(tier)


def provider_of(tier: Tier, run: str) -> Provider:
    """Return the provider of a tier's workers for a run.

    :param run: the run's id, by which its jobs are found again.
    :raises ProviderError: if the tier names none that there is.

    >>> provider_of(Tier(provider="local"), "run-7").queries
    0
    """
    if tier.provider == "condor":
        return CondorProvider(run=run, schedd=tier.schedd, pool=tier.pool)
    if tier.provider == "local":
        return LocalProvider()
    from ctxflow.factory.parsl_provider import ParslProvider  # A second, with Parsl behind it, that few sites need.
    from ctxflow.factory.parsl_systems import PARSL, parsl_provider

    if tier.provider in PARSL or ":" in tier.provider:
        return ParslProvider(parsl_provider(tier), run)
    names = ", ".join(["condor", "local", *PARSL])
    raise ProviderError(f"tier {tier.name} has no provider {tier.provider!r}: write one of {names}, or MODULE:NAME")


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
    """Return what starts a worker where a site names this environment; an archive is unpacked only later.

    >>> python_of("/shared/envs/ctxflow"), python_of(None)
    ('/shared/envs/ctxflow/bin/python', 'python3')
    """
    if environment is None or environment.endswith((".tar.gz", ".tgz")):
        return "python3"
    return os.path.join(environment, "bin", "python")


def worker_command(tier: Tier, lead: Lead) -> list[str]:
    """Return the command of a worker; program and password have the paths of the lead.

    >>> print(*worker_command(Tier(name="a10", disk_gb=9), Lead("n1", 9123, "ctxflow.pyz", "password")))
    python3 ctxflow.pyz worker n1:9123 --password password --tier a10 --cores 2 --memory 10000 --disk 9000 --gpus 0
    """
    words = [lead.python, lead.program, "worker", f"{lead.address}:{lead.port}", "--password", lead.password_file]
    words += ["--tier", tier.name, "--cores", str(tier.cores), "--memory", str(tier.memory // 10**6)]
    words += [] if tier.disk is None else ["--disk", str(tier.disk // 10**6)]
    words += ["--gpus", "0"]  # TaskVine need not deal out GPUs: the batch system has, and one host uses them all.
    return [*words, "--ssl"] if lead.ssl else words


def worker_job(tier: Tier, lead: Lead) -> WorkerJob:
    """Return the job of one worker; program and password travel with it.

    >>> worker_job(Tier(name="a10"), Lead("10.0.0.1", 9123, "/run/ctxflow.pyz", "/run/password")).command[:2]
    ['python3', 'ctxflow.pyz']
    """
    program, password = os.path.basename(lead.program), os.path.basename(lead.password_file)
    there = Lead(lead.address, lead.port, program, password, lead.python, lead.ssl)
    words = [*worker_command(tier, there), "--remove-password"]
    return job_of(tier, words, [lead.program, lead.password_file])


def job_of(tier: Tier, words: Sequence[str], files: Sequence[str]) -> WorkerJob:
    """Return a job with a tier's size and options that runs a command, with these files beside it."""
    return WorkerJob(
        tier.name,
        words,
        files=files,
        environment=tier.env,
        cores=tier.cores,
        memory=tier.memory,
        disk=tier.disk or 0,
        gpus=tier.gpus,
        options=tier.wishes,
    )
