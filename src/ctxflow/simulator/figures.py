"""The figures of an experiment, each beside the paper's, in the one form that all reproductions print.

What does not live here: anything that is measured.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxflow.host.processes import machine_memory
from ctxflow.version import __version__

Progress = Callable[[float, str], None]
"""Told how much is done, from 0 to 1, and what is being done."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """One number beside the paper's.

    :ivar value: the median of the samples, or the number itself.
    :ivar better: "higher" or "lower".
    :ivar spread: the largest sample less the smallest.
    :ivar n: how many samples it is of.
    :ivar paper: what the paper has in the same unit, None where it prints none.
    """

    value: float
    unit: str
    better: str = "higher"
    spread: float = 0.0
    n: int = 1
    paper: float | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked of an experiment.

    :ivar quick: a small one, to see that it runs.
    :ivar seed: of all its randomness.
    :ivar pictures: the folder that pictures go to, None for none.
    """

    quick: bool = False
    seed: int = 0
    pictures: Path | None = None
    progress: Progress = lambda done, what: None


Experiment = Callable[[Request], Mapping[str, Figure]]


def quantile(samples: Sequence[float], share: float) -> float:
    """The sample below which a share of them lies (nearest rank).

    :raises ValueError: if there are none.

    >>> quantile([4.0, 1.0, 3.0, 2.0], 0.5)
    2.0
    """
    if not samples:
        raise ValueError("there are no samples to take a quantile of")
    ordered = sorted(samples)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def rounded(value: float) -> float:
    """Four significant digits: what is beyond them is noise.

    >>> rounded(0.123456)
    0.1235
    """
    return float(f"{value:.4g}")


def median(samples: Sequence[float], unit: str, better: str, paper: float | None = None) -> Figure:
    """The median of some samples as a figure."""
    spread = rounded(max(samples) - min(samples))
    return Figure(rounded(statistics.median(samples)), unit, better, spread, len(samples), paper)


def report(paper: str, figures: Mapping[str, Figure]) -> dict[str, Any]:
    """All that a reproduction prints with --json."""
    values = {name: dataclasses.asdict(each) for name, each in figures.items()}
    return {"benchmark": f"reproduce-{paper}", "machine": machine(), "versions": versions(()), "figures": values}


def machine() -> dict[str, str | int | float]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(machine_memory() / 1e9, 1),
        "load": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.release()}",
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of Python, ctxflow and those of the packages that are installed."""
    found = {"python": platform.python_version(), "ctxflow": __version__}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
