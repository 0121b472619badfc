"""What is possible in a site, but seldom meant: said by `ctxflow site check`, and no error.

What does not live here: what is impossible (rules.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ctxflow.policies.registry import DEFAULTS
from ctxflow.sites.model import Site
from ctxflow.sites.rules import ARCHIVES
from ctxflow.sites.secret_names import is_secret, secrets_in
from ctxflow.sites.tier import Tier

_TASKVINE_ONLY = (
    "environment", "address", "port", "ssl", "fan_out", "keepalive_interval", "keepalive_timeout", "acquire",
    "join_timeout",
)  # fmt: skip
_LARGE_GB = 2000


def hints(site: Site, environment: bool = True, others_read: bool = False) -> Iterator[str]:
    """What a site's author may want to change, a sentence each.

    :param environment: whether to say that the environment is not on this machine.
    :param others_read: whether other users may read the file.

    >>> list(hints(Site(fan_out=3)))
    ['fan_out does nothing with the embedded engine: leave it out, or write engine = "taskvine" for a cluster']
    """
    if site.engine == "embedded":
        for key in _TASKVINE_ONLY:
            if key in site.model_fields_set:
                instead = 'write engine = "taskvine" for a cluster'
                yield f"{key} does nothing with the embedded engine: leave it out, or {instead}"
        return
    if site.gpus_per_worker is not None:
        yield "gpus_per_worker is for the embedded engine: write gpus in each tier"
    elsewhere = site.environment and not site.environment.endswith(ARCHIVES)
    if environment and site.environment and elsewhere and not os.path.exists(site.environment):
        yield (
            f"environment {site.environment} is not on this machine: see that it is on those of the workers, or have "
            "it sent there: `ctxflow env pack`"
        )
    if site.preemption != DEFAULTS["preemption"] and not any(tier.machine_gpus for tier in site.tiers):
        yield "preemption makes room on machines for workers with several GPUs: write machine_gpus in a tier"
    for tier in site.tiers:
        yield from _of_tier(tier)
        yield from _secrets(tier, others_read)
    if site.regions and not any(region.hosts for region in site.regions):
        claimed = {name for region in site.regions for name in region.tiers}
        for tier in site.tiers:
            if tier.name not in claimed and "CTXFLOW_REGION" not in tier.variables:
                yield f"tier {tier.name} is in no region, so its workers count as in {site.home}: name it in one"


def _secrets(tier: Tier, others_read: bool) -> Iterator[str]:
    for key in ("options", "submit"):
        for name in dict.fromkeys(secrets_in(getattr(tier, key))):
            yield (
                f"{name} in {key} of tier {tier.name} looks like a secret, and batch systems show {key} to who asks: "
                f"write it under variables, which workers get in a file that is yours alone"
            )
    names = [name for name in tier.variables if is_secret(name)]
    if names and others_read:
        yield (
            f"{', '.join(names)} in variables of tier {tier.name} looks like a secret, and other users may read this "
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
