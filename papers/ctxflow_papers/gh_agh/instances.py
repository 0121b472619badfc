"""Problems to measure on: the paper's, draws from its ranges, and one from the Azure LLM inference trace.

The ranges are those of section 4.1; where the paper names none, the values of this project, each named below.
docs/placement.md describes what was chosen and why.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxflow.policies.agh.problem import Problem

Range = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Task:
    """The ranges of one of the paper's six query types.

    :ivar rate: queries an hour. The paper gives the first and the last; the four between are ours.
    :ivar delay: the limit in seconds, of the paper's 1.5 to 25; which type gets which part is ours.
    :ivar max_error: of the paper's 2 to 8 %; which type gets which part is ours.
    :ivar error: before it is divided by the model's capacity.
    :ivar price: rho, dollars per ms.
    :ivar unserved: phi, dollars.
    :ivar kilobytes: theta, per token.
    :ivar compute: alpha, GFLOP a token.
    """

    name: str
    inputs: int
    outputs: int
    rate: Range
    delay: Range
    max_error: Range
    error: Range
    price: Range
    unserved: Range
    kilobytes: Range
    compute: Range


TEXT_PRICE, MATH_PRICE, MEDIA_PRICE = (1e-4, 3e-4), (5e-4, 8e-4), (5e-4, 1e-3)
TEXT_UNSERVED, MEDIA_UNSERVED = (1000.0, 1500.0), (2000.0, 3000.0)
TEXT_KB, IMAGE_KB, VIDEO_KB = (10.0, 14.0), (40.0, 60.0), (80.0, 120.0)
TASKS = (
    Task("Summarization", 512, 256, (18e3, 25e3), (2, 5), (0.02, 0.05), (0.03, 0.05), TEXT_PRICE, TEXT_UNSERVED,
         TEXT_KB, (0.3, 0.7)),
    Task("Code", 256, 512, (10e3, 15e3), (2, 6), (0.02, 0.04), (0.02, 0.03), TEXT_PRICE, TEXT_UNSERVED,
         TEXT_KB, (0.6, 1.0)),
    Task("Translation", 128, 128, (8e3, 12e3), (1.5, 4), (0.02, 0.04), (0.02, 0.03), TEXT_PRICE, TEXT_UNSERVED,
         TEXT_KB, (0.2, 0.4)),
    Task("Math", 64, 256, (5e3, 8e3), (4, 10), (0.03, 0.06), (0.05, 0.07), MATH_PRICE, TEXT_UNSERVED,
         TEXT_KB, (1.0, 1.5)),
    Task("Image", 32, 1024, (2e3, 5e3), (6, 15), (0.04, 0.08), (0.06, 0.08), MEDIA_PRICE, MEDIA_UNSERVED,
         IMAGE_KB, (2.0, 3.0)),
    Task("Video", 48, 2048, (1e3, 3e3), (10, 25), (0.04, 0.08), (0.08, 0.10), MEDIA_PRICE, MEDIA_UNSERVED,
         VIDEO_KB, (3.5, 4.5)),
)  # fmt: skip

# Name, weights (GB), KV cache (bytes per token, from the architectures at FP16), capacity (what errors are divided
# by), layers, width.
MODELS = (
    ("Llama-1B", 2.0, 32768, 0.5, 16, 2048),
    ("Llama-3B", 6.0, 114688, 1.5, 28, 3072),
    ("Llama-8B", 16.0, 131072, 3.0, 32, 4096),
    ("Llama-70B", 140.0, 327680, 8.0, 80, 8192),
    ("Llama-31B", 62.0, 262144, 5.0, 64, 5120),
    ("Llama-11B-Vision", 22.0, 163840, 2.5, 40, 4096),
)
# Name, memory (GB), bandwidth (GB/s), TFLOPS at FP16, dollars an hour at FP16, link to its neighbours (GB/s).
GPUS = {
    "A6000": (48.0, 768.0, 40.7, (0.45, 0.70), 600.0),
    "RTX4090": (24.0, 1008.0, 82.6, (0.45, 0.60), 600.0),
    "A100-40GB": (40.0, 1555.0, 78.0, (0.90, 1.40), 600.0),
    "H100-80GB": (80.0, 3350.0, 371.0, (1.90, 2.50), 900.0),
}
# Bytes of a weight relative to FP16 (sigma), what errors are multiplied by, what the price is (ours: quantised
# modes are cheaper, and no price leaves the paper's 0.35 to 2.50).
PRECISIONS = {"FP16": (1.0, 1.0, 1.0), "INT8": (0.5, 1.15, 0.9), "INT4": (0.25, 1.35, 0.8)}
TIERS = tuple(
    (gpu, precision)
    for gpu, precisions in (
        ("A6000", ("FP16", "INT8", "INT4")),
        ("RTX4090", ("FP16", "INT8")),
        ("A100-40GB", ("FP16", "INT8")),
        ("H100-80GB", ("FP16", "INT8", "INT4")),
    )
    for precision in precisions
)
OVERHEAD = (0.9, 1.2)  # tau: the paper publishes none.
STORAGE_DOLLARS = (0.0005, 0.001)
BUDGET_DOLLARS = 100.0
STORAGE_GB = 1000.0
VARIANT = 0.1  # How far the copies of models and tiers beyond the paper's six and ten are from their originals.


def draw(
    seed: int,
    shape: tuple[int, int, int] = (6, 6, 10),
    budget_dollars: float | None = None,
    storage_gb: float | None = None,
) -> Problem:
    """A problem from the paper's ranges.

    Fewer query types, models or tiers than the paper has are a random choice of its own, kept in its order; of more,
    the first are all of its own, and the others copies (types drawn afresh; models and tiers within 10 %).

    :param shape: how many query types, models and tiers.
    :param budget_dollars, storage_gb: the paper's 100 $ and 1,000 GB; above six types they grow in proportion.

    >>> draw(3, (3, 3, 3)) == draw(3, (3, 3, 3)), draw(0, (20, 20, 20)).budget_dollars
    (True, 333.333)
    """
    random = np.random.default_rng([seed, *shape])
    tasks = [TASKS[index] for index in _choose(random, shape[0], len(TASKS))]
    types = [_query_type(random, task, f"{task.name}{_copy(n, len(TASKS))}") for n, task in enumerate(tasks)]
    growth = max(1.0, shape[0] / len(TASKS))
    return _assemble(
        random,
        types,
        tasks,
        shape,
        name=f"draw-{seed}-" + "x".join(map(str, shape)),
        source=f"the ranges of GH/AGH, section 4.1; numpy's default_rng([{seed}, {', '.join(map(str, shape))}])",
        budget_dollars=_round(BUDGET_DOLLARS * growth) if budget_dollars is None else budget_dollars,
        storage_gb=_round(STORAGE_GB * growth) if storage_gb is None else storage_gb,
    )


BOUND_BY = ("throughput", "budget", "storage", "delay", "error")


def tightened(problem: Problem, limit: str, seed: int) -> Problem:
    """Return a problem in which another limit binds than in the paper's draws, which mostly rent and storage decide.

    :param limit: one of `BOUND_BY`. Throughput: the work of a token is 30 to 1,000 times the paper's, and the budget
        grows with what exceeds 30. Budget: 0.1 to 0.8 of it; storage: 0.1 to 0.9. Delay: the limits of all types are
        0.1 to 0.8 of theirs; error: 0.2 to 0.8. Factors are drawn, that of throughput by its logarithm.

    >>> tightened(draw(0, (3, 3, 3)), "storage", 0).storage_gb < 1000
    True
    """
    random = np.random.default_rng([seed, BOUND_BY.index(limit)])
    data = problem.model_dump(mode="json", exclude_none=True)
    if limit == "throughput":
        factor = float(np.exp(random.uniform(np.log(30), np.log(1000))))
        work = data["gflop_per_token"]
        data["gflop_per_token"] = [[[factor * each for each in row] for row in plane] for plane in work]
        data["budget_dollars"] *= max(1.0, factor / 30)
    elif limit in ("budget", "storage"):
        field, most = ("budget_dollars", 0.8) if limit == "budget" else ("storage_gb", 0.9)
        data[field] *= random.uniform(0.1, most)
    else:
        field, least = ("max_delay_seconds", 0.1) if limit == "delay" else ("max_error", 0.2)
        factor = random.uniform(least, 0.8)
        for kind in data["query_types"]:
            kind[field] *= factor
    return Problem.from_data({**data, "name": f"{problem.name}-{limit}"})


def from_trace(path: Path, seed: int = 0) -> Problem:
    """The paper's models and tiers, with query types from an Azure trace (TIMESTAMP, ContextTokens, GeneratedTokens).

    Queries are split by the trace's terciles of input length, and each third at its median of output length: six
    types with their mean lengths and their rate over the trace. Both halves of the longest inputs have the widest
    delay limit. All else is drawn from the ranges of the paper's Code.

    :raises ValueError: if the file is no such trace.
    """
    inputs, outputs, hours = _read_trace(path)
    random = np.random.default_rng([seed, 2023])
    code = TASKS[1]
    third = np.searchsorted(np.quantile(inputs, [1 / 3, 2 / 3]), inputs)
    types, tasks = [], []
    for index, (size, delay) in enumerate((("short", (1.5, 4.0)), ("medium", (4.0, 12.0)), ("long", (15.0, 25.0)))):
        middle = np.median(outputs[third == index])
        for answer, chosen in (("brief", outputs <= middle), ("wordy", outputs > middle)):
            here = chosen & (third == index)
            task = dataclasses.replace(code, delay=delay)
            kind = _query_type(random, task, f"{size}-{answer}")
            kind |= {
                "queries_per_hour": _round(here.sum() / hours),
                "input_tokens": _round(inputs[here].mean()),
                "output_tokens": _round(outputs[here].mean()),
            }
            types.append(kind)
            tasks.append(task)
    return _assemble(
        random,
        types,
        tasks,
        (6, 6, 10),
        name="azure-2023-code",
        source=f"{path.name}: {len(inputs)} queries in {hours:.3f} h; all else the ranges of GH/AGH, seed {seed}",
        budget_dollars=BUDGET_DOLLARS,
        storage_gb=STORAGE_GB,
    )


def _read_trace(path: Path) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Input and output tokens of all queries, and the hours from the first to the last."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        times = [datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in (rows[0], rows[-1])]
        inputs = np.array([row["ContextTokens"] for row in rows], dtype=float)
        outputs = np.array([row["GeneratedTokens"] for row in rows], dtype=float)
    except (KeyError, IndexError, ValueError, TypeError):
        raise ValueError(f"{path} is no trace with TIMESTAMP, ContextTokens and GeneratedTokens") from None
    return inputs, outputs, (times[1] - times[0]).total_seconds() / 3600


def _choose(random: np.random.Generator, count: int, available: int) -> list[int]:
    if count < available:
        return sorted(random.choice(available, count, replace=False).tolist())
    return [index % available for index in range(count)]


def _copy(number: int, available: int) -> str:
    return "" if number < available else f"-{number // available + 1}"


def _round(value: float) -> float:
    """Six significant digits: what a person can read in the file."""
    return float(f"{value:.6g}")


def _uniform(random: np.random.Generator, bounds: Range) -> float:
    return _round(random.uniform(*bounds))


def _query_type(random: np.random.Generator, task: Task, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "queries_per_hour": _uniform(random, task.rate),
        "input_tokens": task.inputs,
        "output_tokens": task.outputs,
        "max_delay_seconds": _uniform(random, task.delay),
        "max_error": _uniform(random, task.max_error),
        "delay_dollars_per_ms": _uniform(random, task.price),
        "unserved_dollars": _uniform(random, task.unserved),
        "storage_kb_per_token": _uniform(random, task.kilobytes),
    }


def _assemble(
    random: np.random.Generator,
    types: list[dict[str, Any]],
    tasks: Sequence[Task],
    shape: tuple[int, int, int],
    **fields: Any,
) -> Problem:
    """A problem of these query types on the paper's models and tiers."""
    models = [MODELS[index] for index in _choose(random, shape[1], len(MODELS))]
    tiers = [TIERS[index] for index in _choose(random, shape[2], len(TIERS))]
    varied = [np.where(np.arange(count) < own, 1.0, random.uniform(1 - VARIANT, 1 + VARIANT, count))
              for count, own in ((shape[1], len(MODELS)), (shape[2], len(TIERS)))]  # fmt: skip
    weights = [_round(model[1] * factor) for model, factor in zip(models, varied[0], strict=True)]
    overhead = [_uniform(random, OVERHEAD) for _ in tasks]
    base_error = [_uniform(random, task.error) for task in tasks]
    alpha = [_uniform(random, task.compute) for task in tasks]
    tokens = [float(kind["input_tokens"] + kind["output_tokens"]) for kind in types]
    prices = {gpu: _uniform(random, values[3]) for gpu, values in GPUS.items()}
    bandwidth = [GPUS[gpu][1] * float(factor) for (gpu, _), factor in zip(tiers, varied[1], strict=True)]

    def table(cell: Any) -> list[list[list[float]]]:
        """Numbers by type, model and tier."""
        return [[[_round(cell(i, j, k)) for k in range(shape[2])] for j in range(shape[1])] for i in range(shape[0])]

    def compute(i: int, j: int, k: int) -> float:
        """d^comp: the weights are read once a token."""
        return overhead[i] * weights[j] * PRECISIONS[tiers[k][1]][0] / bandwidth[k]

    def communication(i: int, j: int, k: int) -> float:
        """d^comm: two activations of two bytes per unit of width and layer, over the link."""
        return 4.0 * models[j][4] * models[j][5] / (GPUS[tiers[k][0]][4] * 1e9)

    def residency(i: int, j: int, k: int) -> float:
        """T^res: the time in which the bandwidth reads the query's KV cache."""
        return tokens[i] * models[j][2] / (bandwidth[k] * 1e9)

    return Problem.from_data({
        **fields,
        "storage_dollars_per_gb_hour": _uniform(random, STORAGE_DOLLARS),
        "query_types": types,
        "models": [
            {"name": f"{model[0]}{_copy(n, len(MODELS))}", "weights_gb": weights[n], "kv_bytes_per_token": model[2]}
            for n, model in enumerate(models)
        ],
        "tiers": [
            {
                "name": f"{gpu}-{precision}{_copy(n, len(TIERS))}",
                "memory_gb": GPUS[gpu][0],
                "tflops": _round(GPUS[gpu][2] / PRECISIONS[precision][0]),
                "dollars_per_hour": _round(prices[gpu] * PRECISIONS[precision][2] * varied[1][n]),
            }
            for n, (gpu, precision) in enumerate(tiers)
        ],
        "compute_seconds_per_token": table(compute),
        "communication_seconds_per_token": table(communication),
        "error": table(lambda i, j, k: base_error[i] / models[j][3] * PRECISIONS[tiers[k][1]][1]),
        "gflop_per_token": table(lambda i, j, k: alpha[i] * PRECISIONS[tiers[k][1]][0]),
        "resident_queries": table(residency),
    })  # fmt: skip
