"""What a person sees of a job while it runs: a view on a terminal, lines elsewhere, nothing if that is wanted.

One protocol, so that another can take its place. What does not live here: any figure (outcome.py), and what the view
looks like (view.py).
"""

from __future__ import annotations

import os
import sys
import time
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live

from ctxflow.batch.outcome import Outcome
from ctxflow.batch.view import View
from ctxflow.batch.words import duration, lacking, number, one_line
from ctxflow.consoles import VisibleConsole
from ctxflow.observe.progress import Progress
from ctxflow.terminal import timed, visible
from ctxflow.wording import counted

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
        print(timed(visible(text)), file=self._stream, flush=True)


class LiveDisplay(LineDisplay):
    """The view of the job (view.py), which stays where it is, for a terminal. Sentences go above it.

    :param title: what the job is called.
    """

    def __init__(self, console: Console, title: str) -> None:
        super().__init__()
        self._console = console
        self._title = title
        # Drawn when the job says how it stands, not from a thread that would take the job's time.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def progress(self, now: Progress) -> None:
        """Draw it anew."""
        if not self._live.is_started:
            self._live.start()
        self._live.update(View(now, self._title), refresh=True)

    def end(self) -> None:
        """Take the view away."""
        self._live.stop()

    def _print(self, text: str) -> None:
        self._console.print(timed(text), markup=False, highlight=False, soft_wrap=True)


def make_display(quiet: bool, title: str = "") -> Display:
    """The display for where standard error goes to.

    :param title: what the job is called.
    """
    if quiet:
        return QuietDisplay()
    console = VisibleConsole(stderr=True)
    return LiveDisplay(console, title) if console.is_terminal else LineDisplay()


def describe(now: Progress) -> str:
    """A line on how a job stands.

    >>> describe(Progress(done=1200, dead=3, total=5000, rate=20.0, left=190.0, workers=2, evictions=1))
    '1,200 of 5,000 rows, 3 dead, 20 rows/s, 3 min 10 s left, 2 workers, 1 eviction'
    >>> describe(Progress(sessions={"running": 7, "idle": 2}, chunks=120, chunks_per_s=4.5, workers=2))
    '9 sessions (7 running), 4.5 chunks/s, 2 workers'
    """
    total = "" if now.total is None else f" of {'about ' if now.guessed else ''}{now.total:,}"
    parts = []
    if now.counts_rows:
        parts.append(f"{now.done:,}{total} {now.unit}")
        if now.dead:
            parts.append(f"{now.dead:,} dead")
        parts.append(f"{number(now.rate)} {now.unit}/s")
    if now.sessions:
        parts.append(f"{counted(sum(now.sessions.values()), 'session')} ({now.sessions.get('running', 0):,} running)")
        parts.append(f"{number(now.chunks_per_s)} chunks/s")
    if now.tokens_per_s is not None:
        parts.append(f"{number(now.tokens_per_s)} tokens/s")
    if now.left:
        parts.append(f"{duration(now.left)} left")
    if now.workers is not None:
        parts.append(counted(now.workers, "worker"))
    parts += [f"{amount} {state}" for state, amount in now.by_state.items() if state != "warm"]
    if now.evictions:
        parts.append(counted(now.evictions, "eviction"))
    return "; ".join([", ".join(parts), *lacking(now.tiers)])


def summary(outcome: Outcome, output: str, goes_on: bool = True) -> str:
    """A sentence or two on how a job ended.

    :param goes_on: whether it can be taken up again.
    """
    if outcome.already:
        text = f"nothing to do: {counted(outcome.done, 'row')} done before, in {output}"
    else:
        text = f"{counted(outcome.done_now, 'row')} done in {duration(outcome.seconds)}"
        text += f", {outcome.done:,} in all: {output}" if outcome.done != outcome.done_now else f": {output}"
    if outcome.truncated_now:
        text += f'\n{counted(outcome.truncated_now, "row")} of these too long, and cut: they say "truncated": true'
    for column, many in outcome.nulled.items():
        values = counted(many, "value")
        text += f"\n{values} of {column} became null, since the output cannot hold {'it' if many == 1 else 'them'}"
    for column, many in outcome.altered.items():
        were, are = ("was", "it as it is") if many == 1 else ("were", "them as they are")
        texts = counted(many, "text or key", "texts or keys")
        text += f"\n{texts} of {column} {were} written otherwise, since the output cannot hold {are}"
    if outcome.dead:
        text += f"\n{counted(outcome.dead, 'row')} failed"
        if output != os.devnull:
            text += f", see {output}.errors.jsonl" + ("; --retry-errors tries them again" if goes_on else "")
    return text
