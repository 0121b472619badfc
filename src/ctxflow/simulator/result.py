"""What comes of a simulated run: the figures that people ask for.

What does not live here: making the simulation (building.py), and many of them (studies.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ctxflow.simulator.bounds import mixed_fluid_seconds
from ctxflow.simulator.building import Built, build
from ctxflow.simulator.scenario import Scenario
from ctxflow.simulator.simulation import Listener


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a simulated run. Seconds of virtual time; bytes.

    :ivar seconds: the makespan, or the time at which the simulation was ended.
    :ivar finished: whether every item was settled by then.
    :ivar fluid_seconds: no scheduler could have been done earlier with these workers.
    :ivar workers: connected, averaged over the run.
    :ivar lost_items: items of batches that an eviction ended, and `lost_seconds` of work on them.
    :ivar wasted_items: items that duplicates answered second.
    :ivar dead: items that were given up.
    :ivar raised: calls that raised and builds that failed, on bad hosts.
    :ivar moved: bytes that came from each origin, and from "peers".
    """

    seconds: float
    finished: bool
    items: int
    done: int
    fluid_seconds: float
    workers: float
    joined: int
    evicted: int
    batches: int
    duplicates: int
    wasted_items: int
    lost_items: int
    lost_seconds: float
    loads: int
    load_seconds: float
    stage_seconds: float
    moved: Mapping[str, float]
    dead: int = 0
    raised: int = 0

    @property
    def items_per_second(self) -> float:
        """Items done, over all of the run."""
        return self.done / self.seconds if self.seconds else 0.0

    @property
    def efficiency(self) -> float:
        """The fluid bound divided by the makespan: 1 is what nobody beats."""
        return self.fluid_seconds / self.seconds if self.seconds and self.finished else 0.0


def play(scenario: Scenario, seed: int = 0, until: float = math.inf, listener: Listener | None = None) -> Result:
    """Simulate it once.

    :param until: when to end at the latest, in virtual seconds.
    :param listener: told of every event with its commands.

    >>> from ctxflow.sites import Site
    >>> from ctxflow.simulator.workload_file import WorkloadFile
    >>> workload = WorkloadFile(apps=[{"items": 100, "spread": 0}], contexts=[{"load_spread": 0}], dispatch_seconds=0,
    ...     matching={"seconds": 0})
    >>> result = play(Scenario(Site(workers=2, batching={"policy": "fixed", "size": 10}), workload))
    >>> result.seconds, result.fluid_seconds, result.loads
    (65.0, 50.0, 2)
    """
    return run(build(scenario, seed, listener), until)


def run(built: Built, until: float = math.inf) -> Result:
    """Run a simulation that is ready, and say what came of it."""
    outcome = built.simulation.run(until)
    account, seconds = outcome.account, outcome.seconds
    return Result(
        seconds=seconds,
        finished=outcome.done + outcome.dead == outcome.items,
        items=outcome.items,
        done=outcome.done,
        fluid_seconds=mixed_fluid_seconds(outcome.presence, built.times.item, built.items),
        workers=account.worker_seconds / seconds if seconds else 0.0,
        joined=account.joined,
        evicted=account.evicted,
        batches=outcome.batches,
        duplicates=outcome.duplicates,
        wasted_items=outcome.wasted_items,
        lost_items=account.lost_items,
        lost_seconds=account.lost_seconds,
        loads=account.loads,
        load_seconds=account.load_seconds,
        stage_seconds=account.stage_seconds,
        moved={name: size for name, size in built.staging.moved.items() if size},
        dead=outcome.dead,
        raised=account.raised,
    )
