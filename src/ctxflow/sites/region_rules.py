"""What is impossible in a site's regions although each value by itself is fine, each with what to write.

What does not live here: what one key can be (region.py), and the rest of the site (rules.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ctxflow.sites.model import Site
from ctxflow.sites.problem import Problem, suggestion
from ctxflow.sites.region import Region


def region_problems(site: Site) -> Iterator[Problem]:
    """All that is impossible in a site's regions.

    >>> site = Site(engine="taskvine", regions=[Region(name="north", tiers=["a10"])])
    >>> [problem.text for problem in region_problems(site)]
    ["region north has the tier 'a10', and no tier is called so: add one with that name, or leave it out"]
    """
    if site.regions and site.engine == "embedded":
        yield Problem(
            ("regions",),
            "the embedded engine's workers are all on this machine, so it has no regions: leave them out, or write "
            'engine = "taskvine" for a cluster',
        )
        return
    names = [region.name for region in site.regions]
    if site.region is not None and site.region not in names:
        known = f"write one of {', '.join(names)}" if names else "write [[regions]] and under it its name"
        yield Problem(("region",), f"region = {site.region!r} is no region of the site: {known}")
    owners: dict[str, str] = {}
    for number, region in enumerate(site.regions):
        if region.name in names[:number]:
            yield Problem(
                ("regions", number, "name"), f'two regions have the name "{region.name}": give one of them another'
            )
        for tier in region.tiers:
            if tier in owners:
                yield Problem(
                    ("regions", number, "tiers"),
                    f"tier {tier} is in two regions, {owners[tier]} and {region.name}: leave it out of one, or tell "
                    "its machines apart with hosts",
                )
            owners.setdefault(tier, region.name)
        for problem in _of_region(site, region, names):
            yield Problem(("regions", number, *problem.path), problem.text)


def _of_region(site: Site, region: Region, names: list[str]) -> Iterator[Problem]:
    tiers = [tier.name for tier in site.tiers]
    for tier in region.tiers:
        if tier not in tiers:
            otherwise = "add one with that name, or leave it out"
            yield Problem(
                ("tiers",),
                f"region {region.name} has the tier {tier!r}, and no tier is called so: "
                + suggestion(tier, tiers, otherwise),
            )
    for key in ("latency_ms", "bandwidth_mbit"):
        for other, value in getattr(region, key).items():
            if other not in names:
                yield Problem(
                    (key,),
                    f"{key} of region {region.name} names {other!r}, which is no region: "
                    + suggestion(other, names, f"the site has {', '.join(names)}"),
                )
            if not math.isfinite(value) or value < 0 or (value == 0 and key == "bandwidth_mbit"):
                yield Problem(
                    (key,),
                    f"{key} of region {region.name} cannot be {value:g}: write a number, such as {{{other} = 40}}",
                )
    if region.power_price is not None and not math.isfinite(region.power_price):
        yield Problem(
            ("power_price",),
            f"power_price of region {region.name} cannot be {region.power_price:g}: write dollars a kWh, such as 0.12",
        )
