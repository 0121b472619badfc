"""`ctxflow plan` and `preempt`: a placement, and a preemption, decided for a case that is given as data."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from ctxflow.cli.screen import native_output_aside, spinner
from ctxflow.errors import counted
from ctxflow.files import text_of, written_out
from ctxflow.terminal import visible_console

if TYPE_CHECKING:
    from rich.console import Console

    from ctxflow.planning.job_problem import JobProblem
    from ctxflow.policies.agh.problem import Problem
    from ctxflow.policies.agh.solution import Solution
    from ctxflow.policies.flextopo.cluster import Preemptor
    from ctxflow.policies.flextopo.preemption import Decision


# The names of `ctxflow.policies.agh.solution.METHODS`.
SolutionMethod = Literal["gh", "agh", "agh-printed", "improved", "exact"]
SelectionMethod = Literal["standard", "imp", "exhaustive", "exact"]

COULD_BE_SERVED = 3  # The exit status of a plan that leaves demand unserved which could be served.
_PROBLEM = (
    "The problem's JSON file (docs/placement.md lists its fields), or one of ctxflow's own instances: paper, azure."
)


def plan(
    site: Annotated[str | None, typer.Argument(metavar="SITE", help='A site file, or "local".')] = None,
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB", help="A job file (docs/placement.md lists its keys).")
    ] = None,
    problem: Annotated[Path | None, typer.Option(metavar="FILE", help=_PROBLEM)] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Ask the batch systems how many workers have a machine now.")
    ] = False,
    measured: Annotated[
        Path | None, typer.Option(metavar="RUN", help="An earlier run, whose measured speeds count.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the problem that was made, for --problem.")
    ] = None,
    method: Annotated[SolutionMethod, typer.Option(help="How it is solved.")] = "agh",
    as_json: Annotated[bool, typer.Option("--json", help="Print the solution as JSON.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the random orderings of agh and improved.")] = 0,
    time_limit: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds for the solver of exact (600 by default).")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="By which share delays and errors may be above what is known, and limits are kept all the same: by "
            "default 0.25, and for measured speeds what their items deviate.",
        ),
    ] = None,
    gap: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The share of the cost at which exact stops looking.")
    ] = 1e-4,
) -> None:
    """Say what to run where: for a site and a job, or for a placement problem.

    Given query types with their rates and limits, models, and tiers with
    their prices: which models are deployed on which tiers, and which share of
    each query type goes where, at the least cost. Of a site and a job the
    problem is made from what is known, and the plan says where each figure
    comes from. Limits on delays and errors are kept with a margin. Every
    answer is checked against all constraints, and those that it breaks are
    named; so is what keeps a query type from being served, as far as proven.

    \b
    Methods
      gh           greedy, in milliseconds
      agh          greedy from many orders, with local search
      agh-printed  the same with the paper's moves alone
      improved     agh, then the exact method around its answer
      exact        the MILP from agh's answer on, with a proven bound

    \b
    The exit status is 1 if there is no feasible answer, and 3 if the answer
    leaves demand unserved that could be served.

    \b
    ctxflow plan site.toml job.toml --live --measured RUN
    ctxflow plan site.toml job.toml --save problem.json
    ctxflow plan --problem paper
    ctxflow plan --problem problem.json --method exact --time-limit 60
    ctxflow plan --problem azure --method improved --json | jq .costs.total
    """
    from ctxflow.policies.agh.margins import USUAL
    from ctxflow.policies.agh.solution import solve

    made: JobProblem | None = None
    if problem is not None:
        if site is not None or live or measured is not None or save is not None:
            raise typer.BadParameter("give SITE and JOB, or --problem FILE alone")
        given = _given(problem)
    elif site is None or job is None:
        raise typer.BadParameter("give SITE and JOB, or --problem FILE")
    else:
        with spinner("Asking the batch systems ..." if live else "Reading ..."):
            made = _made(site, job, live, measured)
        given = made.problem
        if save is not None:
            with written_out(save) as file:
                file.write(given.to_json().encode())
    with spinner("Solving ..."), native_output_aside():
        usual = [USUAL] * len(given.query_types) if made is None else made.margins
        margins = usual if margin is None else [margin] * len(usual)
        found = solve(given, method, seed=seed, time_limit=time_limit, gap=gap, margins=margins)
        left = found.left
    if as_json:
        print(json.dumps(found.as_data() if made is None else {**found.as_data(), **made.as_data(found)}))
    elif made is None:
        show(found)
    else:
        _show_site(made, found)
    if not found.feasible:
        raise typer.Exit(1)
    if left.possible:
        raise typer.Exit(COULD_BE_SERVED)


def _given(problem: Path) -> Problem:
    """Return the problem of a file, or one of ctxflow's own by its name."""
    from ctxflow.policies.agh.problem import Problem, azure_instance, paper_instance

    own = {"paper": paper_instance, "azure": azure_instance}.get(str(problem))
    return Problem.read(problem) if own is None else own()


def _made(site: str, job: Path, live: bool, measured: Path | None) -> JobProblem:
    """Return the problem of a site and a job."""
    from ctxflow.factory.tier_providers import ask_tiers
    from ctxflow.planning.job_file import load_job
    from ctxflow.planning.job_problem import make_problem, survey_site
    from ctxflow.simulator.scenario import read_recorded, tiers_of_site
    from ctxflow.sites import load_site

    loaded = load_site(site)
    wanted = load_job(job, {tier.spec.name: None for tier in tiers_of_site(loaded)})
    recorded = None if measured is None else read_recorded(measured)
    if not live:
        return make_problem(loaded, wanted, recorded=recorded)
    answers = [(answer.tier.name, answer.survey, answer.problems) for answer in ask_tiers(loaded)]
    surveys, silent = survey_site(answers)
    found = make_problem(loaded, wanted, surveys, recorded)
    return dataclasses.replace(found, notes=(*silent, *found.notes))


def _show_site(made: JobProblem, found: Solution) -> None:
    """Print the plan of a site for people: workers, with what each serves."""
    console, problem = visible_console(), made.problem
    staff = made.staffing(found)
    table = Table(title=f"{problem.name}: what runs")
    for name in ("model", "tier", "workers", "cost/h", "serves"):
        table.add_column(name, justify="right" if name in ("workers", "cost/h") else "left")
    for each in staff:
        offer = made.offers[each.offer]
        serves = [
            f"{share:.0%} of {problem.query_types[query].name}, in {made.delay(query, each):.3g} s"
            for query, share in each.shares
        ]
        count, cost = f"{each.workers} of {offer.workers}", f"{each.workers * offer.price:.2f}"
        table.add_row(problem.models[each.model].name, offer.name, count, cost, "\n".join(serves))
    if staff:
        console.print(table)
        rent = sum(each.workers * made.offers[each.offer].price for each in staff)
        console.print(f"{rent:.2f} an hour, {rent * problem.horizon_hours:.2f} over {problem.horizon_hours:g} h")
    else:
        console.print("Nothing can run.")
    for kind, share in zip(problem.query_types, found.allocation.unserved if found.allocation else (), strict=False):
        if share > 1e-6:
            console.print(f"{kind.name}: {share:.1%} of it is not served", style="yellow", markup=False)
    _show_end(console, found, made.left_out, made.notes)


def _show_end(console: Console, found: Solution, left_out: Sequence[str] = (), notes: Sequence[str] = ()) -> None:
    """Print what is wrong with a solution, what was left out of it, and how it was found."""
    for violation in found.violations:
        console.print(f"not feasible: {violation}", style="red", markup=False)
    left = found.left
    if left.possible:
        more = ", ".join(f"{100 * share:.3g}% of {name}" for name, share in left.possible.items())
        if left.dollars is not None and left.dollars > 0:
            hint = f", for {left.dollars:.2f} $ more than leaving it is priced at: raise its price to have it served"
        else:
            less = "" if left.dollars is None else f", for {-left.dollars:.2f} $ less"
            hint = f"{less}; try --method exact"
        console.print(f"could be served and is not: {more}{hint}", style="red", markup=False)
    elif not left.settled:
        console.print("whether more could be served was not decided in time", style="yellow", markup=False)
    for reason in left.reasons:
        console.print(f"not served: {reason}", style="yellow", markup=False)
    _show_margins(console, found)
    for text in left_out:
        console.print(f"left out: {text}", markup=False)
    for text in notes:
        console.print(f"note: {text}", style="dim", markup=False)
    console.print(f"{found.method}, {found.seconds:.3f} s", style="dim")


def _show_margins(console: Console, found: Solution) -> None:
    """Print how far delays and errors may be above what is known, and whose limits leave no room for that."""
    names: dict[float, list[str]] = {}
    for kind, margin in zip(found.problem.query_types, found.margins, strict=True):
        names.setdefault(round(margin, 3), []).append(kind.name)
    for margin, those in sorted(names.items(), reverse=True):
        whose = "" if len(names) == 1 else f" for {', '.join(those)}"
        text = (
            f"with a margin of {margin:.0%} on delays and errors" if margin else "without a margin on delays and errors"
        )
        console.print(f"planned {text}{whose}", style="dim", markup=False)


def show(found: Solution) -> None:
    """Print a solution for people."""
    console = visible_console()
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
    _show_end(console, found)


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


def preempt(
    cluster: Annotated[
        Path,
        typer.Option(help="The nodes, what runs on them, and the preemptor, as JSON.", exists=True, dir_okay=False),
    ],
    policy: Annotated[SelectionMethod, typer.Option(help="How victims are selected.")] = "exact",
    alpha: Annotated[float, typer.Option(help="What counts: 0 topology, 1 priorities.", min=0.0, max=1.0)] = 0.0,
    basis: Annotated[Literal["allocation", "victims"], typer.Option(help="What topology is judged on.")] = "allocation",
    as_json: Annotated[bool, typer.Option("--json", help="Print the decision as JSON.")] = False,
) -> None:
    """Decide what to preempt for a preemptor, in a cluster given as data (docs/preemption.md has the form).

    Exits with 1 if the preemptor fits nowhere, whatever is preempted.
    """
    from ctxflow.policies.flextopo.candidates import Scoring
    from ctxflow.policies.flextopo.cluster_json import cluster_from_json
    from ctxflow.policies.flextopo.preemption import decide

    try:
        data = json.loads(text_of(cluster))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{cluster} is no JSON: {error}") from None
    nodes, preemptor = cluster_from_json(data)
    if preemptor is None:
        raise ValueError(f'{cluster} names no preemptor: add "preemptor": {{"id", "priority", "gpus", ...}}')
    started = time.perf_counter()
    decision = decide(nodes, preemptor, policy, Scoring(alpha, basis))
    seconds = time.perf_counter() - started
    if as_json:
        data = {"node": None} if decision is None else decision.to_json()
        print(json.dumps({"policy": policy, **data, "seconds": round(seconds, 6)}, indent=2))
    else:
        print(_in_words(decision, preemptor, len(nodes)))
    if decision is None:
        raise typer.Exit(1)


def _in_words(decision: Decision | None, preemptor: Preemptor, nodes: int) -> str:
    if decision is None:
        wish = " aligned" if preemptor.affinity == "guaranteed" else ""
        return f"{preemptor.id} fits on none of {counted(nodes, 'node')}{wish}, whoever of lower priority gives way."
    together = {"numa": "in one NUMA node", "socket": "in one socket", "machine": "across sockets"}
    lines = [
        f"{preemptor.id} goes to {decision.node}, {together[decision.level.name.lower()]}"
        + ("." if decision.hit else f"; the hardware could hold it {together[decision.target.name.lower()]}."),
        f"  gives way    {', '.join(decision.victims) or 'nobody: there is room'}",
        f"  GPUs         {', '.join(map(str, decision.gpus)) or 'none'}",
        f"  core groups  {', '.join(map(str, decision.core_groups)) or 'none'}",
    ]
    return "\n".join(lines)
