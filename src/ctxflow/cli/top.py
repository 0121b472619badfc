"""`ctxflow top` and `ctxflow status`: how a batch stands, seen from another terminal.

What does not live here: the view (batch/view.py), and the status file that it is made of (batch/status_file.py).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.live import Live

from ctxflow.batch.display import JobView
from ctxflow.batch.job_status import LIVE, exit_status, find_status, found_below, read_status, told
from ctxflow.batch.phrases import describe
from ctxflow.consoles import VisibleConsole
from ctxflow.observe.progress import Progress, StatusReader, condition
from ctxflow.terminal import timed

_LOOK_SECONDS = 0.5
_LINE_SECONDS = 10.0
_NOT_FOUND = 2

Which = Annotated[
    Path | None,
    typer.Argument(
        metavar="[OUTPUT|RUN]",
        help="A batch's output, or a run's directory; by default the newest live one below here.",
        show_default=False,
    ),
]


def top(which: Which = None) -> None:
    """Follow a batch from another terminal, until it ends or you press Ctrl-C, which does nothing to the batch.

    \b
    ctxflow top                   the newest live batch below this directory
    ctxflow top results.jsonl     the one that writes there, on any machine that sees the file
    ctxflow top runs/NAME         the one with that run

    It reads OUTPUT.status.json, which the driver rewrites every second. Without a terminal it prints a line every
    ten seconds.

    \b
    Exit status
      0    it runs, or every row has a result      1    it failed, was stopped, died, or is silent
      3    it is done, some rows failed            2    none is found
    """
    watched = StatusReader(*chosen(which))
    watched.settle()
    console = VisibleConsole()
    try:
        status = _follow(watched, console) if console.is_terminal else _lines(watched)
    except KeyboardInterrupt:
        status = watched.look()
    raise typer.Exit(exit_status(status))


def status(
    which: Which = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON, with its condition.")] = False,
) -> None:
    """Say once how a batch stands.

    \b
    ctxflow status                       the newest live batch below this directory
    ctxflow status results.jsonl --json  the one that writes there, for programs

    \b
    Exit status
      0    it runs, or every row has a result      1    it failed, was stopped, died, or is silent
      3    it is done, some rows failed            2    none is found
    """
    found = StatusReader(*chosen(which)).settle()
    if as_json:
        print(json.dumps({**found, "condition": condition(found)}, indent=1))
    else:
        VisibleConsole().print(_view(found))
    raise typer.Exit(exit_status(found))


def chosen(which: Path | None) -> tuple[Path, dict[str, Any]]:
    """The status file that is meant, and what it says."""
    if which is not None:
        path = find_status(which)
        status = read_status(path) if path is not None else None
        if path is not None and status is not None:
            return path, status
        if not which.is_dir():
            _refuse(f"{which} has no status: name the output of a batch that was started, or a run's directory")
    found = found_below(which or Path.cwd())
    if not found:
        below = which or "this directory"
        _refuse(f"no batch has its status below {below}: name the batch's output, or a run's directory")
    path, status = found[0]
    others = [other for other, its in found[1:] if condition(its) in LIVE]
    if condition(status) in LIVE and others:
        print(f"ctxflow: {len(others) + 1} are live below this directory; name one of the others:", file=sys.stderr)
        for other in others:
            print(f"  {other}", file=sys.stderr)
    return path, status


def _refuse(sentence: str) -> NoReturn:
    print(f"ctxflow: {sentence}", file=sys.stderr)
    raise typer.Exit(_NOT_FOUND)


def _view(status: Mapping[str, Any]) -> JobView:
    return JobView(Progress.of(status), str(status["output"] or status["run"]), *told(status))


def _follow(watched: StatusReader, console: Console) -> dict[str, Any]:
    """Show the view until the batch has ended."""
    status = watched.status
    with Live(_view(status), console=console, auto_refresh=False) as live:
        while condition(status) in (*LIVE, "silent"):
            time.sleep(_LOOK_SECONDS)
            status = watched.look()
            live.update(_view(status), refresh=True)
        live.update(_view(status), refresh=True)  # It may have died since it was shown.
    return status


def _lines(watched: StatusReader) -> dict[str, Any]:
    """Print a line now and then until the batch has ended."""
    status, due = watched.status, 0.0
    while condition(status) in LIVE:
        if time.monotonic() >= due:
            due = time.monotonic() + _LINE_SECONDS
            print(timed(describe(Progress.of(status))), flush=True)
        time.sleep(_LOOK_SECONDS)
        status = watched.look()
    state, sentence, _ = told(status)
    print(timed(f"{describe(Progress.of(status))}; {state}" + (f": {sentence}" if sentence else "")))
    return status
