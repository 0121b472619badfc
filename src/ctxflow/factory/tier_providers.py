"""The batch systems of a site's tiers: their providers, what they have, a dry run, and what ended runs left there."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxflow.errors import CtxflowError, counted
from ctxflow.factory.condor_provider import CondorProvider
from ctxflow.factory.exchange import RunFiles
from ctxflow.factory.limits import maximum_of, shares
from ctxflow.factory.local import LocalProvider
from ctxflow.factory.provider import FoundJob, PoolSurvey, Provider, ProviderError, WorkerJob
from ctxflow.factory.run_files import Lead, PublishedRun, all_directories, live_runs, python_of, worker_job
from ctxflow.files import own_folder, read_own, write_private
from ctxflow.host.local_files import abandoned, remove_abandoned
from ctxflow.ownership import lives
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier
from ctxflow.sites.site_rules import is_secret


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
class TierAnswer:
    """What a tier's batch system answers.

    :param survey: None where it could not be queried; the problems say why then.
    :param problems: why no worker of the tier would come, a sentence each; `advice`, what to change besides.
    """

    tier: Tier
    survey: PoolSurvey | None
    problems: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


def ask_tiers(site: Site) -> Iterator[TierAnswer]:
    """Survey each tier, in order; a batch system that does not answer is asked once.

    >>> site = Site(engine="taskvine", tiers=(Tier(provider="local", gpus=0, cores=1, memory_gb=0.1, disk_gb=0.1),))
    >>> next(ask_tiers(site)).problems
    ()
    """
    silent: dict[tuple[object, ...], str] = {}
    for tier in site.tiers:
        where = (tier.provider, tier.schedd, tier.pool)
        if where not in silent:
            try:
                address, python = site.taskvine.address or "localhost", python_of(site.python_environment)
                lead = Lead(address, 9123, "ctxflow.pyz", "password", python)
                yield _judged(tier, provider_of(tier, "check").survey(worker_job(tier, lead)))
                continue
            except ProviderError as error:
                silent[where] = str(error)
        yield TierAnswer(tier, None, (silent[where],))


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """What a factory would submit for one tier of one run ("" for one that is made up): how many workers, and how."""

    run: str
    tier: str
    count: int
    description: str


def rehearse(site: Site, runs: Sequence[PublishedRun]) -> list[Rehearsed]:
    """Return what the factory of a site would submit for its runs, of these.

    :param runs: live ones, the oldest first. Where none is the factory's, one is made up that wants all there may be,
        and whose files are in a folder called RUN.
    :raises ProviderError: if it cannot be expressed for a batch system.
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
        options, python = site.taskvine, python_of(site.python_environment)
        lead = Lead(options.address or "ADDRESS", options.ports[0], program, password, python, options.ssl)
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


def _judged(tier: Tier, survey: PoolSurvey) -> TierAnswer:
    problems: list[str] = []
    advice = list(survey.advice)
    if not survey.may_submit:
        problems, advice = advice or ["the batch system takes no jobs of yours: ask its administrator"], []
    if survey.machines == 0:
        problems, advice = [*problems, *(advice or ["no machine will do: ask for less"])], []
    elif survey.workers is not None and survey.workers < tier.workers:
        more = f"workers = {tier.workers} is more than the {survey.workers} that those machines hold at most"
        advice.append(f"{more}: the rest would wait; write workers = {survey.workers}, or ask for less a worker")
    return TierAnswer(tier, survey, tuple(problems), tuple(advice))


_SETTLED_SECONDS = 60.0  # A file that is younger may belong to a run that is just beginning, or ending.
_OF_A_RUN = (".json", ".wanted", ".wanted.new", ".news")


@dataclasses.dataclass(frozen=True)
class Leftovers:
    """What is left of runs that have ended.

    :ivar jobs: with each, the first of the tiers whose batch system has it.
    :ivar elsewhere: how many jobs were left out, whose runs may go on, on another machine that shares the user's home,
        or in a container.
    :ivar troubles: which batch systems could not be queried, a sentence each.
    """

    jobs: list[tuple[Tier, FoundJob]]
    files: list[str]
    elsewhere: int
    troubles: list[str]


def find_leftovers(site: Site) -> Leftovers:
    """Return all jobs of this user that are workers of no live run, and all files of ended ones."""
    found: list[tuple[Tier, FoundJob]] = []
    troubles = []
    for tier in {queue_of(tier): tier for tier in reversed(site.tiers)}.values():
        try:
            found += [(tier, job) for job in provider_of(tier, "clean").find()]
        except ProviderError as error:
            troubles.append(str(error))
    # Afterwards, so that no run that begins meanwhile is taken for dead.
    live, away = {run.id for run in live_runs()}, _away()
    jobs = [(tier, job) for tier, job in found if job.run not in live | away]
    elsewhere = sum(job.run in away for _, job in found)
    return Leftovers(jobs, files_left(), elsewhere, troubles)


def files_left() -> list[str]:
    """Return all files and folders of this machine's dead runs, but those that they keep for good: `runs/`."""
    return [*sorted(_dead_files({run.id for run in live_runs()}, _away())), *abandoned()]


def remove_leftovers(found: Leftovers) -> list[str]:
    """Remove all of it; return what could not be removed, a sentence each."""
    troubles = []
    for source, tier in {queue_of(tier): tier for tier, _ in found.jobs}.items():
        try:
            provider_of(tier, "clean").discard([job.job for its, job in found.jobs if queue_of(its) == source])
        except ProviderError as error:
            troubles.append(str(error))
    return troubles + remove_files(found.files)


def remove_files(paths: Iterable[str]) -> list[str]:
    """Remove what `files_left` found; return what could not be removed, a sentence each."""
    troubles = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            try:
                if os.path.isdir(path):
                    remove_abandoned(path)
                else:
                    os.unlink(path)
            except OSError as error:
                troubles.append(f"{path} cannot be removed: {error.strerror}")
    return troubles


def _away() -> set[str]:
    """Return the runs whose drivers cannot be seen from here: on a machine that shares the home, or in a container."""
    here = socket.gethostname()
    return {name for name, told in _connections().items() if told.get("host", here) not in ("", here) or _unseen(told)}


def _unseen(told: Mapping[str, Any]) -> bool:
    pid, born = told.get("pid"), told.get("born")
    return isinstance(pid, int) and isinstance(born, str) and lives(pid, born) is None


def _connections() -> dict[str, Mapping[str, Any]]:
    """Return what each run's connection file says, nothing where that cannot be read."""
    found: dict[str, Mapping[str, Any]] = {}
    for path in _files():
        name, kind = os.path.splitext(os.path.basename(path))
        if kind == ".json":
            found[name] = {}
            with contextlib.suppress(OSError, ValueError):
                told = json.loads(read_own(path))
                found[name] = told if isinstance(told, dict) else {}
    return found


def _dead_files(live: set[str], away: set[str]) -> Iterator[str]:
    now = functools.cache(_now_in)
    for path in _files():
        name = os.path.basename(path)
        run = next((name.removesuffix(kind) for kind in _OF_A_RUN if name.endswith(kind)), None)
        if name.endswith(".part"):  # What a kill left of one that was being written.
            run = name.partition(".")[0]
        if run is None or run in live or run in away:
            continue
        with contextlib.suppress(OSError):
            whole = name.endswith(".json") and _connections().get(run, {}).get("host")
            if whole or now(os.path.dirname(path)) - os.path.getmtime(path) > _SETTLED_SECONDS:
                yield path


def _now_in(directory: str) -> float:
    """Return the time by the clock that dates a folder's files, which may be a file server's."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".now-") as probe:
        return os.fstat(probe.fileno()).st_mtime


def _files() -> list[str]:
    found = []
    for directory in filter(own_folder, all_directories()):
        with contextlib.suppress(OSError):
            found += [entry.path for entry in os.scandir(directory)]
    return found


def check_site(site: Site) -> Site:
    """Check that a factory can serve a site, and return it; a CtxflowError says what to write."""
    if not site.capabilities.acquires or not site.tiers:
        raise CtxflowError(
            f'the site "{site.name}" has no workers to acquire: write engine = "taskvine" and at least one [[tiers]]'
        )
    if site.acquire != "factory":
        raise CtxflowError(
            f'runs of the site "{site.name}" acquire their workers themselves: write acquire = "factory" in its file'
        )
    for tier in site.tiers:
        provider_of(tier, "check")
    return site


def site_differences(before: Site, after: Site) -> list[str]:
    """Return what has changed in a site file, a sentence each."""
    old, new = ({tier.name: tier for tier in site.tiers} for site in (before, after))
    told = ["the site file was read again" + ("" if before != after else ": nothing has changed")]
    told += [f"tier {name} is new" for name in new if name not in old]
    told += [f"tier {name} is gone: its workers may finish" for name in old if name not in new]
    for name in filter(old.__contains__, new):
        most_before, most = maximum_of(before, old[name]), maximum_of(after, new[name])
        if most_before != most:
            told.append(f"tier {name} has at most {counted(most, 'worker')} now, not {most_before}")
        if changed := [key for key, value in new[name] if value != getattr(old[name], key) and key != "workers"]:
            told.append(f"tier {name} has another {', '.join(changed)}")
    return told
