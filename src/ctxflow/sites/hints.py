"""What is possible in a site, but seldom meant: said by `ctxflow site check`, and no error.

What does not live here: what is impossible (site_rules.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from ctxflow.policies.registry import DEFAULTS
from ctxflow.sites.engine_kinds import OWN, engine_kind
from ctxflow.sites.site_model import Site, Tier
from ctxflow.sites.site_rules import ARCHIVES

_NEEDS = {"python_environment": "remote", "acquire": "acquires", "join_timeout": "acquires"}  # Keys, and capabilities.
_LARGE_GB = 2000


def hints(site: Site, environment: bool = True, others_read: bool = False) -> Iterator[str]:
    """Yield what a site's author may want to change, a sentence each.

    :param environment: whether to say that the environment is not on this machine.
    :param others_read: whether other users may read the file.

    >>> list(hints(Site(taskvine={"fan_out": 3})))
    ['fan_out does nothing with the embedded engine: leave it out, or write engine = "taskvine" for a cluster']
    """
    yield from _idle_keys(site)
    if not site.capabilities.acquires:
        return
    elsewhere = site.python_environment and not site.python_environment.endswith(ARCHIVES)
    if environment and site.python_environment and elsewhere and not os.path.exists(site.python_environment):
        yield (
            f"python_environment {site.python_environment} is not on this machine: see that it is on those of the "
            "workers, or have it sent there: `ctxflow env pack`"
        )
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
            yield (
                f"{name} in {key} of tier {tier.name} looks like a secret, and batch systems show {key} to who asks: "
                f"write it under env, which workers get in a file that is yours alone"
            )
    names = [name for name in tier.env if is_secret(name)]
    if names and others_read:
        yield (
            f"{', '.join(names)} in env of tier {tier.name} looks like a secret, and other users may read this "
            "file: call chmod go-r on it"
        )


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
        yield (
            f"requirements of tier {tier.name} looks at GPUs, and fails where a machine has several models: write it "
            "as require_gpus, without the prefix"
        )


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
