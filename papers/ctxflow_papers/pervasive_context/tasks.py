"""How long tasks took, as the paper's Table 2 counts it."""

from __future__ import annotations

import array
import statistics
from collections.abc import Mapping, Sequence

from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

TABLE_2: Mapping[str, tuple[float, float, float, float]] = {
    "pv3_1": (15.10, 27.26, 5.55, 390.03),
    "pv4_1": (0.32, 0.13, 0.0008, 15.25),
    "pv3_100": (46.78, 32.88, 5.93, 195.89),
    "pv4_100": (31.91, 9.3, 0.0008, 79.05),
}
"""Printed: mean, standard deviation, least and most seconds of a task."""

STATISTICS = ("mean", "deviation", "least", "most")


class TaskTimes:
    """Seconds of every task that came to its end: a `ctxflow.simulator.simulation.Listener`.

    A task is a call; where nothing lives on from task to task, also the building of the context before it.

    :param level: what workers keep of the context.
    """

    def __init__(self, level: str) -> None:
        self.seconds = array.array("d")
        self._builds = level != ev.PERVASIVE
        self._loads: dict[str, float] = {}

    def __call__(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        """See an event."""
        if isinstance(event, ev.BatchFinished):
            self.seconds.append(event.seconds + self._loads.pop(event.worker, 0.0))
        elif self._builds and isinstance(event, ev.ContextReady):
            self._loads[event.worker] = event.seconds


def statistics_of(seconds: Sequence[float]) -> tuple[float, float, float, float]:
    """Mean, standard deviation, least and most.

    >>> statistics_of([1.0, 2.0, 3.0])
    (2.0, 1.0, 1.0, 3.0)
    """
    return statistics.fmean(seconds), statistics.stdev(seconds), min(seconds), max(seconds)
