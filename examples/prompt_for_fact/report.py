"""What a person sees of a sweep: live progress, the results table, the closing lines, the plot."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from scores import PairResult, Score, beats, ranked

PLAIN_SECONDS = 10.0
"""How often a line is written where there is no terminal."""

Sample = tuple[float, int, int]


@dataclass(frozen=True)
class Figures:
    """How a run went.

    :ivar seconds: from the first item to the last.
    :ivar items: answered in this run; items that an earlier run answered are not counted.
    """

    seconds: float
    items: int
    workers: int
    evictions: int
    retried: int
    dead: int
    loads: int

    def __str__(self) -> str:
        """Write what was evicted, retried and lost in one sentence."""
        return (
            f"{self.items:,} items in {self.seconds:.0f} s: {counted(self.evictions, 'worker')} evicted, "
            f"{counted(self.retried, 'item')} retried, {self.dead:,} lost, "
            f"contexts built {counted(self.loads, 'time')}"
        )


def counted(number: int, noun: str) -> str:
    """Write a number with its noun.

    >>> counted(1, "worker"), counted(2000, "item"), counted(0, "item")
    ('1 worker', '2,000 items', 'no items')
    """
    return f"{number:,} {noun}" + "s" * (number != 1) if number else f"no {noun}s"


class LiveProgress:
    """Progress while a sweep runs: a bar on a terminal, elsewhere a line now and then.

    :param total: how many items there are in all.
    :param state: gives a few words on workers and evictions.
    """

    def __init__(self, console: Console, total: int, state: Callable[[], str]) -> None:
        self._console, self._total, self._state = console, total, state
        self._done = 0
        self._stage = "starting"
        self._started = self._shown = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (
                TextColumn("{task.fields[stage]}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[state]}"),
            )
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=total, stage=self._stage, state="")

    def __enter__(self) -> LiveProgress:
        """Begin to show."""
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show the last state and stop."""
        self._show()
        if self._bar:
            self._bar.stop()

    def stage(self, name: str) -> None:
        """Say what comes now."""
        self._stage = name
        self._show()

    def advance(self, items: int = 1) -> None:
        """Some more items are done."""
        self._done += items
        if time.monotonic() - self._shown >= (0.25 if self._bar else PLAIN_SECONDS):
            self._show()

    def _show(self) -> None:
        self._shown = time.monotonic()
        if self._bar:
            self._bar.update(self._task, completed=self._done, stage=self._stage, state=self._state())
            return
        seconds = self._shown - self._started
        line = f"{seconds:5.0f} s  {self._done:,} of {self._total:,} items  {self._stage}  {self._state()}"
        self._console.print(line, highlight=False, soft_wrap=True)


def shown_model(result: PairResult) -> str:
    """Write a model's name, with what a reader must know of it."""
    return f"{result.model} ({result.note})" if result.note else result.model


def results_table(results: Sequence[PairResult], baseline: Score, baseline_label: str) -> Table:
    """Lay the results out, best pair first, the baseline last."""
    table = Table(title="Accuracy of each pair, with 95 % intervals (Wilson)")
    for heading in ("Model", "Template"):
        table.add_column(heading)
    for heading in ("Dev split", "Test split", "Empty claims seen as such"):
        table.add_column(heading, justify="right")
    for result in ranked(results):
        control = "-" if not result.control.n else f"{result.control.correct} of {result.control.n}"
        table.add_row(shown_model(result), result.template, str(result.dev), str(result.test), control)
    table.add_section()
    table.add_row("majority class", baseline_label, "", str(baseline), "")
    return table


def verdict(results: Sequence[PairResult], baseline: Score) -> str:
    """Name the best pair and say how it stands to the baseline."""
    best = ranked(results)[0]
    apart = (
        "above the majority class with intervals that do not meet"
        if beats(best.test, baseline)
        else "not surely better than the majority class"
    )
    chosen = "the dev split" if best.dev.n else "the test split"
    return (
        f"Best pair (chosen by {chosen}): {shown_model(best)} with {best.template}, {best.test} on the test "
        f"split, {apart}."
    )


def throughput(history: Sequence[Sample], window: float = 5.0) -> list[tuple[float, float]]:
    """Items per second over time.

    :param history: samples of (seconds, workers, items done), in order.
    :param window: seconds that each figure looks back.

    >>> throughput([(0, 1, 0), (1, 2, 10), (2, 2, 30)], window=1)
    [(1, 10.0), (2, 20.0)]
    """
    rates: list[tuple[float, float]] = []
    first = 0
    for last in range(1, len(history)):
        while first < last - 1 and history[first + 1][0] <= history[last][0] - window:
            first += 1
        span = history[last][0] - history[first][0]
        if span > 0:
            rates.append((history[last][0], (history[last][2] - history[first][2]) / span))
    return rates


def plot(history: Sequence[Sample], path: Path) -> bool:
    """Draw throughput and workers over time.

    :returns: False if there is nothing to draw.
    :raises ImportError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    rates = throughput(history)
    if not rates or not history[-1][2]:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    upper.plot([at for at, _ in rates], [rate for _, rate in rates])
    upper.set_ylabel("items per second")
    upper.set_ylim(bottom=0)
    lower.step([sample[0] for sample in history], [sample[1] for sample in history], where="post")
    lower.set_ylabel("workers")
    lower.set_ylim(0, max(sample[1] for sample in history) + 0.5)
    lower.set_xlabel("seconds since the start")
    figure.savefig(path)
    return True
