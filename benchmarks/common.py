"""What the benchmarks share: figures, their one JSON form, the table, the machine, and interleaved rounds.

What does not live here: anything that is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ctxflow.simulator import experiments as reproductions
from ctxflow.simulator.experiments import Figure, machine, median

Measurement = Callable[[], float]


def figure(samples: Sequence[float], unit: str, better: str = "higher") -> Figure:
    """The median of some rounds and their spread.

    >>> figure([3.0, 1.0, 2.0], "s", "lower")
    Figure(value=2.0, unit='s', better='lower', spread=2.0, n=3, paper=None)
    """
    return median(samples, unit, better)


def single(value: float, unit: str, better: str, count: int, spread: float = 0.0) -> Figure:
    """A figure that sums up `count` cases, to four digits.

    >>> single(0.123456, "%", "lower", 100).value
    0.1235
    """
    return Figure(float(f"{value:.4g}"), unit, better, float(f"{spread:.4g}"), count)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Figure:
    """How many times the peer's figure ours is, round by round: the machine's speed drifts between rounds.

    >>> ratio([10.0, 30.0], [5.0, 10.0]).value
    2.5
    """
    return figure([a / b for a, b in zip(ours, theirs, strict=True)], "times")


def interleaved(measurements: Mapping[str, Measurement], rounds: int, what: str) -> dict[str, list[float]]:
    """Take every measurement once a round; each round begins with another one.

    :returns: the samples of each, by name.
    """
    samples: dict[str, list[float]] = {name: [] for name in measurements}
    names = list(measurements)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            progress(f"{what}: round {number + 1} of {rounds}, {name}")
            samples[name].append(measurements[name]())
            progress(f"{what}: round {number + 1} of {rounds}, {name}: {samples[name][-1]:,.4g}")
    return samples


def progress(text: str) -> None:
    """Say on stderr what goes on: one line that is overwritten on a terminal."""
    end = "" if sys.stderr.isatty() else "\n"
    start = "\r\x1b[2K" if sys.stderr.isatty() else ""
    print(start + text, end=end, file=sys.stderr, flush=True)


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python, ctxflow (with the commit, and whether files differ from it) and installed packages."""
    packages = list(packages)
    found = reproductions.versions(packages)
    describe = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    with contextlib.suppress(OSError):
        told = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        found["ctxflow"] = f"{found['ctxflow']} {told.stdout}".strip()
    for name in packages:
        if name not in found:
            progress(f"{name} is not installed: left out")
    return found


def report(
    benchmark: str,
    figures: Mapping[str, Figure],
    packages: Mapping[str, str],
    as_json: bool,
    more: Mapping[str, object] | None = None,
) -> None:
    """Print the figures: one JSON object, or a table; and what else there is to say of them."""
    if sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr)
    if as_json:
        values = {name: dataclasses.asdict(each) for name, each in figures.items()}
        facts = {"machine": machine(), "versions": packages, **(more or {})}
        print(json.dumps({"benchmark": benchmark, **facts, "figures": values}))
        return
    console = Console()
    console.print(table(benchmark, figures))
    facts = {**machine(), **packages, **(more or {})}
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), style="dim")


def table(benchmark: str, figures: Mapping[str, Figure]) -> Table:
    """The figures for a terminal."""
    shown = Table(title=benchmark)
    for name in ("figure", "median", "spread", "unit", "better", "rounds"):
        shown.add_column(name, justify="right" if name in ("median", "spread", "rounds") else "left")
    for name, each in figures.items():
        shown.add_row(name, f"{each.value:,}", f"{each.spread:,}", each.unit, each.better, str(each.n))
    return shown
