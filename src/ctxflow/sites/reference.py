"""Write out every key: of one site, and the reference page `python -m ctxflow.sites.reference > docs/sites.md`."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo

from ctxflow.policies.registry import FAMILIES
from ctxflow.sites.engine_kinds import OWN
from ctxflow.sites.site_model import Region, Site, Tier
from ctxflow.sites.site_problems import toml_key, toml_value

_HEAD = """\
<!-- Made by `python -m ctxflow.sites.reference`: change the models, not this page. -->
# Site files

A site file describes where work runs; a program does not change when its site does: `ContextExecutor(site="my.toml")`.
It is [TOML](https://toml.io): a key and its value on a line, text in quotes, and a header `[[tiers]]` before the keys
of each tier.

```toml
name = "my-campus"
engine = "taskvine"                      # a cluster; "embedded" is this machine
python_environment = "/shared/envs/ctxflow"  # the workers' Python (environments.md)
scaling = "queue-proportional"           # workers follow the load

[[tiers]]                                # one kind of worker
name = "a10"
provider = "condor"                      # the batch system
workers = 20
require_gpus = 'DeviceName == "NVIDIA A10"'

[[tiers]]                                # another, from another batch system: one run uses both
name = "static"
provider = "slurm"
workers = 4
options = {partition = "gpu", walltime = "04:00:00"}
```

Start from the file in [site-configs](../site-configs) that is closest to your site: `local`, `gpu-server`,
`condor-campus`, `ospool`, `slurm-campus`, `pbs`, `grid-engine`, `kubernetes`, `testbed`, `testbed-tiers`. Then:

```console
$ ctxflow site check my-site.toml           # reports problems with the line, the key, and what to write
$ ctxflow site check my-site.toml --live    # queries the batch systems: machines, GPUs, and permission to submit
$ ctxflow site show my-site.toml            # every key, and which of them you set
```

Common mistakes:

- **Keys of the site come first.** Keys below a header `[[tiers]]` belong to that tier.
- **Expressions contain double quotes**, so enclose them in single ones: `requirements = 'Arch == "X86_64"'`.
- **`requirements` applies to a machine, `require_gpus` to each of its GPUs**, whose attributes have no prefix:
  `DeviceName`, `Capability`, `GlobalMemoryMb`. A machine may hold GPUs of several models.
- **Request little.** Each worker is a separate job; the smaller it is, the more machines match, and the less is lost.
"""
_SITE = """
## Keys of the site

Keys whose meaning begins with "Cluster" are for engines with remote workers, such as `engine = "taskvine"`.
"""
_ENGINE = """
## Keys of an engine

Each engine has a table for its specific keys, under a header with its name, below the keys of the site:

```toml
engine = "taskvine"

[taskvine]
port = [9000, 9100]
ssl = true
```

In earlier versions they were keys of the site; they still work there.
"""
_TIER = """
## Keys of a tier

Under a header `[[tiers]]`. Keys whose meaning begins with the name of a batch system are for its tiers.
`options` takes the arguments of Parsl's provider; `ctxflow site check` checks their names.
"""
_REGION = """
## Keys of a region

A site whose workers are in several places (pools, racks, campuses, with slow links between them) has a
header `[[regions]]` for each. `routing = "torta"` and `scaling = "activation"` use them
([routing](routing.md)); other policies ignore them.

```toml
region = "campus"                        # of this machine: above the first header

[[regions]]
name = "campus"
tiers = ["a10"]                          # a tier for each schedd, pool, or set of machines
power_price = 0.21

[[regions]]
name = "north"
hosts = ["n*.example.org"]               # or by the machines' names, whatever their tier
latency_ms = {campus = 40}
bandwidth_mbit = {campus = 200}
power_price = 0.09
```

Machines distinguished by an attribute are a tier each: `requirements = 'Rack == "north"'`. A worker may report its
region in the environment variable `CTXFLOW_REGION`, which machines or a tier (`env`) can set. It takes precedence over
patterns of names, and these over tiers; workers in no region are in this machine's.
"""
_POLICIES = f"""
## Policies

Each family of policies has a key: {", ".join(f"`{family}`" for family in FAMILIES)}.
Its value is a policy's name, or a table with the policy's options too:

```toml
routing = "least-loaded"

[batching]                               # or on one line: batching = {{policy = "fixed", size = 50}}
policy = "fixed"
size = 50
```

An unknown name is refused with a list of the known ones. In a program, `Site(routing=...)` takes an object.
"""


def reference() -> str:
    """Return the page, in Markdown."""
    engines = (part for kind in OWN.values() for part in (f"\n### `[{kind.name}]`\n", *_table(kind.options)))
    tables = (*_table(Site), _ENGINE, *engines, _TIER, *_table(Tier), _REGION, *_table(Region))
    return "".join([_HEAD, _SITE, *tables, _POLICIES])


def _table(model: type[pydantic.BaseModel]) -> Iterator[str]:
    yield "\n| key | type | default | meaning |\n|---|---|---|---|\n"
    for key, field in model.model_fields.items():
        if key in FAMILIES:
            kind = "policy"
        elif model is Site and key in (*_HEADERS, *OWN):
            kind = f"`[[{key}]]`" if key in _HEADERS else f"`[{key}]`"
        else:
            kind = _kind(field.annotation) + _bounds(field)
        cells = (f"`{key}`", kind, _default(field), (field.description or "").replace("|", "\\|"))
        yield f"| {' | '.join(cells)} |\n"


def _kind(annotation: Any) -> str:
    """Return a type in words.

    >>> _kind(int | None), _kind(Literal["a", "b"]), _kind(int | tuple[int, int])
    ('whole number', '`"a"` or `"b"`', 'whole number, or list of 2')
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return ", or ".join(_kind(part) for part in arguments if part is not type(None))
    if origin is Literal:
        return " or ".join(f'`"{word}"`' for word in arguments)
    if origin is tuple:
        if arguments[-1] is not ...:
            return f"list of {len(arguments)}"
        return "list of texts" if arguments[0] is str else "list of numbers"
    if origin is dict:
        return {str: "table of texts", float: "table of numbers"}.get(arguments[1], "table")
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}[annotation]


def _bounds(field: FieldInfo) -> str:
    bounds = {name: getattr(m, name) for m in field.metadata for name in ("ge", "le", "gt") if hasattr(m, name)}
    if "le" in bounds:
        return f", {bounds['ge']:g} to {bounds['le']:g}"
    if "ge" in bounds:
        return f", from {bounds['ge']:g}"
    return f", more than {bounds['gt']:g}" if "gt" in bounds else ""


def _default(field: FieldInfo) -> str:
    empty = field.default in (None, {}, ()) or isinstance(field.default, pydantic.BaseModel)
    return "" if empty else f"`{toml_value(field.default)}`"


_HEADERS = ("tiers", "regions")
_Of = tuple[()] | tuple[str] | tuple[str, int]


@dataclass(frozen=True)
class Entry:
    """One key of a site, or of its part `of`, such as ("taskvine",) or ("tiers", 0); its default if not `given`."""

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


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201 - this is what it is for
