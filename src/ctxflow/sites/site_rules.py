"""What is impossible in a site although each value by itself is fine, each with what to write.

What does not live here: what one key can be (site_model.py, engine_kinds.py), and asking the batch system (factory/).
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
from ctxflow.sites.engine_kinds import TaskVineOptions
from ctxflow.sites.provider_keys import OWN_SUBMIT_KEYS, TIER_KEYS, mistake, option_problems
from ctxflow.sites.site_model import Region, Site, Tier
from ctxflow.sites.site_problems import FileProblem, shown, suggestion

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


def problems(site: Site) -> Iterator[FileProblem]:
    """Yield all that is impossible in a site.

    >>> [problem.text for problem in problems(Site(taskvine={"keepalive_interval": 30}))]
    ['keepalive_timeout = 15 must be more than keepalive_interval = 30: write keepalive_timeout = 90']
    """
    yield from _engine(site)
    yield from _network(site.taskvine)
    if not math.isfinite(site.join_timeout):
        text = "join_timeout cannot be infinite: write seconds, such as join_timeout = 300"
        yield FileProblem(("join_timeout",), text)
    yield from _environment(site.python_environment)
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
            yield FileProblem(key, f'two tiers have the name "{tier.name}": write another, such as name = "{other}"')
        for problem in (*tier_problems(tier), *_places(tier, site.acquire)):
            yield FileProblem(("tiers", number, *problem.path), problem.text)
    yield from region_problems(site)


def _engine(site: Site) -> Iterator[FileProblem]:
    if site.tiers and not site.capabilities.acquires:
        yield FileProblem(
            ("engine",) if "engine" in site.model_fields_set else ("tiers",),
            f'the {site.engine} engine has no tiers: write engine = "taskvine" (above the first [[tiers]]) for a '
            "cluster, or leave the tiers out for this machine",
        )
    if site.capabilities.acquires and not site.tiers:
        yield FileProblem(
            ("engine",),
            f'engine = "{site.engine}" needs at least one tier: write [[tiers]] and under it provider = "condor" (or '
            'another), as in site-configs/; for this machine alone write engine = "embedded"',
        )


def _machines(site: Site) -> Iterator[FileProblem]:
    """Yield tiers that share machines with no other."""
    count = Counter(tier.machines for tier in site.tiers)
    for number, tier in enumerate(site.tiers):
        if tier.machines is not None and count[tier.machines] < 2:
            yield FileProblem(
                ("tiers", number, "machines"),
                f"machines of tier {tier.name} are {shown(tier.machines)}, and no other tier's are: write the same for "
                "the tiers that are the same machines, or leave it out",
            )


def _limits(site: Site) -> Iterator[FileProblem]:
    """Yield limits that nobody would count."""
    priced = any(tier.price is not None for tier in site.tiers)
    for scope in ("run", "factory", "user"):
        for measure in ("gpu_hours", "cost"):
            key = f"{measure}_per_{scope}"
            if getattr(site, key) is None:
                continue
            if not site.capabilities.acquires:
                yield FileProblem(
                    (key,), f"{key} is for workers that are acquired, which the {site.engine} engine's are not"
                )
            elif scope != "run" and site.acquire != "factory":
                yield FileProblem(
                    (key,), f'{key} is counted by a factory: write acquire = "factory", or {measure}_per_run'
                )
            elif measure == "cost" and not priced:
                yield FileProblem(
                    (key,), f"{key} cannot be counted: write the price of a worker's hour below [[tiers]]"
                )


def _network(options: TaskVineOptions) -> Iterator[FileProblem]:
    def problem(key: str, text: str) -> FileProblem:
        return FileProblem(("taskvine", key), text)

    interval, timeout = options.keepalive_interval, options.keepalive_timeout
    if timeout <= interval:
        yield problem(
            "keepalive_timeout",
            f"keepalive_timeout = {timeout} must be more than keepalive_interval = {interval}: write "
            f"keepalive_timeout = {3 * interval}",
        )
    port = options.port
    ports = [port] if isinstance(port, int) else list(port)
    if any(not 0 <= each <= 65535 for each in ports):
        yield problem("port", f"port cannot be {shown(port)}: write a number from 1024 to 65535, or 0 for any")
    elif ports != sorted(ports):
        low, high = sorted(ports)
        yield problem("port", f"port has the highest first: write port = [{low}, {high}]")
    address = options.address or ""
    host = re.sub(r"^\w+://|:\d+$|/$", "", address)
    if host != address:
        yield problem("address", f'address is a host alone, and port a key of its own: write address = "{host}"')


def _environment(environment: str | None) -> Iterator[FileProblem]:
    wrong = environment_mistake(environment) if environment is not None else None
    if wrong:
        yield FileProblem(("python_environment",), wrong)


def environment_mistake(environment: str) -> str | None:
    """Return what to change in a site's environment, as far as this machine can tell; None if nothing.

    >>> environment_mistake("/opt/ctxflow/bin/python3")
    'python_environment is the folder that bin/python is in: write "/opt/ctxflow"'
    """
    if environment.startswith("~"):
        return f'python_environment cannot begin with ~: write "{os.path.expanduser(environment)}"'
    if environment.endswith(ARCHIVES):
        there = os.path.isfile(environment)
        advice = "make it with `ctxflow env pack`, and write its path"
        return None if there else f"python_environment {environment} is not there: {advice}"
    if folder := re.fullmatch(r"(.*)/bin/python[\d.]*", environment):
        return f'python_environment is the folder that bin/python is in: write "{folder[1]}"'
    if os.path.isfile(environment):
        advice = "write a folder, or a .tar.gz that `ctxflow env pack` made"
        return f"python_environment {environment} is no packed environment: {advice}"
    path = PurePath(environment)
    if not path.is_absolute():
        whole = os.path.abspath(environment) if os.path.isdir(environment) else f"/shared/{path.name}"
        return f'python_environment {environment!r} means nothing elsewhere: write its whole path, such as "{whole}"'
    if os.path.isdir(environment) and not os.path.exists(path / "bin" / "python"):
        return f"python_environment {environment} has no bin/python: write the folder of a virtual or conda environment"
    return None


def _policy(family: str, choice: Any) -> Iterator[FileProblem]:
    name = choice.get("policy") if isinstance(choice, Mapping) else choice
    if isinstance(choice, Mapping) and name is None:
        yield FileProblem(
            (family,),
            f'the {family} policy has no name: write {{policy = "...", ...}}, such as policy = "{names(family)[0]}"',
        )
    elif isinstance(name, str) and not known(family, name):
        close = suggestion(name, names(family), "")
        choose = f"choose one of {', '.join(names(family))}"
        yield FileProblem(
            (family,), f"there is no {family} policy {name!r}: {choose}" + (f"; {close}" if close else "")
        )
    elif isinstance(name, (int, float, list)):
        yield FileProblem(
            (family,), f"the {family} policy cannot be {shown(name)}: write a name ({', '.join(names(family))})"
        )
    elif isinstance(choice, Mapping):
        try:
            make(family, dict(choice))
        except (ValueError, TypeError) as error:
            named = [key for key in choice if key != "policy" and key in str(error)]
            yield FileProblem((family, *named[:1]), f"the {family} policy {name!r} cannot be made so: {error}")


def tier_problems(tier: Tier) -> Iterator[FileProblem]:
    """Yield all that is impossible in a tier; the paths begin with its keys.

    >>> [problem.text for problem in tier_problems(Tier(workers=2, minimum=5))]
    ['minimum = 5 of tier gpu is more than workers = 2: write at most 2, or more workers']
    """
    whose = f"of tier {tier.name}"
    if tier.minimum > tier.workers:
        yield FileProblem(
            ("minimum",),
            f"minimum = {tier.minimum} {whose} is more than workers = {tier.workers}: write at most {tier.workers}, or "
            "more workers",
        )
    for key in ("memory_gb", "disk_gb", "gpu_memory_gb", "price", "boot_seconds"):
        if math.isinf(getattr(tier, key) or 0):
            yield FileProblem((key,), f"{key} {whose} cannot be infinite: write a number, such as {key} = 10")
    for name in tier.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or name == "CTXFLOW_JOB":
            yield FileProblem(("env",), f"env {whose} cannot set {name!r}: write another name")
    if tier.provider not in PROVIDERS and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", tier.provider):
        yield _unknown_provider(tier)
        return
    yield from _foreign_keys(tier)
    if tier.provider == "condor":
        yield from _expressions(tier)
        yield from _submit(tier)
    elif tier.provider != "local":
        yield from option_problems(tier)


def _unknown_provider(tier: Tier) -> FileProblem:
    meant = _ALIASES.get(tier.provider.lower())
    hint = f"did you mean {meant!r}?" if meant else suggestion(tier.provider, PROVIDERS, "")
    choice = ", ".join(PROVIDERS)
    return FileProblem(
        ("provider",),
        f"provider of tier {tier.name} cannot be {shown(tier.provider)}: write one of {choice}, or MODULE:NAME"
        + (f"; {hint}" if hint else ""),
    )


def _foreign_keys(tier: Tier) -> Iterator[FileProblem]:
    """Yield keys that the tier's provider does not understand."""
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
        yield FileProblem((key,), f'{key} of tier {tier.name} is {only}, and its provider is "{tier.provider}": {what}')


def _places(tier: Tier, acquire: str) -> Iterator[FileProblem]:
    if not tier.machine_gpus:
        return
    key = ("machine_gpus",)
    what = f"machine_gpus of tier {tier.name}"
    if tier.provider != "condor":
        yield FileProblem(key, f'{what} is HTCondor\'s, and its provider is "{tier.provider}": leave it out')
    elif acquire == "factory":
        yield FileProblem(key, f'{what} needs runs that acquire their workers themselves: write acquire = "run"')
    elif tier.machine_gpus < tier.gpus:
        yield FileProblem(key, f"{what} is less than a worker has: write machine_gpus = {tier.gpus} or more")


def _expressions(tier: Tier) -> Iterator[FileProblem]:
    if tier.gpus == 0 and tier.require_gpus is not None:
        yield FileProblem(
            ("require_gpus",),
            f"require_gpus of tier {tier.name} asks for GPUs, and gpus = 0: write gpus = 1, or leave require_gpus out",
        )
    for key in ("requirements", "require_gpus"):
        expression = getattr(tier, key)
        if expression is not None and (wrong := mistake(expression)):
            yield FileProblem((key,), f"{key} of tier {tier.name} is no ClassAd expression: {wrong}")
    if tier.require_gpus and re.search(r"\b(CUDA|GPUs_)\w+", tier.require_gpus):
        found = re.findall(r"\b(?:CUDA|GPUs_)(\w+)", tier.require_gpus)[0]
        yield FileProblem(
            ("require_gpus",),
            f"require_gpus of tier {tier.name} looks at one GPU, whose attributes have no prefix: write {found}",
        )


def _submit(tier: Tier) -> Iterator[FileProblem]:
    for key in tier.submit:
        lower = key.lower()
        if lower in OWN_SUBMIT_KEYS or lower.replace("my.", "+") in OWN_SUBMIT_KEYS:
            yield FileProblem(
                ("submit", key),
                f"submit of tier {tier.name} sets {key!r}, which ctxflow needs for itself: leave it out",
            )
        elif lower in TIER_KEYS:
            yield FileProblem(
                ("submit", key),
                f"submit of tier {tier.name} sets {key!r}, for which a tier has a key: write {TIER_KEYS[lower]} = ...",
            )
        elif not re.fullmatch(r"\+?[A-Za-z][\w.]*", key):
            yield FileProblem(
                ("submit", key),
                f"submit of tier {tier.name} has a key {key!r} that HTCondor cannot have: write letters, digits and _",
            )


def region_problems(site: Site) -> Iterator[FileProblem]:
    """Yield all that is impossible in a site's regions.

    >>> site = Site(engine="taskvine", regions=[Region(name="north", tiers=["a10"])])
    >>> [problem.text for problem in region_problems(site)]
    ["region north has the tier 'a10', and no tier is called so: add one with that name, or leave it out"]
    """
    if site.regions and not site.capabilities.remote:
        yield FileProblem(
            ("regions",),
            f"the {site.engine} engine's workers are all on this machine, so it has no regions: leave them out, or "
            'write engine = "taskvine" for a cluster',
        )
        return
    names = [region.name for region in site.regions]
    if site.region is not None and site.region not in names:
        known = f"write one of {', '.join(names)}" if names else "write [[regions]] and under it its name"
        yield FileProblem(("region",), f"region = {site.region!r} is no region of the site: {known}")
    owners: dict[str, str] = {}
    for number, region in enumerate(site.regions):
        if region.name in names[:number]:
            yield FileProblem(
                ("regions", number, "name"), f'two regions have the name "{region.name}": give one of them another'
            )
        for tier in region.tiers:
            if tier in owners:
                yield FileProblem(
                    ("regions", number, "tiers"),
                    f"tier {tier} is in two regions, {owners[tier]} and {region.name}: leave it out of one, or tell "
                    "its machines apart with hosts",
                )
            owners.setdefault(tier, region.name)
        for problem in _of_region(site, region, names):
            yield FileProblem(("regions", number, *problem.path), problem.text)


def _of_region(site: Site, region: Region, names: list[str]) -> Iterator[FileProblem]:
    tiers = [tier.name for tier in site.tiers]
    for tier in region.tiers:
        if tier not in tiers:
            otherwise = "add one with that name, or leave it out"
            yield FileProblem(
                ("tiers",),
                f"region {region.name} has the tier {tier!r}, and no tier is called so: "
                + suggestion(tier, tiers, otherwise),
            )
    for key in ("latency_ms", "bandwidth_mbit"):
        for other, value in getattr(region, key).items():
            if other not in names:
                yield FileProblem(
                    (key,),
                    f"{key} of region {region.name} names {other!r}, which is no region: "
                    + suggestion(other, names, f"the site has {', '.join(names)}"),
                )
            if not math.isfinite(value) or value < 0 or (value == 0 and key == "bandwidth_mbit"):
                yield FileProblem(
                    (key,),
                    f"{key} of region {region.name} cannot be {value:g}: write a number, such as {{{other} = 40}}",
                )
    if region.power_price is not None and not math.isfinite(region.power_price):
        yield FileProblem(
            ("power_price",),
            f"power_price of region {region.name} cannot be {region.power_price:g}: write dollars a kWh, such as 0.12",
        )
