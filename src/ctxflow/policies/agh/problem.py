"""The placement problem as data: query types, models, tiers, and what each does on each; JSON in and out.

GH/AGH's problem P_DM (section 2.1), with the units in the names, and its checks. docs/placement.md describes the file's
fields. Two instances come with ctxflow.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from ctxflow.errors import counted

MOST = 1e15
"""The largest number, but for limits: products of several are still numbers. A limit above it is none."""


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
    """One kind of query, with what its senders ask for (the paper's i).

    :ivar queries_per_hour: the arrival rate, lambda.
    :ivar input_tokens: h.
    :ivar output_tokens: f.
    :ivar max_delay_seconds: Delta; the average over a type's routes stays within it.
    :ivar max_error: epsilon, a share of answers; the average over a type's routes stays within it.
    :ivar delay_dollars_per_ms: rho, for the delay of one average query.
    :ivar unserved_dollars: phi, for leaving the whole type unserved.
    :ivar max_unserved: zeta, the share of the type that may be left unserved.
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
    """A model that could be loaded (the paper's j).

    :ivar weights_gb: B, the size of the weights.
    :ivar kv_bytes_per_token: beta, what a token takes in the KV cache.
    """

    name: Name
    weights_gb: Positive
    kv_bytes_per_token: NotNegative = 0.0


class GpuTier(_Part):
    """A GPU model at a precision (the paper's k).

    :ivar memory_gb: C^GPU, of one GPU.
    :ivar tflops: P^GPU, of one GPU.
    :ivar dollars_per_hour: p^c, of one GPU.
    :ivar tensor_parallel: N_k, the TP degrees that its machines allow.
    :ivar pipeline_parallel: M_k, the PP depths.
    :ivar gpus: how many GPUs there are to be had; None for no limit, as in the paper.
    """

    name: Name
    memory_gb: Positive
    tflops: Positive
    dollars_per_hour: NotNegative
    tensor_parallel: Annotated[tuple[Degree, ...], Field(min_length=1)] = (1, 2, 4, 8)
    pipeline_parallel: Annotated[tuple[Degree, ...], Field(min_length=1)] = (1, 2, 4)
    gpus: Annotated[Whole, Field(ge=0)] | None = None


class Problem(_Part):
    """What to place, on what, within which limits.

    The four tables hold one number for each query type, model and tier, in the order in which those are listed.

    :ivar source: where the numbers come from.
    :ivar horizon_hours: Delta_T, for which GPUs are rented.
    :ivar budget_dollars: delta, for rent and storage over the horizon.
    :ivar storage_gb: C_s, for models and queries' data together.
    :ivar storage_dollars_per_gb_hour: p^s.
    :ivar utilization: eta, the share of the GPUs' throughput that can be used.
    :ivar compute_seconds_per_token: d^comp, on one GPU.
    :ivar communication_seconds_per_token: d^comm, for each pipeline stage.
    :ivar error: e-bar, the share of wrong answers.
    :ivar gflop_per_token: alpha.
    :ivar resident_queries: T^res, by which (5f) multiplies a query's KV cache. The paper puts r*beta/bandwidth there,
        in seconds, without the arrival rate; the queries in flight at a time are what it stands for.

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
        """Read a problem.

        :raises ValueError: for what is not JSON, and for what cannot be, with the field's name.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the problem is not JSON: {error}") from None
        return cls.from_data(data)

    @classmethod
    def from_data(cls, data: Any) -> Problem:
        """Return a problem from what JSON gives: dicts, lists, numbers.

        :raises ValueError: for what cannot be, with the field's name.
        """
        try:
            return cls.model_validate(data)
        except pydantic.ValidationError as error:
            raise ValueError("the problem cannot be: " + _explain(error)) from None

    @classmethod
    def read(cls, path: Path) -> Problem:
        """Read a problem's file.

        :raises ValueError: as `from_json`, and if there is no such file.
        """
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise ValueError(f"the problem {path} cannot be read: {reason}") from None
        return cls.from_json(text)

    def to_json(self) -> str:
        """Return the problem's file; one line for each row of a table."""
        data = self.model_dump(mode="json", exclude_none=True)
        head = {key: value for key, value in data.items() if key not in TABLES}
        text = json.dumps(head, indent=1)
        rows = [f' "{field}": {_rows(data[field])}' for field in TABLES]
        return text.removesuffix("\n}") + ",\n" + ",\n".join(rows) + "\n}\n"


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
                raise ValueError(
                    f"{field}[{i}][{j}]: has numbers for {counted(len(row), 'tier')}, and there are {shape[2]}"
                )


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
    """Return the instance that every table names: `paper_instance.json`, which is `draw(1)`: all six, six and ten.

    Seed 1 is the first from 0 whose draw can be served whole, as the paper's can, which says no more of its numbers.
    """
    return _stored("paper_instance.json")


def azure_instance() -> Problem:
    """Return the instance whose lengths and rates come from the Azure trace: `azure_instance.json`."""
    return _stored("azure_instance.json")


@functools.cache
def _stored(name: str) -> Problem:
    return Problem.from_json((resources.files(__package__) / name).read_text())
