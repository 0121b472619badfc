"""The experiments are run on the simulated engine, and set beside the paper's figures.

What does not live here: their settings (settings.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from ctxflow.executors.simulated import SimulatedEngine
from ctxflow.scheduler import Policies
from ctxflow.simulator.simulation import Listener, Simulation, SimulationOutcome, Workload, tiers_of
from ctxflow.simulator.tree_staging import TreeStaging
from ctxflow_papers.pervasive_context.settings import EXPERIMENTS, FAN_OUT, ORIGINS, PEER_BANDWIDTH, Settings


@dataclasses.dataclass(frozen=True)
class Row:
    """One experiment beside the paper's. Times in seconds.

    :ivar paper: None where only a figure of the paper shows it; `source` says whether it is printed or derived.
    :ivar ratio: ours divided by the paper's.
    :ivar done: inferences answered.
    :ivar workers: connected on average.
    :ivar fluid: when no scheduler could have been done earlier with these workers.
    """

    name: str
    seconds: float
    paper: float | None
    source: str
    ratio: float | None
    done: int
    workers: float
    fluid: float
    evicted: int
    lost_items: int
    loads: int


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


def row(settings: Settings, outcome: SimulationOutcome) -> Row:
    """An experiment's outcome beside the paper's."""
    return Row(
        settings.name,
        outcome.seconds,
        settings.paper,
        settings.paper_source,
        outcome.seconds / settings.paper if settings.paper else None,
        outcome.done,
        outcome.account.worker_seconds / outcome.seconds,
        outcome.fluid(settings.times.item),
        outcome.account.evicted,
        outcome.account.lost_items,
        outcome.account.loads,
    )


def rows(
    experiments: Iterable[Settings] = EXPERIMENTS, seed: int = 0, tell: Callable[[str], None] = lambda name: None
) -> Iterator[Row]:
    """Run experiments one after the other.

    :param tell: told the name of each before it begins.
    """
    for settings in experiments:
        tell(settings.name)
        yield row(settings, play(settings, seed))
