"""What a person sees of a job while it runs: a bar on a terminal, lines elsewhere, nothing if that is wanted.

One protocol, so that another view can take its place. What does not live here: any figure (outcome.py).
"""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.progress import Progress as Bar

from ctxflow.batch.outcome import Outcome, Progress

_SHOWN_ERRORS = 10


class Display(Protocol):
    """Something that shows a job. All is called on the job's thread."""

    def note(self, text: str) -> None:
        """A sentence to the person."""

    def dead(self, place: str, message: str) -> None:
        """A row went to the dead letters."""

    def progress(self, now: Progress) -> None:
        """How it stands; called several times a second."""

    def end(self) -> None:
        """Nothing more comes."""


class QuietDisplay:
    """Shows nothing but an error that ends the job, which the command prints."""

    def note(self, text: str) -> None:
        """Nothing."""

    def dead(self, place: str, message: str) -> None:
        """Nothing."""

    def progress(self, now: Progress) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


class LineDisplay:
    """A line every ten seconds; for logs, and wherever there is no terminal.

    :param every: seconds from line to line.
    """

    def __init__(self, stream: TextIO | None = None, every: float = 10.0) -> None:
        self._stream = stream or sys.stderr
        self._every = every
        self._next = time.monotonic() + every
        self._errors = 0

    def note(self, text: str) -> None:
        """The sentence."""
        self._print(f"ctxflow: {text}")

    def dead(self, place: str, message: str) -> None:
        """The first few, on a line each."""
        self._errors += 1
        if self._errors <= _SHOWN_ERRORS:
            self._print(f"{place}: {one_line(message)}")
        elif self._errors == _SHOWN_ERRORS + 1:
            self._print("further rows that fail are in the dead letters alone")

    def progress(self, now: Progress) -> None:
        """A line, if it is time."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            self._print(describe(now))

    def end(self) -> None:
        """Nothing."""

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class BarDisplay(LineDisplay):
    """A bar that moves, for a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        columns = (SpinnerColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"))
        self._bar = Bar(*columns, console=console, transient=True)
        self._task = self._bar.add_task("starting", total=None)

    def progress(self, now: Progress) -> None:
        """Move the bar."""
        if not self._bar.live.is_started:
            self._bar.start()
        self._bar.update(self._task, completed=now.done + now.dead, total=now.total, description=describe(now))

    def end(self) -> None:
        """Take the bar away."""
        self._bar.stop()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def make_display(quiet: bool) -> Display:
    """The display for where standard error goes to."""
    if quiet:
        return QuietDisplay()
    console = Console(stderr=True)
    return BarDisplay(console) if console.is_terminal else LineDisplay()


def describe(now: Progress) -> str:
    """A line on how a job stands."""
    total = "" if now.total is None else f" of {'about ' if now.guessed else ''}{now.total:,}"
    parts = [f"{now.done:,}{total} rows"]
    if now.dead:
        parts.append(f"{now.dead:,} dead")
    parts.append(f"{now.rate:,.3g} rows/s" if now.rate < 100 else f"{now.rate:,.0f} rows/s")
    if now.left is not None:
        parts.append(f"{duration(now.left)} left")
    if now.workers is not None:
        parts.append(f"{now.workers} worker{'' if now.workers == 1 else 's'}")
    parts += [f"{count} {state}" for state, count in now.by_state.items() if state != "warm"]
    return ", ".join(parts)


def summary(outcome: Outcome, output: str) -> str:
    """A sentence or two on how a job ended."""
    if outcome.already:
        text = f"nothing to do: {_rows(outcome.done)} done before, in {output}"
    else:
        text = f"{_rows(outcome.done_now)} done in {duration(outcome.seconds)}"
        text += f", {outcome.done:,} in all: {output}" if outcome.done != outcome.done_now else f": {output}"
    if outcome.dead:
        text += f"\n{_rows(outcome.dead)} failed, see {output}.errors.jsonl; --retry-errors tries them again"
    return text


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def duration(seconds: float) -> str:
    """A time span for people.

    >>> duration(3.21), duration(75), duration(4000), duration(200_000)
    ('3.2 s', '1 min 15 s', '1 h 06 min', '2 d 7 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def one_line(text: str, most: int = 300) -> str:
    """A message on one line, of bounded length.

    >>> one_line("one\\n  two")
    'one two'
    """
    joined = " ".join(text.split())
    return joined if len(joined) <= most else joined[: most - 3] + "..."
