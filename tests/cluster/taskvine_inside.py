"""Runs inside the testbed: the engines' contract suite against the TaskVine engine with real vine_workers."""

from __future__ import annotations

import os
from typing import Any

import psutil
import pytest

from ctxflow.executors.taskvine.engine import TaskVineEngine
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier
from ctxflow.testing.engines import EngineContract

_TIER = Tier(name="local", provider="local", workers=2, cores=1, memory_gb=2, disk_gb=2, gpus=0)


def _site() -> Site:
    return Site(
        engine="taskvine",
        tiers=(_TIER,),
        taskvine={"address": "127.0.0.1", "keepalive_interval": 1, "keepalive_timeout": 5},
    )


class TestTaskVineContract(EngineContract):
    own_folders = True

    def make(self) -> TaskVineEngine:
        return TaskVineEngine(_site())

    def evict(self, engine: Any, worker: str) -> None:
        tier, job = engine.worker_jobs()[worker]
        engine._acquirer.provider(tier).evict(job)

    def notify(self, engine: Any, worker: str) -> None:
        tier, job = engine.worker_jobs()[worker]
        engine._acquirer.provider(tier).notify(job)

    def processes(self, engine: Any) -> list[int]:
        return [child.pid for child in psutil.Process().children(recursive=True)]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-p", "no:cacheprovider", *os.sys.argv[1:]]))
