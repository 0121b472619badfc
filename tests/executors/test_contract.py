"""The engines' contract suite on the embedded engine, and on the simulated one, which executes nothing."""

import os
import signal

import pytest

from ctxflow.executors.embedded import EmbeddedEngine
from ctxflow.executors.simulated import SimulatedEngine, SimulatedMachine
from ctxflow.host.linux import descendants
from ctxflow.scheduler import commands as cmd
from ctxflow.simulator import Drawn, GpuTimes
from ctxflow.testing import worker_calls as work
from ctxflow.testing.contract_hooks import ContractRun
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
        run.poll(0.595)

    def evict(self, engine, worker):
        engine.evict(worker)

    def notify(self, engine, worker):
        engine.evict(worker, notice=0.1)


@pytest.fixture
def played(tmp_path):
    return ContractRun(TestSimulated().make(), str(tmp_path), TestSimulated.tier)


def test_a_run_whose_contexts_can_be_unloaded_serves_another_scene(played):
    first, second = played.start(2)
    context = played.declare(work.slow, 0)
    for worker in (first, second):
        played.load(worker, context)
    assert played.settle() and not played.events
    assert played.start() == [first], "as many workers as the scene asks for"
    assert played.load(first, context), "it has to be built again"
    assert played.settle()
    assert len(played.start(2)) == 2


@pytest.mark.parametrize(
    "disturb",
    [
        lambda run, worker, context: run.engine.evict(worker),
        lambda run, worker, context: run.execute(cmd.Release(worker)),
        lambda run, worker, context: run.run(worker, context, work.sleep_with_context, [60]),
        lambda run, worker, context: run.execute(cmd.Load(worker, run.declare(work.slow, 60))),
    ],
    ids=["evicted", "released", "calling", "building"],
)
def test_a_run_that_is_not_as_it_was_serves_no_other(played, disturb):
    disturb(played, *played.built())
    assert not played.settle()
