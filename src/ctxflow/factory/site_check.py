"""What the batch systems and this machine say of a site, for `ctxflow site check --live`.

What does not live here: what is wrong with the file by itself (sites/), asking one batch system (the providers), and
how it is shown (cli/).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ctxflow.environments.opening import UnusableEnvironment, read_manifest
from ctxflow.factory.provider import Provider, ProviderError, Survey
from ctxflow.factory.providers import provider_of
from ctxflow.factory.worker_job import Lead, python_of, worker_job
from ctxflow.sites import Site
from ctxflow.sites.tier import Tier

_PYTHON_SECONDS = 30
_ABOUT = "import json, sys; print(json.dumps([sys.version_info[0], sys.version_info[1]]))"


@dataclass(frozen=True)
class TierAnswer:
    """What a tier's batch system says.

    :param survey: None where it could not be asked; the problems say why then.
    :param problems: why no worker of the tier would come, a sentence each.
    :param advice: what to change besides.
    """

    tier: Tier
    survey: Survey | None
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
    """Survey each tier, in order. A batch system that cannot be asked is asked once.

    >>> site = Site(engine="taskvine", tiers=(Tier(provider="local", gpus=0, cores=1, memory_gb=0.1, disk_gb=0.1),))
    >>> next(ask_tiers(site)).problems
    ()
    """
    silent: dict[tuple[object, ...], str] = {}
    for tier in site.tiers:
        where = (tier.provider, tier.schedd, tier.pool)
        if where not in silent:
            try:
                lead = Lead(site.address or "localhost", 9123, "ctxflow.pyz", "password", python_of(site.environment))
                yield _judged(tier, provider(tier, "check").survey(worker_job(tier, lead)))
                continue
            except ProviderError as error:
                silent[where] = str(error)
        yield TierAnswer(tier, None, (silent[where],))


def _judged(tier: Tier, survey: Survey) -> TierAnswer:
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
    if site.environment is None:
        where = "the workers' images" if images else "the workers' PATH"
        return EnvironmentAnswer(
            f"python3 of {where}, which cannot be seen from here",
            advice=(f"see that python3 and vine_worker are on {where}, and that it is Python {mine} like this one",),
        )
    if os.path.isfile(site.environment):
        return _archive(site.environment, mine)
    python = python_of(site.environment)
    if not os.path.exists(python):
        missing = f"environment {site.environment} is not on this machine"
        if images:
            return EnvironmentAnswer(f"{missing}; the images must have it")
        problem = f"{missing}: write a folder that this machine and those of the workers see, or `ctxflow env pack` it"
        return EnvironmentAnswer(missing, (problem,))
    return _folder(site.environment, python, mine)


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
