"""Why demand is unserved: what of it could be served, and for the rest the limits that are proven to keep it.

Each is decided by the MILP with another objective, to leave as little unserved as can be: once as the problem is, and
once without each limit. What the solver does not decide within its effort is said to be undecided.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ctxflow.policies.agh.allocation import Allocation, check, data_gb
from ctxflow.policies.agh.linear_programs import Effort, Solver
from ctxflow.policies.agh.placement_program import build, read, written
from ctxflow.policies.agh.problem import MOST, Arrays, Bools, Floats, GpuTier, Problem, QueryType

LEAST_SHARE = 1e-6  # Under this nothing counts as unserved.
GAINED = 1e-4  # The share of a type that has to be gained for more to count as possible.
EFFORT = Effort(seconds=20.0, nodes=2000)


@dataclasses.dataclass(frozen=True)
class Reason:
    """What keeps a query type ("": all of them) from being served whole: a constraint as the checker names it."""

    query_type: str
    constraint: str
    text: str

    def __str__(self) -> str:
        name = f"({self.constraint})" if self.constraint[:1].isdigit() else self.constraint
        return f"{self.query_type or 'all query types'}: {name} {self.text}".replace(":  ", ": ")


@dataclasses.dataclass(frozen=True)
class Unserved:
    """What was found out about the demand that an allocation leaves unserved.

    :ivar possible: query type -> the share that could be served besides, with no other served less.
    :ivar dollars: what the objective (5a) is more then, less than 0 where serving it is cheaper; None if nothing could.
    :ivar settled: whether it was proven that no more could be served.
    :ivar reasons: what keeps the rest, each proven.
    """

    possible: Mapping[str, float] = dataclasses.field(default_factory=dict)
    dollars: float | None = None
    settled: bool = True
    reasons: tuple[Reason, ...] = ()


def judge(problem: Problem, allocation: Allocation | None = None) -> Unserved:
    """Return what of the unserved demand could be served, and why the rest cannot; of all demand, without allocation.

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> poor = paper_instance().model_copy(update={"budget_dollars": 0.0})
    >>> print(judge(poor).reasons[0])
    all query types: (5c) the budget of 0 $ does not pay for any model on any tier: the cheapest takes 10.53 $
    """
    arrays = Arrays.of(problem)
    if general := tuple(_nothing_runs(arrays)):
        return Unserved(reasons=general)
    now = np.ones(len(problem.query_types)) if allocation is None else np.array(allocation.unserved)
    missing = [int(i) for i in np.flatnonzero(now > LEAST_SHARE)]
    alone = tuple(reason for i in missing for reason in _alone(arrays, i, _usable(arrays)))
    explained = {reason.query_type for reason in alone}
    whole = {kind.name for kind in problem.query_types if kind.max_unserved <= LEAST_SHARE}
    if whole & explained and (allocation is None or check(problem, allocation)):
        return Unserved(reasons=alone)  # Nothing keeps all limits; what could be served without does not matter.
    best = _least_unserved(problem, now, allocation)
    gained = now - best.unserved
    possible = {problem.query_types[i].name: float(gained[i]) for i in missing if gained[i] > GAINED}
    dollars = None
    if possible and best.allocation is not None:
        before = Allocation((), (), tuple(now)) if allocation is None else allocation
        dollars = best.allocation.costs(problem).total - before.costs(problem).total
    rest = [int(i) for i in np.flatnonzero(best.unserved > GAINED) if problem.query_types[i].name not in explained]
    shared = tuple(_limits(problem, best, rest)) if rest and best.settled else ()
    return Unserved(possible, dollars, best.settled, alone + shared)


@dataclasses.dataclass(frozen=True)
class _Least:
    """The least that can be unserved (I,), the cheapest allocation found that leaves no more, and if it is proven."""

    unserved: Floats
    allocation: Allocation | None
    settled: bool


def _least_unserved(problem: Problem, most: Floats, start: Allocation | None) -> _Least:
    """Return how little can be unserved, in the sum over all types, of each no more than `most` (I,)."""
    kinds = tuple(
        kind.model_copy(update={"max_unserved": min(1.0, float(share))})
        for kind, share in zip(problem.query_types, most, strict=True)
    )
    arrays = Arrays.of(problem.model_copy(update={"query_types": kinds}))
    options = arrays.options()
    if not options.any():
        return _Least(most, None, True)
    made, solver = build(arrays, options), Solver(presolve=True)
    known = None if start is None or check(problem, start) else written(made, start, arrays)
    cost = np.zeros(len(made.program.cost))
    cost[made.u] = 1.0
    found = solver.solve(dataclasses.replace(made.program, cost=cost), EFFORT, known)
    if found.values is None:
        return _Least(most, None, found.infeasible)
    unserved = np.minimum(most, found.values[made.u])
    upper = made.program.upper.copy()
    upper[made.u] = np.minimum(upper[made.u], unserved + GAINED / 10)
    cheapest = solver.solve(dataclasses.replace(made.program, upper=upper), EFFORT, found.values)
    allocation = read(arrays, made, found.values if cheapest.values is None else cheapest.values)
    if check(problem.model_copy(update={"query_types": tuple(_any_unserved(problem))}), allocation):
        return _Least(most, None, False)  # The solver erred: nothing is proven.
    return _Least(unserved, allocation, found.closed)


def _any_unserved(problem: Problem) -> Iterator[QueryType]:
    return (kind.model_copy(update={"max_unserved": 1.0}) for kind in problem.query_types)


def _limits(problem: Problem, best: _Least, missing: Sequence[int]) -> Iterator[Reason]:
    """Yield each limit without which more of the missing types could be served; all together, if no single one is."""
    names = ", ".join(problem.query_types[i].name for i in missing)
    one = problem.query_types[missing[0]].name if len(missing) == 1 else ""
    helps = False
    for constraint, without, text in _relaxed(problem, missing):
        if helps and constraint == "5g":
            continue  # More GPUs are more throughput.
        found = _least_unserved(without, best.unserved, None)
        gained = best.unserved - found.unserved
        if found.allocation is None or not any(gained[i] > GAINED for i in missing):
            continue
        helps = True
        costs = found.allocation.costs(without)
        spent = costs.rental + costs.model_storage + costs.data_storage
        served = "all of it" if max(found.unserved[i] for i in missing) <= GAINED else "more of it"
        yield Reason(one, constraint, text.format(spent=spent, served=served, names=names))
    if not helps:
        yield Reason(one, "", f"several limits together keep {names} from being served: none of them does so alone")


def _relaxed(problem: Problem, missing: Sequence[int]) -> Iterator[tuple[str, Problem, str]]:
    """Yield the problem without each limit, with the limit's name and what it means if that helps."""
    yield (
        "5c",
        problem.model_copy(update={"budget_dollars": MOST}),
        (f"the budget of {problem.budget_dollars:g} $ is too small: with {{spent:.2f}} $ {{served}} could be served"),
    )
    if any(tier.gpus is not None for tier in problem.tiers):
        yield (
            "gpus",
            problem.model_copy(update={"tiers": tuple(map(_more_gpus, problem.tiers))}),
            ("there are too few GPUs: with more of them {served} could be served"),
        )
    yield (
        "5h",
        problem.model_copy(update={"storage_gb": MOST}),
        (f"the storage of {problem.storage_gb:g} GB is too small: with more {{served}} could be served"),
    )
    faster = tuple(tier.model_copy(update={"tflops": min(MOST, 1e3 * tier.tflops)}) for tier in problem.tiers)
    yield (
        "5g",
        problem.model_copy(update={"tiers": faster}),
        ("what may run has too little throughput: with more {served} could be served"),
    )
    larger = tuple(tier.model_copy(update={"memory_gb": 1e3 * tier.memory_gb}) for tier in problem.tiers)
    yield (
        "5f",
        problem.model_copy(update={"tiers": larger}),
        ("the GPUs' memory is too small: with more {served} could be served"),
    )
    for constraint, field, what in (("5i", "max_delay_seconds", "delay"), ("5j", "max_error", "error")):
        most = MOST if constraint == "5i" else 1.0
        kinds = tuple(
            kind.model_copy(update={field: most}) if i in missing else kind
            for i, kind in enumerate(problem.query_types)
        )
        yield (
            constraint,
            problem.model_copy(update={"query_types": kinds}),
            (f"the limit on the {what} of {{names}} leaves too few places: without it {{served}} could be served"),
        )


def _more_gpus(tier: GpuTier) -> GpuTier:
    """Return a tier without a limit on its GPUs, nor on a pipeline's stages where these are as many as its GPUs."""
    depths = tier.pipeline_parallel
    if tier.gpus is not None and max(depths) == tier.gpus > 1:
        depths = (*depths, *(n for n in (2**power for power in range(11)) if n > tier.gpus))
    return tier.model_copy(update={"gpus": None, "pipeline_parallel": depths})


def _dollars(arrays: Arrays) -> Floats:
    """Return (J, K, C) the dollars of a deployment by itself."""
    cost: Floats = arrays.rent[:, None] * arrays.gpus + arrays.model_dollars[:, None, None]
    return cost


def _usable(arrays: Arrays) -> Bools:
    """Return (J, K, C) what could run by itself."""
    affordable: Bools = arrays.fits & (_dollars(arrays) <= arrays.problem.budget_dollars)
    return affordable & (arrays.gpus <= arrays.stock[:, None])


def _nothing_runs(arrays: Arrays) -> Iterator[Reason]:
    problem = arrays.problem
    if not arrays.fits.any():
        model = min(problem.models, key=lambda each: each.weights_gb)
        room = float((arrays.memory_gb[:, None] * arrays.gpus * arrays.allowed).max())
        yield Reason("", "5f", f"no model fits any tier: {model.name} takes {model.weights_gb:g} GB, "
                     f"and the GPUs of the largest configuration have {room:g} GB together")  # fmt: skip
    elif (cheapest := _dollars(arrays)[arrays.fits].min()) > problem.budget_dollars:
        yield Reason("", "5c", f"the budget of {problem.budget_dollars:g} $ does not pay for any model on any tier: "
                     f"the cheapest takes {cheapest:.2f} $")  # fmt: skip
    elif not _usable(arrays).any():
        yield Reason("", "gpus", "no tier has as many GPUs as a model needs within the budget")
    elif problem.storage_gb < arrays.weights_gb.min():
        yield Reason("", "5h", f"the storage of {problem.storage_gb:g} GB holds no model: the smallest takes "
                     f"{arrays.weights_gb.min():g} GB")  # fmt: skip


def _alone(arrays: Arrays, i: int, usable: Bools) -> Iterator[Reason]:
    """Yield what keeps a query type from being served whole even alone."""
    problem, kind = arrays.problem, arrays.problem.query_types[i]
    delay = arrays.delay[i][usable]
    error = np.broadcast_to(arrays.error[i][..., None], usable.shape)[usable]
    if delay.min() > kind.max_delay_seconds:
        yield Reason(kind.name, "5i", f"a delay of {kind.max_delay_seconds:g} s cannot be kept: the fastest model "
                     f"within memory and budget takes {delay.min():.3g} s")  # fmt: skip
    if error.min() > kind.max_error:
        yield Reason(kind.name, "5j", f"an error of {kind.max_error:g} cannot be kept: the best model within memory "
                     f"and budget has {error.min():.3g}")  # fmt: skip
    elif delay.min() <= kind.max_delay_seconds and not _mixable(arrays, i, usable):
        yield Reason(kind.name, "5j", f"an error of {kind.max_error:g} and (5i) a delay of {kind.max_delay_seconds:g} "
                     "s contradict each other: what is fast enough errs too much")  # fmt: skip
    stored = data_gb(problem, i) + float(arrays.weights_gb.min())
    if stored > problem.storage_gb:
        yield Reason(kind.name, "5h", f"its data and the smallest model take {stored:.4g} GB, and the storage holds "
                     f"{problem.storage_gb:g} GB")  # fmt: skip


def _mixable(arrays: Arrays, i: int, usable: Bools) -> bool:
    """Return whether one option, or two in some proportion, keep both the delay and the error of a query type."""
    delay = arrays.delay[i][usable] / arrays.max_delay[i]
    error = np.broadcast_to(arrays.error[i][..., None], usable.shape)[usable] / max(float(arrays.max_error[i]), 1e-12)
    order = np.lexsort((error, delay))
    front = order[error[order] <= np.minimum.accumulate(error[order])]  # No other is better in both.
    d, e = delay[front], error[front]
    fast, good = d <= 1, e <= 1
    if (fast & good).any():
        return True
    # Of a fast and a good one together, the delay must allow the share of the good one that the error needs.
    most = (1 - d[fast])[:, None] / (d[good][None] - d[fast][:, None])
    least = (e[fast] - 1)[:, None] / (e[fast][:, None] - e[good][None])
    return bool((least <= most).any())
