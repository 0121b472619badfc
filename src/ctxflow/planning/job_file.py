"""The job file of `ctxflow plan SITE JOB`: what is asked, which models could answer, and what is known of the GPUs.

Its keys, and what can be wrong with them, each with its line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field

from ctxflow.app_options import read_errors
from ctxflow.models.model_folder import BYTES
from ctxflow.sites.loader import advice, located, read_toml
from ctxflow.sites.site_problems import FileError, FileProblem, shown, suggestion

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]
Name = Annotated[str, Field(min_length=1)]


class PlanJobError(FileError):
    """A job that cannot be used."""


class _Entry(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class Query(_Entry):
    """One kind of query: `[[queries]]`.

    :ivar rate: queries an hour; or `items` in all, within the job's hours.
    :ivar models: the candidates; all models by default.
    :ivar errors: share of wrong answers by model; or `evaluation`, a file such as prompt_for_fact's.
    :ivar app: whose calls of a measured run count; by default the app of the query's name, else all of the context.
    """

    name: Name
    rate: NotNegative | None = None
    items: NotNegative | None = None
    prompt_tokens: Positive
    output_tokens: NotNegative
    max_delay: Positive = 3600.0
    max_error: Share = 1.0
    max_unserved: Share = 1.0
    unserved: NotNegative | None = None
    models: tuple[Name, ...] = ()
    errors: dict[str, Share] = {}
    evaluation: str | None = None
    app: str | None = None


class CandidateModel(_Entry):
    """One model: `[[models]]`.

    :ivar path: its folder, its config.json, or package:NAME; or else `parameters` in billions.
    :ivar context: its name in a measured run; by default the model's.
    """

    name: Name
    path: str | None = None
    parameters: Positive | None = None
    precision: str | None = None
    kv_bytes_per_token: NotNegative | None = None
    context: str | None = None


class Known(_Entry):
    """What is known of a tier that the site file does not say: `[[tiers]]`."""

    name: Name
    gpu: str | None = None
    gpu_memory_gb: Positive | None = None
    tflops: Positive | None = None
    bandwidth_gb_s: Positive | None = None
    price: NotNegative | None = None


class PlanJob(_Entry):
    """All that a job file says."""

    name: Name = "job"
    hours: Positive = 24.0
    budget: NotNegative | None = None
    queries: Annotated[tuple[Query, ...], Field(min_length=1)]
    models: Annotated[tuple[CandidateModel, ...], Field(min_length=1)]
    tiers: tuple[Known, ...] = ()


_LISTS: dict[str, type[pydantic.BaseModel]] = {"queries": Query, "models": CandidateModel, "tiers": Known}


def load_job(path: Path, tiers: Mapping[str, object]) -> PlanJob:
    """Read a job's file.

    :param tiers: the site's, by name.
    :raises JobError: with a line for each thing that is wrong: the file, its line, the key, and what to write.
    """
    text, values = read_toml(path, "job", "the path of a job file", PlanJobError)
    try:
        job = PlanJob(**values)
        found = list(_problems(job, tiers))
    except pydantic.ValidationError as error:
        found = list(_explained(error, values))
    if found:
        raise PlanJobError(located(found, str(path), text))
    return job.model_copy(update={"queries": tuple(_with_errors(job, n, path, text) for n in range(len(job.queries)))})


def _explained(error: pydantic.ValidationError, values: Mapping[str, Any]) -> Iterator[FileProblem]:
    errors = error.errors(include_url=False)
    within = {each["loc"][0] for each in errors if len(each["loc"]) > 1}
    for each in errors:
        path = tuple(each["loc"])
        if len(path) == 1 and path[0] in within:  # A list of which an entry is wrong is too short to pydantic.
            continue
        inside = path[0] in _LISTS and len(path) > 2
        model = _LISTS[str(path[0])] if inside else PlanJob
        key = str(path[2] if inside else path[0])
        if inside:
            which = values[str(path[0])][path[1]].get("name", int(path[1]) + 1)
            whose = f" of { ({'queries': 'query'}.get(str(path[0]), str(path[0])[:-1])) } {which}"
        else:
            whose = ""
        field = model.model_fields.get(key)
        if each["type"] == "missing":
            there = (
                f"[[{key}]] on a line of its own, and the keys of each under it" if key in _LISTS else f"{key} = ..."
            )
            yield FileProblem(path[:-1], f"there is no {key}{whose}: write {there}")
        elif field is None:
            keys = ", ".join(model.model_fields)
            yield FileProblem(
                path, f"there is no key {key!r}{whose}: {suggestion(key, model.model_fields, 'the keys are ' + keys)}"
            )
        elif each["type"] in ("less_than_equal", "too_short") or (key in _LISTS and not inside):
            what = "a share from 0 to 1" if each["type"] == "less_than_equal" else f"[[{key}]], and its keys under it"
            yield FileProblem(path, f"{key}{whose} cannot be {shown(each['input'])}: write {what}")
        else:
            yield FileProblem(path, f"{key}{whose} cannot be {shown(each['input'])}: {advice(key, {**each}, field)}")


def _problems(job: PlanJob, tiers: Mapping[str, object]) -> Iterator[FileProblem]:
    """Yield what is impossible although each value by itself is fine."""
    models = [model.name for model in job.models]
    for kind in ("queries", "models", "tiers"):
        names = [each.name for each in getattr(job, kind)]
        for number, name in enumerate(names):
            if name in names[:number]:
                yield FileProblem((kind, number, "name"), f"two {kind} are called {name!r}: write another name")
    for number, query in enumerate(job.queries):
        yield from _query_problems(query, ("queries", number), models)
    for number, model in enumerate(job.models):
        if (model.path is None) == (model.parameters is None):
            text = "write path = FOLDER (or config.json, or package:NAME), or parameters = BILLIONS, one of the two"
            yield FileProblem(("models", number), f"model {model.name} must have a path or parameters: {text}")
        if model.precision is not None and model.precision not in BYTES:
            text = (
                f"precision of model {model.name} cannot be {shown(model.precision)}: write one of {', '.join(BYTES)}"
            )
            yield FileProblem(("models", number, "precision"), text)
    for number, known in enumerate(job.tiers):
        if known.name not in tiers:
            text = f"the site has no tier {known.name!r}: {suggestion(known.name, tiers, 'it has ' + ', '.join(tiers))}"
            yield FileProblem(("tiers", number, "name"), text)


def _query_problems(query: Query, place: tuple[str | int, ...], models: list[str]) -> Iterator[FileProblem]:
    if (query.rate is None) == (query.items is None):
        text = "write rate = QUERIES_AN_HOUR, or items = QUERIES_IN_ALL, one of the two"
        yield FileProblem(place, f"query {query.name} must have a rate or items: {text}")
    for key in ("models", "errors"):
        for name in getattr(query, key):
            if name not in models:
                hint = suggestion(name, models, f"there are {', '.join(models)}")
                yield FileProblem((*place, key), f"{key} of query {query.name} names no model {name!r}: {hint}")
    if query.errors and query.evaluation is not None:
        yield FileProblem((*place, "evaluation"), f"query {query.name} has errors and an evaluation: leave one out")


def _with_errors(job: PlanJob, number: int, path: Path, text: str) -> Query:
    """Return a query with its models' errors, from its evaluation file if it has one."""
    query = job.queries[number]
    if query.evaluation is None:
        return query
    file = path.parent / query.evaluation
    try:
        best = read_errors(file)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = getattr(error, "strerror", None) or f"it is no evaluation ({type(error).__name__}: {error})"
        wrong = f"evaluation {query.evaluation} of query {query.name} cannot be used: {why}"
        raise PlanJobError(located([FileProblem(("queries", number, "evaluation"), wrong)], str(path), text)) from None
    errors = {m.name: best[key] for m in job.models for key in (m.path or m.name, m.name) if key in best}
    if not errors:
        wrong = (
            f"evaluation {query.evaluation} of query {query.name} has no model of this job: it has {', '.join(best)}"
        )
        raise PlanJobError(located([FileProblem(("queries", number, "evaluation"), wrong)], str(path), text))
    return query.model_copy(update={"errors": errors})
