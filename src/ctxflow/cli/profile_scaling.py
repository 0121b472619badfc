"""`ctxflow profile-scaling`: which levels the scaling policy `closed-loop` should have for a site and its work."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from ctxflow.cli.screen import AsJson, Seed, SiteOrRun, Workload, share_bar
from ctxflow.cli.simulate_command import recorded_of, scenario_of
from ctxflow.errors import counted
from ctxflow.terminal import visible_console

if TYPE_CHECKING:
    from ctxflow.policies.turboserve.autoscaling import Profiled
    from ctxflow.simulator.scaling_profile import RecordedSessions

SHARES = "0.25,0.35,0.5,0.65,0.8,1.0"  # `ctxflow.simulator.scaling_profile.SHARES`, which a help must not import.


def profile_scaling(
    what: SiteOrRun,
    workload: Workload = None,
    target: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.001, help="The longest that an item, or a session's chunk, may take."),
    ] = 60.0,
    window: Annotated[
        float, typer.Option(metavar="SECONDS", min=10.0, help="Length of the stretches that are simulated.")
    ] = 720.0,
    shares: Annotated[str, typer.Option(metavar="A,B,C", help="The shares of a worker's capacity to try.")] = SHARES,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key, as `ctxflow simulate` does."),
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Find the levels of `scaling = "closed-loop"`, in simulation.

    The policy holds as many workers as bring their load to a share of what
    they can carry, and the share falls as arrivals become more volatile. This
    cuts a workload (or a recorded run) into windows, simulates each with every
    share, and keeps the cheapest with which no item takes longer than the
    target; in a run of sessions, no chunk. Where no share keeps the target,
    it takes the one that exceeds it least, says so, and its exit status is 1.
    It prints the line for the site file.

    \b
    ctxflow profile-scaling site.toml workload.toml --target 120
    ctxflow profile-scaling runs/20261121-054135-17 --target 120
    """
    from ctxflow.policies.registry import described
    from ctxflow.policies.turboserve.autoscaling import levels
    from ctxflow.simulator.scaling_profile import closed_loop_of, profiled, profiled_sessions, windows_of
    from ctxflow.simulator.scenario import parse_change

    candidates = _shares(shares)
    sessions = _sessions_of(what) if workload is None else None
    with share_bar("Profiling") as tell:
        if sessions is not None:
            if changes:
                raise typer.BadParameter("--set is for workloads and runs of items, and this run had sessions")
            options = described("scaling", "closed-loop")
            tolerance, boot = options["tolerance"], options["boot_seconds"]
            rows = profiled_sessions(sessions, target, window, candidates, tolerance, boot, tell)
        else:
            asked = [parse_change(text) for text in changes or ()]
            scenario = scenario_of(what, workload, recorded_of(what, workload), asked)
            tolerance = closed_loop_of(scenario)["tolerance"]
            rows = profiled(windows_of(scenario, window, seed), target, candidates, seed, tell)
    found = levels(rows)
    table = [[bound, each.utilization] for bound, each in zip(found.bounds, found.parameters, strict=False)]
    table.append([found.parameters[-1].utilization])
    rounded = [[float(f"{each:.4g}") for each in row] for row in table]
    line = f'scaling = {{ policy = "closed-loop", levels = {json.dumps(rounded)}, tolerance = {tolerance} }}'
    if as_json:
        print(json.dumps({"target": target, "windows": _as_data(rows), "levels": table, "line": line}))
    else:
        _show(rows, "chunks" if sessions is not None else "items", target, line)
    if not all(row.valid for row in rows):
        raise typer.Exit(1)


def _shares(text: str) -> list[float]:
    try:
        found = sorted({float(each) for each in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] <= 0:
        raise typer.BadParameter(f"--shares is a list of numbers above 0, such as 0.5,0.8; this is {text!r}")
    return found


def _as_data(rows: Sequence[Profiled]) -> list[dict[str, object]]:
    return [
        {
            "volatility": row.volatility, "share": row.parameters.utilization, "worker_hours": row.replayed.cost,
            "longest_seconds": row.replayed.worst, "target_kept": row.valid,
            "seconds_over": row.replayed.over if math.isfinite(row.replayed.over) else None,  # Not all came.
        }
        for row in rows
    ]  # fmt: skip


def _sessions_of(run: str) -> RecordedSessions | None:
    """Return the sessions of a recorded run, None where it had none."""
    from ctxflow.observe.run_report import EVENTS, find_run
    from ctxflow.simulator.scaling_profile import read_sessions

    if not Path(run).is_dir():
        return None  # Reported where a run of items is looked for.
    log = find_run(Path(run)) / EVENTS
    if not log.is_file():
        return None
    with open(log, encoding="utf-8", errors="replace") as lines:
        found = read_sessions(lines)
    return found if found.events else None


def _show(rows: Sequence[Profiled], what: str, target: float, line: str) -> None:
    console = visible_console()
    table = Table(
        box=box.SIMPLE_HEAD, title=f"{counted(len(rows), 'window')}, {what} within {target:g} s", title_justify="left"
    )
    longest = "longest chunk, s" if what == "chunks" else "longest wait, s"
    for name in ("volatility", "share", "worker-hours", longest):
        table.add_column(name, justify="right")
    for row in rows:
        worst = f"{row.replayed.worst:,.1f}" + ("" if row.valid else " (too long)")
        table.add_row(f"{row.volatility:.3g}", f"{row.parameters.utilization:g}", f"{row.replayed.cost:,.2f}", worst)
    console.print(table)
    if missed := sum(not row.valid for row in rows):
        print(
            f"In {missed} of {counted(len(rows), 'window')} no share keeps the target, and the share that exceeds it "
            "least was taken: give the site more workers, or --target more seconds.\n"
        )
    print(f"For the site file:\n\n{line}")
