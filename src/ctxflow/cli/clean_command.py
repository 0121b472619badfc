"""`ctxflow clean`: remove what ended runs left, after showing it."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxflow.cli.screen import say
from ctxflow.errors import UsageError, counted

if TYPE_CHECKING:
    from ctxflow.observe.progress import KnownRun

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800, "": 1}


def clean(
    folder: Annotated[
        Path,
        typer.Argument(help="The folder in which the programs were started; by default this one.", show_default=False),
    ] = Path(),
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Only runs that ended so long ago, such as 12h, 7d or 0.")
    ] = "7d",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove them without asking.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON; nothing is asked.")] = False,
) -> None:
    """Remove what runs that have ended left: their folders, with event logs, summaries and what workers said.

    \b
    ctxflow clean                      what ended a week ago or earlier; asks
    ctxflow clean --older-than 0 -y    all that have ended
    ctxflow clean --json               what there is, for programs

    Reports on these runs cannot be made any more. A run that goes on stays, and so does all that a job needs to be
    taken up again: OUTPUT.progress and what lies beside OUTPUT are never touched. Nothing else removes runs.

    What programs that were killed left in the temporary directory (ctxflow-*) and among the files by which live runs
    are found is removed too, whatever its age and wherever they were started.

    \b
    Exit status
      0    all that was to be removed is
      1    something could not be removed
      2    the command line is wrong
    """
    from ctxflow.factory.tier_providers import files_left, remove_files
    from ctxflow.observe.progress import known_runs, removable

    age = seconds_of(older_than)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}: name the one that holds runs/")
    runs = known_runs(folder)
    chosen = removable(runs, age)
    left = files_left()
    if not as_json:
        _show(chosen, left, runs, age)
    wanted = yes or (not as_json and bool(chosen or left) and _asked())
    failed = [run for run in chosen if not _remove(run)] if wanted else []
    troubles = remove_files(left) if wanted else []
    for trouble in troubles:
        say(trouble)
    gone = [run for run in chosen if run not in failed] if wanted else []
    if as_json:
        listed = [{**_as_data(run), "removable": run in chosen, "removed": run in gone} for run in runs]
        files = [{"path": path, "removed": not os.path.exists(path)} for path in left]
        print(json.dumps({"runs": listed, "left_behind": files}, indent=1))
    elif wanted and (chosen or left):
        also = f" and {counted(len(left) - len(troubles), 'other file')}" if left else ""
        print(f"removed {counted(len(gone), 'run')}{also}, {size_text(sum(run.size for run in gone))}")
    raise typer.Exit(1 if failed or troubles else 0)


def _show(chosen: list[KnownRun], left: list[str], runs: list[KnownRun], age: float) -> None:
    from ctxflow.causes import duration

    others, live = sum(not run.own for run in runs), sum(run.own and not run.is_over for run in runs)
    younger = len(runs) - len(chosen) - live - others
    for run in chosen:
        ago = duration(max(0.0, time.time() - run.updated))
        of = f"  {run.output}" if run.output else ""
        print(f"{size_text(run.size):>9}  {run.state:<11}  {ago:>12} ago  {run.folder}{of}")
    for path in left:
        print(f"{'':>9}  left behind by what was killed  {path}")
    rest = [f"{counted(younger, 'run')} ended less than {duration(age)} ago"] if younger else []
    rest += [f"{counted(live, 'run')} not known to have ended"] if live else []
    rest += [f"{counted(others, 'run')} of other users"] if others else []
    if chosen:
        print(f"{counted(len(chosen), 'run')}, {size_text(sum(run.size for run in chosen))} in all")
    elif not left:
        print("there is nothing to remove")
    if rest:
        print(f"left: {', '.join(rest)}")


def _asked() -> bool:
    if not sys.stdin.isatty():
        print("nothing is removed: give --yes to remove them")
        return False
    return typer.confirm("Remove them?")


def _remove(run: KnownRun) -> bool:
    from ctxflow.observe.progress import remove

    try:
        if remove(run):
            return True
        say(f"{run.folder} is left: its run goes on, or another folder has its place now")
    except OSError as error:
        inside = "" if error.filename in (None, run.folder.name, str(run.folder)) else f" ({error.filename} in it)"
        say(f"{run.folder}{inside} cannot be removed: {error.strerror}")
    return False


def _as_data(run: KnownRun) -> dict[str, Any]:
    about = {"folder": str(run.folder), "state": run.state, "updated": run.updated}
    return {**about, "bytes": run.size, "output": run.output}


def seconds_of(age: str) -> float:
    """Return a length of time, as people write it, in seconds.

    >>> seconds_of("7d"), seconds_of("1.5 h"), seconds_of("0")
    (604800.0, 5400.0, 0.0)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw]?)\s*", age.lower())
    if found is None:
        raise UsageError(f"{age!r} is no length of time: write a number and s, m, h, d or w, such as 12h or 7d")
    return float(found[1]) * _UNITS[found[2]]


def size_text(size: float) -> str:
    """Return a size for people.

    >>> size_text(512), size_text(1_234_567), size_text(45_600_000_000)
    ('512 B', '1.23 MB', '45.6 GB')
    """
    if size < 1000:
        return f"{size:.0f} B"
    unit = "kB" if size < 1e6 else "MB" if size < 1e9 else "GB"
    return f"{size / {'kB': 1e3, 'MB': 1e6, 'GB': 1e9}[unit]:.3g} {unit}"
