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

_HEADERS = ("tiers", "regions")


@dataclass(frozen=True)
class Entry:
    """One key of a site, of a tier or of a region.

    :param of: what it is of, such as ("tiers", 0); () for the site's own.
    :param given: whether somebody gave it; otherwise it is the default.
    """

    of: tuple[()] | tuple[str, int]
    key: str
    value: Any
    given: bool


def entries(site: Site) -> Iterator[Entry]:
    """Every key of a site, and then of its tiers and regions.

    >>> [entry.key for entry in entries(Site(workers=2)) if entry.given]
    ['workers']
    """
    yield from _of(site, ())
    for header in _HEADERS:
        for number, model in enumerate(getattr(site, header)):
            yield from _of(model, (header, number))


def _of(model: pydantic.BaseModel, of: tuple[()] | tuple[str, int]) -> Iterator[Entry]:
    for key in type(model).model_fields:
        if of or key not in _HEADERS:
            yield Entry(of, key, getattr(model, key), key in model.model_fields_set)


def toml_lines(site: Site) -> Iterator[tuple[str, Entry | None]]:
    """The lines of a site file that says all that a site is, with the entry that each is of.

    Defaults end in `# default`; keys without a value, which TOML has not, are comments.

    >>> print(*[line for line, _ in toml_lines(Site(workers=2))][:3], sep="\\n")
    name = "local"                     # default
    engine = "embedded"                # default
    workers = 2
    """
    of: tuple[()] | tuple[str, int] = ()
    for entry in entries(site):
        if entry.of and entry.of != of:
            of = entry.of
            yield "", None
            yield f"[[{of[0]}]]", None
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
        f"{entry.of[0]}.{entry.of[1]}.{entry.key}" if entry.of else entry.key for entry in entries(site) if entry.given
    ]
    return {"site": site.model_dump(mode="json"), "given": given}
