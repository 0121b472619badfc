"""Show a job while it runs: a live view on a terminal, lines elsewhere, nothing with `--quiet`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ctxflow.batch.job_status import describe, hours, lacking, number, time_left
from ctxflow.causes import duration
from ctxflow.errors import counted, one_line
from ctxflow.observe.progress import Progress
from ctxflow.terminal import UNLIMITED, timed, visible_console

_SHOWN_ERRORS = 10
_SHOWN_CHARACTERS = 500  # Of each.


def unheard() -> contextlib.AbstractContextManager[None]:
    """Let a job go on where its output is not read: a terminal that was closed, a pipe whose reader has ended."""
    return contextlib.suppress(OSError)


class Display:
    """What shows a job: nothing here, which others override. All is called on the job's thread."""

    def note(self, text: str) -> None:
        """Show a sentence."""

    def dead(self, place: str, message: str) -> None:
        """Show that a row went to the dead letters."""

    def progress(self, now: Progress) -> None:
        """Show how the job stands; called several times a second."""

    def end(self) -> None:
        """End: nothing more comes."""


class QuietDisplay(Display):
    """Show nothing: an error that ends the job is printed by the command."""


class LineDisplay(Display):
    """Print a line every ten seconds; for logs, and wherever there is no terminal."""

    def __init__(self, stream: TextIO | None = None, every: float = 10.0) -> None:
        self._stream = stream or sys.stderr
        self._every = every
        self._next = time.monotonic() + every
        self._errors = 0

    def note(self, text: str) -> None:
        """Print the sentence."""
        self._print(one_line(f"ctxflow: {text}"))

    def dead(self, place: str, message: str) -> None:
        """Print the first few, on a line each."""
        self._errors += 1
        if self._errors <= _SHOWN_ERRORS:
            self._print(one_line(f"{place}: {message}", _SHOWN_CHARACTERS))
        elif self._errors == _SHOWN_ERRORS + 1:
            self._print("further rows that fail are in the dead letters alone")

    def progress(self, now: Progress) -> None:
        """Print a line, if it is time."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            self._print(one_line(describe(now)))

    def _print(self, text: str) -> None:
        with unheard():
            print(f"{timed(text)}\n", end="", file=self._stream, flush=True)  # At once, whenever it is interrupted.


class LiveDisplay(LineDisplay):
    """Show the job's view on a terminal, below sentences."""

    def __init__(self, console: Console, title: str) -> None:
        super().__init__()
        self._console = console
        self._title = title
        # Drawn when the job says how it stands, not from a thread that would take the job's time.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def progress(self, now: Progress) -> None:
        """Draw it anew."""
        with unheard():
            if not self._live.is_started:
                self._live.start()
            self._live.update(JobView(now, self._title), refresh=True)

    def end(self) -> None:
        """Take the view away."""
        with unheard():
            self._live.stop()

    def _print(self, text: str) -> None:
        with unheard():
            self._console.print(timed(text), markup=False, highlight=False, soft_wrap=True)


def make_display(quiet: bool, title: str = "", filters: bool = False) -> Display:
    """Return the display that fits standard error, with a title for the job.

    :param filters: whether results go to the standard output, which is left to them where it is the terminal, too.
    """
    if quiet:
        return QuietDisplay()
    console = visible_console(stderr=True)
    live = console.is_terminal and not (filters and sys.stdout.isatty())
    return LiveDisplay(console, title) if live else LineDisplay()


_NARROW, _WIDE = 80, 120
_TIERS = 8  # Lines; what is beyond becomes one.
_SMALL_BAR = 12
_SPARE = 20  # Columns of two lines that words may leave empty.
_STATES = ("warm", "loading", "staging", "waking", "parked")


class JobView:
    """A job's view, from 80 columns on, in the terminal's own colours, which carry no information alone.

    :param title: what the job is called, such as its output.
    :param note: a sentence below it, such as why it failed; `style`, of this and the state.
    """

    def __init__(self, now: Progress, title: str, state: str = "running", note: str = "", style: str = "") -> None:
        self._now, self._title = now, title
        self._state, self._note, self._style = state, note, style
        self._ended = state not in ("starting", "running", "silent")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield its lines."""
        now, width = self._now, options.max_width
        whole = width >= UNLIMITED
        width = _NARROW if whole else width
        yield self._headline(width, whole)
        if now.total:
            share = min(1.0, (now.done + now.dead) / now.total)
            bar = _bar(now.done / now.total, now.dead / now.total, width - 7, options.ascii_only)
            yield bar.append(f" {_percent(share):>6}", "bold")
        rows = _job_lines(now, self._ended) if now.counts_rows else []
        job: RenderableType = _grid(rows + _session_lines(now, self._ended))
        run: RenderableType = _grid(_run_lines(now, self._ended))
        if len(now.tiers) > 1:
            run = Group(run, _tiers(now, options.ascii_only, whole))
        if width >= _WIDE:
            yield _beside(job, run)
        else:
            yield job
            yield run
        if now.newest_dead:
            letter = f"newest dead letter: {now.newest_dead}"
            yield Text(one_line(letter, len(letter) if whole else 2 * width - _SPARE), "red")
        if self._note:
            yield Text(self._note, self._style)

    def _headline(self, width: int, whole: bool) -> Table:
        right = Text(self._state, f"bold {self._style}".strip(), no_wrap=True)
        if self._now.seconds:
            since = "for" if self._state in ("starting", "running") else "after"
            right.append(f" {since} {duration(self._now.seconds)}", "not bold")
        title = self._title if whole else _end_of(self._title, width - len(right.plain) - 2)
        line = Table.grid(padding=(0, 2), expand=True)
        line.width = max(width, cell_len(title) + len(right.plain) + 2)
        line.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        line.add_column(justify="right", no_wrap=True)
        line.add_row(Text(title, "bold"), right)
        return line


Lines = list[tuple[str, Text]]  # Labels and what stands beside them.


def _job_lines(now: Progress, ended: bool) -> Lines:
    rows = Text(f"{now.done:,}", "bold").append(" done", "not bold")
    if now.dead:
        rows.append(", ", "not bold").append(f"{now.dead:,} dead", "red not bold")
    if now.rest is not None:
        rows.append(f", {'about ' if now.guessed else ''}{now.rest:,} left", "not bold")
    elif now.running:
        rows.append(f", {now.running:,} queued or running", "not bold")
    overall = ("overall", _speed(now.rate_overall, now.unit, now.tokens_per_s_overall))
    if ended:
        return [(now.unit, rows), overall]
    lines = [(now.unit, rows), ("now", _speed(now.rate, now.unit, now.tokens_per_s)), overall]
    if now.rest is not None:
        lines.append(("time left", Text(time_left(now.left, now.left_low, now.left_high))))
    return lines


def _session_lines(now: Progress, ended: bool) -> Lines:
    if not now.sessions:
        return []
    told = ", ".join(f"{many:,} {state}" for state, many in now.sessions.items() if many)
    chunks = Text(f"{now.chunks:,}", "bold").append(" made", "not bold")
    if not ended:
        chunks.append(f", {number(now.chunks_per_s)} chunks/s now", "not bold")
    if now.migrations:
        chunks.append(f", {counted(now.migrations, 'migration')}", "not bold")
    return [("sessions", Text(told or "none is open"))] * (not ended) + [("chunks", chunks)]


def _speed(rate: float, unit: str, tokens: float | None) -> Text:
    text = Text(f"{number(rate)} {unit}/s")
    return text if tokens is None else text.append(f", {number(tokens)} tokens/s")


def _run_lines(now: Progress, ended: bool) -> Lines:
    if now.workers is None:
        return [("workers", Text("none is needed yet"))]
    asked = [tier["asked"] for tier in now.tiers.values() if tier["asked"] is not None]
    workers = Text(f"{now.workers:,}", "bold")
    if asked:
        workers.append(f" of {sum(asked):,} asked for", "not bold")
    if len(now.tiers) == 1:
        workers.append(f" ({next(iter(now.tiers))})", "not bold")
    lines = [("workers", workers)]
    lines += [("lacking", Text(text, "yellow")) for text in lacking(now) if not ended]
    if now.contexts:
        found = now.by_state
        names = [state for state in _STATES if state in found] + sorted(found.keys() - set(_STATES))
        told = ", ".join(f"{found[state]:,} {state}" for state in names) or "none"
        lines.append(("contexts", Text(told)))
    lost = Text().append(counted(now.evictions, "eviction"), "yellow" if now.evictions else "")
    if now.crashes:
        lost.append(", ").append(counted(now.crashes, "crash", "crashes"), "red")
    lines.append(("losses", lost))
    used = f"{hours(now.gpu_hours)} GPU-hours" if now.gpu_hours else f"{hours(now.worker_hours)} worker-hours"
    lines.append(("used", Text(used if now.cost is None else f"{used}, cost {now.cost:,.2f}")))
    lines += [("limit", Text(_limit(each), "yellow" if each["used"] >= each["limit"] else "")) for each in now.limits]
    return lines


def _limit(each: Mapping[str, Any]) -> str:
    """Return how much of a limit is used."""
    unit = "GPU-hours" if each["measure"] == "gpu_hours" else "cost"
    return f"{each['used']:.4g} of {each['limit']:g} {unit} ({each['scope']})"


def _tiers(now: Progress, ascii_only: bool, whole: bool) -> Table:
    """Return a line for each tier, those with the most workers first."""
    tiers = now.tiers
    used = "gpu_hours" if now.gpu_hours else "worker_hours"
    priced = any(tier["cost"] is not None for tier in tiers.values())
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("tier", no_wrap=True, overflow="ellipsis", max_width=None if whole else 20, min_width=9)
    table.add_column("workers", no_wrap=True)
    for header in ["", "GPU-hours" if now.gpu_hours else "worker-hours", *["cost"] * priced]:
        table.add_column(header, justify="right", no_wrap=True)
    order = sorted(tiers, key=lambda name: (-tiers[name]["joined"], -(tiers[name]["asked"] or 0), name))
    shown = order if len(order) <= _TIERS else order[: _TIERS - 1]
    lines = [(name, tiers[name]) for name in shown]
    if rest := order[len(shown) :]:
        lines.append((f"{len(rest)} others", _sum([tiers[name] for name in rest])))
    for name, tier in lines:
        bar, workers = _joined(tier, ascii_only)
        cost = "" if tier["cost"] is None else f"{tier['cost']:,.2f}"
        table.add_row(Text(name), bar, workers, hours(tier[used]), *[cost] * priced)
    return table


def _joined(tier: Mapping[str, Any], ascii_only: bool) -> tuple[Text, str]:
    """Return a bar and words on the workers that joined, of those requested."""
    joined, asked = tier["joined"], tier["asked"]
    if asked is None:
        return Text(), f"{joined:,}"
    share = min(1.0, joined / asked) if asked else 0.0
    return _bar(share, 0.0, _SMALL_BAR, ascii_only), f"{joined:,} of {asked:,}"


def _sum(tiers: list[Mapping[str, Any]]) -> dict[str, Any]:
    asked = [tier["asked"] for tier in tiers if tier["asked"] is not None]
    costs = [tier["cost"] for tier in tiers]
    return {
        **{name: sum(tier[name] for tier in tiers) for name in ("joined", "gpu_hours", "worker_hours")},
        "asked": sum(asked) if asked else None,
        "cost": None if None in costs else sum(costs),
    }


def _beside(left: RenderableType, right: RenderableType) -> Table:
    both = Table.grid(padding=(0, 4), expand=True)
    both.add_column(ratio=1)
    both.add_column(ratio=1)
    both.add_row(left, right)
    return both


def _grid(lines: Lines) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=9, no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(label, text)
    return table


def _bar(done: float, dead: float, width: int, ascii_only: bool) -> Text:
    """Return a bar of what is done, dead and left, each with a mark of its own, whatever the colours."""
    good, bad, open_ = ("#", "x", "-") if ascii_only else ("━", "╍", "─")
    first = min(width, int(done * width))
    second = min(width - first, max(int(dead > 0), round(dead * width)))
    bar = Text(no_wrap=True).append(good * first, "green").append(bad * second, "red")
    return bar.append(open_ * (width - first - second))


def _percent(share: float) -> str:
    """Return a share in percent, never 100% before the end."""
    return "100%" if share >= 1 else f"{int(share * 1000) / 10:.1f}%"


def _end_of(path: str, width: int) -> str:
    """Return a path without its beginning where it is too long."""
    return path if len(path) <= width else "..." + path[-max(1, width - 3) :]
