"""Bars and spinners on standard error, and standard output kept for a command's own words."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator

from ctxflow.terminal import visible_console

_PATIENCE = 2.0  # Seconds without a bar.


@contextlib.contextmanager
def native_output_aside() -> Iterator[None]:
    """Send what native code prints on standard output to standard error, so that --json prints JSON alone.

    HiGHS prints a line of its own now and then, whatever it is told. For a command's main thread: descriptors belong
    to the whole process.
    """
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


def spinner(text: str) -> contextlib.AbstractContextManager[object]:
    """Show that something is done, on a terminal alone."""
    console = visible_console(stderr=True)
    return console.status(text) if console.is_terminal else contextlib.nullcontext()


@contextlib.contextmanager
def share_bar(what: str) -> Iterator[Callable[[float], None]]:
    """Give a function that takes the share that is done; a bar is shown on a terminal once it has taken a while."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = visible_console(stderr=True)
    begun = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0, visible=False)
        yield lambda share: bar.update(task, completed=share, visible=time.monotonic() - begun > _PATIENCE)


@contextlib.contextmanager
def bytes_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Give a function that takes bytes read; a bar is shown on a terminal once it has taken a while."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = visible_console(stderr=True)
    begun, done = time.monotonic(), 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, visible=False)

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar.update(task, completed=done, visible=time.monotonic() - begun > _PATIENCE)

        yield advance
