"""The engines' contract suite on the embedded engine, and on the simulated one, which executes nothing."""

import os
import signal

from ctxflow.executors.embedded import EmbeddedEngine
from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.host.linux import descendants
from ctxflow.simulator import Drawn, GpuTimes
from ctxflow.testing.engines import EngineContract


class TestEmbedded(EngineContract):
    def make(self):
        return EmbeddedEngine(workers=2, rejoin_seconds=0.05)

    def evict(self, engine, worker):
        assert engine.evict(worker) == worker

    def notify(self, engine, worker):
        os.kill(engine.worker_pids()[worker], signal.SIGTERM)

    def processes(self, engine):
        hosts = list(engine.worker_pids().values())
        return hosts + [pid for host in hosts for pid in descendants(host)]


class TestSimulated(EngineContract):
    executes = False
    tier = "default"

    def make(self):
        times = GpuTimes({"": 0.01}, loading=Drawn(0.25), matching=Drawn(0.5))
        return SimulatedEngine([SimulatedMachine("a"), SimulatedMachine("b")], times, salvage={"app"})

    def reach(self, run, there):
        run.events += run.engine.poll(0.595)

    def evict(self, engine, worker):
        engine.evict(worker)

    def notify(self, engine, worker):
        engine.evict(worker, notice=0.1)
