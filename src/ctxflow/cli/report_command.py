"""`ctxflow report`: what happened in a run, as text, as data, as pictures and as a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ctxflow.cli.screen import bytes_bar, may_draw, spinner
from ctxflow.errors import UsageError

if TYPE_CHECKING:
    from ctxflow.observe.run_report import Report

_PLAIN = str.maketrans("├└─│", "|`-|")


Format = Literal["png", "svg", "pdf"]


def report(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            help="A run's directory, or one above it that holds exactly one; "
            "by default the latest below ./runs, ./runinfo and ./.demo.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="With --html: the page; by default report.html beside the run."),
    ] = None,
    html: Annotated[bool, typer.Option("--html", help="Write it all as one page, and print no more.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all of it as JSON; pictures only with --output.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Folder for the pictures; by default the run's own.")] = None,
    form: Annotated[Format, typer.Option("--format", help="What pictures are written as.")] = "png",
    pictures: Annotated[bool, typer.Option("--pictures/--no-pictures", help="Whether to draw pictures.")] = True,
    every: Annotated[
        bool, typer.Option("--all", help="Show every transfer of a large tree, and every cause of failures.")
    ] = False,
) -> None:
    """Say what happened in a run, in words, as data and in pictures.

    Every run writes an event log; TaskVine's manager writes one of its own.
    From them come:

    \b
    - a summary: items, workers, evictions, context loads, what ran where,
      what the GPU-hours went into, and how near to the fluid bound it came
    - what each tier gave: workers, evictions, lifetimes, time in the queue,
      why jobs were held
    - the placement that holds, where one is planned
    - how long calls and context loads took, and where the time of loads
      went: files, imports, weights, compiling, and what contexts name
    - who sent which context file to whom: a line for each transfer, below
      the one that brought the file to its sender
    - why calls, contexts and items failed, grouped by cause
    - four pictures: transfers (an arrow for each), workers_and_items (over
      time, by tier), call_times (a histogram) and lifetimes (of each tier's
      workers until they were evicted)

    \b
    Programs write their runs to ./runs/TIME-PID/LABEL, Parsl those that it
    loaded to ./runinfo/NUMBER/LABEL, and `ctxflow demo` to
    ./.demo/runs/NUMBER/LABEL. A run that goes on can be looked at too.

    \b
    ctxflow report                        the latest run
    ctxflow report runinfo/003 --format pdf
    ctxflow report runinfo/003 --html night.html
    ctxflow report --json --no-pictures | jq .summary.hours

    \b
    Exit status
      0    it is said      1    what the run wrote cannot be read
                           2    no run is found, or it is not clear which
    """
    from ctxflow.observe.run_report import as_data, as_text, find_run, logs_of, read_report

    if html and file is None and run is not None and run.suffix == ".html" and not run.exists():
        run, file = None, run  # The latest run, to that file.
    if file is not None and not html:
        raise UsageError(f"{file} is one argument too many: name a run, or with --html also the page's file")
    if html and (as_json or output is not None):
        raise UsageError("a page holds all of it: leave --json and --output out, or --html")
    found = find_run(run)
    with bytes_bar("Reading the logs", sum(log.stat().st_size for log in logs_of(found))) as advance:
        what = read_report(found, advance)
    if html:
        print(_write_page(what, file or found / "report.html", pictures, every))
        return
    if as_json:
        print(json.dumps(as_data(what)))
    else:
        _print(as_text(what, every))
    if pictures and (output is not None or not as_json):
        _draw(what, output or found, form, quiet=as_json)


def _write_page(what: Report, path: Path, pictures: bool, every: bool) -> Path:
    from ctxflow.observe.page import page, write_page

    if path.is_dir():
        path /= "report.html"
    with spinner("Drawing ..."):
        drawings = {}
        if pictures and may_draw():
            from ctxflow.observe.page import drawings as draw

            drawings = draw(what)
        write_page(path, page(what, drawings, every))
    return path


def _draw(what: Report, directory: Path, form: Format, quiet: bool) -> None:
    if not may_draw():
        return
    from ctxflow.observe.plots import draw

    with spinner("Drawing ..."):
        written = draw(directory, what.history, what.transfers, what.trees, form)
    if written and not quiet:
        print("\nPictures")
        for path in written:
            print(f"  {path}")


def _print(text: str) -> None:
    """Print, with plain lines for trees where the terminal has no others."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = text.translate(_PLAIN).encode("ascii", "replace").decode()
    print(text)
