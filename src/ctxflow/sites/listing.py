"""A site written out: every key with its value, and which were given.

What does not live here: colours and tables (cli/).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pydantic

from ctxflow.sites.engine_kinds import OWN
from ctxflow.sites.site_model import Site
from ctxflow.sites.site_problems import toml_key, toml_value

_HEADERS = ("tiers", "regions")
_Of = tuple[()] | tuple[str] | tuple[str, int]


@dataclass(frozen=True)
class Entry:
    """One key of a site, of its engine's table, of a tier or of a region.

    :param of: what it is of, such as ("taskvine",) or ("tiers", 0); () for the site's own.
    :param given: whether somebody gave it; otherwise it is the default.
    """

    of: _Of
    key: str
    value: Any
    given: bool


def entries(site: Site) -> Iterator[Entry]:
    """Yield the keys of a site, of its engine, its tiers and its regions; of other engines, those that were given.

    >>> [entry.key for entry in entries(Site(workers=2)) if entry.given]
    ['workers']
    """
    tables = engine_tables(site)
    yield from (entry for entry in _of(site, ()) if entry.key not in (*_HEADERS, *tables))
    for name, table in tables.items():
        yield from (entry for entry in _of(table, (name,)) if entry.given or name == site.engine)
    for header in _HEADERS:
        for number, model in enumerate(getattr(site, header)):
            yield from _of(model, (header, number))


def engine_tables(site: Site) -> dict[str, pydantic.BaseModel]:
    """Return the keys of engines that a site has, by the names of their tables."""
    fields = {key: getattr(site, key) for key in type(site).model_fields if key in OWN or key == site.engine}
    return {key: table for key, table in fields.items() if isinstance(table, pydantic.BaseModel)}


def _of(model: pydantic.BaseModel, of: _Of) -> Iterator[Entry]:
    for key in type(model).model_fields:
        yield Entry(of, key, getattr(model, key), key in model.model_fields_set)


def toml_lines(site: Site) -> Iterator[tuple[str, Entry | None]]:
    """Yield the lines of a site file that says all that a site is, with the entry that each is of.

    Defaults end in `# default`; keys without a value, which TOML has not, are comments.

    >>> print(*[line for line, _ in toml_lines(Site(workers=2))][:3], sep="\\n")
    name = "local"                     # default
    engine = "embedded"                # default
    workers = 2
    """
    of: _Of = ()
    for entry in entries(site):
        if entry.of and entry.of != of:
            of = entry.of
            yield "", None
            yield f"[[{of[0]}]]" if len(of) > 1 else f"[{toml_key(of[0])}]", None
        key = toml_key(entry.key)
        if entry.value is None:
            yield f"# {key} =", entry
        else:
            line = f"{key} = {toml_value(entry.value)}"
            yield (line if entry.given else f"{line:<34} # default"), entry


def as_data(site: Site) -> dict[str, Any]:
    """Return a site as JSON has it: its values, and the places of those that were given.

    >>> as_data(Site(workers=2))["given"]
    ['workers']
    """
    given = [".".join(map(str, (*entry.of, entry.key))) for entry in entries(site) if entry.given]
    return {"site": site.model_dump(mode="json"), "given": given}
