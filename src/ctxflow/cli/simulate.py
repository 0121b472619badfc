"""`ctxflow simulate`: what would come of a site and a workload, or of a recorded run with something changed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ctxflow.cli.simulation_text import as_data, recorded_data, show
from ctxflow.consoles import VisibleConsole
from ctxflow.installing import how_to_install
from ctxflow.observe.run_report import read_report
from ctxflow.simulator.recorded_run import Recorded
from ctxflow.simulator.scenario import (
    Change,
    Scenario,
    combinations,
    load_scenario,
    parse_change,
    parse_sweep,
    read_recorded,
    recorded_scenario,
)
from ctxflow.simulator.studies import LOG, Case, study

_PATIENCE = 2.0  # Seconds without a progress display.
AS_IT_WAS = "as it was"


def simulate(
    what: Annotated[
        str,
        typer.Argument(metavar="SITE|RUN", help="A site file, or the directory of a recorded run.", show_default=False),
    ],
    workload: Annotated[
        Path | None,
        typer.Argument(metavar="WORKLOAD", help="A workload file; with a site only.", show_default=False),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key; may be given again.", show_default=False),
    ] = None,
    sweeps: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep", metavar="KEY=A,B,C", help="Simulate each value; may be given again.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all randomness.")] = 0,
    runs: Annotated[int, typer.Option(min=1, help="Simulate with so many seeds: medians and spreads.")] = 1,
    hours: Annotated[float, typer.Option("--until", min=0.001, help="Give up after so many virtual hours.")] = 168.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    output: Annotated[Path | None, typer.Option(help="Folder for event logs and pictures.", show_default=False)] = None,
) -> None:
    """Say what would come of a run, before burning a night of GPUs.

    The very scheduler and policies of live runs, in virtual time: makespan,
    items/s, how close to the fluid bound that nobody beats (workers never
    idle; nothing is staged, loaded or lost), what evictions cost, context
    loads, bytes moved.

    \b
    Given a site and a workload (docs/simulator.md tells its keys; this does):
      [\\[apps]]
      items = 150_000
      item_seconds = 0.3          # or {a10 = 0.27, titan-x = 0.38}
      [\\[contexts]]
      load_seconds = 15

    \b
    Given a run's directory, what the run showed is measured from its event
    log (seconds of items, calls, loads; when workers came and went), and it
    is simulated as it was and with the changes, beside what was recorded.

    \b
    Keys of the site, and after "workload." those of the workload; a list's
    entry goes by its name; 2x is twice what it was; KEY= is the default.
      --set batching=opportunistic --set tiers.a10.workers=40
      --set workload.evictions.per_hour=6
      --sweep batching.size=10,100,1000

    \b
    ctxflow simulate site.toml workload.toml --sweep batching=fixed,opportunistic
    ctxflow simulate runs/20261121-054135-17 --set workers=2x
    ctxflow simulate site.toml workload.toml --output sim && ctxflow report sim
    """
    common = [parse_change(text) for text in changes or ()]
    swept = combinations([parse_sweep(text) for text in sweeps or ()])
    recorded = recorded_of(what, workload)
    cases = list(_cases(what, workload, recorded, common, swept, output))
    with progress("Simulating") as tell:
        summaries = study(cases, range(seed, seed + runs), hours * 3600, tell)
    pictures = [path for case in cases if case.log for path in _draw(case.log)]
    if as_json:
        data: dict[str, Any] = {"seed": seed, "runs": runs, "cases": [as_data(each) for each in summaries]}
        if recorded is not None:
            data |= {"recorded": recorded_data(recorded), "doubts": recorded.doubts}
        print(json.dumps(data))
    else:
        show(summaries, recorded)
        if pictures:
            print("\nPictures", *(f"  {path}" for path in pictures), sep="\n")
    if not all(summary.finished for summary in summaries):
        raise typer.Exit(1)


def recorded_of(what: str, workload: Path | None) -> Recorded | None:
    """The recorded run that is meant, None where a site and a workload are given."""
    if workload is not None:
        return None
    if not Path(what).is_dir():
        raise typer.BadParameter(f"give a workload file too, or the directory of a recorded run: {what} is neither")
    return read_recorded(Path(what))


def _cases(
    what: str,
    workload: Path | None,
    recorded: Recorded | None,
    common: Sequence[Change],
    swept: Sequence[tuple[Change, ...]],
    output: Path | None,
) -> Iterator[Case]:
    """The scenarios to simulate, with their names and places."""

    def scenario(changes: Sequence[Change]) -> Scenario:
        if recorded is not None:
            return recorded_scenario(recorded, changes)
        assert workload is not None
        return load_scenario(what, workload, changes)

    wanted: list[tuple[str, Sequence[Change]]] = [
        (", ".join(change.text for change in each) or ", ".join(c.text for c in common) or "simulated", each)
        for each in swept
    ]
    if recorded is not None:
        wanted = [each for each in wanted if each[1] or common]
        yield Case(AS_IT_WAS, scenario([]), _place(output, AS_IT_WAS, bool(wanted)))
    for name, each in wanted:
        several = len(wanted) > 1 or recorded is not None
        yield Case(name, scenario([*common, *each]), _place(output, name, several))


def _place(output: Path | None, name: str, several: bool) -> Path | None:
    if output is None or not several:
        return output
    return output / (re.sub(r"[^\w.=-]+", "-", name).strip("-") or "case")


def _draw(directory: Path) -> list[Path]:
    """The pictures of a simulated run, from its event log."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"ctxflow: pictures need matplotlib: {how_to_install('matplotlib', extra='report')}", file=sys.stderr)
        return []
    from ctxflow.observe.plots import draw

    found = read_report(directory)
    return [directory / LOG, *draw(directory, found.history, found.transfers, found.trees)]


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[float], None]]:
    """Gives a function that takes the share that is done; shows a bar on a terminal once it has taken a while."""
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = VisibleConsole(stderr=True)
    begun = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0, visible=False)
        yield lambda share: bar.update(task, completed=share, visible=time.monotonic() - begun > _PATIENCE)
