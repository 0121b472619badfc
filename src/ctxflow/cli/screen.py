"""What commands share: options of one meaning, bars and spinners, and standard output kept clean."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxflow.installing import how_to_install
from ctxflow.terminal import visible_console

_PATIENCE = 2.0  # Seconds without a bar.

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Seed = Annotated[int, typer.Option(help="Of all randomness.")]
SiteOrRun = Annotated[
    str, typer.Argument(metavar="SITE|RUN", help="A site file, or the directory of a recorded run.", show_default=False)
]
Workload = Annotated[Path | None, typer.Argument(metavar="WORKLOAD", help="A workload file; with a site only.")]


def say(sentence: str) -> None:
    """Print what is no result: on standard error."""
    print(f"ctxflow: {sentence}", file=sys.stderr)


def metrics_place(metrics: str | None) -> tuple[str, int] | None:
    """Return the address and port of --metrics, None where it is not given."""
    if metrics is None:
        return None
    from ctxflow.factory.service import place_of

    try:
        return place_of(metrics)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--metrics") from None


@contextlib.contextmanager
def native_output_aside() -> Iterator[None]:
    """Send what native code (HiGHS) prints on standard output to standard error; for a command's main thread."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # C's own buffer, which is full only when standard output is no terminal.
        os.dup2(kept, 1)
        os.close(kept)


def may_draw() -> bool:
    """Return whether pictures can be drawn; say so if not."""
    there = importlib.util.find_spec("matplotlib") is not None
    if not there:
        say(f"pictures need matplotlib: {how_to_install('matplotlib', extra='report')}")
    return there


def spinner(text: str) -> contextlib.AbstractContextManager[object]:
    """Show that something is done, on a terminal alone."""
    console = visible_console(stderr=True)
    return console.status(text) if console.is_terminal else contextlib.nullcontext()


def share_bar(what: str) -> contextlib.AbstractContextManager[Callable[[float], None]]:
    """Give a function that takes the share that is done; a bar is shown on a terminal once it has taken a while."""
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

    return _bar(1.0, TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())


@contextlib.contextmanager
def bytes_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Give a function that takes bytes read; a bar is shown on a terminal once it has taken a while."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    done = 0
    with _bar(total, TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn()) as tell:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            tell(done)

        yield advance


@contextlib.contextmanager
def _bar(total: float, *columns: Any) -> Iterator[Callable[[float], None]]:
    from rich.progress import Progress

    console = visible_console(stderr=True)
    begun = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, visible=False)
        yield lambda done: bar.update(task, completed=done, visible=time.monotonic() - begun > _PATIENCE)
