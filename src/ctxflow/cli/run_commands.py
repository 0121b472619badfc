"""`ctxflow top`, `status`, `workers` and `drain`: follow a run by its status file, and drain hosts and tiers of it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ctxflow.cli.screen import say
from ctxflow.errors import UsageError, counted, one_line, visible
from ctxflow.terminal import UNLIMITED, timed, visible_console

if TYPE_CHECKING:
    from ctxflow.batch.display import JobView
    from ctxflow.observe.progress import StatusReader

_LOOK_SECONDS, _LINE_SECONDS = 0.5, 10.0

Which = Annotated[
    Path | None,
    typer.Argument(
        metavar="[OUTPUT|RUN]",
        help="A batch's output, or a run's directory; by default the newest live one below here.",
    ),
]


def top(which: Which = None) -> None:
    """Follow a batch from another terminal, until it ends or you press Ctrl-C, which does nothing to the batch.

    \b
    ctxflow top                  the newest live batch below this directory
    ctxflow top results.jsonl    the one that writes there
    ctxflow top runs/NAME        the one with that run

    It reads OUTPUT.status.json, which the driver rewrites every second, on any machine that sees the file. Without a
    terminal it prints a line every ten seconds.

    \b
    Exit status
      0    it runs, or every row has a result
      1    it failed, was stopped, died, or is silent
      2    none is found
      3    it is done, some rows failed
    """
    from ctxflow.batch.job_status import exit_status
    from ctxflow.observe.progress import StatusReader

    watched = StatusReader(*chosen(which))
    watched.settle()
    console = visible_console()
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
    ctxflow status                         the newest live batch below here
    ctxflow status results.jsonl --json    the one that writes there, as JSON

    \b
    Exit status
      0    it runs, or every row has a result
      1    it failed, was stopped, died, or is silent
      2    none is found
      3    it is done, some rows failed
    """
    from ctxflow.batch.job_status import exit_status
    from ctxflow.observe.progress import StatusReader, condition

    found = StatusReader(*chosen(which)).settle()
    if as_json:
        print(json.dumps({**found, "condition": condition(found)}, indent=1))
    else:
        visible_console().print(_view(found))
    raise typer.Exit(exit_status(found))


def chosen(which: Path | None) -> tuple[Path, dict[str, Any]]:
    """Return the status file that is meant, and what it says."""
    from ctxflow.batch.job_status import LIVE, find_status, found_below
    from ctxflow.observe.progress import condition, load_status

    if which is not None:
        path = find_status(which)
        if path is not None and (status := load_status(path)) is not None:
            return path, status
        if not which.is_dir():
            raise UsageError(
                f"{which} has no status: name the output of a batch that was started, or a run's directory"
            )
    found = found_below(which or Path.cwd())
    if not found:
        below = which or "this directory"
        raise UsageError(f"no batch has its status below {below}: name the batch's output, or a run's directory")
    path, status = found[0]
    others = [other for other, its in found[1:] if condition(its) in LIVE]
    if condition(status) in LIVE and others:
        names = "".join(f"\n  {other}" for other in others)
        say(f"{len(others) + 1} are live below this directory; name one of the others:{names}")
    return path, status


def _view(status: Mapping[str, Any]) -> JobView:
    from ctxflow.batch.display import JobView
    from ctxflow.batch.job_status import told
    from ctxflow.observe.progress import Progress

    return JobView(Progress.of(status), str(status["output"] or status["run"]), *told(status))


def _follow(watched: StatusReader, console: Console) -> dict[str, Any]:
    """Show the view until the batch has ended."""
    from rich.live import Live

    from ctxflow.batch.job_status import LIVE
    from ctxflow.observe.progress import condition

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
    from ctxflow.batch.job_status import LIVE, describe, told
    from ctxflow.observe.progress import Progress, condition

    status, due = watched.status, 0.0
    while condition(status) in LIVE:
        if time.monotonic() >= due:
            due = time.monotonic() + _LINE_SECONDS
            print(timed(describe(Progress.of(status))), flush=True)
        time.sleep(_LOOK_SECONDS)
        status = watched.look()
    state, sentence, _ = told(status)
    print(timed(f"{describe(Progress.of(status), ended=True)}; {state}" + (f": {sentence}" if sentence else "")))
    return status


_LENGTH = 100  # Of a cell of the table on a terminal.
Worker = Mapping[str, Any]


def workers(
    which: Which = None,
    log: Annotated[
        str | None,
        typer.Option(metavar="WORKER", help="Print what this one wrote; its name, job or host, or how one begins."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
) -> None:
    """List the workers of a run: host, GPU, tier, job, age, calls done and failed, and the last error.

    \b
    ctxflow workers                     those of the newest live run below here
    ctxflow workers results.jsonl       those of the batch that writes there
    ctxflow workers --log host1.site    what the worker on that host wrote

    The last that left are listed too. It reads what the run wrote some seconds ago.

    \b
    Exit status
      0    done
      2    no run is found, or no such worker
    """
    from ctxflow.batch.job_status import LIVE, lacking
    from ctxflow.executors.kept_files import read_workers
    from ctxflow.observe.progress import Progress, condition

    _, status = chosen(which)
    found = read_workers(str(status["run"])) if status.get("run") else []
    if log is not None:
        _print_log(_named(found, log), str(status["run"]))
    elif as_json:
        print(json.dumps({"run": status["run"], "workers": found}, indent=1))
    else:
        console = visible_console()
        causes = lacking(Progress.of(status)) if condition(status) in LIVE else []
        if found:
            console.print(_table(found, _LENGTH if console.width < UNLIMITED else sys.maxsize))
        else:
            print("the run has no workers yet" + ("" if causes else ": `ctxflow status` says why"))
        for text in causes:
            print(text)


def _table(found: list[Worker], most: int) -> Table:
    """Return a table of workers, with so many characters in a cell."""
    from ctxflow.causes import duration

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for header in ("host", "GPU", "tier", "job", "state", "age", "done", "failed"):
        right = header in ("age", "done", "failed")
        table.add_column(header, justify="right" if right else "left", no_wrap=True)
    errors = any(each["error"] for each in found)
    if errors:
        table.add_column("last error", overflow="fold", min_width=24)
    for each in found:
        gpus = each["gpus"]
        model = str(each["gpu_model"] or "") or ("GPU" if gpus else "-")
        many = f"{gpus} x {model}" if gpus > 1 else model
        age = duration(max(0.0, (each["ended"] or time.time()) - each["joined"]))
        job = each["job"] or each["worker"]
        failed = Text(f"{each['failed']:,}", "red" if each["failed"] else "")
        words = [each["host"], many, each["tier"], job, each["state"], age, f"{each['done']:,}"]
        error = [Text(one_line(each["error"], most))] * errors
        table.add_row(*(Text(one_line(word, most)) for word in words), failed, *error)
    return table


def _named(found: list[Worker], name: str) -> Worker:
    """Return the worker that is meant, which has to be exactly one."""
    keys = ("worker", "job", "host")
    exact = [each for each in found if name in (each[key] for key in keys)]
    meant = exact or [each for each in found if any(str(each[key] or "").startswith(name) for key in keys)]
    living = [each for each in meant if each["ended"] is None]
    chosen_ones = living or meant
    if not chosen_ones:
        raise UsageError(f"the run has no worker {name}: `ctxflow workers` lists them")
    if len(chosen_ones) > 1:
        others = ", ".join(str(each["job"] or each["worker"]) for each in chosen_ones[:8])
        raise UsageError(f"{len(chosen_ones)} workers are called so: name one of {others}")
    return chosen_ones[0]


def _print_log(worker: Worker, run: str) -> None:
    """Print the files that a worker's output is in, of which there has to be one here."""
    place = Path(worker["log"] or os.path.join(run, "taskvine", "jobs", worker["tier"], f"{worker['job']}.out"))
    found = sorted(place.iterdir(), key=os.path.getmtime) if place.is_dir() else [place] if place.is_file() else []
    if not found:
        raise UsageError(
            f"nothing of what {worker['worker']} writes is on this machine: its batch system brings it when the job "
            f"ends, to {place}"
            if worker["job"]
            else f"{worker['worker']} was started by hand: see where that was done"
        )
    for path in filter(os.path.getsize, found):
        print(f"== {path}")
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                sys.stdout.write(visible(line.rstrip("\n")) + "\n")


def drain(
    name: Annotated[str, typer.Argument(metavar="HOST|TIER", help="A host, as `ctxflow workers` lists it, or a tier.")],
    which: Which = None,
    undo: Annotated[bool, typer.Option("--undo", help="Let the run use it again.")] = False,
) -> None:
    """Have a live run leave a host or a tier: workers there end what they run, and leave.

    \b
    ctxflow drain host7.site                   the newest live run below here
    ctxflow drain preemptible results.jsonl    the batch that writes there
    ctxflow drain host7.site --undo            it may be used again

    No row is lost or counted as failed, and none is asked for there until --undo, or the run's end. A host is kept
    from by HTCondor and Slurm; other batch systems may start workers there, which get no work.

    \b
    Exit status
      0    the run is asked to, and does so within seconds
      2    there is no such run, host or tier
    """
    from ctxflow.batch.job_status import LIVE
    from ctxflow.executors.figures import ask, drained
    from ctxflow.executors.kept_files import read_workers
    from ctxflow.observe.progress import condition

    _, status = chosen(which)
    if condition(status) not in LIVE or not status.get("run"):
        raise UsageError("that run does not go on: name one that `ctxflow status` says is running")
    run = str(status["run"])
    try:
        hosts, tiers = drained(run)
        there = {str(each["host"]) for each in read_workers(run) if each["ended"] is None}
        is_tier = name in status.get("tiers", {})
        found = name if is_tier else _host(name, there | set(hosts))
        chosen_ones = tiers if is_tier else hosts
        if undo and found not in chosen_ones:
            raise UsageError(f"{found} is not drained: nothing is to be undone")
        kept = [each for each in chosen_ones if each != found] if undo else [*chosen_ones, found]
        ask(run, hosts if is_tier else kept, kept if is_tier else tiers)
    except OSError as error:
        raise UsageError(f"the run in {run} cannot be asked: {error}; call it as the user whose run it is") from None
    if undo:
        print(f"{found} may be used again")
        return
    key = "tier" if is_tier else "host"
    many = sum(each["ended"] is None and each[key] == found for each in read_workers(run))
    print(f"{counted(many, 'worker')} of {key} {found} will leave; `ctxflow workers` shows them")


def _host(name: str, there: set[str]) -> str:
    """Return the host that is meant, by its name or the first part of that."""
    meant = [name] if name in there else sorted(host for host in there if host.partition(".")[0] == name)
    if len(meant) != 1:
        known = ", ".join(sorted(there)) or "none yet"
        raise UsageError(f"the run has no tier {name}, and no worker on such a host: its hosts are {known}")
    return meant[0]
