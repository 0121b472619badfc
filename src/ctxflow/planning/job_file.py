"""The job file of `ctxflow plan SITE JOB` with its errors, and the roofline estimate of its models on known GPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field

from ctxflow.app_options import read_errors
from ctxflow.models.model_folder import BYTES, Shape
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
    :raises PlanJobError: with a line for each mistake: the file, its line, the key, and what to write.
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
        inside, key, whose = path[0] in _LISTS and len(path) > 2, str(path[0]), ""
        model: type[pydantic.BaseModel] = PlanJob
        if inside:
            which = values[key][path[1]].get("name", int(path[1]) + 1)
            whose = f" of {'query' if key == 'queries' else key[:-1]} {which}"
            model, key = _LISTS[key], str(path[2])
        field = model.model_fields.get(key)
        if each["type"] == "missing":
            wanted = f"[[{key}]] on a line of its own, and the keys of each under it"
            yield FileProblem(
                path[:-1], f"there is no {key}{whose}: write {wanted if key in _LISTS else f'{key} = ...'}"
            )
        elif field is None:
            hint = suggestion(key, model.model_fields, "the keys are " + ", ".join(model.model_fields))
            yield FileProblem(path, f"there is no key {key!r}{whose}: {hint}")
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
            text = f"precision of model {model.name} cannot be {shown(model.precision)}"
            yield FileProblem(("models", number, "precision"), f"{text}: write one of {', '.join(BYTES)}")
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

    def refused(why: str) -> PlanJobError:
        wrong = FileProblem(
            ("queries", number, "evaluation"), f"evaluation {query.evaluation} of query {query.name} {why}"
        )
        return PlanJobError(located([wrong], str(path), text))

    try:
        best = read_errors(path.parent / query.evaluation)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = getattr(error, "strerror", None) or f"it is no evaluation ({type(error).__name__}: {error})"
        raise refused(f"cannot be used: {why}") from None
    errors = {m.name: best[key] for m in job.models for key in (m.path or m.name, m.name) if key in best}
    if not errors:
        raise refused(f"has no model of this job: it has {', '.join(best)}")
    return query.model_copy(update={"errors": errors})


EFFICIENCY = 0.5  # Of the data sheet's figures that is reached.
USABLE = 0.9  # The share of a GPU's memory for weights and KV cache.
MOST_TOGETHER = 256  # Queries written together at most.


@dataclasses.dataclass(frozen=True)
class DataSheet:
    """A GPU's data sheet: memory in GB, dense half-precision TFLOPS, memory bandwidth in GB/s."""

    memory_gb: float
    tflops: float
    bandwidth_gb_s: float


# Half precision without sparsity; of Pascal, whose half precision is slow, single precision.
GPUS = {name: DataSheet(*figures) for name, figures in {
    "GTX 1080 Ti": (11, 11.3, 484), "TITAN X (Pascal)": (12, 11, 480), "TITAN RTX": (24, 130, 672),
    "RTX 2080 Ti": (11, 54, 616), "RTX 3090": (24, 71, 936), "RTX 4090": (24, 165, 1008),
    "Quadro RTX 6000": (24, 130, 672), "RTX A5000": (24, 111, 768), "RTX A6000": (48, 155, 768),
    "Tesla P100": (16, 18.7, 732), "Tesla V100": (16, 112, 900), "Tesla T4": (16, 65, 320), "A10": (24, 125, 600),
    "A30": (24, 165, 933), "A40": (48, 150, 696), "L4": (24, 121, 300), "L40": (48, 181, 864), "L40S": (48, 362, 864),
    "A100 40GB": (40, 312, 1555), "A100 80GB": (80, 312, 1935), "H100 PCIe": (80, 756, 2000),
    "H100 80GB HBM3": (80, 989, 3350), "H200": (141, 989, 4800),
}.items()}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a query takes on a worker: seconds until its answer, and a worker's seconds where others are served too."""

    delay: float
    seconds: float


def gpu_of(name: str) -> DataSheet | None:
    """Return the data sheet of a GPU by the name that its driver gives it; None if it is not in the table.

    >>> gpu_of("NVIDIA A10").memory_gb, gpu_of("NVIDIA L40S").tflops, gpu_of("NVIDIA A100-SXM4-80GB").bandwidth_gb_s
    (24, 362, 1935)
    >>> gpu_of("unheard of") is None
    True
    """
    words = set(name.lower().replace("-", " ").split())
    known = [(len(key), gpu) for key, gpu in GPUS.items() if set(key.lower().split()) <= words]
    return max(known, key=lambda pair: pair[0])[1] if known else None


def estimate(
    model: Shape, gpu: DataSheet, gpus: int, input_tokens: float, output_tokens: float, max_delay: float
) -> Speed | None:
    """Return what a query takes on a worker, with as many served together as memory and the delay limit allow.

    A roofline: reading the prompt is bound by arithmetic, writing a token by reading the weights and the KV cache of
    all that are written together. It may be off by a factor of two.

    :param gpus: of the worker, which share the model.
    :returns: None if the model and one query do not fit the worker's memory.

    >>> small = Shape(1.7e9, 3.4, 196608)
    >>> speed = estimate(small, GPUS["A10"], 1, 500, 100, 60.0)
    >>> round(speed.delay, 1), round(speed.seconds, 3)
    (9.6, 0.075)
    >>> estimate(small, DataSheet(3, 10, 300), 1, 500, 100, 60.0) is None
    True
    """
    tokens = input_tokens + output_tokens
    cache = model.kv_bytes_per_token * tokens / 1e9
    room = USABLE * gpus * gpu.memory_gb - model.weights_gb
    if room < cache or room < 0:
        return None
    flops, bandwidth = EFFICIENCY * gpus * gpu.tflops * 1e12, EFFICIENCY * gpus * gpu.bandwidth_gb_s
    reading = 2 * model.parameters * input_tokens / flops
    together = 1
    while together * 2 <= MOST_TOGETHER and together * 2 * cache <= room:
        together *= 2
    while True:
        step = max((model.weights_gb + together * cache) / bandwidth, 2 * model.parameters * together / flops)
        # A query waits for the others' prompts too.
        speed = Speed(reading * together + output_tokens * step, reading + output_tokens * step / together)
        if speed.delay <= max_delay or together == 1:
            return speed
        together //= 2
