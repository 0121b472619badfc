"""The placement problem of a site and a job, with a note on where each figure comes from, and an answer's workers.

In the problem a model has one deployment on a tier; in ctxflow any number of workers, each of which serves by itself.
So a worker of the site is a "GPU" of the problem, and a configuration is a number of workers: as many stages of
a pipeline whose communication takes no time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from ctxflow.errors import counted
from ctxflow.factory.provider import PoolSurvey
from ctxflow.models.model_folder import BYTES, Shape, locate_model, shape_of
from ctxflow.planning.job_file import USABLE, CandidateModel, DataSheet, Known, PlanJob, Query, Speed, estimate, gpu_of
from ctxflow.policies.agh.allocation import Allocation
from ctxflow.policies.agh.margins import USUAL
from ctxflow.policies.agh.problem import MOST, GpuTier, Model, Problem, QueryType, Table
from ctxflow.policies.agh.solution import Solution
from ctxflow.policies.agh.staffing import workers_needed
from ctxflow.simulator.recorded_run import Recorded
from ctxflow.simulator.scenario import ScenarioTier, tiers_of_site
from ctxflow.sites import Site

LEAST_MARGIN = 0.05  # However little the measured items differed: another day is another run.
UNSERVED = 10.0  # What it costs by default to leave a query unserved, in rents of the whole site.


@dataclasses.dataclass(frozen=True)
class JobProblem:
    """A problem made from a site and a job: its offers and speeds.

    :ivar margins: by query type, how far delays and errors may be above what is known (`margins.with_margins`).
    :ivar notes: where figures come from, a sentence each; `left_out`: which model cannot be where, and why.
    """

    problem: Problem
    offers: tuple[SiteOffer, ...]
    speeds: tuple[tuple[tuple[Speed | None, ...], ...], ...]
    margins: tuple[float, ...]
    notes: tuple[str, ...]
    left_out: tuple[str, ...]

    def staffing(self, found: Solution) -> list[StaffedModel]:
        """Return the workers that an answer takes."""
        return [] if found.allocation is None else staffing(self.problem, self.offers, self.speeds, found.allocation)

    def delay(self, query: int, each: StaffedModel) -> float:
        """Return the seconds until an answer to a query type on these workers."""
        speed = self.speeds[query][each.model][each.offer]
        return speed.delay if speed is not None else float("inf")

    def as_data(self, found: Solution) -> dict[str, object]:
        """Return what a plan for a site has besides the solution's own, for JSON."""
        queries, models = self.problem.query_types, self.problem.models
        return {
            "workers": [
                {
                    "model": models[each.model].name, "tier": self.offers[each.offer].name, "workers": each.workers,
                    "shares": {queries[query].name: share for query, share in each.shares},
                }
                for each in self.staffing(found)
            ],
            "notes": list(self.notes),
            "left_out": list(self.left_out),
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Offered:
    """A tier with the GPU of its workers, where it is known."""

    offer: SiteOffer
    gpus: int
    gpu_model: str
    gpu: DataSheet | None


def make_problem(
    site: Site, job: PlanJob, surveys: Mapping[str, PoolSurvey] | None = None, recorded: Recorded | None = None
) -> JobProblem:
    """Return the placement problem of a site and a job.

    :param surveys: by tier, what the batch systems have now.
    :param recorded: a run whose measured speeds count.
    :raises ValueError: if something is not known, saying what to write where.
    """
    notes: list[str] = []
    left_out: dict[str, None] = {}
    tiers = [_offered(site, tier, job, (surveys or {}).get(tier.spec.name), notes) for tier in tiers_of_site(site)]
    if any(each.offer.price != each.gpus for each in tiers):
        notes.append("prices are the site's and the job's; a tier without one counts a unit for each GPU and hour")
    else:
        notes.append("no tier has a price: costs are GPU-hours")
    shapes = [_shape(model) for model in job.models]
    rent = job.hours * sum(each.offer.price * each.offer.workers for each in tiers)
    queries = [_query_type(query, job, rent) for query in job.queries]
    seen = _Measured(recorded, notes)
    speeds = tuple(
        tuple(
            tuple(_speed(query, model, shape, tier, seen, left_out) for tier in tiers)
            for model, shape in zip(job.models, shapes, strict=True)
        )
        for query in job.queries
    )
    notes += seen.sources()
    margins = tuple(seen.margin(query.name) for query in job.queries)
    models = [
        Model(name=model.name, weights_gb=shape.weights_gb, kv_bytes_per_token=shape.kv_bytes_per_token)
        for model, shape in zip(job.models, shapes, strict=True)
    ]
    offers = tuple(each.offer for each in tiers)
    errors = [[query.errors.get(model.name, 0.0) for model in job.models] for query in job.queries]
    problem = problem_of(
        job.name, queries, models, offers, speeds, hours=job.hours, budget=job.budget, errors=errors,
        source="; ".join(notes),
    )  # fmt: skip
    return JobProblem(problem, offers, speeds, margins, tuple(notes), tuple(left_out))


def _offered(site: Site, tier: ScenarioTier, job: PlanJob, survey: PoolSurvey | None, notes: list[str]) -> _Offered:
    name, gpus = tier.spec.name, tier.spec.gpus
    known = next((each for each in job.tiers if each.name == name), Known(name=name))
    model = known.gpu or (tier.gpu_model if tier.gpu_model != name else None)
    if model is None and survey is not None and survey.gpu_models:
        model = min(survey.gpu_models, key=lambda each: gpu.bandwidth_gb_s if (gpu := gpu_of(each)) else 0.0)
        if len(survey.gpu_models) > 1:
            notes.append(f"tier {name} has {', '.join(survey.gpu_models)}: the slowest, {model}, counts")
    gpu = gpu_of(model or name)
    stated = known.gpu_memory_gb or (tier.spec.gpu_memory / 1e9 if tier.spec.gpu_memory is not None else None)
    fields = {"memory_gb": stated, "tflops": known.tflops, "bandwidth_gb_s": known.bandwidth_gb_s}
    given = {key: value for key, value in fields.items() if value is not None}
    if given and (gpu is not None or len(given) == len(fields)):
        gpu = DataSheet(**given) if gpu is None else dataclasses.replace(gpu, **given)
    workers = tier.spec.maximum
    if survey is not None:
        there = survey.workers if survey.workers is not None else survey.machines
        if there is not None and there < workers:
            notes.append(f"tier {name}: machines are there for {there} of its {counted(workers, 'worker')} now")
            workers = there
    price = next((each for each in (known.price, tier.spec.price) if each is not None), float(max(1, gpus)))
    memory = stated or (gpu.memory_gb if gpu is not None else None)
    own = next((each.memory_gb for each in site.tiers if each.name == name), 1e6)
    room = USABLE * gpus * memory if gpus and memory is not None else own if not gpus else 1e6
    return _Offered(SiteOffer(name, workers, price, room), gpus, model or "", gpu if gpus else None)


def _shape(model: CandidateModel) -> Shape:
    if model.path is None:
        parameters = 1e9 * (model.parameters or 0.0)
        weights = parameters / 1e9 * BYTES[model.precision or "bfloat16"]
        return Shape(parameters, weights, model.kv_bytes_per_token or 0.0)
    folder = Path(model.path).expanduser()
    local = model.path.startswith("package:")  # Nothing is downloaded for a plan.
    if not local and not folder.exists():
        raise ValueError(f"model {model.name}: there is no {model.path}: write path = FOLDER, or parameters = BILLIONS")
    shape = shape_of(locate_model(model.path) if local else folder, model.precision)
    if model.kv_bytes_per_token is not None:
        shape = dataclasses.replace(shape, kv_bytes_per_token=model.kv_bytes_per_token)
    return shape


def _query_type(query: Query, job: PlanJob, rent: float) -> QueryType:
    rate = query.rate if query.rate is not None else (query.items or 0.0) / job.hours
    return QueryType(
        name=query.name, queries_per_hour=rate, input_tokens=query.prompt_tokens, output_tokens=query.output_tokens,
        max_delay_seconds=query.max_delay, max_error=query.max_error, max_unserved=query.max_unserved,
        unserved_dollars=UNSERVED * (rent + 1.0) if query.unserved is None else query.unserved,
    )  # fmt: skip


class _Measured:
    """Speeds of a recorded run, and which were taken from it."""

    def __init__(self, recorded: Recorded | None, notes: list[str]) -> None:
        self._recorded = recorded
        self._taken: set[tuple[str, str]] = set()
        self.estimated: set[tuple[str, str]] = set()
        self.guessed: set[str] = set()
        self._spreads: dict[str, list[float]] = {}
        if recorded is not None:
            notes += [f"the measured run: {doubt}" for doubt in recorded.doubts]

    def speed(self, query: Query, model: CandidateModel, tier: _Offered) -> Speed | None:
        """Return the speed as measured, None if the run says nothing of it."""
        if self._recorded is None:
            return None
        apps = [app for app in self._recorded.apps if app.context == (model.context or model.name)]
        apps = [app for app in apps if app.name == (query.app or query.name)] or (apps if query.app is None else [])
        kinds = {s.gpu_model for p in self._recorded.places if p.tier == tier.offer.name for s in p.stays}
        for key in (tier.offer.name, tier.gpu_model, *sorted(kind for kind in kinds if kind)):
            those = [app for app in apps if key in app.item_seconds]
            if those:
                self._taken.add((model.name, tier.offer.name))
                items = [app.item_seconds[key] for app in those]
                self._spreads.setdefault(query.name, []).extend(app.spread for app in those)
                calls = max(app.call_seconds for app in those)
                return Speed(calls + max(items), sum(items) / len(items))
        return None

    def margin(self, query: str) -> float:
        """Return the largest deviation of a query type's measured items; the usual margin for estimated speeds."""
        spreads = [spread or USUAL for spread in self._spreads.get(query, [])]  # 0: one call tells of no deviation.
        if query in self.guessed or not spreads:
            spreads.append(USUAL)
        return min(1.0, max(LEAST_MARGIN, *spreads))

    def sources(self) -> list[str]:
        """Return where the speeds come from, a sentence each."""
        found = []
        measured = f"measured in {self._recorded.name}" if self._recorded is not None else ""
        estimated = "estimated from data sheets (a roofline, not measured)"
        for how, which in ((measured, self._taken), (estimated, self.estimated)):
            if which:
                found.append(f"speeds {how}: " + ", ".join(f"{model} on {tier}" for model, tier in sorted(which)))
        return found


def _speed(
    query: Query, model: CandidateModel, shape: Shape, tier: _Offered, seen: _Measured, left_out: dict[str, None]
) -> Speed | None:
    """Return what a query takes there; None, with the reason noted, if it cannot be served there."""
    if query.models and model.name not in query.models:
        return None
    if query.max_error < 1 and model.name not in query.errors:
        left_out[f"{model.name} for {query.name}: its error is not known, and max_error = {query.max_error:g}"] = None
        return None
    place, room = f"{model.name} on {tier.offer.name}", tier.offer.memory_gb
    if shape.weights_gb > room:
        left_out[f"{place}: (5f) {shape.weights_gb:.3g} GB of weights, and a worker has room for {room:.3g} GB"] = None
        return None
    measured = seen.speed(query, model, tier)
    if measured is not None:
        return measured
    if tier.gpu is None:
        what = "no GPU" if not tier.gpus else f"a GPU of which nothing is known ({tier.gpu_model or 'no name'})"
        raise ValueError(
            f"tier {tier.offer.name} has {what}, and how fast {model.name} is there was not measured: give an earlier "
            f'run with --measured RUN, or write [[tiers]] in the job file with name = "{tier.offer.name}" and gpu, or '
            "gpu_memory_gb, tflops and bandwidth_gb_s"
        )
    guess = estimate(shape, tier.gpu, tier.gpus, query.prompt_tokens, query.output_tokens, query.max_delay)
    if guess is None:
        left_out[f"{place}: (5f) the weights and the KV cache of one query of {query.name} take more than the "
                 f"{room:.3g} GB that a worker has"] = None  # fmt: skip
        return None
    seen.estimated.add((model.name, tier.offer.name))
    seen.guessed.add(query.name)
    if guess.delay > query.max_delay:
        text = f"{place}: (5i) a query of {query.name} takes {guess.delay:.3g} s, and max_delay = {query.max_delay:g}"
        left_out[text] = None
    return guess


def survey_site(
    answers: Sequence[tuple[str, PoolSurvey | None, Sequence[str]]],
) -> tuple[dict[str, PoolSurvey], list[str]]:
    """Return the surveys by tier, and a sentence for each tier that could not be asked."""
    surveys = {name: survey for name, survey, _ in answers if survey is not None}
    silent = [
        f"tier {name} could not be asked, and its workers are taken from the site file: {' '.join(problems)}"
        for name, survey, problems in answers
        if survey is None
    ]
    return surveys, silent


NEVER = 1e10  # How many times its limit the delay of a query type is on a model that is none of its candidates.


@dataclasses.dataclass(frozen=True)
class SiteOffer:
    """A tier of a site: workers available, the price of one, an hour, and its memory for one model."""

    name: str
    workers: int
    price: float
    memory_gb: float


Speeds = Sequence[Sequence[Sequence[Speed | None]]]
"""By query type, model and tier; None for a model that the query type cannot have there."""


NO_LIMIT = 1e3  # What is budgeted where nothing is said, in rents of the whole site.
SIZES = 256  # Numbers of workers that are distinguished on a tier, at most: of more, several count as one.


def crew_size(offer: SiteOffer) -> int:
    """Return how many workers of an offer are one "GPU" of the problem: 1 but for tiers of hundreds.

    >>> crew_size(SiteOffer("a10", 50, 1.0, 24.0)), crew_size(SiteOffer("cpu", 1000, 0.1, 4.0))
    (1, 4)
    """
    return max(1, -(-offer.workers // SIZES))


def problem_of(
    name: str,
    queries: Sequence[QueryType],
    models: Sequence[Model],
    offers: Sequence[SiteOffer],
    speeds: Speeds,
    *,
    hours: float,
    budget: float | None = None,
    errors: Sequence[Sequence[float]] | None = None,
    source: str = "",
) -> Problem:
    """Return the placement problem of a site's workers, without a limit on storage.

    :param budget: None for more than all workers cost.
    :param errors: shares of wrong answers by query type and model; none by default.
    :raises ValueError: for what is not possible.
    """
    if not any(offer.workers for offer in offers):
        raise ValueError("there is no worker to be had on any tier: see `ctxflow site check SITE --live`")
    most = hours * sum(offer.price * offer.workers for offer in offers)
    tiers = []
    for offer in offers:
        size = crew_size(offer)
        crews = offer.workers // size
        tiers.append(
            GpuTier(
                name=offer.name, memory_gb=offer.memory_gb, tflops=float(size), dollars_per_hour=size * offer.price,
                tensor_parallel=(1,), pipeline_parallel=tuple(range(1, max(1, crews) + 1)), gpus=crews,
            )
        )  # fmt: skip
    nothing = tuple(tuple((0.0,) * len(offers) for _ in models) for _ in queries)

    def table(figure: str) -> Table:
        return tuple(
            tuple(
                tuple(
                    _figure(query, speed if model.weights_gb <= offer.memory_gb else None, figure)
                    for speed, offer in zip(row, offers, strict=True)
                )
                for row, model in zip(rows, models, strict=True)
            )
            for query, rows in zip(queries, speeds, strict=True)
        )

    storage = 1.0 + len(offers) * len(queries) * sum(model.weights_gb for model in models)  # Enough for every place.
    return Problem(
        name=name, source=source, horizon_hours=hours,
        budget_dollars=NO_LIMIT * (most + 1.0) if budget is None else budget,
        storage_gb=storage, query_types=tuple(queries), models=tuple(models), tiers=tuple(tiers),
        compute_seconds_per_token=table("delay"), communication_seconds_per_token=nothing,
        error=nothing if errors is None else tuple(tuple((each,) * len(offers) for each in row) for row in errors),
        gflop_per_token=table("work"), resident_queries=nothing,
    )  # fmt: skip


def _figure(query: QueryType, speed: Speed | None, figure: str) -> float:
    """Return a table's number: times a query's tokens, it is its delay in (3), and the work of a worker in (5g)."""
    tokens = query.tokens
    if speed is None:
        return min(MOST, NEVER * query.max_delay_seconds / tokens) if figure == "delay" else 0.0
    return speed.delay / tokens if figure == "delay" else 1e3 * speed.seconds / tokens


@dataclasses.dataclass(frozen=True)
class StaffedModel:
    """Workers of a tier that hold a model, in an answer, by their numbers, and (query type, its share) served there."""

    model: int
    offer: int
    workers: int
    shares: tuple[tuple[int, float], ...]


def staffing(
    problem: Problem, offers: Sequence[SiteOffer], speeds: Speeds, allocation: Allocation
) -> list[StaffedModel]:
    """Return the workers that an answer needs, never more than its deployments have."""
    held = [((each.model, each.tier), each.gpus * crew_size(offers[each.tier])) for each in allocation.deployments]
    shares: dict[tuple[int, int], dict[int, float]] = {}
    for route in allocation.routes:
        shares.setdefault((route.model, route.tier), {})[route.query_type] = route.share
    busy = dict.fromkeys(shares, 0.0)
    for (model, number), own in shares.items():
        for query, share in own.items():
            speed = speeds[query][model][number]
            rate = problem.query_types[query].queries_per_hour
            busy[model, number] += share * rate * (speed.seconds if speed else 0.0) / 3600
    return [
        StaffedModel(model, number, workers, tuple(sorted(shares[model, number].items())))
        for (model, number), workers in workers_needed(held, busy, problem.utilization).items()
    ]
