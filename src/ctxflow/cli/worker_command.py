"""`ctxflow worker-command`: the line that starts a worker of a live run by hand."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from typing import Annotated

import typer

from ctxflow.errors import CtxflowError, UsageError
from ctxflow.factory.connection import LiveRun, live_runs


def worker_command(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="The beginning of a run's id, or its directory; by default the one that is going on.",
            show_default=False,
        ),
    ] = None,
    tier: Annotated[
        str | None, typer.Option(help="The tier that the worker is one of; by default the first.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is known of the run as JSON.")] = False,
) -> None:
    """Print the line that starts a worker for a run by hand.

    It works on every machine that reaches this one and sees the files that it names. The worker joins those that
    the run has from its batch systems, and stays until the run ends or it gets Ctrl-C.

    \b
    ctxflow worker-command                  the run that is going on
    ssh gpu7 "$(ctxflow worker-command)"    a worker on gpu7, at once
    """
    found = _choose(live_runs(), run)
    name = tier or next(iter(found.commands))
    if name not in found.commands:
        raise UsageError(f"run {found.id} has no tier {name!r}: its tiers are {', '.join(found.commands)}")
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "tier": name, "command": found.commands[name]}))
        return
    sys.stderr.write(_explanation(found, name))
    print(shlex.join(found.commands[name]))


def _choose(runs: list[LiveRun], wanted: str | None) -> LiveRun:
    """The run that is meant.

    :raises CtxflowError: if there is none.
    :raises UsageError: if it is not clear which, or none is of that name.
    """
    if wanted is None:
        fitting = runs
    else:
        place = os.path.realpath(wanted)
        fitting = [run for run in runs if run.id.startswith(wanted) or _lies_in(run.directory, place)]
    if len(fitting) == 1:
        return fitting[0]
    if not runs:
        raise CtxflowError(
            "no run of yours with workers from elsewhere is going on on this machine: start one whose site says "
            'engine = "taskvine", and ask where its program runs'
        )
    told = "; ".join(f"{run.id} in {run.directory}" for run in fitting or runs)
    if fitting:
        raise UsageError(f"{len(fitting)} runs are going on: say which, by the beginning of its id: {told}")
    raise UsageError(f"no run {wanted!r} is going on; these are: {told}")


def _lies_in(directory: str, place: str) -> bool:
    return os.path.commonpath([os.path.realpath(directory), place]) == place


def _explanation(run: LiveRun, tier: str) -> str:
    """What must be so where the line is run."""
    lines = [
        f"Run this line where a worker of tier {tier} is to be. That machine must",
        f"  reach {run.address}, port {run.port}",
        f"  see {run.program}",
        f"  see {run.password_file}, which only you can read: keep it so, since it is the key to the run",
        f"  have vine_worker on its PATH, and {run.commands[tier][0]} with this very Python's minor version",
    ]
    if run.variables[tier]:
        lines.append(f"  have these variables set, as the site does for the tier: {', '.join(run.variables[tier])}")
    lines.append("Where it does not see the files, copy them there (mode 0600) and change their paths in the line.")
    return "\n".join(lines) + "\n"
