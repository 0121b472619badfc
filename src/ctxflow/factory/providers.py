"""From a tier's `provider` key to the provider.

What does not live here: the providers themselves.
"""

from __future__ import annotations

from ctxflow.factory.condor import CondorProvider
from ctxflow.factory.local import LocalProvider
from ctxflow.factory.provider import Provider, ProviderError
from ctxflow.sites.tier import Tier


def source_of(tier: Tier) -> tuple[object, ...]:
    """What tells the batch system of one tier from that of another.

    >>> source_of(Tier(name="a10")) == source_of(Tier(name="a40")) != source_of(Tier(schedd="other"))
    True
    """
    return tier.provider, tier.schedd, tier.pool, str(sorted(tier.options.items()))


def queue_of(tier: Tier) -> tuple[object, ...]:
    """What tells the queue in which one tier's jobs are found from that of another: Slurm's is one for all partitions.

    >>> queue_of(Tier(provider="slurm", options={"partition": "a"})) == queue_of(Tier(provider="slurm"))
    True
    """
    if tier.provider == "slurm":
        return tier.provider, tier.options.get("clusters")
    return source_of(tier)


def provider_of(tier: Tier, run: str) -> Provider:
    """Who lends a tier's workers to a run.

    :param run: the run's id, by which its jobs are found again.
    :raises ProviderError: if the tier names none that there is.

    >>> provider_of(Tier(provider="local"), "run-7").queries
    0
    """
    if tier.provider == "condor":
        return CondorProvider(run=run, schedd=tier.schedd, pool=tier.pool)
    if tier.provider == "local":
        return LocalProvider()
    from ctxflow.factory.parsl_jobs import ParslProvider  # A second, with Parsl behind it, that few sites need.
    from ctxflow.factory.parsl_tiers import PARSL, parsl_provider

    if tier.provider in PARSL or ":" in tier.provider:
        return ParslProvider(parsl_provider(tier), run)
    names = ", ".join(["condor", "local", *PARSL])
    raise ProviderError(f"tier {tier.name} has no provider {tier.provider!r}: write one of {names}, or MODULE:NAME")
