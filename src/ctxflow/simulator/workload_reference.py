"""The reference page of workload files, made from the models: `python -m ctxflow.simulator.workload_reference`."""

from __future__ import annotations

from collections.abc import Iterator

import pydantic

from ctxflow.simulator.workload_file import (
    AppEntry,
    ContextEntry,
    EvictionTable,
    FaultEntry,
    Links,
    Matching,
    WorkloadFile,
)
from ctxflow.sites.site_problems import toml_value

_HEAD = """\
<!-- Made by `python -m ctxflow.simulator.workload_reference > docs/workloads.md`: change the models, not this page. -->
# Workload files

What `ctxflow simulate SITE WORKLOAD` simulates on a site ([simulator.md](simulator.md)): the items, how long they
take, what is staged and built on workers, and when workers join and leave. Every key has a default, so that
this is a complete file:

```toml
[[apps]]
items = 150_000
item_seconds = {a10 = 0.27, titan-x = 0.38}   # seconds of an item, by tier or GPU model; or one number
[[contexts]]
load_seconds = 15
```

A file with many of the keys:

```toml
[[apps]]
name = "verify"
context = "llm"
items = 150_000
item_seconds = 0.3
call_seconds = 0.5

[[apps]]
name = "interactive"
context = "llm"
items = 500
begin = 600                     # from the tenth minute on,
per_second = 0.5                # one every two seconds
batch_size = 1
priority = 1

[[contexts]]
name = "llm"
load_seconds = 15
files_gb = 7.4
origin = "filesystem"           # from there once, and then from worker to worker

[links]
filesystem = 84                 # Gbit/s
peers = 1

[evictions]
per_hour = 6                    # of each worker; or trace = "runs/20261121-054135-17"
away_seconds = 120
notice_seconds = 10

[[faults]]
kind = "slow"
share = 0.05                    # of all hosts
begin = 600
```

A tier's GPU model is the one in its `require_gpus`, `DeviceName == "..."`; other tiers are identified by their
names. Problems in a file are reported with the line, the key, and what to write.
"""
_PARTS: dict[str, type[pydantic.BaseModel]] = {
    "[[apps]]": AppEntry, "[[contexts]]": ContextEntry, "[links]": Links, "[evictions]": EvictionTable,
    "[matching]": Matching, "[[faults]]": FaultEntry,
}  # fmt: skip


def reference() -> str:
    """Return the page, in Markdown."""
    parts = [_HEAD]
    for header, model in _PARTS.items():
        parts += [f"\n## `{header}`\n\n{model.__doc__}\n", *_table(model, list(model.model_fields))]
    inner = {header.strip("[]") for header in _PARTS}
    keys = [key for key in WorkloadFile.model_fields if key not in inner]
    parts += ["\n## Above the first header\n", *_table(WorkloadFile, keys)]
    return "".join(parts)


def _table(model: type[pydantic.BaseModel], keys: list[str]) -> Iterator[str]:
    yield "\n| key | default | meaning |\n|---|---|---|\n"
    for key in keys:
        field = model.model_fields[key]
        default = "" if field.default is None else f"`{toml_value(field.default)}`"
        yield f"| `{key}` | {default} | {field.description} |\n"


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201 - this is what it is for
