#!/usr/bin/env python3
"""How far the placement methods are from the optimum, and how long they take.

    benchmarks/placement.py --json                     100 instances of each size, 60 s each for the exact method
    benchmarks/placement.py --instances 10 --sizes 3 4
    benchmarks/placement.py --quick                    3 instances of each size

Backs docs/placement.md's figures on the gap and the runtime. Instances are `draw(seed, shape)`, seeds from 0, of
(3,3,3), (4,4,5) and (6,6,10): the paper's ranges, with its budget of 100 $ and its storage of 1,000 GB. A gap is a
method's cost over the exact method's proven bound, less 1; every answer goes through the independent checker, and
one that breaks a constraint ends the benchmark. `X_gap_mean` and `X_gap_max` are over all sizes together, those with a
number at their end over the size with so many query types.

- `instances_N`: how many instances of the size were solved: 100 in the full form, 3 with --quick.
- `unserved_points_over`: the most that AGH leaves unserved beyond the exact method, in points of all query types.
- `agh_over_gh`: the most that AGH costs beyond GH, in %: 0 or less, or it broke its promise.
- `closed`: the share of instances that the exact method proved within its time. Where it did not, a gap is to a bound
  under the optimum by an unknown share, so `X_gap_mean_closed` and `X_gap_max_closed` are over the others alone.
- `binds_5c` and so on: the share in which the exact method's answer uses up 99.9 % of a limit that all share (5c,
  5f, 5g, 5h), or of some query type's own (5i, 5j).
- `X_seconds_20`: CPU seconds of one core at (20,20,20), from the problem to the answer; beside it the exact method's
  with the same 60 s (`exact_gap_20` is what is open then).
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import defaultdict
from collections.abc import Sequence

import common
from common import single

from ctxflow.cli.screen import native_output_aside
from ctxflow.policies.agh import Allocation, Problem, Solution, solve
from ctxflow.policies.agh.allocation import data_gb
from ctxflow_papers.gh_agh.instances import draw

SHAPES = ((3, 3, 3), (4, 4, 5), (6, 6, 10))
LARGE = (20, 20, 20)
HEURISTICS = ("gh", "agh-printed", "agh", "improved")
FULL = 0.999


def checked(problem: Problem, method: str, time_limit: float | None = None) -> Solution:
    """A solution that keeps every constraint.

    :raises SystemExit: if it does not.
    """
    found = solve(problem, method, time_limit=time_limit)
    if found.violations:
        raise SystemExit(f"{method} on {problem.name} breaks {found.violations[0]}")
    return found


def binding(problem: Problem, allocation: Allocation) -> set[str]:
    """The constraints that an allocation uses up."""
    costs, found = allocation.costs(problem), set()
    if costs.rental + costs.model_storage + costs.data_storage >= FULL * problem.budget_dollars:
        found.add("5c")
    stored = sum(problem.models[route.model].weights_gb for route in allocation.routes)
    stored += sum(data_gb(problem, route.query_type) * route.share for route in allocation.routes)
    if stored >= FULL * problem.storage_gb:
        found.add("5h")
    for each in allocation.deployments:
        tier, held = problem.tiers[each.tier], problem.models[each.model].weights_gb / each.gpus
        if held >= FULL * tier.memory_gb:
            found.add("5f")
        work = 0.0
        for route in allocation.routes:
            if (route.model, route.tier) == (each.model, each.tier):
                kind = problem.query_types[route.query_type]
                alpha = problem.gflop_per_token[route.query_type][each.model][each.tier]
                work += alpha * kind.tokens * kind.queries_per_hour / 1e3 * route.share
        if work >= FULL * problem.utilization * 3600 * tier.tflops * each.gpus:
            found.add("5g")
    delay: dict[int, float] = defaultdict(float)
    error: dict[int, float] = defaultdict(float)
    for route, seconds in zip(allocation.routes, allocation.delays(problem), strict=True):
        delay[route.query_type] += seconds
        error[route.query_type] += problem.error[route.query_type][route.model][route.tier] * route.share
    for i, kind in enumerate(problem.query_types):
        if delay[i] >= FULL * kind.max_delay_seconds:
            found.add("5i")
        if error[i] >= FULL * kind.max_error:
            found.add("5j")
    return found


@dataclasses.dataclass
class Tally:
    """What was found on the instances of one size.

    :ivar over: each method's costs over the bound, less 1. :ivar seconds: what each took.
    :ivar worse: points of demand that AGH leaves unserved beyond the exact method.
    :ivar above: AGH's cost over GH's, less 1.
    :ivar bound_by: whether each constraint binds.
    """

    over: dict[str, list[float]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    worse: list[float] = dataclasses.field(default_factory=list)
    above: list[float] = dataclasses.field(default_factory=list)
    closed: list[bool] = dataclasses.field(default_factory=list)
    bound_by: dict[str, list[bool]] = dataclasses.field(default_factory=lambda: defaultdict(list))

    def add(self, problem: Problem, time_limit: float) -> None:
        """Solve an instance with every method."""
        exact = checked(problem, "exact", time_limit)
        if exact.bound is None or exact.allocation is None:
            raise SystemExit(f"the exact method has no bound on {problem.name} after {time_limit:g} s: give it more")
        self.closed.append(exact.proven)
        full = binding(problem, exact.allocation)
        for name in ("5c", "5f", "5g", "5h", "5i", "5j"):
            self.bound_by[name].append(name in full)
        self.seconds["exact"].append(exact.seconds)
        found = {method: checked(problem, method) for method in HEURISTICS}
        for method, solution in found.items():
            self.over[method].append(solution.costs.total / exact.bound - 1)
            self.seconds[method].append(solution.seconds)
        missing = sum(found["agh"].allocation.unserved) - sum(exact.allocation.unserved)
        self.worse.append(100 * missing / problem.shape[0])
        self.above.append(found["agh"].costs.total / found["gh"].costs.total - 1)


def gaps(shapes: Sequence[tuple[int, int, int]], instances: int, time_limit: float) -> dict[str, common.Figure]:
    """Every method beside the exact one's bound, over all sizes and by size."""
    tallies = {}
    for shape in shapes:
        tally = tallies[str(shape[0])] = Tally()
        for seed in range(instances):
            problem = draw(seed, shape)
            common.progress(f"{problem.name}: instance {seed + 1} of {instances}")
            tally.add(problem, time_limit)
            if not tally.closed[-1]:
                gap = 100 * tally.over["improved"][-1]
                common.progress(f"{problem.name}: not closed; improved is {gap:.2f} % above the bound")
    figures = _shares(list(tallies.values()), "")
    for size, tally in tallies.items():
        figures[f"instances_{size}"] = single(len(tally.closed), "instances", "higher", 1)
        figures |= _shares([tally], f"_{size}")
        for method, values in tally.seconds.items():
            figures[f"{method.replace('-', '_')}_{size}_seconds"] = common.figure(values, "s", "lower")
    return figures


def _shares(tallies: Sequence[Tally], ending: str) -> dict[str, common.Figure]:
    """The gaps, what is closed and what binds, over some sizes together."""
    figures = {}
    for method in HEURISTICS:
        name, values = method.replace("-", "_"), [each for tally in tallies for each in tally.over[method]]
        spread = 100 * (max(values) - min(values))
        figures[f"{name}_gap_mean{ending}"] = single(100 * sum(values) / len(values), "%", "lower", len(values), spread)
        figures[f"{name}_gap_max{ending}"] = single(100 * max(values), "%", "lower", len(values), spread)
        proven = [
            each for tally in tallies for each, closed in zip(tally.over[method], tally.closed, strict=True) if closed
        ]
        if proven:
            spread = 100 * (max(proven) - min(proven))
            mean = 100 * sum(proven) / len(proven)
            figures[f"{name}_gap_mean_closed{ending}"] = single(mean, "%", "lower", len(proven), spread)
            figures[f"{name}_gap_max_closed{ending}"] = single(100 * max(proven), "%", "lower", len(proven), spread)
    worse = [each for tally in tallies for each in tally.worse]
    above = [100 * each for tally in tallies for each in tally.above]
    closed = [each for tally in tallies for each in tally.closed]
    figures[f"unserved_points_over{ending}"] = single(
        max(worse), "points", "lower", len(worse), max(worse) - min(worse)
    )
    figures[f"agh_over_gh{ending}"] = single(max(above), "%", "lower", len(above), max(above) - min(above))
    figures[f"closed{ending}"] = single(100 * sum(closed) / len(closed), "%", "higher", len(closed))
    for name in tallies[0].bound_by:
        which = [each for tally in tallies for each in tally.bound_by[name]]
        figures[f"binds_{name}{ending}"] = single(100 * sum(which) / len(which), "% of draws", "lower", len(which))
    return figures


def runtimes(rounds: int, time_limit: float | None) -> dict[str, common.Figure]:
    """CPU seconds at (20,20,20), and the exact method's time beside them, if it is given any."""
    samples: dict[str, list[float]] = defaultdict(list)
    for seed in range(rounds):
        problem = draw(seed, LARGE)
        for method in ("gh", "agh", "agh-printed"):
            common.progress(f"{problem.name}: {method}")
            begun = time.process_time()
            solve(problem, method)
            samples[method.replace("-", "_")].append(time.process_time() - begun)
    figures = {f"{name}_seconds_20": common.figure(values, "s", "lower") for name, values in samples.items()}
    if time_limit is not None:
        problem = draw(0, LARGE)
        common.progress(f"{problem.name}: exact, {time_limit:g} s")
        found = checked(problem, "exact", time_limit)
        figures["exact_seconds_20"] = common.figure([found.seconds], "s", "lower")
        if found.gap is not None:
            figures["exact_gap_20"] = single(100 * found.gap, "%", "lower", 1)
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How far placements are from the optimum, and how long they take.")
    parser.add_argument("--instances", type=int, default=100, help="of each size (100)")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for the exact method, each (60)")
    sizes = [shape[0] for shape in SHAPES]
    parser.add_argument("--sizes", type=int, nargs="+", choices=sizes, default=sizes, help="query types (3 4 6)")
    parser.add_argument("--rounds", type=int, default=5, help="instances of (20,20,20) that are timed (5)")
    parser.add_argument("--quick", action="store_true", help="3 instances of each size: to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    if given.instances < 1 or given.rounds < 1:
        parser.error("--instances and --rounds are how often it is measured: give 1 or more")
    instances, rounds = (3, 2) if given.quick else (given.instances, given.rounds)
    with native_output_aside():
        figures = runtimes(rounds, None if given.quick else given.time_limit)
        figures |= gaps([shape for shape in SHAPES if shape[0] in given.sizes], instances, given.time_limit)
    common.report("placement", figures, common.versions(("numpy", "highspy")), given.json)


if __name__ == "__main__":
    main()
