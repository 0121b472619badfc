"""`ctxflow reproduce`: a paper's experiments on ctxflow's own policies, each figure beside the paper's."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from ctxflow.cli.aside import native_output_aside
from ctxflow.consoles import VisibleConsole
from ctxflow.simulator.figures import Experiment, Figure, Request, report

PAPERS = {
    "pervasive-context": (
        "ctxflow.simulator.pervasive_context.reproduction:reproduce",
        "a context is kept from call to call, on opportunistic GPUs",
    ),
    "gh-agh": ("ctxflow.simulator.gh_agh:reproduce", "which models on which GPUs, by a greedy heuristic"),
    "flextopo": ("ctxflow.simulator.flextopo:reproduce", "preemption that respects a machine's topology"),
    "turboserve": (
        "ctxflow.simulator.turboserve:reproduce",
        "long-lived sessions: where they go, and on how many GPUs",
    ),
    "torta": ("ctxflow.simulator.torta:reproduce", "tasks over regions and time, by optimal transport and PPO"),
}
"""Where each paper's experiment is (a `ctxflow.simulator.figures.Experiment`), and what it is about."""


def reproduce(
    paper: Annotated[str, typer.Argument(help=f"One of: {', '.join(PAPERS)}.")],
    quick: Annotated[bool, typer.Option("--quick", help="A small one, to see that it runs.")] = False,
    seed: Annotated[int, typer.Option(help="Of all randomness.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Draw the paper's figures into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a paper's experiments and print its figures beside ours."""
    if paper not in PAPERS:
        raise typer.BadParameter(f"there is no {paper!r} here: choose one of {', '.join(PAPERS)}")
    module, _, function = PAPERS[paper][0].partition(":")
    experiment: Experiment = getattr(importlib.import_module(module), function)
    console = VisibleConsole(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(paper, total=1.0)

        def tell(done: float, what: str) -> None:
            progress.update(task, completed=done, description=what)

        with native_output_aside():
            figures = experiment(Request(quick, seed, output, tell))
    if as_json:
        print(json.dumps(report(paper, figures)))
    else:
        VisibleConsole().print(_table(paper, figures))


def _table(paper: str, figures: Mapping[str, Figure]) -> Table:
    shown = Table(title=f"{paper}: {PAPERS[paper][1]}")
    for name in ("figure", "ours", "paper", "ratio", "unit", "samples"):
        number = name not in ("figure", "unit")
        width = 16 if name == "unit" else None
        shown.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold", max_width=width)
    for name, each in figures.items():
        theirs = "" if each.paper is None else f"{each.paper:,g}"
        ratio = f"{each.value / each.paper:.2f}" if each.paper else ""
        shown.add_row(name, f"{each.value:,g}", theirs, ratio, each.unit, f"{each.n:,}")
    return shown
