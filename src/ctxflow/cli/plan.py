"""`ctxflow plan`: which models on which tiers, with which parallelism, for a problem given as data."""

from __future__ import annotations

import contextlib
import enum
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ctxflow.cli.aside import native_output_aside
from ctxflow.policies.placement.instances import azure_instance, paper_instance
from ctxflow.policies.placement.problem import Problem
from ctxflow.policies.placement.solution import METHODS, Solution, solve

_OWN = {"paper": paper_instance, "azure": azure_instance}
Method = enum.Enum("Method", {name: name for name in METHODS}, type=str)  # type: ignore[misc]


def plan(
    problem: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="The problem's JSON file (docs/placement.md tells its fields), "
            "or one of ctxflow's own instances: paper, azure.",
            show_default=False,
        ),
    ],
    method: Annotated[Method, typer.Option(help="How it is solved.")] = Method.agh,  # type: ignore[attr-defined]
    as_json: Annotated[bool, typer.Option("--json", help="Print the solution as JSON.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the random orderings of agh and improved.")] = 0,
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Seconds for the solver of improved (2 by default) and exact (600).", show_default=False
        ),
    ] = None,
    gap: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The share of the cost at which exact stops looking.")
    ] = 1e-4,
) -> None:
    """Say what to run where, for a placement problem.

    Given query types with their rates and limits, models, and tiers with
    their prices: which models are deployed on which tiers, with which tensor
    and pipeline parallelism, and which share of each query type goes where.
    Every answer is checked against all constraints, and those that it
    breaks are named; so is what keeps a query type from being served.

    \b
    Methods
      gh           greedy, in milliseconds
      agh          greedy from many orders, with local search
      agh-printed  the same with the paper's moves alone
      improved     agh, then the exact method around its answer (SciPy)
      exact        the MILP, with a proven bound (SciPy)

    \b
    The exit status is 1 if there is no feasible answer.

    \b
    ctxflow plan --problem paper
    ctxflow plan --problem problem.json --method exact --time-limit 60
    ctxflow plan --problem azure --method improved --json | jq .costs.total
    """
    given = _OWN[str(problem)]() if str(problem) in _OWN else Problem.read(problem)
    console = Console(stderr=True)
    waiting = console.status("Solving ...") if console.is_terminal else contextlib.nullcontext()
    with waiting, native_output_aside():
        try:
            found = solve(given, method.value, seed=seed, time_limit=time_limit, gap=gap)
        except ModuleNotFoundError as error:
            raise ValueError(str(error)) from None
    if as_json:
        print(json.dumps(found.as_data()))
    else:
        show(found)
    if not found.feasible:
        raise typer.Exit(1)


def show(found: Solution) -> None:
    """Print a solution for people."""
    console = Console()
    if found.allocation is None or found.costs is None:
        console.print("There is no allocation." if found.proven else "No allocation was found in time.")
    else:
        console.print(_deployments(found), _routes(found))
        costs = found.costs
        console.print(
            f"{costs.total:.2f} $ over {found.problem.horizon_hours:g} h: rental {costs.rental:.2f}, "
            f"model storage {costs.model_storage:.2f}, data storage {costs.data_storage:.2f}, "
            f"delay {costs.delay:.2f}, unserved {costs.unserved:.2f}"
        )
    if found.bound is not None:
        share = "" if found.gap is None else f", at most {found.gap:.3%} less"
        console.print(f"no allocation costs less than {found.bound:.2f} ${share}")
    for violation in found.violations:
        console.print(f"not feasible: {violation}", style="red", markup=False)
    for reason in found.reasons:
        console.print(f"not served: {reason}", style="yellow", markup=False)
    console.print(f"{found.method}, {found.seconds:.3f} s", style="dim")


def _deployments(found: Solution) -> Table:
    problem, table = found.problem, Table(title=f"{found.problem.name}: what runs")
    for name in ("model", "tier", "TP", "PP", "GPUs", "$/h"):
        table.add_column(name, justify="left" if name in ("model", "tier") else "right")
    for each in found.allocation.deployments if found.allocation else ():
        tier = problem.tiers[each.tier]
        numbers = (each.tensor_parallel, each.pipeline_parallel, each.gpus)
        price = f"{each.gpus * tier.dollars_per_hour:.2f}"
        table.add_row(problem.models[each.model].name, tier.name, *map(str, numbers), price)
    return table


def _routes(found: Solution) -> Table:
    problem, table = found.problem, Table(title="who goes where")
    for name in ("query type", "model", "tier", "share", "delay s", "limit s"):
        table.add_column(name, justify="left" if name in ("query type", "model", "tier") else "right")
    if found.allocation is None:
        return table
    for route, seconds in zip(found.allocation.routes, found.allocation.delays(problem), strict=True):
        kind = problem.query_types[route.query_type]
        delay = f"{seconds / route.share:.2f}" if route.share else "-"
        names = (kind.name, problem.models[route.model].name, problem.tiers[route.tier].name)
        table.add_row(*names, f"{route.share:.1%}", delay, f"{kind.max_delay_seconds:.2f}")
    for kind, share in zip(problem.query_types, found.allocation.unserved, strict=True):
        if share > 1e-6:
            table.add_row(kind.name, "unserved", "", f"{share:.1%}", "", "")
    return table
