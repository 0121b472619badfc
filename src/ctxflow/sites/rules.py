"""What is impossible in a site although each value by itself is fine, each with what to write.

What does not live here: what one key can be (model.py, tier.py), and asking the batch system (factory/).
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from ctxflow.policies.registry import FAMILIES, known, make, names
from ctxflow.sites.classad_text import mistake
from ctxflow.sites.condor_keys import OWN_SUBMIT_KEYS, TIER_KEYS
from ctxflow.sites.model import Site
from ctxflow.sites.parsl_options import option_problems
from ctxflow.sites.problem import Problem, shown, suggestion
from ctxflow.sites.region_rules import region_problems
from ctxflow.sites.tier import Tier

PROVIDERS = ("condor", "slurm", "pbs", "grid-engine", "kubernetes", "local")
ARCHIVES = (".tar.gz", ".tgz")
_ALIASES = {
    "htcondor": "condor", "sge": "grid-engine", "uge": "grid-engine", "age": "grid-engine",
    "gridengine": "grid-engine", "grid_engine": "grid-engine", "torque": "pbs", "pbspro": "pbs", "openpbs": "pbs",
    "k8s": "kubernetes", "kube": "kubernetes", "sbatch": "slurm", "localhost": "local", "embedded": "local",
}  # fmt: skip
# HTCondor's keys, and where other batch systems have the like.
_CONDOR_ONLY = {
    "requirements": "options, such as options = {constraint = ...} or {partition = ...}",
    "require_gpus": "options, such as options = {constraint = ...} or {partition = ...}",
    "priority": "options, such as options = {qos = ...} or {scheduler_options = ...}",
    "schedd": "options, such as options = {clusters = ...}",
    "pool": "options, such as options = {clusters = ...}",
    "submit": "options, such as options = {scheduler_options = ...}",
}


def problems(site: Site) -> Iterator[Problem]:
    """All that is impossible in a site.

    >>> [problem.text for problem in problems(Site(keepalive_interval=30))]
    ['keepalive_timeout = 15 must be more than keepalive_interval = 30: write keepalive_timeout = 90']
    """
    yield from _engine(site)
    yield from _network(site)
    yield from _environment(site.environment)
    for family in FAMILIES:
        yield from _policy(family, getattr(site, family))
    yield from _machines(site)
    yield from _limits(site)
    seen: dict[str, int] = {}
    for number, tier in enumerate(site.tiers):
        first = seen.setdefault(tier.name, number)
        if first != number:
            other = next(f"{tier.name}-{n}" for n in range(2, len(site.tiers) + 2) if f"{tier.name}-{n}" not in seen)
            key = ("tiers", number, "name")
            yield Problem(key, f'two tiers have the name "{tier.name}": write another, such as name = "{other}"')
        for problem in (*tier_problems(tier), *_places(tier, site.acquire)):
            yield Problem(("tiers", number, *problem.path), problem.text)
    yield from region_problems(site)


def _engine(site: Site) -> Iterator[Problem]:
    if site.engine == "embedded" and site.tiers:
        yield Problem(
            ("engine",) if "engine" in site.model_fields_set else ("tiers",),
            'the embedded engine has no tiers: write engine = "taskvine" (above the first [[tiers]]) for a cluster, or '
            "leave the tiers out for this machine",
        )
    if site.engine == "taskvine" and not site.tiers:
        yield Problem(
            ("engine",),
            'engine = "taskvine" needs at least one tier: write [[tiers]] and under it provider = "condor" (or '
            'another), as in site-configs/; for this machine alone write engine = "embedded"',
        )


def _machines(site: Site) -> Iterator[Problem]:
    """Tiers that share machines with no other."""
    count = Counter(tier.machines for tier in site.tiers)
    for number, tier in enumerate(site.tiers):
        if tier.machines is not None and count[tier.machines] < 2:
            yield Problem(
                ("tiers", number, "machines"),
                f"machines of tier {tier.name} are {shown(tier.machines)}, and no other tier's are: write the same for "
                "the tiers that are the same machines, or leave it out",
            )


def _limits(site: Site) -> Iterator[Problem]:
    """Limits that nobody would count."""
    priced = any(tier.price is not None for tier in site.tiers)
    for scope in ("run", "factory", "user"):
        for measure in ("gpu_hours", "cost"):
            key = f"{measure}_per_{scope}"
            if getattr(site, key) is None:
                continue
            if site.engine == "embedded":
                yield Problem((key,), f"{key} is for workers that are acquired, which the embedded engine's are not")
            elif scope != "run" and site.acquire != "factory":
                yield Problem((key,), f'{key} is counted by a factory: write acquire = "factory", or {measure}_per_run')
            elif measure == "cost" and not priced:
                yield Problem((key,), f"{key} cannot be counted: write the price of a worker's hour below [[tiers]]")


def _network(site: Site) -> Iterator[Problem]:
    if site.keepalive_timeout <= site.keepalive_interval:
        yield Problem(
            ("keepalive_timeout",),
            f"keepalive_timeout = {site.keepalive_timeout} must be more than keepalive_interval = "
            f"{site.keepalive_interval}: write keepalive_timeout = {3 * site.keepalive_interval}",
        )
    ports = [site.port] if isinstance(site.port, int) else list(site.port)
    if any(not 0 <= port <= 65535 for port in ports):
        yield Problem(("port",), f"port cannot be {shown(site.port)}: write a number from 1024 to 65535, or 0 for any")
    elif ports != sorted(ports):
        low, high = sorted(ports)
        yield Problem(("port",), f"port has the highest first: write port = [{low}, {high}]")
    host = re.sub(r"^\w+://|:\d+$|/$", "", site.address or "")
    if host != (site.address or ""):
        yield Problem(("address",), f'address is a host alone, and port a key of its own: write address = "{host}"')
    if not math.isfinite(site.join_timeout):
        yield Problem(("join_timeout",), "join_timeout cannot be infinite: write seconds, such as join_timeout = 300")


def _environment(environment: str | None) -> Iterator[Problem]:
    wrong = environment_mistake(environment) if environment is not None else None
    if wrong:
        yield Problem(("environment",), wrong)


def environment_mistake(environment: str) -> str | None:
    """What to change in a site's environment, as far as this machine can tell; None if nothing.

    >>> environment_mistake("/opt/ctxflow/bin/python3")
    'environment is the folder that bin/python is in: write "/opt/ctxflow"'
    """
    if environment.startswith("~"):
        return f'environment cannot begin with ~: write "{os.path.expanduser(environment)}"'
    if environment.endswith(ARCHIVES):
        there = os.path.isfile(environment)
        advice = "make it with `ctxflow env pack`, and write its path"
        return None if there else f"environment {environment} is not there: {advice}"
    if folder := re.fullmatch(r"(.*)/bin/python[\d.]*", environment):
        return f'environment is the folder that bin/python is in: write "{folder[1]}"'
    if os.path.isfile(environment):
        advice = "write a folder, or a .tar.gz that `ctxflow env pack` made"
        return f"environment {environment} is no packed environment: {advice}"
    path = PurePath(environment)
    if not path.is_absolute():
        whole = os.path.abspath(environment) if os.path.isdir(environment) else f"/shared/{path.name}"
        return f'environment {environment!r} means nothing elsewhere: write its whole path, such as "{whole}"'
    if os.path.isdir(environment) and not os.path.exists(path / "bin" / "python"):
        return f"environment {environment} has no bin/python: write the folder of a virtual or conda environment"
    return None


def _policy(family: str, choice: Any) -> Iterator[Problem]:
    name = choice.get("policy") if isinstance(choice, Mapping) else choice
    if isinstance(choice, Mapping) and name is None:
        yield Problem(
            (family,),
            f'the {family} policy has no name: write {{policy = "...", ...}}, such as policy = "{names(family)[0]}"',
        )
    elif isinstance(name, str) and not known(family, name):
        close = suggestion(name, names(family), "")
        choose = f"choose one of {', '.join(names(family))}"
        yield Problem((family,), f"there is no {family} policy {name!r}: {choose}" + (f"; {close}" if close else ""))
    elif isinstance(name, (int, float, list)):
        yield Problem(
            (family,), f"the {family} policy cannot be {shown(name)}: write a name ({', '.join(names(family))})"
        )
    elif isinstance(choice, Mapping):
        try:
            make(family, dict(choice))
        except (ValueError, TypeError) as error:
            named = [key for key in choice if key != "policy" and key in str(error)]
            yield Problem((family, *named[:1]), f"the {family} policy {name!r} cannot be made so: {error}")


def tier_problems(tier: Tier) -> Iterator[Problem]:
    """All that is impossible in a tier; the paths begin with its keys.

    >>> [problem.text for problem in tier_problems(Tier(workers=2, minimum=5))]
    ['minimum = 5 of tier gpu is more than workers = 2: write at most 2, or more workers']
    """
    whose = f"of tier {tier.name}"
    if tier.minimum > tier.workers:
        yield Problem(
            ("minimum",),
            f"minimum = {tier.minimum} {whose} is more than workers = {tier.workers}: write at most {tier.workers}, or "
            "more workers",
        )
    for key in ("memory_gb", "disk_gb", "gpu_memory_gb", "price", "boot_seconds"):
        if math.isinf(getattr(tier, key) or 0):
            yield Problem((key,), f"{key} {whose} cannot be infinite: write a number, such as {key} = 10")
    for name in tier.variables:
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or name == "CTXFLOW_JOB":
            yield Problem(("variables",), f"variables {whose} cannot set {name!r}: write another name")
    if tier.provider not in PROVIDERS and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", tier.provider):
        yield _unknown_provider(tier)
        return
    yield from _foreign_keys(tier)
    if tier.provider == "condor":
        yield from _expressions(tier)
        yield from _submit(tier)
    elif tier.provider != "local":
        yield from option_problems(tier)


def _unknown_provider(tier: Tier) -> Problem:
    meant = _ALIASES.get(tier.provider.lower())
    hint = f"did you mean {meant!r}?" if meant else suggestion(tier.provider, PROVIDERS, "")
    choice = ", ".join(PROVIDERS)
    return Problem(
        ("provider",),
        f"provider of tier {tier.name} cannot be {shown(tier.provider)}: write one of {choice}, or MODULE:NAME"
        + (f"; {hint}" if hint else ""),
    )


def _foreign_keys(tier: Tier) -> Iterator[Problem]:
    """Keys that the tier's provider does not understand."""
    given = [key for key in (*_CONDOR_ONLY, "image", "options") if getattr(tier, key) not in (None, {})]
    for key in given:
        only, instead = "HTCondor's", _CONDOR_ONLY.get(key, "")
        if key == "options":
            if tier.provider not in ("condor", "local"):
                continue
            only, instead = "for Parsl's providers", "submit" if tier.provider == "condor" else ""
        elif tier.provider == "condor" or (key == "image" and tier.provider == "kubernetes"):
            continue
        elif key == "image":
            only = "for condor and kubernetes"
        instead = "" if tier.provider == "local" else instead
        what = f"write it in {instead}" if instead else "leave it out"
        yield Problem((key,), f'{key} of tier {tier.name} is {only}, and its provider is "{tier.provider}": {what}')


def _places(tier: Tier, acquire: str) -> Iterator[Problem]:
    if not tier.machine_gpus:
        return
    key = ("machine_gpus",)
    what = f"machine_gpus of tier {tier.name}"
    if tier.provider != "condor":
        yield Problem(key, f'{what} is HTCondor\'s, and its provider is "{tier.provider}": leave it out')
    elif acquire == "factory":
        yield Problem(key, f'{what} needs runs that acquire their workers themselves: write acquire = "run"')
    elif tier.machine_gpus < tier.gpus:
        yield Problem(key, f"{what} is less than a worker has: write machine_gpus = {tier.gpus} or more")


def _expressions(tier: Tier) -> Iterator[Problem]:
    if tier.gpus == 0 and tier.require_gpus is not None:
        yield Problem(
            ("require_gpus",),
            f"require_gpus of tier {tier.name} asks for GPUs, and gpus = 0: write gpus = 1, or leave require_gpus out",
        )
    for key in ("requirements", "require_gpus"):
        expression = getattr(tier, key)
        if expression is not None and (wrong := mistake(expression)):
            yield Problem((key,), f"{key} of tier {tier.name} is no ClassAd expression: {wrong}")
    if tier.require_gpus and re.search(r"\b(CUDA|GPUs_)\w+", tier.require_gpus):
        found = re.findall(r"\b(?:CUDA|GPUs_)(\w+)", tier.require_gpus)[0]
        yield Problem(
            ("require_gpus",),
            f"require_gpus of tier {tier.name} looks at one GPU, whose attributes have no prefix: write {found}",
        )


def _submit(tier: Tier) -> Iterator[Problem]:
    for key in tier.submit:
        lower = key.lower()
        if lower in OWN_SUBMIT_KEYS or lower.replace("my.", "+") in OWN_SUBMIT_KEYS:
            yield Problem(
                ("submit", key),
                f"submit of tier {tier.name} sets {key!r}, which ctxflow needs for itself: leave it out",
            )
        elif lower in TIER_KEYS:
            yield Problem(
                ("submit", key),
                f"submit of tier {tier.name} sets {key!r}, for which a tier has a key: write {TIER_KEYS[lower]} = ...",
            )
        elif not re.fullmatch(r"\+?[A-Za-z][\w.]*", key):
            yield Problem(
                ("submit", key),
                f"submit of tier {tier.name} has a key {key!r} that HTCondor cannot have: write letters, digits and _",
            )
