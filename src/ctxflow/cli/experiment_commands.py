"""`ctxflow reproduce`: papers' experiments, as far as installed.

The experiments are found by their entry points (`ctxflow.simulator.experiments`); ctxflow-papers has them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ctxflow.cli.screen import AsJson, Seed, native_output_aside
from ctxflow.terminal import visible_console

if TYPE_CHECKING:
    from ctxflow.simulator.experiments import Experiment, Figure

_NAMES = sorted({each.name for each in importlib.metadata.entry_points(group="ctxflow.experiments")})
_ONE_OF = f"One of: {', '.join(_NAMES)}." if _NAMES else "None is installed here."


@contextlib.contextmanager
def _progress(name: str) -> Iterator[Callable[[float, str], None]]:
    """Give a function that takes the share that is done, and of what; a bar shows it on a terminal."""
    from rich.progress import Progress

    console = visible_console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=1.0)
        yield lambda done, what: bar.update(task, completed=done, description=what)


def reproduce(
    paper: Annotated[str, typer.Argument(help=_ONE_OF)],
    quick: Annotated[bool, typer.Option("--quick", help="A small one, to see that it runs.")] = False,
    seed: Seed = 0,
    output: Annotated[Path | None, typer.Option(help="Draw the paper's figures into this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a paper's experiments and print its figures beside ours.

    They are a distribution of their own, ctxflow-papers.
    """
    from ctxflow.simulator.experiments import ExperimentRequest, find_experiment, report

    experiment = find_experiment(paper)
    with _progress(paper) as tell, native_output_aside():
        figures = experiment.run(ExperimentRequest(quick, seed, output, tell))
    if as_json:
        print(json.dumps(report(paper, figures)))
    else:
        visible_console().print(_table(experiment, figures))


def _table(experiment: Experiment, figures: Mapping[str, Figure]) -> Table:
    shown = Table(title=f"{experiment.name}: {experiment.help}")
    for name in ("figure", "ours", "paper", "ratio", "unit", "samples"):
        number = name not in ("figure", "unit")
        width = 16 if name == "unit" else None
        shown.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold", max_width=width)
    for name, each in figures.items():
        theirs = "" if each.paper is None else f"{each.paper:,g}"
        ratio = f"{each.value / each.paper:.2f}" if each.paper else ""
        shown.add_row(name, f"{each.value:,g}", theirs, ratio, each.unit, f"{each.n:,}")
    return shown
