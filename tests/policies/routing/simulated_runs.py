"""Whole runs in virtual time for tests of policies, with events checked by the scheduler's invariants.

One in five while few items are open, in releases every one, else one in twenty: what is checked is all that is open,
and what is wrong stays so.
"""

import math

from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.scheduler import Policies
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Drawn, GpuTimes, Simulation, Workload, pools
from ctxflow.simulator.pools import MixedTimes
from suite import depth

REGIONS = [
    ev.RegionSpec("campus", {"north": 0.04}, {"north": 25e6}, power_price=0.3, home=True),
    ev.RegionSpec("north", {"campus": 0.04}, {"campus": 25e6}, power_price=0.1),
]


class Run:
    """A simulated run.

    :ivar loads: (time, worker, context) of every load; `calls`: (time, worker, app); `regions`: of the workers;
        `asked`: (time, tier, workers) that were asked for.
    """

    def __init__(
        self, routing, machines, arrivals, contexts=2, load=8.0, item=1.0, size=4, regions=REGIONS, scaling="fixed",
        tiers=None, shared=False, origins=(), tick=1.0,
    ):  # fmt: skip
        names = [f"c{number}" for number in range(contexts)]
        kinds = {(machine.tier, machine.gpu_model) for machine in machines}
        speed = {"fast": 1.0, "slow": 2.0, None: 1.0}
        times = MixedTimes(
            {f"a{n}": {kind: GpuTimes({"": item * speed[kind[1]]}) for kind in kinds} for n in range(contexts)},
            {name: {kind: Drawn(load) for kind in kinds} for name in names},
        )
        specs = [ev.ContextSpec(name, name, gpus=1) for name in names]
        apps = [
            ev.AppSpec(f"a{n}", f"a{n}", names[0] if shared else name, region=origins[n] if origins else "")
            for n, name in enumerate(names)
        ]
        policies = Policies.chosen(
            {"routing": routing, "batching": {"policy": "fixed", "size": size}, "scaling": scaling}
        )
        tiers = tiers or [ev.TierSpec("default", 0, len(machines), gpus=1)]
        self.loads, self.calls, self.regions, self.asked = [], [], {}, []
        self._heards = 0
        workload = Workload(specs, apps, sorted(arrivals))
        self.simulation = Simulation(
            SimulatedEngine(machines, times), policies, workload, tiers, listener=self._heard, regions=regions,
            tick=tick,
        )  # fmt: skip
        self.outcome = self.simulation.run()

    def _heard(self, event, commands):
        self._heards += 1
        each = depth.some(5, deeply=1) if len(self.simulation.scheduler.state.open) < 200 else 20
        if self._heards % each == 0:
            self.simulation.scheduler.validate()
        if isinstance(event, ev.WorkerJoined):
            self.regions[event.worker.id] = event.worker.region
        self.loads += [(event.time, c.worker, c.context) for c in commands if isinstance(c, cmd.Load)]
        self.asked += [(event.time, c.tier, c.workers) for c in commands if isinstance(c, cmd.Acquire)]
        self.calls += [(event.time, c.worker, c.app) for c in commands if isinstance(c, cmd.Run)]


def machine(name, region="campus", model=None, until=math.inf, since=0.0, tier="default"):
    return SimulatedMachine(name, model, tier, region, gpu_memory=10, available=pools.during(since, until))
