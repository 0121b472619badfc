"""Runs inside the testbed: two apps with a context each, on workers of two regions; see test_regions.py.

It writes one JSON object a line: what goes on, at last what came of it, read off the run's event log.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

from ctxflow import ContextExecutor, batch_app, context

sys.path.append(str(Path(__file__).resolve().parents[1]))
from waiting import eventually

FILE_BYTES = 6 * 2**20
BATCH = 10
SITE = """\
name = "two-regions"
engine = "taskvine"
python_environment = "/opt/ctxflow"
taskvine = {{keepalive_interval = 1, keepalive_timeout = 5}}
start_when = 1.0
routing = "{routing}"
region = "near"

[[tiers]]
workers = 8
cores = 1
memory_gb = 4
disk_gb = 10

[[regions]]
name = "near"
hosts = ["host1*", "host2*"]

[[regions]]
name = "far"
hosts = ["host3*", "host4*"]
latency_ms = {{near = 1}}
bandwidth_mbit = {{near = {mbit}}}
"""


def tell(**what: object) -> None:
    """Write a line."""
    print(json.dumps(what), flush=True)


def make_app(number: int, seconds: float):
    """An app with a context of its own: a file of some MB, and a second to build."""
    path = os.path.abspath(f"weights{number}.bin")
    with open(path, "wb") as file:
        file.write(random.Random(number).randbytes(FILE_BYTES))

    @context(gpus=1, files={"weights": path})
    def checksum(weights: str, number: int) -> int:
        time.sleep(1.0)
        with open(weights, "rb") as file:
            return zlib.crc32(file.read()) + number

    @batch_app(checksum(number=number), batch_size=BATCH)
    def answer(salt: int, items: list[int]) -> list[int]:
        time.sleep(seconds * len(items))
        return [item + salt for item in items]

    with open(path, "rb") as file:
        return answer, zlib.crc32(file.read()) + number


def what_was_loaded(directory: str) -> dict[str, object]:
    """From the event log: how often contexts were loaded, on how many workers each, and who was where."""
    loads: collections.Counter[str] = collections.Counter()
    workers: dict[str, set[str]] = collections.defaultdict(set)
    regions: dict[str, str] = {}
    with open(os.path.join(directory, "events.jsonl")) as file:
        next(file)  # Which says how the run decides.
        for line in map(json.loads, file):
            if line["event"]["is"] == "WorkerJoined":
                worker = line["event"]["worker"]
                regions[worker["id"]] = worker["region"]
            for command in line["commands"]:
                if command["is"] == "Load" and command["context"]:
                    loads[command["context"]] += 1
                    workers[command["context"]].add(command["worker"])
    return {
        "loads": sorted(loads.values()),
        "workers": sorted(len(those) for those in workers.values()),
        "regions": sorted(regions.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--routing", required=True)
    parser.add_argument("--items", type=int, default=240, help="of each app")
    parser.add_argument("--seconds", type=float, default=0.05, help="that an item takes")
    parser.add_argument("--mbit", type=float, default=40.0, help="of the link between the regions")
    options = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="regions-", dir=os.path.expanduser("~"))
    os.chdir(directory)
    Path("site.toml").write_text(SITE.format(routing=options.routing, mbit=options.mbit))
    made = [make_app(number, options.seconds) for number in range(2)]
    ended = threading.Event()
    executor = ContextExecutor(site="site.toml")

    def watch() -> None:
        while not ended.wait(0.3):
            status = executor.status()
            tell(done=status.items_done, there=status.workers, lost=status.workers_lost)

    with executor:
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        futures = [[app(item) for item in range(options.items)] for app, _ in made]
        eventually(lambda: executor.status().items_done, within=300)
        begun = time.monotonic()
        wrong = sum(
            future.result() != item + salt
            for (_, salt), those in zip(made, futures, strict=True)
            for item, future in enumerate(those)
        )
        seconds, status, kept = time.monotonic() - begun, executor.status(), executor.calls.run.directory
    ended.set()
    watcher.join()
    tell(
        routing=options.routing, seconds=seconds, wrong=wrong, submitted=status.items_submitted, done=status.items_done,
        dead=status.items_dead, lost=status.workers_lost, **what_was_loaded(kept),
    )  # fmt: skip
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
