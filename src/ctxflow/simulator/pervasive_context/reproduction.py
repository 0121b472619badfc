"""The experiments as figures for `ctxflow reproduce`.

What does not live here: their settings and how they are run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ctxflow.simulator.figures import Figure, Request, rounded
from ctxflow.simulator.pervasive_context.experiments import rows
from ctxflow.simulator.pervasive_context.settings import EXPERIMENTS

QUICK = 3000
"""Items of each experiment in a quick run, whose times are not the paper's."""


def reproduce(request: Request) -> Mapping[str, Figure]:
    """Seconds of each experiment (pv5: inferences done): a `ctxflow.simulator.figures.Experiment`."""
    experiments = EXPERIMENTS
    if request.quick:
        experiments = tuple(dataclasses.replace(each, items=QUICK, paper=None) for each in EXPERIMENTS)
    figures: dict[str, Figure] = {}

    def tell(name: str) -> None:
        request.progress(len(figures) / len(experiments), name)

    for settings, row in zip(experiments, rows(experiments, request.seed, tell), strict=True):
        if settings.until < float("inf"):
            figures[f"{row.name}_done"] = Figure(row.done, "inferences")
        else:
            figures[f"{row.name}_s"] = Figure(rounded(row.seconds), "s", "lower", paper=row.paper)
    return figures
