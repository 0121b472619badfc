"""The reference page of site files, made from the models: `python -m ctxflow.sites.reference > docs/sites.md`.

What does not live here: what the keys mean, which their models say (site_model.py, engine_kinds.py).
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo

from ctxflow.policies.registry import FAMILIES
from ctxflow.sites.engine_kinds import OWN
from ctxflow.sites.site_model import Region, Site, Tier
from ctxflow.sites.site_problems import toml_value

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
    return "".join(
        [
            _HEAD,
            _SITE,
            *_table(Site),
            _ENGINE,
            *_engine_tables(),
            _TIER,
            *_table(Tier),
            _REGION,
            *_table(Region),
            _POLICIES,
        ]
    )


def _engine_tables() -> Iterator[str]:
    for kind in OWN.values():
        yield f"\n### `[{kind.name}]`\n"
        yield from _table(kind.options)


def _table(model: type[pydantic.BaseModel]) -> Iterator[str]:
    yield "\n| key | type | default | meaning |\n|---|---|---|---|\n"
    for key, field in model.model_fields.items():
        if key in FAMILIES:
            kind = "policy"
        elif model is Site and key in ("tiers", "regions"):
            kind = f"`[[{key}]]`"
        elif model is Site and key in OWN:
            kind = f"`[{key}]`"
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
        return "list of numbers" if arguments[0] is float else "list of texts"
    if origin is dict:
        return {str: "table of texts", float: "table of numbers"}.get(arguments[1], "table")
    return {int: "whole number", float: "number", str: "text", bool: "true or false"}[annotation]


def _bounds(field: FieldInfo) -> str:
    low, high = (next((getattr(m, name) for m in field.metadata if hasattr(m, name)), None) for name in ("ge", "le"))
    above = next((m.gt for m in field.metadata if hasattr(m, "gt")), None)
    if high is not None:
        return f", {low:g} to {high:g}"
    if low is not None:
        return f", from {low:g}"
    return "" if above is None else f", more than {above:g}"


def _default(field: FieldInfo) -> str:
    empty = field.default in (None, {}, ()) or isinstance(field.default, pydantic.BaseModel)
    return "" if empty else f"`{toml_value(field.default)}`"


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201 - this is what it is for
