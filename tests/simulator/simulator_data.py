"""What the simulator's tests share: policies, a small pool, a run."""

from ctxflow.executors.simulated import SimulatedEngine
from ctxflow.scheduler import Policies
from ctxflow.simulator import Drawn, GpuTimes, Simulation, Workload, pools
from ctxflow.simulator.simulation import tiers_of

TIMES = GpuTimes({"fast": 0.1, "slow": 0.4}, item_spread=0.5, loading=Drawn(5.0, 2.0, 1.0), matching=Drawn(2.0))


def policies(batching):
    return Policies.chosen({"batching": batching})


def pool(available, each=3):
    return pools.machines(each, "fast", available) + pools.machines(each, "slow", available)


def prepared(batching, machines, times=TIMES, workload=None, staging=None, seed=0, notice=0.0, salvage=(), **options):
    """A simulation; by default of 2,000 items without files."""
    engine = SimulatedEngine(machines, times, staging, seed, notice, salvage)
    return Simulation(engine, policies(batching), workload or Workload.of(2000), tiers_of(machines), **options)


def play(batching, machines, items=2000, until=float("inf"), **options):
    """What comes of it."""
    options.setdefault("workload", Workload.of(items))
    return prepared(batching, machines, **options).run(until)


class Clock:
    """Timers to be stepped by hand."""

    def __init__(self):
        self.now = 0.0
        self._due = []
        self._order = 0

    def at(self, time, action, *values):
        self._order += 1
        self._due.append((time, self._order, action, values))

    def run(self, until=float("inf")):
        while self._due and min(self._due)[0] <= until:
            due = min(self._due)
            self._due.remove(due)
            self.now = due[0]
            due[2](*due[3])
        self.now = max(self.now, until) if until < float("inf") else self.now
