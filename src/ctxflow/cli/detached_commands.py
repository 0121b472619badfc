"""`ctxflow batch --detach`, and the commands for detached jobs: `ctxflow jobs`, `ctxflow logs`, `ctxflow cancel`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ctxflow.cli.screen import say
from ctxflow.errors import counted
from ctxflow.terminal import visible_console

if TYPE_CHECKING:
    from ctxflow.batch.detached import Detached, DetachedView
    from ctxflow.batch.job import Job

_SHOWN_ENDED = 10
_LOOK_SECONDS = 0.5
_AGAIN_SECONDS = 5.0
_CANCEL_SECONDS = 90.0


def _complete(incomplete: str) -> list[tuple[str, str]]:
    """Return ids that begin so, the youngest first, each with what it is: for the shell's completion."""
    from ctxflow.batch.detached import found_jobs

    jobs = reversed(found_jobs())
    return [(str(job.id), f"{job.does}: {job.output}") for job in jobs if str(job.id).startswith(incomplete)]


_Job = Annotated[str, typer.Argument(metavar="JOB", help="Its number.", autocompletion=_complete)]


def submit_detached(job: Job, metrics: str | None, quiet: bool, as_json: bool, **how: bool) -> bool:
    """Submit a job's driver, and say how to follow it; False if all of the job is done already."""
    from ctxflow.batch.detached import detach, site_for_detaching
    from ctxflow.batch.display import LineDisplay, QuietDisplay
    from ctxflow.batch.driver import begin_job

    site = site_for_detaching(job)
    display = QuietDisplay() if quiet else LineDisplay()
    if not begin_job(job, display=display, **how):
        return False
    flags = [*["--quiet"] * quiet, *["--json"] * as_json, *([] if metrics is None else ["--metrics", metrics])]
    made = detach(job, site, flags)
    if as_json:
        print(json.dumps({"job": made.id, "htcondor": made.cluster, "folder": str(made.folder)}))
    elif not quiet:
        say(
            f"job {made.id} is submitted (HTCondor's {made.cluster}); it needs this terminal no more\n"
            f"  ctxflow jobs              how it stands\n"
            f"  ctxflow logs {made.id} --follow   what it says, until it ends\n"
            f"  ctxflow cancel {made.id}          end it; what is done is kept"
        )
    return True


def jobs(
    every: Annotated[bool, typer.Option("--all", help="All jobs that ended, too, not only the last ten.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list, all jobs in it.")] = False,
) -> None:
    """List the batches that were detached: how they stand, and how they ended.

    \b
    queued      the driver waits to start, or to start again
    held        HTCondor does not start it before somebody sees to the reason
    running     it runs
    done        every row was tried
    failed      it ended, and says why
    cancelled   it was ended by somebody
    lost        HTCondor has it no more

    A job is remembered in a folder of ~/.local/state/ctxflow/jobs; remove the
    folder to forget it. Exit status: 0, or 1 if HTCondor cannot be used here.
    """
    from ctxflow.batch.detached import ENDED, found_jobs, views

    found = views(found_jobs())
    if as_json:
        print(json.dumps([_as_json(view) for view in found], indent=1))
        return
    ended = [view for view in found if view.standing.state in ENDED]
    hidden = set() if every else {view.job.id for view in ended[:-_SHOWN_ENDED]}
    if not found:
        say("there are no jobs: `ctxflow batch --detach` makes one")
        return
    console = visible_console()
    console.print(jobs_table([view for view in found if view.job.id not in hidden], time.time()))
    if hidden:
        console.print(f"[dim]{counted(len(hidden), 'job')} that ended earlier: ctxflow jobs --all[/dim]")


def jobs_table(found: list[DetachedView], now: float) -> Group:
    """Return two lines for each job: how it stands, and below it its output, and why it is held or failed."""
    from ctxflow.batch.job_status import number

    colours = {"running": "green", "held": "red", "failed": "red", "lost": "red", "queued": "yellow"}
    cells, below = [["job", "state", "since", "rows", "dead", "rows/s", "restarts"]], [""]
    for view in found:
        standing, row = view.standing, _as_json(view)
        rate = "" if row["rate"] is None or standing.state != "running" else number(row["rate"])
        dead, restarts = (f"{count:,}" if count else "" for count in (row["dead"], standing.restarts))
        cells.append([str(view.job.id), standing.state, _clock(standing.since, now), _rows(row), dead, rate, restarts])
        why = f": {standing.reason}" if standing.reason and standing.state != "running" else ""
        below.append(f"{_near(view.job.output)}{why}")
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines: list[RenderableType] = []
    for line, text in zip(cells, below, strict=True):
        padded = [
            each.ljust(width) if name in ("state", "since") else each.rjust(width)
            for each, width, name in zip(line, widths, cells[0], strict=True)
        ]
        told = Text("  ".join(padded).rstrip(), style="" if text else "bold", no_wrap=True)
        told.stylize(colours.get(line[1], ""), widths[0] + 2, widths[0] + 2 + len(line[1]))
        lines.append(told)
        if text:
            below_it = Text(text, style="dim", overflow="fold")
            lines.append(Padding(below_it, (0, 0, 0, widths[0] + 2), expand=False))
    return Group(*lines)


def _as_json(view: DetachedView) -> dict[str, Any]:
    status = view.status or {}
    told = {key: status.get(key) for key in ("done", "dead", "total", "guessed", "rate", "left", "workers", "run")}
    keys = ("id", "does", "input", "output", "site", "submitted", "host")
    about = {key: getattr(view.job, key) for key in keys}
    there = {"htcondor": view.job.cluster, "folder": str(view.job.folder)}
    return {**about, **there, **dataclasses.asdict(view.standing), **told}


def _rows(row: dict[str, Any]) -> str:
    """Return the rows done, of how many."""
    if row["done"] is None:
        return ""
    return f"{row['done']:,}" + ("" if row["total"] is None else f" of {'~' * bool(row['guessed'])}{row['total']:,}")


def _near(path: str) -> str:
    """Return a path relative to here, if that is shorter."""
    with contextlib.suppress(ValueError):
        path = min(path, os.path.relpath(path), key=len)
    return path


def _clock(then: float, now: float) -> str:
    """Return a time of today, or of this year, or of another."""
    when, today = datetime.fromtimestamp(then), datetime.fromtimestamp(now)
    if when.date() == today.date():
        return f"{when:%H:%M:%S}"
    return f"{when:%d %b %H:%M}" if now - then < 300 * 86_400 else f"{when:%Y-%m-%d}"


def logs(
    job: _Job,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
) -> None:
    """Print what a detached batch says.

    With --follow, the exit status is the job's: 0 every row has a result, 3 some failed, 1 it failed, 130 it was
    cancelled. Ctrl-C ends the command (130), and not the job.
    """
    from ctxflow.batch.detached import ENDED, views

    chosen = _named(job)
    shown, told = 0, ("", "")
    while True:
        view = views([chosen])[0]  # Before what it says is read: an end is followed by nothing.
        shown += _print_from(chosen, shown)
        state, reason = view.standing.state, view.standing.reason
        if state != "running" and (state, reason) != told:
            told = (state, reason)
            say(f"job {chosen.id} is {state}{': ' + reason if reason else ''}")
        if not follow:
            return
        if state in ENDED:
            raise typer.Exit(view.standing.exit_status)
        time.sleep(_LOOK_SECONDS)


def _print_from(job: Detached, start: int) -> int:
    """Print what was logged since; return how many bytes."""
    try:
        with open(job.log, "rb") as file:
            file.seek(start)
            text = file.read()
    except FileNotFoundError:
        return 0
    text = text[: text.rfind(b"\n") + 1]
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()
    return len(text)


def cancel(job: _Job) -> None:
    """End a detached batch: its driver, and all its workers.

    What was done is kept, and the same `ctxflow batch` command goes on from there. Exit status: 0 if neither driver
    nor workers are left (also when the job had ended before), 1 if some are, with the command that removes them.
    """
    from ctxflow.batch.detached import ENDED, views
    from ctxflow.factory.condor_provider import end_jobs, jobs_there

    chosen = _named(job)
    if chosen.host != os.uname().nodename:
        say(f"job {chosen.id} is in the queue of {chosen.host}: cancel it there")
        raise typer.Exit(1)
    before = views([chosen])[0].standing
    deadline, again = time.monotonic() + _CANCEL_SECONDS, 0.0
    with visible_console(stderr=True).status("") as spinner:
        while left := jobs_there([chosen.tag])[chosen.tag]:
            if time.monotonic() > deadline:
                break
            if time.monotonic() >= again:  # Its driver may have asked for a worker meanwhile.
                end_jobs(left)
                again = time.monotonic() + _AGAIN_SECONDS
            workers = len(set(left) - {chosen.cluster})
            parts = ["its driver"] * (chosen.cluster in left) + [counted(workers, "worker")] * bool(workers)
            if not chosen.cluster:  # Its submission was interrupted: which of them is the driver is not known.
                parts = [counted(len(left), "job")]
            spinner.update(f"job {chosen.id}: {' and '.join(parts)} end")
            time.sleep(_LOOK_SECONDS)
    if left:
        rest = f"{len(left)} of job {chosen.id}'s jobs do not leave their machines ({', '.join(left)})"
        say(f"{rest}: give the command again, or see condor_q")
        raise typer.Exit(1)
    view = views([chosen])[0]
    if before.state in ENDED:
        say(f"job {chosen.id} had ended before: it is {before.state}")
        return
    done = "" if view.status is None else f"; {_near(chosen.output)} keeps {counted(view.status.get('done', 0), 'row')}"
    say(f"job {chosen.id} is cancelled{done}")


def _named(name: str) -> Detached:
    from ctxflow.batch.detached import job_named

    try:
        return job_named(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="JOB") from None
