"""What can be wrong with a workload file, as sentences that say what to write.

What does not live here: reading it (scenario.py), and sites (ctxflow.sites).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pydantic

from ctxflow.simulator.workload_file import AppEntry, ContextEntry, Evictions, FaultEntry, Links, Matching, WorkloadFile
from ctxflow.sites.explain import advice
from ctxflow.sites.site_problems import FileError, Path, SiteProblem, shown, suggestion

_LISTS: dict[str, type[pydantic.BaseModel]] = {"apps": AppEntry, "contexts": ContextEntry, "faults": FaultEntry}
_CALLED = {"apps": "an app", "contexts": "a context", "faults": "a fault"}
_TABLES: dict[str, type[pydantic.BaseModel]] = {"links": Links, "evictions": Evictions, "matching": Matching}


class WorkloadError(FileError):
    """A workload that cannot be used."""


def explain(error: pydantic.ValidationError, values: Mapping[str, Any]) -> Iterator[SiteProblem]:
    """The problems that the model found, each once.

    >>> try:
    ...     WorkloadFile(apps=[{"name": "verify", "itms": 3}])
    ... except pydantic.ValidationError as error:
    ...     print(next(explain(error, {"apps": [{"name": "verify", "itms": 3}]})).text)
    an app has no key 'itms' (app verify): did you mean 'items'?
    """
    found = [(_place(each["loc"], values), dict(each)) for each in error.errors(include_url=False)]
    told: set[Path] = set()
    for path, each in found:
        # Of a value that may be of several kinds, what is wrong deepest inside says most.
        deeper = any(other[: len(path)] == path != other for other, _ in found)
        if path not in told and not deeper:
            told.add(path)
            yield SiteProblem(path, _sentence(path, each, values))


def _place(loc: Sequence[str | int], values: Any) -> Path:
    """The keys of a place, without the names of alternatives that pydantic adds to it."""
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


def _inside(path: Path, values: Mapping[str, Any]) -> tuple[type[pydantic.BaseModel], str, str, Path]:
    """The model that a place is in, what it is called, which one it is, and the keys from there on."""
    first = str(path[0])
    if first in _LISTS and len(path) > 2:
        kind, entry = first[:-1], values[first][path[1]]
        name = entry.get("name")
        which = f"{kind} {name}" if isinstance(name, str) else f"{kind} {int(path[1]) + 1}"
        return _LISTS[first], _CALLED[first], which, path[2:]
    if first in _TABLES and len(path) > 1:
        return _TABLES[first], f"[{first}]", first, path[1:]
    return WorkloadFile, "a workload", "", path


def _sentence(path: Path, error: dict[str, Any], values: Mapping[str, Any]) -> str:
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
    if model is WorkloadFile and key in _TABLES:
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


def _unknown(key: str, model: type[pydantic.BaseModel], what: str, which: str) -> str:
    begin = f"{what} has no key {key!r}" + (f" ({which})" if what.startswith("a") else "")
    if model is WorkloadFile:
        begin = f"a workload has no key {key!r}"
        for table, inner in {**_LISTS, **_TABLES}.items():
            if key in inner.model_fields:
                header = f"[[{table}]]" if table in _LISTS else f"[{table}]"
                return f"{begin}: put it under a header {header}"
    keys = ", ".join(model.model_fields)
    return f"{begin}: {suggestion(key, model.model_fields, f'its keys are {keys}')}"


def problems(workload: WorkloadFile, tiers: Mapping[str, str]) -> Iterator[SiteProblem]:
    """All that is impossible in a workload, on a site.

    :param tiers: the site's, with the GPU model of each.

    >>> [problem.text for problem in problems(WorkloadFile(apps=[{"context": "llm"}]), {})]
    ["app app needs a context 'llm' that there is not: there are context"]
    """
    names = [context.name for context in workload.contexts]
    for kind, called in (("apps", [app.name for app in workload.apps]), ("contexts", names)):
        for number, name in enumerate(called):
            if name in called[:number]:
                text = f'two {kind} are called {name!r}: write another name, such as name = "{name}-{number + 1}"'
                yield SiteProblem((kind, number, "name"), text)
    for number, app in enumerate(workload.apps):
        if app.context and app.context not in names:
            there = ", ".join(names) or "none"
            text = f"app {app.name} needs a context {app.context!r} that there is not: there are {there}"
            yield SiteProblem(("apps", number, "context"), text)
        both = [key for key in ("items", "begin", "per_second") if key in app.model_fields_set]
        if app.arrivals is not None and both:
            text = f"app {app.name} has arrivals and {both[0]}: arrivals say when how many come, so leave one out"
            yield SiteProblem(("apps", number, both[0]), text)
        yield from _covers(app.item_seconds, ("apps", number, "item_seconds"), f"app {app.name}", tiers)
    for number, context in enumerate(workload.contexts):
        place = ("contexts", number, "load_seconds")
        yield from _covers(context.load_seconds, place, f"context {context.name}", tiers)
    for number, fault in enumerate(workload.faults):
        if fault.tier is not None and fault.tier not in tiers:
            text = f"a fault names a tier {fault.tier!r} that the site has not: there are {', '.join(tiers)}"
            yield SiteProblem(("faults", number, "tier"), text)
        if fault.hosts is not None and fault.share is not None:
            text = f"fault {number + 1} has hosts and share: both say how many hosts are bad, so leave one out"
            yield SiteProblem(("faults", number, "share"), text)
    yield from _eviction_problems(workload.evictions, tiers)


def _covers(
    given: float | dict[str, float], place: Path, whose: str, tiers: Mapping[str, str]
) -> Iterator[SiteProblem]:
    """A table by GPU model or tier must have a figure for every tier."""
    if not isinstance(given, dict):
        return
    for tier, model in tiers.items():
        if tier not in given and model not in given:
            called = tier if model == tier else f"{tier} ({model})"
            text = f"{place[-1]} of {whose} has no figure for tier {called}: add {tier} = SECONDS"
            yield SiteProblem(place, text)


def _eviction_problems(evictions: Evictions, tiers: Mapping[str, str]) -> Iterator[SiteProblem]:
    for key in ("per_hour", "trace"):
        value = getattr(evictions, key)
        for name in value if isinstance(value, dict) else ():
            if name not in tiers:
                text = f"{key} of evictions names a tier {name!r} that the site has not: there are {', '.join(tiers)}"
                yield SiteProblem(("evictions", key, name), text)
    if evictions.trace is not None and evictions.per_hour:
        text = "evictions have a trace and per_hour: a trace says when workers are taken, so leave one out"
        yield SiteProblem(("evictions", "per_hour"), text)
