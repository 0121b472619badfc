"""Runs inside the testbed: the engines' contracts on sessions and items in flight, and sessions that wander.

`sessions_inside.py contract` is the contract; `wander --site SITE` and `burst --site SITE` write one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ctxflow import ContextExecutor, context, session_app
from ctxflow.executors.taskvine.engine import TaskVineEngine
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier
from ctxflow.testing.item_contract import ItemContract
from ctxflow.testing.parking_contract import ParkingContract
from ctxflow.testing.session_contract import SessionContract
from ctxflow.testing.thread_contract import ThreadContract
from ctxflow.testing.wandering import Wandering, take_all, walk

sys.path.append(str(Path(__file__).resolve().parents[1]))
from waiting import eventually, patience

BOOT_SECONDS = 6.0
BURST_WORKERS = 4  # At least: so many are waited for.
_TIER = Tier(name="local", provider="local", workers=2, cores=1, memory_gb=2, disk_gb=2, gpus=0)


class TestTaskVineSessions(SessionContract):
    def make(self) -> TaskVineEngine:
        return TaskVineEngine(Site(engine="taskvine", tiers=(_TIER,), taskvine={"address": "127.0.0.1"}, slots=2))

    def notify(self, engine: Any, worker: str) -> None:
        tier, job = engine.worker_jobs()[worker]
        engine._acquirer.provider(tier).notify(job)


class TestTaskVineItems(ItemContract):
    make = TestTaskVineSessions.make
    notify = TestTaskVineSessions.notify


class TestTaskVineThreads(ThreadContract):
    make = TestTaskVineSessions.make
    notify = TestTaskVineSessions.notify


class TestTaskVineParking(ParkingContract):
    make = TestTaskVineSessions.make


def wander(site: str, sessions: int, chunks: int, moves: int, evictions: int) -> None:
    """Sessions over the site's workers, moved, suspended and evicted meanwhile."""
    placement = Wandering(per_second=moves / 12, at_most=moves)
    os.chdir(tempfile.mkdtemp())
    with ContextExecutor(site, workers=6, sessions=placement) as executor:
        stop, taken = threading.Event(), []

        def evict() -> None:
            luck = random.Random(3)
            while len(taken) < evictions and not stop.wait(2.0):
                jobs = executor.engine.worker_jobs()
                if len(jobs) > 1:
                    _, job = jobs[luck.choice(sorted(jobs))]
                    how = ["condor_vacate_job", *(["-fast"] if len(taken) % 2 else []), job]
                    subprocess.run(how, check=True, capture_output=True)
                    taken.append(job)

        first = walk(0.0).open(0)
        first.take(patience())  # Somebody is there.
        first.close()
        thread = threading.Thread(target=evict, daemon=True)
        thread.start()
        # Long enough that some are, on a machine that may be busy.
        walked = take_all(walk(0.05), sessions, chunks, suspensions=sessions // 2, suspended=3.0)
        stop.set()
        thread.join()
        run = executor.run
        assert run is not None
        run.validate()
        counters = run._scheduler.state.counters
        hosts = {event.host for event in run._scheduler.state.workers.values()}
        print(
            json.dumps(
                {
                    "right": walked.right,
                    "wrong": walked.wrong,
                    "errors": walked.errors,
                    "seconds": round(walked.seconds, 1),
                    "moves": placement.moves,
                    "migrations": counters.migrations,
                    "suspensions": counters.suspensions,
                    "evictions": len(taken),
                    "lost": counters.lost,
                    "steps": counters.steps,
                    "hosts": sorted(hosts),
                }
            )
        )


@context
def nothing() -> None:
    """A model stands here as a rule."""


@session_app(nothing(), chunk_target=0.3, ahead=2)
def talk(_: None, states: list[Any], prompts: list[Any]) -> list[tuple[int, int]]:
    """A step takes longer for more sessions: three meet the target."""
    time.sleep(0.09 * len(states))
    return [((state or 0) + 1, (state or 0) + 1) for state in states]


def burst(site: str, sessions: int) -> None:
    """Few sessions, then many for a time, then few: what is asked of the factory, and what became of it."""
    os.chdir(tempfile.mkdtemp())
    scaling = {"policy": "closed-loop", "sessions_per_worker": 4, "boot_seconds": BOOT_SECONDS}
    with ContextExecutor(site, workers=6, sessions="turboserve", scaling=scaling) as executor:
        quiet = talk.open()
        quiet.take(patience())
        more = [talk.open() for _ in range(1, sessions)]

        def all_are_there() -> bool:
            for session in (quiet, *more):
                session.take(patience())
            return executor.status().workers >= BURST_WORKERS

        def one_is_left() -> bool:
            quiet.take(patience())
            return executor.status().workers <= 1

        eventually(all_are_there, within=200, pause=0.001)
        for session in more:
            session.close()
        eventually(one_is_left, within=200, pause=0.001)
        run = executor.run
        assert run is not None
        run.validate()
        directory = os.path.abspath(run.directory)
    asked, joined = [], []
    with open(os.path.join(directory, "events.jsonl"), encoding="utf-8") as file:
        next(file)  # Which says how the run decides.
        for line in map(json.loads, file):
            event = line["event"]
            asked += [[event["time"], c["workers"]] for c in line["commands"] if c["is"] == "Acquire"]
            if event["is"] in ("WorkerJoined", "WorkerLost"):
                joined.append([event["time"], 1 if event["is"] == "WorkerJoined" else -1])
    print(json.dumps({"asked": asked, "joined": joined, "boot_seconds": BOOT_SECONDS, "directory": directory}))


def main() -> int:
    """Do what is asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["contract", "wander", "burst"])
    parser.add_argument("--site", default="")
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--moves", type=int, default=60)
    parser.add_argument("--evictions", type=int, default=4)
    given = parser.parse_args()
    if given.what == "contract":
        words = ["-q", "--noconftest", "-p", "no:cacheprovider", "--timeout", f"{patience(60)}"]
        return int(pytest.main([__file__, *words]))
    if given.what == "burst":
        burst(given.site, given.sessions)
        return 0
    wander(given.site, given.sessions, given.chunks, given.moves, given.evictions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
