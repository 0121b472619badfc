"""`ctxflow workers`: the workers of a live run, what each did, and what one of them wrote.

What does not live here: how that is known (executors/worker_table.py), and which run is meant (cli/top.py).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from ctxflow.batch.phrases import duration, one_line
from ctxflow.cli.top import Which, chosen
from ctxflow.consoles import VisibleConsole
from ctxflow.errors import UsageError
from ctxflow.executors.worker_table import read_workers
from ctxflow.terminal import visible

_LENGTH = 100  # Of an error in the table.
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
    ctxflow workers                       those of the newest live run below this directory
    ctxflow workers results.jsonl         those of the batch that writes there
    ctxflow workers --log host1.site      what the worker on that host wrote

    The last that left are listed too. It reads what the run wrote some seconds ago.

    \b
    Exit status
      0    done      2    no run is found, or no such worker
    """
    _, status = chosen(which)
    found = read_workers(str(status["run"])) if status.get("run") else []
    if log is not None:
        _print_log(_named(found, log), str(status["run"]))
    elif as_json:
        print(json.dumps({"run": status["run"], "workers": found}, indent=1))
    elif not found:
        print("the run has no workers yet: `ctxflow status` says why")
    else:
        VisibleConsole().print(_table(found))


def _table(found: list[Worker]) -> Table:
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
        error = [Text(one_line(each["error"], _LENGTH))] * errors
        table.add_row(*(Text(one_line(word)) for word in words), failed, *error)
    return table


def _named(found: list[Worker], name: str) -> Worker:
    """The one that is meant.

    :raises UsageError: if that is none, or not one alone.
    """
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
    for path in _logs(worker, run):
        if os.path.getsize(path):
            print(f"== {path}")
            with open(path, encoding="utf-8", errors="replace") as file:
                for line in file:
                    sys.stdout.write(visible(line.rstrip("\n")) + "\n")


def _logs(worker: Worker, run: str) -> list[Path]:
    """The files that a worker's output is in.

    :raises UsageError: if there is none here.
    """
    place = Path(worker["log"] or os.path.join(run, "taskvine", "jobs", worker["tier"], f"{worker['job']}.out"))
    found = sorted(place.iterdir(), key=os.path.getmtime) if place.is_dir() else [place] if place.is_file() else []
    if not found:
        raise UsageError(
            f"nothing of what {worker['worker']} writes is on this machine: its batch system brings it when the job "
            f"ends, to {place}"
            if worker["job"]
            else f"{worker['worker']} was started by hand: see where that was done"
        )
    return found
