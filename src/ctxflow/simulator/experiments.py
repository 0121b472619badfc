"""What an experiment for `ctxflow reproduce` is, and where experiments are found.

A distribution offers one with an entry point in the group `ctxflow.experiments`, whose value is an `Experiment` and
whose name is its name; those of five papers are in `ctxflow-papers`, in the folder `papers/` of ctxflow's tree:

    [project.entry-points."ctxflow.experiments"]
    my-paper = "my_package:EXPERIMENT"

What an experiment measures it gives as figures, each beside the paper's.
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

from ctxflow.errors import UsageError
from ctxflow.host.linux import machine_memory
from ctxflow.installing import __version__, how_to_install_papers

GROUP = "ctxflow.experiments"
Tell = Callable[[float, str], None]
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
class ExperimentRequest:
    """The arguments of an experiment.

    :ivar quick: a small one, to see that it runs.
    :ivar seed: of all its randomness.
    :ivar pictures: the folder that pictures go to, None for none.
    """

    quick: bool = False
    seed: int = 0
    pictures: Path | None = None
    progress: Tell = lambda done, what: None


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The evaluation of a paper.

    To import the module that has it is quick: what it runs is imported when it is run.

    :ivar name: what the command line calls it.
    :ivar help: what the paper is about, in a line.
    :ivar run: runs all of it.
    """

    name: str
    help: str
    run: Callable[[ExperimentRequest], Mapping[str, Figure]]


def experiment_names() -> list[str]:
    """Return the names of the experiments that are installed, without importing any."""
    return sorted({point.name for point in importlib.metadata.entry_points(group=GROUP)})


def find_experiment(name: str) -> Experiment:
    """Return an experiment that is installed.

    :raises UsageError: if none is installed, saying how to install those of the papers, or none of this name.
    """
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.name == name:
            found = point.load()
            if not isinstance(found, Experiment):
                raise TypeError(f"the entry point {name} in {GROUP} is {point.value}, which is no Experiment")
            return found
    known = experiment_names()
    if not known:
        raise UsageError(f"the papers' experiments are not installed here: {how_to_install_papers()}")
    raise UsageError(f"there is no {name!r} here: choose one of {', '.join(known)}")


def quantile(samples: Sequence[float], share: float) -> float:
    """Return the quantile of samples by nearest rank.

    :raises ValueError: if there are none.

    >>> quantile([4.0, 1.0, 3.0, 2.0], 0.5)
    2.0
    """
    if not samples:
        raise ValueError("there are no samples to take a quantile of")
    ordered = sorted(samples)
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1]


def rounded(value: float) -> float:
    """Round to four significant digits: what is beyond them is noise.

    >>> rounded(0.123456)
    0.1235
    """
    return float(f"{value:.4g}")


def median(samples: Sequence[float], unit: str, better: str, paper: float | None = None) -> Figure:
    """Return the median of samples as a figure."""
    spread = rounded(max(samples) - min(samples))
    return Figure(rounded(statistics.median(samples)), unit, better, spread, len(samples), paper)


def report(paper: str, figures: Mapping[str, Figure]) -> dict[str, Any]:
    """Return all that a reproduction prints with --json."""
    values = {name: dataclasses.asdict(each) for name, each in figures.items()}
    return {"benchmark": f"reproduce-{paper}", "machine": machine(), "versions": versions(()), "figures": values}


def machine() -> dict[str, str | int | float]:
    """Return the machine and its load: what the figures were measured on."""
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
    """Return the versions of Python, ctxflow and those of the packages that are installed."""
    found = {"python": platform.python_version(), "ctxflow": __version__}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
