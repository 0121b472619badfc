"""One front for all methods: a problem in, a checked solution out, with the reasons why not all is served."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from ctxflow.policies.agh.allocation import Allocation, CostTerms, Violation, check, data_gb
from ctxflow.policies.agh.arrays import Arrays, Bools
from ctxflow.policies.agh.draft import Mechanisms
from ctxflow.policies.agh.exact import exact, improved
from ctxflow.policies.agh.heuristics import adaptive, greedy
from ctxflow.policies.agh.problem import Problem

METHODS = {
    "gh": "the paper's greedy heuristic",
    "agh": "the paper's adaptive one, which here also relocates whole deployments",
    "agh-printed": "the adaptive one with the paper's moves alone",
    "improved": "AGH, then the exact method around its answer",
    "exact": "the MILP, proven as far as the time limit allows",
}


@dataclasses.dataclass(frozen=True)
class Solution:
    """What a method found.

    :ivar allocation: None if there is none, or if the exact method found none in its time.
    :ivar costs: its five terms.
    :ivar violations: what the independent checker says: none if it is feasible.
    :ivar seconds: for the method, without the check.
    :ivar bound: the exact method's lower bound in dollars, None for the others.
    :ivar proven: whether it is proven to be the best within the gap asked for; if there is no allocation, that there
        is none.
    :ivar reasons: why not all is served.
    """

    problem: Problem
    method: str
    allocation: Allocation | None
    costs: CostTerms | None
    violations: list[Violation]
    seconds: float
    bound: float | None
    proven: bool
    reasons: list[Reason]

    @property
    def feasible(self) -> bool:
        """Return whether there is an allocation that keeps every constraint."""
        return self.allocation is not None and not self.violations

    @property
    def gap(self) -> float | None:
        """Return how much of the cost might be saved at most, None without a bound."""
        if self.bound is None or self.costs is None:
            return None
        return max(0.0, (self.costs.total - self.bound) / self.costs.total) if self.costs.total else 0.0

    def as_data(self) -> dict[str, Any]:
        """Return all of it for JSON; docs/placement.md describes each field."""
        costs = None if self.costs is None else {**dataclasses.asdict(self.costs), "total": self.costs.total}
        nothing: dict[str, Any] = {"deployments": [], "routes": [], "unserved": {}}
        return {
            "problem": self.problem.name,
            "method": self.method,
            "feasible": self.feasible,
            "violations": [{**dataclasses.asdict(each), "text": str(each)} for each in self.violations],
            "costs": costs,
            "seconds": self.seconds,
            "bound": self.bound,
            "gap": self.gap,
            "proven": self.proven,
            "reasons": [{**dataclasses.asdict(each), "text": str(each)} for each in self.reasons],
            **(nothing if self.allocation is None else self.allocation.as_data(self.problem)),
        }


def solve(
    problem: Problem,
    method: str = "agh",
    *,
    mechanisms: Mechanisms | None = None,
    seed: int = 0,
    time_limit: float | None = None,
    gap: float = 1e-4,
) -> Solution:
    """Solve a problem, and check the answer.

    :param method: one of `METHODS`.
    :param mechanisms: M1 to M3 for gh, agh and agh-printed; all on by default.
    :param seed: of the random orderings of agh and improved.
    :param time_limit: seconds for the solver of improved (2 by default) and exact (600).
    :param gap: the share of the cost at which the exact method is content.
    :raises ValueError: for an unknown method.
    :raises ModuleNotFoundError: for improved and exact without SciPy.

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> solution = solve(paper_instance(), "agh")
    >>> solution.feasible, max(solution.allocation.unserved)
    (True, 0.0)
    """
    begun = time.perf_counter()
    bound, proven = None, False
    arrays = Arrays.of(problem)
    allocation: Allocation | None
    if method == "gh":
        allocation = greedy(arrays, mechanisms).allocation()
    elif method in ("agh", "agh-printed"):
        allocation = adaptive(arrays, mechanisms, seed, printed=method == "agh-printed").allocation()
    elif method == "improved":
        allocation = improved(arrays, seed, 2.0 if time_limit is None else time_limit)
    elif method == "exact":
        outcome = exact(arrays, 600.0 if time_limit is None else time_limit, gap)
        allocation, bound, proven = outcome.allocation, outcome.bound, outcome.closed
    else:
        raise ValueError(f"there is no placement method {method!r}: choose one of {', '.join(METHODS)}")
    seconds = time.perf_counter() - begun
    served = allocation is not None and max(allocation.unserved) <= 1e-6
    return Solution(
        problem=problem,
        method=method,
        allocation=allocation,
        costs=None if allocation is None else allocation.costs(problem),
        violations=[] if allocation is None else check(problem, allocation),
        seconds=seconds,
        bound=bound,
        proven=proven,
        reasons=[] if served else reasons(problem, allocation),
    )


FULL = 0.999


@dataclasses.dataclass(frozen=True)
class Reason:
    """What keeps a query type, or all of them, from being served whole.

    :ivar query_type: its name, "" for a limit that all share.
    :ivar constraint: as the checker names it.
    """

    query_type: str
    constraint: str
    text: str

    def __str__(self) -> str:
        name = f"({self.constraint})" if self.constraint[0].isdigit() else self.constraint
        return f"{self.query_type or 'all query types'}: {name} {self.text}"


def reasons(problem: Problem, allocation: Allocation | None = None) -> list[Reason]:
    """Return why not all is served.

    :param allocation: then only of those that it leaves unserved, and the shared limits that it uses up.

    >>> from ctxflow.policies.agh.problem import paper_instance
    >>> poor = paper_instance().model_copy(update={"budget_dollars": 0.0})
    >>> print(reasons(poor)[0])
    all query types: (5c) the budget of 0 $ does not pay for any model on any tier: the cheapest takes 10.53 $
    """
    arrays = Arrays.of(problem)
    general = next(_nothing_runs(arrays), None)
    if general is not None:
        return [general]
    unserved = [1.0] * len(problem.query_types) if allocation is None else allocation.unserved
    missing = [i for i, share in enumerate(unserved) if share > 1e-6]
    own = [reason for i in missing for reason in _alone(arrays, i, _usable(arrays))]
    explained = {reason.query_type for reason in own}
    if allocation is not None and any(problem.query_types[i].name not in explained for i in missing):
        own += _shared(problem, allocation)
    return own


def _affordable(arrays: Arrays) -> Bools:
    stored = arrays.model_dollars[:, None, None]
    rent = arrays.rent[:, None] * arrays.gpus
    return arrays.fits & (rent + stored <= arrays.problem.budget_dollars)


def _usable(arrays: Arrays) -> Bools:
    """Return (J, K, C) what could run by itself."""
    return _affordable(arrays) & (arrays.gpus <= arrays.stock[:, None])


def _nothing_runs(arrays: Arrays) -> Iterator[Reason]:
    problem = arrays.problem
    if not arrays.fits.any():
        model = min(problem.models, key=lambda each: each.weights_gb)
        room = float((arrays.memory_gb[:, None] * arrays.gpus * arrays.allowed).max())
        yield Reason("", "5f", f"no model fits any tier: {model.name} takes {model.weights_gb:g} GB, "
                     f"and the GPUs of the largest configuration have {room:g} GB together")  # fmt: skip
    elif not _affordable(arrays).any():
        cost = arrays.rent[:, None] * arrays.gpus + arrays.model_dollars[:, None, None]
        yield Reason("", "5c", f"the budget of {problem.budget_dollars:g} $ does not pay for any model on any tier: "
                     f"the cheapest takes {cost[arrays.fits].min():.2f} $")  # fmt: skip
    elif not _usable(arrays).any():
        yield Reason("", "gpus", "no tier has as many GPUs as a model needs within the budget")
    elif problem.storage_gb < arrays.weights_gb.min():
        yield Reason("", "5h", f"the storage of {problem.storage_gb:g} GB holds no model: the smallest takes "
                     f"{arrays.weights_gb.min():g} GB")  # fmt: skip


def _alone(arrays: Arrays, i: int, usable: Bools) -> Iterator[Reason]:
    """Yield what keeps a query type from being served whole even if it were the only one."""
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
    power = (arrays.capacity[:, None] * arrays.gpus)[None] >= arrays.work[i][..., None]
    if not (power & usable).any():
        yield Reason(kind.name, "5g", "no deployment within the budget has the throughput for all of it")
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
    # Between a fast one and a good one, the share of the good that the delay allows has to be what the error needs.
    most = (1 - d[fast])[:, None] / (d[good][None] - d[fast][:, None])
    least = (e[fast] - 1)[:, None] / (e[fast][:, None] - e[good][None])
    return bool((least <= most).any())


def _shared(problem: Problem, allocation: Allocation) -> Iterator[Reason]:
    costs = allocation.costs(problem)
    spent = costs.rental + costs.model_storage + costs.data_storage
    stored = sum(problem.models[route.model].weights_gb for route in allocation.routes)
    stored += sum(data_gb(problem, route.query_type) * route.share for route in allocation.routes)
    if stored >= FULL * problem.storage_gb:
        yield Reason("", "5h", f"the storage of {problem.storage_gb:g} GB is full")
    else:
        yield Reason("", "5c", f"{spent:.2f} $ of the budget of {problem.budget_dollars:g} $ are spent, and "
                     "serving more takes more than is left, or than leaving it unserved does")  # fmt: skip
