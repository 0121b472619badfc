"""What is impossible in a site although each value by itself is fine, and what is seldom meant (`hints`)."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from ctxflow.policies.registry import DEFAULTS, FAMILIES, known, make, names
from ctxflow.sites.engine_kinds import OWN, TaskVineOptions, engine_kind
from ctxflow.sites.provider_keys import tier_problems
from ctxflow.sites.site_model import Region, Site, Tier
from ctxflow.sites.site_problems import FileProblem, shown, suggestion

ARCHIVES = (".tar.gz", ".tgz")


def problems(site: Site) -> Iterator[FileProblem]:
    """Yield all that is impossible in a site.

    >>> [problem.text for problem in problems(Site(taskvine={"keepalive_interval": 30}))]
    ['keepalive_timeout = 15 must be more than keepalive_interval = 30: write keepalive_timeout = 90']
    """
    yield from _engine(site)
    yield from _network(site.taskvine)
    if not math.isfinite(site.join_timeout):
        instead = "write seconds, such as join_timeout = 300"
        yield FileProblem(("join_timeout",), f"join_timeout cannot be infinite: {instead}")
    if site.python_environment is not None and (wrong := environment_mistake(site.python_environment)):
        yield FileProblem(("python_environment",), wrong)
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
        for problem in tier_problems(tier, site.acquire):
            yield FileProblem(("tiers", number, *problem.path), problem.text)
    yield from region_problems(site)


def _engine(site: Site) -> Iterator[FileProblem]:
    if site.tiers and not site.capabilities.acquires:
        path = ("engine",) if "engine" in site.model_fields_set else ("tiers",)
        instead = 'write engine = "taskvine" (above the first [[tiers]]) for a cluster'
        text = f"the {site.engine} engine has no tiers: {instead}, or leave the tiers out for this machine"
        yield FileProblem(path, text)
    if site.capabilities.acquires and not site.tiers:
        instead = 'write [[tiers]] and under it provider = "condor" (or another), as in site-configs/'
        alone = 'for this machine alone write engine = "embedded"'
        yield FileProblem(("engine",), f'engine = "{site.engine}" needs at least one tier: {instead}; {alone}')


def _machines(site: Site) -> Iterator[FileProblem]:
    """Yield tiers that share machines with no other."""
    count = Counter(tier.machines for tier in site.tiers)
    for number, tier in enumerate(site.tiers):
        if tier.machines is not None and count[tier.machines] < 2:
            instead = "write the same for the tiers that are the same machines, or leave it out"
            text = f"machines of tier {tier.name} are {shown(tier.machines)}, and no other tier's are: {instead}"
            yield FileProblem(("tiers", number, "machines"), text)


def _limits(site: Site) -> Iterator[FileProblem]:
    """Yield limits that nothing would count."""
    priced = any(tier.price is not None for tier in site.tiers)
    for scope in ("run", "factory", "user"):
        for measure in ("gpu_hours", "cost"):
            key = f"{measure}_per_{scope}"
            if getattr(site, key) is None:
                continue
            text = ""
            if not site.capabilities.acquires:
                text = f"{key} is for workers that are acquired, which the {site.engine} engine's are not"
            elif scope != "run" and site.acquire != "factory":
                text = f'{key} is counted by a factory: write acquire = "factory", or {measure}_per_run'
            elif measure == "cost" and not priced:
                text = f"{key} cannot be counted: write the price of a worker's hour below [[tiers]]"
            if text:
                yield FileProblem((key,), text)


def _network(options: TaskVineOptions) -> Iterator[FileProblem]:
    def problem(key: str, text: str) -> FileProblem:
        return FileProblem(("taskvine", key), text)

    interval, timeout = options.keepalive_interval, options.keepalive_timeout
    if timeout <= interval:
        rule = f"keepalive_timeout = {timeout} must be more than keepalive_interval = {interval}"
        yield problem("keepalive_timeout", f"{rule}: write keepalive_timeout = {3 * interval}")
    for key in ("port", "transfer_port"):
        port = getattr(options, key)
        ports = [port] if isinstance(port, int) else list(port)
        if any(not 0 <= each <= 65535 for each in ports) or (len(ports) > 1 and 0 in ports):
            yield problem(key, f"{key} cannot be {shown(port)}: write a number from 1024 to 65535, or 0 for any")
        elif ports != sorted(ports):
            low, high = sorted(ports)
            yield problem(key, f"{key} has the highest first: write {key} = [{low}, {high}]")
    address = options.address or ""
    host = re.sub(r"^\w+://|:\d+$|/$", "", address)
    if host != address:
        yield problem("address", f'address is a host alone, and port a key of its own: write address = "{host}"')


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
        text = f'the {family} policy has no name: write {{policy = "...", ...}}, such as policy = "{names(family)[0]}"'
        yield FileProblem((family,), text)
    elif isinstance(name, str) and not known(family, name):
        close = suggestion(name, names(family), "")
        choose = f"choose one of {', '.join(names(family))}" + (f"; {close}" if close else "")
        yield FileProblem((family,), f"there is no {family} policy {name!r}: {choose}")
    elif isinstance(name, (int, float, list)):
        text = f"the {family} policy cannot be {shown(name)}: write a name ({', '.join(names(family))})"
        yield FileProblem((family,), text)
    elif isinstance(choice, Mapping):
        try:
            make(family, dict(choice))
        except ValueError as error:
            named = [key for key in choice if key != "policy" and key in str(error)]
            yield FileProblem((family, *named[:1]), str(error))


def region_problems(site: Site) -> Iterator[FileProblem]:
    """Yield all that is impossible in a site's regions.

    >>> site = Site(engine="taskvine", regions=[Region(name="north", tiers=["a10"])])
    >>> [problem.text for problem in region_problems(site)]
    ["region north has the tier 'a10', and no tier is called so: add one with that name, or leave it out"]
    """
    if site.regions and not site.capabilities.remote:
        why = f"the {site.engine} engine's workers are all on this machine, so it has no regions"
        yield FileProblem(("regions",), f'{why}: leave them out, or write engine = "taskvine" for a cluster')
        return
    names = [region.name for region in site.regions]
    if site.region is not None and site.region not in names:
        known = f"write one of {', '.join(names)}" if names else "write [[regions]] and under it its name"
        yield FileProblem(("region",), f"region = {site.region!r} is no region of the site: {known}")
    owners: dict[str, str] = {}
    for number, region in enumerate(site.regions):
        if region.name in names[:number]:
            text = f'two regions have the name "{region.name}": give one of them another'
            yield FileProblem(("regions", number, "name"), text)
        for tier in region.tiers:
            if tier in owners:
                instead = "leave it out of one, or tell its machines apart with hosts"
                text = f"tier {tier} is in two regions, {owners[tier]} and {region.name}: {instead}"
                yield FileProblem(("regions", number, "tiers"), text)
            owners.setdefault(tier, region.name)
        for problem in _of_region(site, region, names):
            yield FileProblem(("regions", number, *problem.path), problem.text)


def _of_region(site: Site, region: Region, names: list[str]) -> Iterator[FileProblem]:
    tiers = [tier.name for tier in site.tiers]
    for tier in region.tiers:
        if tier not in tiers:
            hint = suggestion(tier, tiers, "add one with that name, or leave it out")
            text = f"region {region.name} has the tier {tier!r}, and no tier is called so: {hint}"
            yield FileProblem(("tiers",), text)
    for key in ("latency_ms", "bandwidth_mbit"):
        for other, value in getattr(region, key).items():
            if other not in names:
                hint = suggestion(other, names, f"the site has {', '.join(names)}")
                yield FileProblem((key,), f"{key} of region {region.name} names {other!r}, which is no region: {hint}")
            if not math.isfinite(value) or value < 0 or (value == 0 and key == "bandwidth_mbit"):
                instead = f"write a number, such as {{{other} = 40}}"
                yield FileProblem((key,), f"{key} of region {region.name} cannot be {value:g}: {instead}")
    if region.power_price is not None and not math.isfinite(region.power_price):
        given, instead = f"{region.power_price:g}", "write dollars a kWh, such as 0.12"
        yield FileProblem(("power_price",), f"power_price of region {region.name} cannot be {given}: {instead}")


_NEEDS = {"python_environment": "remote", "acquire": "acquires", "join_timeout": "acquires"}  # Keys, and capabilities.
_LARGE_GB = 2000


def hints(site: Site, environment: bool = True, others_read: bool = False) -> Iterator[str]:
    """Yield what a site's author may want to change, a sentence each.

    :param environment: whether to look for it on this machine; `others_read`: whether others may read the file.

    >>> list(hints(Site(taskvine={"fan_out": 3})))
    ['fan_out does nothing with the embedded engine: leave it out, or write engine = "taskvine" for a cluster']
    """
    yield from _idle_keys(site)
    if not site.capabilities.acquires:
        return
    elsewhere = site.python_environment and not site.python_environment.endswith(ARCHIVES)
    if environment and site.python_environment and elsewhere and not os.path.exists(site.python_environment):
        instead = "see that it is on those of the workers, or have it sent there: `ctxflow env pack`"
        yield f"python_environment {site.python_environment} is not on this machine: {instead}"
    if site.preemption != DEFAULTS["preemption"] and not any(tier.machine_gpus for tier in site.tiers):
        yield "preemption makes room on machines for workers with several GPUs: write machine_gpus in a tier"
    for tier in site.tiers:
        yield from _of_tier(tier)
        yield from _secrets(tier, others_read)
    if site.regions and not any(region.hosts for region in site.regions):
        claimed = {name for region in site.regions for name in region.tiers}
        for tier in site.tiers:
            if tier.name not in claimed and "CTXFLOW_REGION" not in tier.env:
                yield f"tier {tier.name} is in no region, so its workers count as in {site.home}: name it in one"


def _idle_keys(site: Site) -> Iterator[str]:
    """Yield keys that the site's engine does not look at."""
    for key, need in _NEEDS.items():
        if key in site.model_fields_set and not getattr(site.capabilities, need):
            yield _does_nothing(key, site.engine, "taskvine")
    for kind in OWN.values():
        if kind.name != site.engine:
            for key in type(table := getattr(site, kind.name)).model_fields:
                if key in table.model_fields_set:
                    yield _does_nothing(key, site.engine, kind.name)


def _does_nothing(key: str, engine: str, other: str) -> str:
    if key == "gpus_per_worker" and engine_kind(engine).capabilities.acquires:
        return "gpus_per_worker is for the embedded engine: write gpus in each tier"
    where = " for a cluster" if OWN[other].capabilities.acquires else ""
    return f'{key} does nothing with the {engine} engine: leave it out, or write engine = "{other}"{where}'


def _secrets(tier: Tier, others_read: bool) -> Iterator[str]:
    for key in ("options", "submit"):
        for name in dict.fromkeys(secrets_in(getattr(tier, key))):
            seen = f"{name} in {key} of tier {tier.name} looks like a secret, and batch systems show {key} to who asks"
            yield f"{seen}: write it under env, which workers get in a file that is yours alone"
    names = ", ".join(name for name in tier.env if is_secret(name))
    if names and others_read:
        seen = f"{names} in env of tier {tier.name} looks like a secret, and other users may read this file"
        yield f"{seen}: call chmod go-r on it"


def _of_tier(tier: Tier) -> Iterator[str]:
    for key in ("memory_gb", "disk_gb"):
        value = getattr(tier, key)
        if value is not None and value >= _LARGE_GB * (10 if key == "disk_gb" else 1):
            meant = f"{key} = {value / 1000:g}"
            yield f"{key} = {value:g} of tier {tier.name} is {value / 1000:g} TB: if you meant MB, write {meant}"
    if tier.workers == 0:
        yield f"tier {tier.name} has workers = 0, so it is never used: write how many at most"
    if tier.pool and not tier.schedd:
        yield f"pool of tier {tier.name} has no schedd beside it, so any of that pool is taken: write schedd too"
    if tier.requirements and any(word in tier.requirements for word in ("GPUs_", "CUDA")):
        fails = f"requirements of tier {tier.name} looks at GPUs, and fails where a machine has several models"
        yield f"{fails}: write it as require_gpus, without the prefix"


_WORDS = r"(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|KEY)"
_NAME = re.compile(rf"{_WORDS}S?(?![A-Z])", re.IGNORECASE)
_GIVEN = re.compile(rf"\b(\w*{_WORDS}S?)(?:=|: )\S", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Return whether a variable's name is that of a secret.

    >>> [is_secret(name) for name in ("HF_TOKEN", "api_key", "AWS_SECRET_ACCESS_KEY", "TOKENIZERS_PARALLELISM")]
    [True, True, True, False]
    """
    return bool(_NAME.search(name))


def secrets_in(value: Any) -> list[str]:
    """Return the names of the secrets that a value gives, whatever it holds.

    >>> secrets_in({"worker_init": "module load cuda; export HF_TOKEN=hf_abc", "secret": "pull", "nodes": 2})
    ['HF_TOKEN']
    """
    if isinstance(value, dict):
        texts = [str(name) for name, each in value.items() if each and isinstance(each, str)]
        named = [name for name in texts if is_secret(name) and name != "secret"]  # Which Parsl has for a name of one.
        return [*named, *(name for each in value.values() for name in secrets_in(each))]
    if isinstance(value, (list, tuple)):
        return [name for each in value for name in secrets_in(each)]
    return _GIVEN.findall(value) if isinstance(value, str) else []
