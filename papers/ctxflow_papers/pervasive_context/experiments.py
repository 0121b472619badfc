"""Running the experiments on the simulated engine; settings.py has their settings."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from ctxflow.executors.simulated import SimulatedEngine
from ctxflow.scheduler import Policies
from ctxflow.simulator.simulation import Listener, Simulation, SimulationOutcome, Workload, tiers_of
from ctxflow.simulator.tree_staging import TreeStaging
from ctxflow_papers.pervasive_context.settings import FAN_OUT, ORIGINS, PEER_BANDWIDTH, Settings


@dataclasses.dataclass(frozen=True)
class Run:
    """An experiment with its outcomes, one a draw.

    :ivar tasks: seconds of the first draw's tasks.
    """

    settings: Settings
    outcomes: Sequence[SimulationOutcome]
    tasks: Sequence[float]

    @property
    def ended(self) -> bool:
        """Whether it is ended before all is done: what counts is then what was done."""
        return self.settings.until < math.inf

    @property
    def workers(self) -> float:
        """Connected on average."""
        return statistics.median(each.account.worker_seconds / each.seconds for each in self.outcomes)

    @property
    def seconds(self) -> float:
        """Until the end."""
        return statistics.median(each.seconds for each in self.outcomes)


def play(settings: Settings, seed: int = 0, listener: Listener | None = None) -> SimulationOutcome:
    """Run one experiment.

    :param listener: told of every event with the commands that it led to.

    >>> from ctxflow_papers.pervasive_context.settings import fixed
    >>> small = Settings("small", batching=fixed(50), items=20_000)
    >>> play(small, seed=1).seconds == play(small, seed=1).seconds
    True
    """
    machines = settings.machines()
    staging = TreeStaging({"context": settings.files}, ORIGINS, PEER_BANDWIDTH, FAN_OUT)
    engine = SimulatedEngine(machines, settings.times, staging, seed)
    policies = Policies.chosen({"batching": settings.batching})
    workload = Workload.of(settings.items, files=bool(settings.files), level=settings.level)
    return Simulation(engine, policies, workload, tiers_of(machines), tick=5.0, listener=listener).run(settings.until)
