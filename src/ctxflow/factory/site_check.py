"""Check a site against its batch systems and this machine, for `ctxflow site check --live` and a factory's dry run.

`ask_tiers` and `ask_environment` ask; `network_problems` says whether workers can reach a run that is started here;
`rehearse` says what a factory would submit. What is wrong with the file by itself: sites/; a trial with a job:
probing.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ctxflow.environments.opening import UnusableEnvironment, read_manifest
from ctxflow.factory.provider import PoolSurvey, Provider, ProviderError, WorkerJob
from ctxflow.factory.run_files import PublishedRun, RunFiles
from ctxflow.factory.service import maximum_of
from ctxflow.factory.sharing import shares
from ctxflow.factory.tier_providers import Lead, provider_of, python_of, worker_job
from ctxflow.safe_files import write_private
from ctxflow.sites import Site
from ctxflow.sites.hints import is_secret
from ctxflow.sites.site_model import Tier

_PYTHON_SECONDS = 30
_ABOUT = "import json, sys; print(json.dumps([sys.version_info[0], sys.version_info[1]]))"


@dataclass(frozen=True)
class TierAnswer:
    """What a tier's batch system answers.

    :param survey: None where it could not be asked; the problems say why then.
    :param problems: why no worker of the tier would come, a sentence each.
    :param advice: what to change besides.
    """

    tier: Tier
    survey: PoolSurvey | None
    problems: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


@dataclass(frozen=True)
class EnvironmentAnswer:
    """Whether the workers' environment is found.

    :param found: what is there, a sentence.
    """

    found: str
    problems: tuple[str, ...] = field(default=())
    advice: tuple[str, ...] = field(default=())


def ask_tiers(site: Site, provider: Callable[[Tier, str], Provider] = provider_of) -> Iterator[TierAnswer]:
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
                yield _judged(tier, provider(tier, "check").survey(worker_job(tier, lead)))
                continue
            except ProviderError as error:
                silent[where] = str(error)
        yield TierAnswer(tier, None, (silent[where],))


def _judged(tier: Tier, survey: PoolSurvey) -> TierAnswer:
    problems: list[str] = []
    advice = list(survey.advice)
    if not survey.may_submit:
        problems, advice = advice or ["the batch system takes no jobs of yours: ask its administrator"], []
    if survey.machines == 0:
        problems, advice = [*problems, *(advice or ["no machine will do: ask for less"])], []
    elif survey.workers is not None and survey.workers < tier.workers:
        advice.append(
            f"workers = {tier.workers} is more than the {survey.workers} that those machines hold at most: the rest "
            f"would wait; write workers = {survey.workers}, or ask for less a worker"
        )
    return TierAnswer(tier, survey, tuple(problems), tuple(advice))


def ask_environment(site: Site) -> EnvironmentAnswer:
    """Look for the workers' environment from here, and compare its Python with this one.

    >>> ask_environment(Site(engine="taskvine")).problems
    ()
    """
    mine = f"{sys.version_info[0]}.{sys.version_info[1]}"
    images = [tier.image for tier in site.tiers if tier.image]
    if site.python_environment is None:
        where = "the workers' images" if images else "the workers' PATH"
        return EnvironmentAnswer(
            f"python3 of {where}, which cannot be seen from here",
            advice=(f"see that python3 and vine_worker are on {where}, and that it is Python {mine} like this one",),
        )
    if os.path.isfile(site.python_environment):
        return _archive(site.python_environment, mine)
    python = python_of(site.python_environment)
    if not os.path.exists(python):
        missing = f"python_environment {site.python_environment} is not on this machine"
        if images:
            return EnvironmentAnswer(f"{missing}; the images must have it")
        problem = f"{missing}: write a folder that this machine and those of the workers see, or `ctxflow env pack` it"
        return EnvironmentAnswer(missing, (problem,))
    return _folder(site.python_environment, python, mine)


def _archive(path: str, mine: str) -> EnvironmentAnswer:
    try:
        manifest = read_manifest(path)
    except (UnusableEnvironment, OSError) as error:
        return EnvironmentAnswer(f"{path} cannot be used", (str(error),))
    found = (
        f"{path}: Python {manifest['python']} for {manifest['platform']}, {manifest['bytes'] / 1e6:,.0f} MB unpacked"
    )
    theirs = ".".join(str(manifest["python"]).split(".")[:2])
    return EnvironmentAnswer(found, _versions(theirs, mine))


def _folder(folder: str, python: str, mine: str) -> EnvironmentAnswer:
    unseen = "whether the workers' machines see it cannot be told from here"
    try:
        done = subprocess.run(
            [python, "-c", _ABOUT], capture_output=True, check=True, text=True, timeout=_PYTHON_SECONDS
        )
        theirs = ".".join(map(str, json.loads(done.stdout)))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        problem = f"{python} does not start here ({error}): make the environment again"
        return EnvironmentAnswer(f"{folder}, whose Python does not start", (problem,))
    return EnvironmentAnswer(f"{folder}: Python {theirs}; {unseen}", _versions(theirs, mine))


def _versions(theirs: str, mine: str) -> tuple[str, ...]:
    if theirs == mine:
        return ()
    return (
        f"the environment has Python {theirs} and this is Python {mine}: run the program with Python {theirs}, or make "
        f"the environment with Python {mine}",
    )


_NO_OTHER_MACHINE = ("tmpfs", "ramfs", "overlay")
_SHARED = ("condor", "local")  # Providers whose jobs need no directory that machines share.


def network_problems(site: Site) -> Iterator[str]:
    """Yield why no worker would reach a run of this site that is started here, a sentence each.

    >>> list(network_problems(Site(engine="taskvine", taskvine={"address": "no-such-host.invalid"})))[0][:46]
    'address no-such-host.invalid cannot be resolve'
    """
    own = site.taskvine.address
    if own:
        try:
            found = {str(info[4][0]) for info in socket.getaddrinfo(own, None)}
        except OSError as error:
            yield (
                f"address {own} cannot be resolved ({error.strerror or error}): write an IP address of this "
                "machine, or a name that the workers' machines know"
            )
            found = set()
        elsewhere = [tier.name for tier in site.tiers if tier.provider != "local"]
        if elsewhere and found and all(address.startswith("127.") or address == "::1" for address in found):
            yield (
                f"address {own} is this machine to itself alone, and tier {elsewhere[0]} is on others: write "
                "the address by which they reach it"
            )
    ports = list(site.taskvine.ports)
    refused = [_refusal(port) for port in ports]
    if ports != [0] and all(refused):
        yield refused[0]


def _refusal(port: int) -> str:
    """Return why nobody can listen at a port here, "" if it can be done."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except PermissionError:
            return f"port = {port} is for root alone on this machine: write one from 1024 on, or 0 for any"
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port = {port} is taken on this machine: write another, or 0 for any, or end who listens there"
            return f"port = {port} cannot be listened at ({error.strerror}): write another, or 0 for any"
    return ""


def network_advice(site: Site) -> Iterator[str]:
    """Yield what may keep workers from a run of this site that is started here, a sentence each."""
    own = site.taskvine.address
    if own and not _is_ours(own):
        yield (f"address {own} is none of this machine's: workers reach a run only if what goes there comes here")
    for tier in site.tiers:
        if tier.provider in _SHARED:
            continue
        here = os.getcwd()
        kind = file_system(here)
        if kind in _NO_OTHER_MACHINE or here.startswith(("/tmp/", "/var/tmp/", "/dev/shm/")):
            yield (
                f"{here} is seldom seen by other machines, and jobs of tier {tier.name} find their files where the run "
                "is started: start it in a directory that all nodes share"
            )
        if tier.disk_gb is not None:
            yield (
                f"disk_gb = {tier.disk_gb:g} of tier {tier.name} is asked of nobody: a worker that finds less in "
                "TMPDIR or /tmp does not start; leave it out where nodes may have less"
            )


def _is_ours(address: str) -> bool:
    for family, kind, number, _, place in _resolved(address):
        with socket.socket(family, kind, number) as trial:
            try:
                trial.bind((place[0], 0))
            except OSError:
                continue
            return True
    return not _resolved(address)  # What cannot be resolved is told already.


def _resolved(address: str) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)  # type: ignore[return-value]
    except OSError:
        return []


def file_system(path: str) -> str:
    """Return the kind of file system of a directory, such as "nfs4"; "" if that cannot be told.

    >>> file_system("/proc")
    'proc'
    """
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
            mounts = [line.split()[1:3] for line in file]
    except OSError:
        return ""
    path = os.path.realpath(path)
    around = [(point, kind) for point, kind in mounts if path == point or path.startswith(point.rstrip("/") + "/")]
    return max(around, key=lambda each: len(each[0]))[1] if around else ""


def own_address() -> str:
    """Return the address that this machine uses for outgoing connections; nothing is sent to find it."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """What a factory would submit for one tier of one run.

    :ivar run: its id; "" for one that is made up.
    :ivar count: how many workers are asked for at first.
    :ivar description: as the batch system would get it.
    """

    run: str
    tier: str
    count: int
    description: str


def rehearse(site: Site, runs: Sequence[PublishedRun]) -> list[Rehearsed]:
    """Return what the factory of a site would submit.

    :param runs: live ones, the oldest first; those that are not the factory's are left out. Where none is left, one is
        made up that wants all there may be, and whose files are in a folder called RUN.
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
