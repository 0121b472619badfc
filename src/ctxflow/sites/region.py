"""Regions: groups of a site's workers that are close to each other, and what is between them.

What does not live here: the site around them (model.py), what is impossible (region_rules.py), and what is decided with
them (policies/routing).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

import pydantic

from ctxflow.scheduler.events import RegionSpec


class Region(pydantic.BaseModel):
    """A group of workers close to each other: a pool, a rack, a campus; with what is known of its place.

    >>> Region(name="north", hosts=["n*.example.org"]).has_host("n12.example.org")
    True
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: str = pydantic.Field("region", pattern=r"^[A-Za-z0-9-]+$", description="What the region is called.")
    tiers: tuple[str, ...] = pydantic.Field(
        (), description="The tiers whose workers are in it: one for each schedd, pool, or set of machines."
    )
    hosts: tuple[str, ...] = pydantic.Field(
        (), description="Patterns of the names of its machines, such as `gpu*.example.org`; they go before tiers."
    )
    latency_ms: dict[str, float] = pydantic.Field(
        {}, description="Milliseconds to other regions, by name; both ways, where the other does not say otherwise."
    )
    bandwidth_mbit: dict[str, float] = pydantic.Field(
        {}, description="Mbit/s to other regions, by name; both ways, where the other does not say otherwise."
    )
    power_price: float | None = pydantic.Field(None, ge=0, description="What power costs there, in dollars a kWh.")

    def has_host(self, host: str) -> bool:
        """Whether one of its patterns is a machine's name."""
        return any(fnmatch.fnmatchcase(host, pattern) for pattern in self.hosts)


def region_of(regions: Sequence[Region], home: str, tier: str, host: str = "", told: str | None = None) -> str:
    """The region of a worker: the one that it tells itself, else by its machine's name, else by its tier, else home.

    :param told: what the worker's environment has as `CTXFLOW_REGION`; a name that no region has does not count.

    >>> regions = [Region(name="north"), Region(name="south", tiers=["a40"], hosts=["s*"])]
    >>> [region_of(regions, "north", *worker) for worker in (("a40", "x"), ("a10", "s1"), ("a10", "x", "south"))]
    ['south', 'south', 'south']
    >>> region_of(regions, "north", "a10", "x", "east")
    'north'
    """
    if any(region.name == told for region in regions):
        return str(told)
    by_host = (region.name for region in regions if region.has_host(host))
    by_tier = (region.name for region in regions if tier in region.tiers)
    return next(by_host, next(by_tier, home))


def region_specs(regions: Sequence[Region], home: str) -> list[RegionSpec]:
    """What the scheduler hears of a site's regions, in seconds and bytes.

    >>> regions = [Region(name="north", latency_ms={"south": 40.0}), Region(name="south", bandwidth_mbit={"north": 80})]
    >>> [(spec.name, spec.home, spec.latency, spec.bandwidth) for spec in region_specs(regions, "north")]
    [('north', True, {'south': 0.04}, {'south': 10000000.0}), ('south', False, {'north': 0.04}, {'north': 10000000.0})]
    """
    latency = {region.name: region.latency_ms for region in regions}
    bandwidth = {region.name: region.bandwidth_mbit for region in regions}
    return [
        RegionSpec(
            region.name,
            {name: ms / 1e3 for name, ms in _both_ways(region.name, latency).items()},
            {name: mbit * 1e6 / 8 for name, mbit in _both_ways(region.name, bandwidth).items()},
            region.power_price,
            region.tiers,
            region.name == home,
        )
        for region in regions
    ]


def _both_ways(name: str, given: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """What a region says of others, and what others say of it."""
    told = {other: values[name] for other, values in given.items() if name in values and other != name}
    return {**told, **{other: value for other, value in given[name].items() if other != name}}
