"""The engines' contract on items in flight, on the embedded engine and the simulated one, which executes nothing."""

import os
import signal

from ctxflow.executors.embedded import EmbeddedEngine
from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.simulator import Drawn, GpuTimes
from ctxflow.testing.item_contract import ItemContract


class TestEmbedded(ItemContract):
    def make(self):
        return EmbeddedEngine(workers=2, rejoin_seconds=0.05)

    def notify(self, engine, worker):
        os.kill(engine.worker_pids()[worker], signal.SIGTERM)


class TestSimulated(ItemContract):
    executes = False
    tier = "default"

    def make(self):
        times = GpuTimes({"": 0.01}, loading=Drawn(0.25), matching=Drawn(0.5))
        return SimulatedEngine([SimulatedMachine("a"), SimulatedMachine("b")], times)

    def notify(self, engine, worker):
        engine.evict(worker, notice=0.1)
