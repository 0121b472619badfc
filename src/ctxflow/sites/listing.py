"""A site written out: every key with its value, and which were given.

What does not live here: colours and tables (cli/).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pydantic

from ctxflow.sites.model import Site
from ctxflow.sites.problem import toml_key, toml_value


@dataclass(frozen=True)
class Entry:
    """One key of a site or of a tier.

    :param tier: the number of the tier that it is of, None for the site's own.
    :param given: whether somebody gave it; otherwise it is the default.
    """

    tier: int | None
    key: str
    value: Any
    given: bool


def entries(site: Site) -> Iterator[Entry]:
    """Every key of a site, and then of its tiers.

    >>> [entry.key for entry in entries(Site(workers=2)) if entry.given]
    ['workers']
    """
    yield from _of(site, None)
    for number, tier in enumerate(site.tiers):
        yield from _of(tier, number)


def _of(model: pydantic.BaseModel, tier: int | None) -> Iterator[Entry]:
    for key in type(model).model_fields:
        if key != "tiers":
            yield Entry(tier, key, getattr(model, key), key in model.model_fields_set)


def toml_lines(site: Site) -> Iterator[tuple[str, Entry | None]]:
    """The lines of a site file that says all that a site is, with the entry that each is of.

    Defaults end in `# default`; keys without a value, which TOML has not, are comments.

    >>> print(*[line for line, _ in toml_lines(Site(workers=2))][:3], sep="\\n")
    name = "local"                     # default
    engine = "embedded"                # default
    workers = 2
    """
    tier: int | None = None
    for entry in entries(site):
        if entry.tier != tier:
            tier = entry.tier
            yield "", None
            yield "[[tiers]]", None
        key = toml_key(entry.key)
        if entry.value is None:
            yield f"# {key} =", entry
        else:
            line = f"{key} = {toml_value(entry.value)}"
            yield (line if entry.given else f"{line:<34} # default"), entry


def as_data(site: Site) -> dict[str, Any]:
    """A site as JSON has it: its values, and the places of those that were given.

    >>> as_data(Site(workers=2))["given"]
    ['workers']
    """
    given = [
        entry.key if entry.tier is None else f"tiers.{entry.tier}.{entry.key}" for entry in entries(site) if entry.given
    ]
    return {"site": site.model_dump(mode="json"), "given": given}
