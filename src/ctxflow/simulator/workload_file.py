"""The workload file of `ctxflow simulate`: its models, what can be wrong in one, and its reference page.

`python -m ctxflow.simulator.workload_file` prints the page. The site is another file, and `scenario.py` reads both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ctxflow.sites.loader import advice
from ctxflow.sites.site_problems import FileError, FileProblem, KeyPath, shown, suggestion, toml_value

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AppEntry(_Entry):
    """One app: its items, when they arrive, and how long they take."""

    name: _Name = Field("app", description="The name of the app.")
    context: str | None = Field(None, description="The context that it needs; by default the first.")
    items: int = Field(1000, ge=1, description="Number of items.")
    begin: NotNegative = Field(0.0, description="Arrival of the first items, in seconds.")
    per_second: Positive | None = Field(
        None, description="Arrivals per second, at random times; by default all items arrive at once."
    )
    arrivals: tuple[tuple[NotNegative, Annotated[int, Field(ge=1)]], ...] | None = Field(
        None, description="`[[seconds, items], ...]`: arrivals over time, in place of the three above."
    )
    item_seconds: Positive | dict[str, Positive] = Field(
        1.0, description="Seconds of an item: a number, or a table by GPU model or tier."
    )
    spread: NotNegative = Field(
        0.3, description="The standard deviation of an item's seconds, as a share of their mean."
    )
    call_seconds: NotNegative = Field(0.0, description="Seconds of a call in addition to its items, on the worker.")
    tokens_per_second: Positive | dict[str, Positive] | None = Field(
        None,
        description="What a worker's engine does at best, of an app of items, whose calls overlap (in place of "
        "`item_seconds`); a number, or a table by GPU model or tier.",
    )
    tokens: Positive = Field(1.0, description="Mean tokens of an item of such an app; `spread` is theirs, log-normal.")
    knee: Positive = Field(
        16.0, description="Items in flight at which such an engine would do its best if it did not bend before."
    )
    bend: Positive = Field(1.5, description="How sharply it bends there: 1 slowly, 30 at once.")
    salvage: bool = Field(
        False,
        description="Whether it yields its results one by one, so that an eviction costs only the item in flight.",
    )
    batch: bool = Field(True, description="Whether items may share a call.")
    batch_size: int | None = Field(None, ge=1, description="The app's own `batch_size`.")
    priority: int = Field(0, description="Higher runs first.")
    poison: int | None = Field(
        None, ge=1, description="One of this many items raises wherever it runs, and with it the call that contains it."
    )


class ContextEntry(_Entry):
    """One context: its files, and how long building it takes."""

    name: _Name = Field("context", description="The name of the context.")
    load_seconds: NotNegative | dict[str, NotNegative] = Field(
        15.0, description="Seconds of building it: a number, or a table by GPU model or tier."
    )
    import_seconds: NotNegative | dict[str, NotNegative] | None = Field(
        None,
        description="Those of `load_seconds` that imports and the start of a process take, which a zygote saves; a "
        "number, or a table by GPU model or tier.",
    )
    load_spread: NotNegative = Field(0.3, description="Their standard deviation, as a share of their mean; log-normal.")
    files_gb: NotNegative = Field(0.0, description="Size of its files in GB (weights, an environment).")
    files: int = Field(1, ge=1, description="Number of files, if opening them takes time.")
    origin: Literal["driver", "filesystem", "internet"] = Field(
        "driver", description="Their source: the machine of the program, a shared filesystem, the internet."
    )
    shared: bool = Field(
        True, description="Whether workers transfer them to each other; else each fetches them from the source."
    )
    unpack_seconds: NotNegative = Field(0.0, description="Seconds from the files' arrival until they can be used.")
    gpus: int | None = Field(None, ge=0, description="GPUs it needs; by default 1 if all workers have one.")
    memory_gb: Positive | None = Field(None, description="Memory it takes on a worker.")
    gpu_memory_gb: Positive | None = Field(None, description="GPU memory it takes; by default all of it.")
    level: Literal["none", "partial", "pervasive"] | None = Field(
        None, description="What workers keep of it; the default is the site's level."
    )


class Links(_Entry):
    """Transfer rates of files, in Gbit/s."""

    driver: Positive = Field(1.0, description="Gbit/s from the program's machine, all transfers together.")
    filesystem: Positive = Field(10.0, description="Gbit/s of the shared filesystem, all readers together.")
    filesystem_reader: Positive = Field(1.0, description="Gbit/s of the shared filesystem for one reader.")
    filesystem_opens: Positive | None = Field(
        None, description="Files that the shared filesystem opens in a second; no limit by default."
    )
    internet: Positive = Field(1.0, description="Gbit/s of the line to the internet, all transfers together.")
    peers: Positive = Field(1.0, description="Gbit/s of each worker's machine; `fan_out` is a key of the site.")


class EvictionTable(_Entry):
    """When workers are evicted. A table gives figures by tier; tiers that are not in it have no evictions."""

    per_hour: NotNegative | dict[str, NotNegative] = Field(
        0.0, description="Evictions per hour of a worker, at random times; a number, or a table by tier."
    )
    away_seconds: NotNegative = Field(60.0, description="Mean seconds until a replacement can start.")
    notice_seconds: NotNegative = Field(0.0, description="Seconds from the notice of an eviction to the eviction.")
    drain_from: NotNegative | None = Field(
        None,
        description="Seconds until the first eviction without replacement; the first tier's workers go first.",
    )
    drain_every: Positive = Field(60.0, description="Seconds from one drained worker to the next.")
    trace: str | dict[str, str] | None = Field(
        None,
        description="The available workers over time: a spot trace (JSON with metadata.gap_seconds and data), or "
        "the directory of a recorded run, whose joins and losses count; a path, or a table by tier. In place of "
        "`per_hour`.",
    )


class Matching(_Entry):
    """The delay from the request for a worker to its joining."""

    seconds: NotNegative = Field(10.0, description="Mean seconds, for tiers without `boot_seconds`.")
    spread: NotNegative = Field(0.5, description="Their standard deviation, as a share of their mean.")


class FaultEntry(_Entry):
    """Bad hosts. Which ones is drawn from the seed."""

    kind: Literal["black-hole", "slow", "flaky-gpu", "no-builds"] = Field(
        "black-hole",
        description="Every call raises at once; calls take longer; calls on one of the host's workers raise "
        "occasionally; no context can be built.",
    )
    tier: str | None = Field(None, description="The tier of the bad hosts; by default any.")
    hosts: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Number of bad hosts; by default 1, or set by `share`."
    )
    share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="The share of the hosts that are bad, in place of `hosts`."
    )
    begin: NotNegative = Field(0.0, description="Start, in seconds.")
    end: Positive | None = Field(None, description="End, in seconds; by default never.")
    factor: Annotated[float, Field(ge=1)] = Field(10.0, description="How many times longer calls take on slow hosts.")
    calls: Annotated[float, Field(gt=0, le=1)] = Field(0.1, description="The share of a flaky GPU's calls that raise.")
    seconds: NotNegative = Field(0.0, description="Seconds after which calls raise, and builds fail.")


class WorkloadFile(_Entry):
    """The contents of a workload file. Every key has a default.

    >>> WorkloadFile.model_validate({"apps": [{"items": 10}]}).apps[0].item_seconds
    1.0
    """

    apps: tuple[AppEntry, ...] = Field(
        (AppEntry.model_validate({}),), min_length=1, description="The apps and their items."
    )
    contexts: tuple[ContextEntry, ...] = Field(
        (ContextEntry.model_validate({}),), description="The contexts that they need."
    )
    links: Links = Field(Links.model_validate({}), description="Transfer rates of files.")
    evictions: EvictionTable = Field(EvictionTable.model_validate({}), description="When workers are evicted.")
    matching: Matching = Field(Matching.model_validate({}), description="The delay until workers join.")
    faults: tuple[FaultEntry, ...] = Field((), description="Bad hosts.")
    workers_per_host: Annotated[int, Field(ge=1)] = Field(1, description="Number of a tier's workers on one host.")
    zygote: Literal["none", "worker", "host"] = Field(
        "none",
        description="Whose loads after the first are spared `import_seconds`: nobody's, a worker's, or all of a host, "
        "evictions or not. As if all contexts imported the same, and a fork took no time.",
    )
    cache: bool = Field(
        False, description="Whether hosts keep files for the next worker there, which then has them at once."
    )
    dispatch_seconds: NotNegative = Field(
        0.01,
        description="Seconds in which a worker waits for a call to be sent to it, and for its answer to be sent back.",
    )

    def context_of(self, app: AppEntry) -> str:
        """Return the name of the context that an app needs; "" for none."""
        if app.context is not None:
            return app.context
        return self.contexts[0].name if self.contexts else ""


_PARTS: dict[str, type[BaseModel]] = {
    "apps": AppEntry, "contexts": ContextEntry, "links": Links, "evictions": EvictionTable, "matching": Matching,
    "faults": FaultEntry,
}  # fmt: skip
_LISTS = {"apps": "an app", "contexts": "a context", "faults": "a fault"}
"""Those of `_PARTS` that are lists, and what an entry is called; the others are tables."""


def _header(part: str) -> str:
    return f"[[{part}]]" if part in _LISTS else f"[{part}]"


class WorkloadError(FileError):
    """A workload that cannot be used."""


def explain(error: ValidationError, values: Mapping[str, Any]) -> Iterator[FileProblem]:
    """Say what the model found wrong, each once.

    >>> try:
    ...     WorkloadFile(apps=[{"name": "verify", "itms": 3}])
    ... except ValidationError as error:
    ...     print(next(explain(error, {"apps": [{"name": "verify", "itms": 3}]})).text)
    an app has no key 'itms' (app verify): did you mean 'items'?
    """
    found = [(_place(each["loc"], values), dict(each)) for each in error.errors(include_url=False)]
    told: set[KeyPath] = set()
    for path, each in found:
        # Of a value that may be of several kinds, what is wrong deepest inside says most.
        deeper = any(other[: len(path)] == path != other for other, _ in found)
        if path not in told and not deeper:
            told.add(path)
            yield FileProblem(path, _sentence(path, each, values))


def _place(loc: Sequence[str | int], values: Any) -> KeyPath:
    """Return the keys of a place, without the names of alternatives that pydantic adds to it."""
    path: list[str | int] = []
    for key in loc:
        inside = values.get(key) if isinstance(values, Mapping) else None
        if isinstance(values, (list, tuple)) and isinstance(key, int) and key < len(values):
            inside = values[key]
        elif not (isinstance(values, Mapping) and key in values):
            continue
        path.append(key)
        values = inside
    return tuple(path)


def _inside(path: KeyPath, values: Mapping[str, Any]) -> tuple[type[BaseModel], str, str, KeyPath]:
    """Return the model that a place is in, what it is called, which one it is, and the keys from there on."""
    first = str(path[0])
    if first in _LISTS and len(path) > 2:
        kind, entry = first[:-1], values[first][path[1]]
        name = entry.get("name")
        which = f"{kind} {name}" if isinstance(name, str) else f"{kind} {int(path[1]) + 1}"
        return _PARTS[first], _LISTS[first], which, path[2:]
    if first in _PARTS and first not in _LISTS and len(path) > 1:
        return _PARTS[first], f"[{first}]", first, path[1:]
    return WorkloadFile, "a workload", "", path


def _sentence(path: KeyPath, error: dict[str, Any], values: Mapping[str, Any]) -> str:
    if not path:
        return f"the workload cannot be used: {error['msg']}"
    model, what, which, rest = _inside(path, values)
    key = str(rest[0])
    field = model.model_fields.get(key)
    if field is None:
        return _unknown(key, model, what, which)
    whose = f" of {which}" if which else ""
    if model is WorkloadFile and key in _LISTS and error["type"] != "too_short":
        return f"{key} is a list: write [[{key}]] on a line of its own, and the keys of each under it"
    if model is WorkloadFile and key in _PARTS and key not in _LISTS:
        return f"{key} is a table: write [{key}] on a line of its own, and its keys under it"
    given: Any = values
    for each in path:
        given = given[each]
    if error["type"] == "too_short":
        return f"there are no {key}: write [[{key}]], and under it items = 1000"
    inner = f"{key}.{rest[1]}" if len(rest) > 1 else key
    begin = f"{inner}{whose} cannot be {shown(given)}"
    if key == "arrivals":
        return f"{begin}: write [[seconds, items], ...], such as arrivals = [[0, 100], [60, 100]]"
    if error["type"] in ("greater_than", "greater_than_equal", "literal_error"):
        return f"{begin}: {advice(inner, {**error, 'input': given}, field)}"
    if "dict" in str(field.annotation):
        example = '"FILE"' if key == "trace" else "0.5"
        return f"{begin}: write {key} = {example}, or a table such as {key} = {{a10 = {example}}}"
    return f"{begin}: {advice(inner, {**error, 'input': given}, field)}"


def _unknown(key: str, model: type[BaseModel], what: str, which: str) -> str:
    begin = f"{what} has no key {key!r}" + (f" ({which})" if what.startswith("a") else "")
    if model is WorkloadFile:
        begin = f"a workload has no key {key!r}"
        for table, inner in sorted(_PARTS.items(), key=lambda part: part[0] not in _LISTS):
            if key in inner.model_fields:
                return f"{begin}: put it under a header {_header(table)}"
    keys = ", ".join(model.model_fields)
    return f"{begin}: {suggestion(key, model.model_fields, f'its keys are {keys}')}"


def problems(workload: WorkloadFile, tiers: Mapping[str, str]) -> Iterator[FileProblem]:
    """Say all that is impossible in a workload, on a site.

    :param tiers: the site's, with the GPU model of each.

    >>> [problem.text for problem in problems(WorkloadFile(apps=[{"context": "llm"}]), {})]
    ["app app needs a context 'llm' that there is not: there are context"]
    """
    names = [context.name for context in workload.contexts]
    for kind, called in (("apps", [app.name for app in workload.apps]), ("contexts", names)):
        for number, name in enumerate(called):
            if name in called[:number]:
                text = f'two {kind} are called {name!r}: write another name, such as name = "{name}-{number + 1}"'
                yield FileProblem((kind, number, "name"), text)
    for number, app in enumerate(workload.apps):
        if app.context and app.context not in names:
            there = ", ".join(names) or "none"
            text = f"app {app.name} needs a context {app.context!r} that there is not: there are {there}"
            yield FileProblem(("apps", number, "context"), text)
        both = [key for key in ("items", "begin", "per_second") if key in app.model_fields_set]
        if app.arrivals is not None and both:
            text = f"app {app.name} has arrivals and {both[0]}: arrivals say when how many come, so leave one out"
            yield FileProblem(("apps", number, both[0]), text)
        yield from _covers(app.item_seconds, ("apps", number, "item_seconds"), f"app {app.name}", tiers)
        best = app.tokens_per_second
        if best is not None:
            yield from _covers(best, ("apps", number, "tokens_per_second"), f"app {app.name}", tiers)
    yield from _context_problems(workload, tiers)
    for number, fault in enumerate(workload.faults):
        if fault.tier is not None and fault.tier not in tiers:
            text = f"a fault names a tier {fault.tier!r} that the site has not: there are {', '.join(tiers)}"
            yield FileProblem(("faults", number, "tier"), text)
        if fault.hosts is not None and fault.share is not None:
            text = f"fault {number + 1} has hosts and share: both say how many hosts are bad, so leave one out"
            yield FileProblem(("faults", number, "share"), text)
    yield from _eviction_problems(workload.evictions, tiers)


def _context_problems(workload: WorkloadFile, tiers: Mapping[str, str]) -> Iterator[FileProblem]:
    for number, context in enumerate(workload.contexts):
        for key in ("load_seconds", "import_seconds"):
            figures = getattr(context, key)
            if figures is not None:
                yield from _covers(figures, ("contexts", number, key), f"context {context.name}", tiers)
    if workload.zygote != "none" and all(context.import_seconds is None for context in workload.contexts):
        text = (
            "a zygote saves the import_seconds of contexts, and none has any: give them, or a run whose event log has "
            "the parts of loads, which earlier versions of ctxflow did not write"
        )
        yield FileProblem(("zygote",), text)


def _covers(
    given: float | dict[str, float], place: KeyPath, whose: str, tiers: Mapping[str, str]
) -> Iterator[FileProblem]:
    """Say which tiers a table by GPU model or tier has no figure for."""
    if not isinstance(given, dict):
        return
    for tier, model in tiers.items():
        if tier not in given and model not in given:
            called = tier if model == tier else f"{tier} ({model})"
            text = f"{place[-1]} of {whose} has no figure for tier {called}: add {tier} = SECONDS"
            yield FileProblem(place, text)


def _eviction_problems(evictions: EvictionTable, tiers: Mapping[str, str]) -> Iterator[FileProblem]:
    for key in ("per_hour", "trace"):
        value = getattr(evictions, key)
        for name in value if isinstance(value, dict) else ():
            if name not in tiers:
                text = f"{key} of evictions names a tier {name!r} that the site has not: there are {', '.join(tiers)}"
                yield FileProblem(("evictions", key, name), text)
    if evictions.trace is not None and evictions.per_hour:
        text = "evictions have a trace and per_hour: a trace says when workers are taken, so leave one out"
        yield FileProblem(("evictions", "per_hour"), text)


_HEAD = """\
<!-- Made by `python -m ctxflow.simulator.workload_file > docs/workloads.md`: change the models, not this page. -->
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


def reference() -> str:
    """Return the page, in Markdown."""
    parts = [_HEAD]
    for part, model in _PARTS.items():
        parts += [f"\n## `{_header(part)}`\n\n{model.__doc__}\n", *_table(model, list(model.model_fields))]
    keys = [key for key in WorkloadFile.model_fields if key not in _PARTS]
    parts += ["\n## Above the first header\n", *_table(WorkloadFile, keys)]
    return "".join(parts)


def _table(model: type[BaseModel], keys: list[str]) -> Iterator[str]:
    yield "\n| key | default | meaning |\n|---|---|---|\n"
    for key in keys:
        field = model.model_fields[key]
        default = "" if field.default is None else f"`{toml_value(field.default)}`"
        yield f"| `{key}` | {default} | {field.description} |\n"


if __name__ == "__main__":
    print(reference(), end="")  # noqa: T201 - this is what it is for
