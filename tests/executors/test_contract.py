"""The engines' contract suite on the embedded engine."""

import os
import signal

from ctxflow.executors.embedded import EmbeddedEngine
from ctxflow.host.processes import descendants
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
