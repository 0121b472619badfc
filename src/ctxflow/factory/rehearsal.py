"""What a factory would ask for, said and not done.

What does not live here: the descriptions themselves, which are the providers' own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence

from ctxflow.factory.connection import Run
from ctxflow.factory.exchange import RunFiles
from ctxflow.factory.provider import WorkerJob
from ctxflow.factory.providers import provider_of
from ctxflow.factory.service import maximum_of
from ctxflow.factory.shares import shares
from ctxflow.factory.worker_job import Lead, python_of, worker_job
from ctxflow.safe_files import write_private
from ctxflow.sites import Site
from ctxflow.sites.secret_names import is_secret
from ctxflow.sites.tier import Tier


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """One tier of one run.

    :ivar run: its id; "" for one that is made up.
    :ivar count: how many workers are asked for at first.
    :ivar description: as the batch system would get it.
    """

    run: str
    tier: str
    count: int
    description: str


def rehearse(site: Site, runs: Sequence[Run]) -> list[Rehearsed]:
    """What the factory of a site would ask for.

    :param runs: live ones, the oldest first; those that are not the factory's are left out. Where none is left, one is
        made up that wants all there may be, and whose files are in a folder called RUN.
    :raises ProviderError: if a batch system could not be told so.
    """
    wishes = {run.id: RunFiles(run.id).read() for run in runs if run.acquire == "factory"}
    ours = {name: wish for name, wish in wishes.items() if wish is not None and wish.site == site.name}
    if not ours:
        return _made_up(site)
    found = []
    for tier in site.tiers:
        wants = {name: wish.wanted.get(tier.name, 0) for name, wish in ours.items()}
        share = shares(wants, maximum_of(site, tier))
        for run in runs:
            if run.id in ours and tier.name in run.commands:
                job = worker_job(tier, run.lead)
                directory = os.path.join(run.directory, "taskvine", "jobs", tier.name)
                found.append(_rehearsed(run.id, tier, job, share[run.id], directory))
    return found


def _made_up(site: Site) -> list[Rehearsed]:
    with tempfile.TemporaryDirectory() as folder:
        program, password = (os.path.join(folder, name) for name in ("ctxflow.pyz", "password"))
        for path in (program, password):
            write_private(path, "")
        port = site.port if isinstance(site.port, int) else site.port[0]
        lead = Lead(site.address or "ADDRESS", port, program, password, python_of(site.environment), site.ssl)
        return [
            dataclasses.replace(told, run="", description=told.description.replace(folder, "RUN"))
            for tier in site.tiers
            for told in [_rehearsed("RUN", tier, worker_job(tier, lead), maximum_of(site, tier), folder)]
        ]


def _rehearsed(run: str, tier: Tier, job: WorkerJob, count: int, directory: str) -> Rehearsed:
    count = min(count, tier.waiting)
    shown = {name: "..." if is_secret(name) else value for name, value in job.environment.items()}
    job = dataclasses.replace(job, environment=shown)
    describe = getattr(provider_of(tier, run), "description", None)
    text = describe(job, count, directory) if describe else json.dumps(dataclasses.asdict(job), indent=2) + "\n"
    return Rehearsed(run, tier.name, count, text)
