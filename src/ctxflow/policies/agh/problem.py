"""The placement problem P_DM of GH/AGH (section 2.1): as data with its checks, and as arrays to compute on.

Units are in the names. docs/placement.md describes the file's fields. Two instances come with ctxflow.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import Field

from ctxflow.errors import counted
from ctxflow.files import text_of

MOST = 1e15
"""The largest number but for limits, so that products of several are finite. A limit above it is none."""


def _no_text(value: Any) -> Any:
    if isinstance(value, (str, bool)):
        raise ValueError("input should be a number")
    return value


Positive = Annotated[float, Field(gt=0, le=MOST, allow_inf_nan=False, strict=True)]
NotNegative = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False, strict=True)]
Limit = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]
Whole = Annotated[int, pydantic.BeforeValidator(_no_text)]
Degree = Annotated[Whole, Field(ge=1, le=1024)]
Name = Annotated[str, Field(min_length=1)]
Table = tuple[tuple[tuple[NotNegative, ...], ...], ...]
"""Numbers by query type, model and tier, in that order."""


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")


class QueryType(_Part):
    """One kind of query, with its service levels (the paper's i).

    :ivar queries_per_hour: the arrival rate, lambda. :ivar input_tokens: h. :ivar output_tokens: f.
    :ivar max_delay_seconds, max_error: Delta and epsilon (a share of answers), limits of the average over its routes.
    :ivar delay_dollars_per_ms: rho, for the delay of one average query.
    :ivar unserved_dollars: phi, for leaving the whole type unserved; `max_unserved`: zeta, the share that may be.
    :ivar storage_kb_per_token: theta; 1 KB is 1000 bytes.
    """

    name: Name
    queries_per_hour: NotNegative
    input_tokens: NotNegative
    output_tokens: NotNegative
    max_delay_seconds: Annotated[Limit, Field(gt=0)]
    max_error: Share
    delay_dollars_per_ms: NotNegative = 0.0
    unserved_dollars: NotNegative
    max_unserved: Share = 1.0
    storage_kb_per_token: NotNegative = 0.0

    @property
    def tokens(self) -> float:
        """Return the tokens of a query, in and out: r."""
        return self.input_tokens + self.output_tokens


class Model(_Part):
    """A model (the paper's j): B, the size of its weights, and beta, what a token takes in the KV cache."""

    name: Name
    weights_gb: Positive
    kv_bytes_per_token: NotNegative = 0.0


class GpuTier(_Part):
    """A GPU model at a precision (the paper's k).

    :ivar memory_gb, tflops, dollars_per_hour: C^GPU, P^GPU and p^c, of one GPU.
    :ivar tensor_parallel, pipeline_parallel: N_k and M_k, the TP degrees and PP depths that its machines allow.
    :ivar gpus: how many are available; None for no limit, as in the paper.
    """

    name: Name
    memory_gb: Positive
    tflops: Positive
    dollars_per_hour: NotNegative
    tensor_parallel: Annotated[tuple[Degree, ...], Field(min_length=1)] = (1, 2, 4, 8)
    pipeline_parallel: Annotated[tuple[Degree, ...], Field(min_length=1)] = (1, 2, 4)
    gpus: Annotated[Whole, Field(ge=0)] | None = None


class Problem(_Part):
    """What to place, on what, within which limits. Tables have a number for each query type, model and tier, as listed.

    :ivar source: where the numbers come from.
    :ivar horizon_hours: Delta_T, for which GPUs are rented.
    :ivar budget_dollars: delta, for rent and storage over the horizon.
    :ivar storage_gb: C_s, for models and queries' data together, at `storage_dollars_per_gb_hour`: p^s.
    :ivar utilization: eta, the share of the GPUs' throughput that can be used.
    :ivar compute_seconds_per_token: d^comp, on one GPU; `communication_...`: d^comm, for each pipeline stage.
    :ivar error: e-bar, the share of wrong answers. :ivar gflop_per_token: alpha.
    :ivar resident_queries: T^res, the queries in flight, by which (5f) multiplies a query's KV cache. (The paper has
        r*beta/bandwidth there, in seconds, without the arrival rate.)

    >>> problem = paper_instance()
    >>> problem.shape, problem.tiers[0].name
    ((6, 6, 10), 'A6000-FP16')
    >>> Problem.from_json(problem.to_json()) == problem
    True
    """

    format: Literal["ctxflow-placement-problem/1"] = "ctxflow-placement-problem/1"
    name: Name
    source: str = ""
    horizon_hours: Positive = 24.0
    budget_dollars: Limit
    storage_gb: Limit
    storage_dollars_per_gb_hour: NotNegative = 0.0
    utilization: Annotated[float, Field(gt=0, le=1, strict=True)] = 0.9
    query_types: Annotated[tuple[QueryType, ...], Field(min_length=1)]
    models: Annotated[tuple[Model, ...], Field(min_length=1)]
    tiers: Annotated[tuple[GpuTier, ...], Field(min_length=1)]
    compute_seconds_per_token: Table
    communication_seconds_per_token: Table
    error: tuple[tuple[tuple[Share, ...], ...], ...]
    gflop_per_token: Table
    resident_queries: Table

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Problem:
        for field in ("query_types", "models", "tiers"):
            names = [each.name for each in getattr(self, field)]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{field}: the name {twice[0]!r} is there twice")
        for field in TABLES:
            _check_shape(field, getattr(self, field), self.shape)
        return self

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return how many query types, models and tiers: (I, J, K)."""
        return len(self.query_types), len(self.models), len(self.tiers)

    @classmethod
    def from_json(cls, text: str) -> Problem:
        """Read a problem; raise ValueError, with the field's name, for what is not JSON or not possible."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the problem is not JSON: {error}") from None
        return cls.from_data(data)

    @classmethod
    def from_data(cls, data: Any) -> Problem:
        """Return a problem from the data of JSON; raise ValueError, with the field's name, for what is not possible."""
        try:
            return cls.model_validate(data)
        except pydantic.ValidationError as error:
            raise ValueError("the problem cannot be: " + _explain(error)) from None

    @classmethod
    def read(cls, path: Path) -> Problem:
        """Read a problem's file; raise ValueError as `from_json`, and if it cannot be read."""
        try:
            text = text_of(path)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise ValueError(f"the problem {path} cannot be read: {reason}") from None
        return cls.from_json(text)

    def to_json(self) -> str:
        """Return the problem's file; one line for each row of a table."""
        data = self.model_dump(mode="json", exclude_none=True)
        head = json.dumps({key: value for key, value in data.items() if key not in TABLES}, indent=1)
        rows = [f' "{field}": {_rows(data[field])}' for field in TABLES]
        return head.removesuffix("\n}") + ",\n" + ",\n".join(rows) + "\n}\n"


TABLES = (
    "compute_seconds_per_token",
    "communication_seconds_per_token",
    "error",
    "gflop_per_token",
    "resident_queries",
)


def _rows(table: list[list[list[float]]]) -> str:
    return "[\n" + ",\n".join("  [" + ",\n   ".join(json.dumps(row) for row in plane) + "]" for plane in table) + "]"


def _check_shape(field: str, table: Any, shape: tuple[int, int, int]) -> None:
    if len(table) != shape[0]:
        raise ValueError(f"{field}: has rows for {len(table)} query types, and there are {shape[0]}")
    for i, plane in enumerate(table):
        if len(plane) != shape[1]:
            raise ValueError(f"{field}[{i}]: has rows for {counted(len(plane), 'model')}, and there are {shape[1]}")
        for j, row in enumerate(plane):
            if len(row) != shape[2]:
                has = f"has numbers for {counted(len(row), 'tier')}"
                raise ValueError(f"{field}[{i}][{j}]: {has}, and there are {shape[2]}")


_WANTED = {
    "model_type": "an object",
    "tuple_type": "a list",
    "too_short": "a list of at least one",
    "float_type": "a number",
    "int_type": "a number",
    "string_type": "a text",
}


def _explain(error: pydantic.ValidationError) -> str:
    """Return the first thing that is wrong, with the field's name."""
    first = error.errors(include_url=False)[0]
    if first["type"] in _WANTED:
        first["msg"] = f"input should be {_WANTED[first['type']]}"
    if not first["loc"]:
        given = f" (it is {first['input']!r:.40})" if first["type"] in _WANTED else ""
        return str(first["msg"]).removeprefix("Value error, ") + given
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    given = "" if first["type"] == "missing" else f" (it is {first['input']!r:.40})"
    more = len(error.errors()) - 1
    message = str(first["msg"]).removeprefix("Value error, ").lower()
    return f"{place}: {message}{given}" + (f"; {more} more are wrong" if more else "")


def paper_instance() -> Problem:
    """Return `paper_instance.json`: draw(1) of the paper's ranges, the first from 0 that can be served whole."""
    return _stored("paper_instance.json")


def azure_instance() -> Problem:
    """Return `azure_instance.json`, whose lengths and rates come from the Azure trace."""
    return _stored("azure_instance.json")


@functools.cache
def _stored(name: str) -> Problem:
    return Problem.from_json((resources.files(__package__) / name).read_text())


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Constants:
    """What the heuristics compute on: the constants of I query types, J models, K tiers and C configurations.

    Made of a placement problem (`Arrays`), or of a live run, whose contexts take no storage (`staffing`).
    Configurations are all (TP, PP) of any tier, fewest GPUs first, then the higher TP, which has the smaller delay, so
    that the first that fits is M1's.

    :ivar tensor, pipeline, gpus: (C,) TP, PP and their product.
    :ivar allowed: (K, C) whether the tier allows it; `fits`: (J, K, C) and the weights fit its GPUs.
    :ivar spare_gb: (J, K, C) what a pair's GPUs have left for KV caches; `kv_gb`: (I, J, K) what the whole type takes.
    :ivar rates: (I,) queries an hour. :ivar delay: (I, J, K, C) seconds, D. :ivar error: (I, J, K).
    :ivar max_delay, max_error, unserved_dollars, max_unserved: (I,).
    :ivar work: (I, J, K) of the whole type in an hour, in the unit of `capacity`: (K,) of one GPU.
    :ivar rent: (K,) dollars of one GPU over the horizon. :ivar stock: (K,) GPUs available, inf without a limit.
    :ivar model_dollars: (J,) of storing the weights (`weights_gb`) over the horizon, for each type that is sent there.
    :ivar data_gb, data_dollars: (I,) of storing the whole type's data. :ivar delay_dollars: (I,) for a second.
    :ivar hours: of the horizon. :ivar budget: dollars. :ivar storage: GB, at `storage_price` dollars an hour each.
    """

    tensor: Ints
    pipeline: Ints
    gpus: Ints
    allowed: Bools
    fits: Bools
    spare_gb: Floats
    kv_gb: Floats
    rates: Floats
    delay: Floats
    error: Floats
    max_delay: Floats
    max_error: Floats
    unserved_dollars: Floats
    max_unserved: Floats
    work: Floats
    capacity: Floats
    weights_gb: Floats
    rent: Floats
    model_dollars: Floats
    data_gb: Floats
    data_dollars: Floats
    delay_dollars: Floats
    stock: Floats
    hours: float
    budget: float
    storage: float
    storage_price: float

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return I, J, K and C."""
        i, j, k, c = self.delay.shape
        return i, j, k, c

    def options(self) -> Bools:
        """Return the configurations that an optimum may need: (J, K, C).

        Left out are those beyond memory, budget or stock by themselves, and those beside another of the pair that has
        no more GPUs, delays no query type more, and could carry all of them at once.
        """
        allowed = self.fits & (self.rent[:, None] * self.gpus <= self.budget)
        allowed &= self.gpus <= self.stock[:, None]
        enough = self.capacity[None, :, None] * self.gpus >= self.work.sum(axis=0)[..., None]
        enough &= self.spare_gb >= self.kv_gb.sum(axis=0)[..., None]
        for slow in range(len(self.gpus)):
            for fast in range(slow):  # Those before it have no more GPUs.
                better = (self.delay[..., fast] <= self.delay[..., slow]).all(axis=0) & allowed[..., fast]
                same_size = self.gpus[fast] == self.gpus[slow]
                allowed[..., slow] &= ~(better & (same_size | enough[..., fast]))
        return allowed


@dataclasses.dataclass(frozen=True)
class Arrays(Constants):
    """The constants of a placement problem, with the problem, its limits finite, and the memory (K,) of one GPU."""

    problem: Problem
    memory_gb: Floats

    @classmethod
    def of(cls, problem: Problem) -> Arrays:
        """Return the arrays of a problem.

        >>> from ctxflow.policies.agh.problem import paper_instance
        >>> arrays = Arrays.of(paper_instance())
        >>> arrays.shape, arrays.gpus[:4].tolist(), arrays.tensor[:4].tolist()
        ((6, 6, 10, 12), [1, 2, 2, 4], [1, 2, 1, 4])
        """
        problem = _bounded(problem)
        types, models, tiers = problem.query_types, problem.models, problem.tiers
        tensor, pipeline, allowed = _configurations(problem)
        gpus = tensor * pipeline
        inputs, outputs = _column(types, "input_tokens"), _column(types, "output_tokens")
        tokens, rate = inputs + outputs, _column(types, "queries_per_hour")
        compute = np.array(problem.compute_seconds_per_token)
        communication = np.array(problem.communication_seconds_per_token)
        delay = (compute * tokens[:, None, None])[..., None] / tensor
        delay += (communication * outputs[:, None, None])[..., None] * pipeline
        weights = _column(models, "weights_gb")
        spare = _column(tiers, "memory_gb")[None, :, None] * gpus - weights[:, None, None]
        data = _column(types, "storage_kb_per_token") * 1e-6 * tokens * rate
        stored = problem.horizon_hours * problem.storage_dollars_per_gb_hour
        kv = _column(models, "kv_bytes_per_token")[None, :, None] * 1e-9 * tokens[:, None, None]
        return cls(
            problem=problem, tensor=tensor, pipeline=pipeline, gpus=gpus, allowed=allowed,
            fits=allowed[None] & (spare >= 0), spare_gb=spare, kv_gb=kv * np.array(problem.resident_queries),
            rates=rate, delay=delay, error=np.array(problem.error), max_delay=_column(types, "max_delay_seconds"),
            max_error=_column(types, "max_error"), unserved_dollars=_column(types, "unserved_dollars"),
            max_unserved=_column(types, "max_unserved"),
            work=np.array(problem.gflop_per_token) * (tokens * rate / 1e3)[:, None, None],
            capacity=problem.utilization * 3600.0 * _column(tiers, "tflops"),
            weights_gb=weights, memory_gb=_column(tiers, "memory_gb"),
            rent=problem.horizon_hours * _column(tiers, "dollars_per_hour"),
            model_dollars=stored * weights, data_gb=data, data_dollars=stored * data,
            delay_dollars=1e3 * _column(types, "delay_dollars_per_ms"),
            stock=np.array([np.inf if tier.gpus is None else tier.gpus for tier in tiers]),
            hours=problem.horizon_hours, budget=problem.budget_dollars, storage=problem.storage_gb,
            storage_price=problem.storage_dollars_per_gb_hour,
        )  # fmt: skip


def _bounded(problem: Problem) -> Problem:
    """Return the problem with every limit finite: at most `MOST`."""

    def capped(part: Any, *names: str) -> dict[str, Any]:
        return {name: min(getattr(part, name), MOST) for name in names}

    types = tuple(kind.model_copy(update=capped(kind, "max_delay_seconds")) for kind in problem.query_types)
    return problem.model_copy(update={**capped(problem, "budget_dollars", "storage_gb"), "query_types": types})


def _column(parts: Any, field: str) -> Floats:
    return np.array([getattr(part, field) for part in parts], dtype=float)


def _configurations(problem: Problem) -> tuple[Ints, Ints, Bools]:
    """Return TP and PP of all configurations, and which tier allows which: (C,), (C,), (K, C)."""
    sets = [{(n, m) for n in tier.tensor_parallel for m in tier.pipeline_parallel} for tier in problem.tiers]
    order = sorted(set().union(*sets), key=lambda pair: (pair[0] * pair[1], -pair[0]))
    allowed = np.array([[pair in each for pair in order] for each in sets])
    tensor, pipeline = np.array(order, dtype=np.int64).T
    return tensor, pipeline, allowed
