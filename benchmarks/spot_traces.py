"""Batches on recorded spot markets, for batching.py: a trace's nodes, with the pervasive-context paper's calibration.

Each node is an A10 that stages, unpacks and loads the paper's context whenever it comes; files go from worker to
worker. Of several nodes the last that came goes first. All policies meet the same nodes, losses and loads.
What does not live here: what is printed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.scheduler import Policies, commands, events
from ctxflow.simulator import Simulation, SimulationOutcome, TreeStaging, Workload, pools
from ctxflow.simulator.simulation import tiers_of
from ctxflow_papers.pervasive_context.settings import (
    A10,
    FAN_OUT,
    ITEM_SECONDS,
    ITEMS,
    ORIGINS,
    PEER_BANDWIDTH,
    Settings,
    fixed,
)

FIXED = {"fixed1000": fixed(1000), "fixed100": fixed(100)}
AHEAD = 7200.0
"""Seconds of work that is always queued: its end is never near."""


class Ready:
    """Seconds in which workers hold the context: a `Listener`."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._total = 0.0

    def __call__(self, event: events.Event, answer: Sequence[commands.Command]) -> None:
        """See an event."""
        if isinstance(event, events.ContextReady):
            self._since[event.worker] = event.time
        elif isinstance(event, events.WorkerLost) and event.worker in self._since:
            self._total += event.time - self._since.pop(event.worker)

    def until(self, end: float) -> float:
        """Their sum, if nobody is lost from now until the end."""
        return self._total + sum(end - since for since in self._since.values())


@dataclasses.dataclass(frozen=True)
class Trace:
    """How many nodes there were when."""

    name: str
    steps: Sequence[tuple[float, int]]

    @classmethod
    def read(cls, path: Path) -> Trace:
        """A SkyPilot trace, named by its nodes and zone."""
        steps = pools.spot_steps(path)
        zone = path.stem.split("_")[3]
        return cls(f"{max(count for _, count in steps)}x_{zone}", steps)

    @property
    def nodes(self) -> int:
        """The most that there were."""
        return max(count for _, count in self.steps)

    @property
    def end(self) -> float:
        """Its length in seconds."""
        return self.steps[-1][0]

    @property
    def evictions(self) -> int:
        """How many nodes were taken."""
        counts = [count for _, count in self.steps]
        return sum(max(0, before - after) for before, after in itertools.pairwise(counts))

    def simulation(
        self, batching: Any, arrivals: Sequence[tuple[float, str, int]], tick: float, **more: Any
    ) -> Simulation:
        """A run on its nodes."""
        machines = pools.with_counts([SimulatedMachine(f"node{n}", A10) for n in range(self.nodes)], self.steps)
        settings = Settings("spot")
        staging = TreeStaging({"context": settings.files}, ORIGINS, PEER_BANDWIDTH, FAN_OUT)
        engine = SimulatedEngine(machines, settings.times, staging)
        policies = Policies.chosen({"batching": batching})
        workload = dataclasses.replace(Workload.of(1, files=True), arrivals=arrivals)
        return Simulation(engine, policies, workload, tiers_of(machines), tick=tick, **more)

    def sustained(self, batching: Any) -> tuple[int, float]:
        """Inferences done over the whole trace with a queue that never ends; and how many there would have been if all
        workers had done nothing else from the moment that they held the context until they were taken."""
        seconds = ITEM_SECONDS[A10]
        arrivals = [(0.0, "app", int(self.nodes * AHEAD / seconds))]
        for (begin, count), (end, _) in itertools.pairwise(self.steps):
            if count:
                arrivals.append((begin, "app", int(count * (end - begin) / seconds)))
        ready = Ready()
        done = self.simulation(batching, arrivals, 30.0, listener=ready).run(self.end).done
        return done, ready.until(self.end) / seconds

    def job(self, batching: Any, start: float) -> SimulationOutcome:
        """The paper's 150,000 inferences, begun at a time of the trace."""
        passed = max(n for n, (begin, _) in enumerate(self.steps) if begin <= start)
        rest = Trace(self.name, [(max(0.0, begin - start), count) for begin, count in self.steps[passed:]])
        return rest.simulation(batching, [(0.0, "app", ITEMS)], 5.0).run(rest.end)


def compare(trace: Trace, jobs: int, tell: Callable[[str], None]) -> dict[str, float]:
    """`opportunistic` against fixed batches on a trace: how many times their useful inferences a second."""
    tell(f"{trace.name}: opportunistic")
    ours, most = trace.sustained("opportunistic")
    found = {"evictions_per_hour": 3600 * trace.evictions / trace.end, "vs_bound": ours / most}
    for name, batching in FIXED.items():
        tell(f"{trace.name}: {name}")
        done, most = trace.sustained(batching)
        found[f"vs_{name}"], found[f"bound_vs_{name}"] = ours / done, most / done
    starts = [0.95 * trace.end * number / jobs for number in range(jobs)]
    tell(f"{trace.name}: {jobs} jobs")
    rates = {}
    for name, batching in {"ours": "opportunistic", **FIXED}.items():
        outcomes = [trace.job(batching, start) for start in starts]
        rates[name] = sum(each.done for each in outcomes) / sum(each.seconds for each in outcomes)
    return found | {f"job_vs_{name}": rates["ours"] / rates[name] for name in FIXED}
