"""Runs inside the testbed: two apps of items, whose calls overlap, on a site that a test chooses policies for.

First `--burst` items of one at once; then, with `--stream`, items of both by turns. It writes one JSON object: what
came of it, read off the run's event log.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from ctxflow import ContextExecutor, context, item_app

sys.path.append(str(Path(__file__).resolve().parents[1]))
from waiting import eventually, finished

WINDOW = 16
WORKERS = 4
ITEM_SECONDS = 1.0
LOAD_SECONDS = 2.0
EVERY = 0.25  # Seconds between two items of a stream.
SITE = """\
name = "windows"
engine = "taskvine"
python_environment = "/opt/ctxflow"
batching = {{policy = "fixed", window = {window}}}
routing = "{routing}"
scaling = "{scaling}"

[[tiers]]
workers = {workers}
cores = 1
memory_gb = 4
disk_gb = 10
"""


def make_app(name: str):
    """An app of items with a context of its own, which needs all of a worker's GPU."""

    async def build():
        time.sleep(LOAD_SECONDS)
        yield {"now": 0}

    build.__name__ = name

    @item_app(context(gpus=1)(build)())
    async def ask(engine, item: int) -> tuple[int, int]:
        engine["now"] += 1
        beside = engine["now"]
        await asyncio.sleep(ITEM_SECONDS)
        engine["now"] -= 1
        return item * item, beside

    return ask


def what_happened(directory: str) -> dict[str, object]:
    """From the event log: loads of each context, those after half of the answers, and the most workers asked for."""
    loads: collections.Counter[str] = collections.Counter()
    asked = [0]
    times: list[float] = []
    answers: list[float] = []
    with open(os.path.join(directory, "events.jsonl")) as file:
        next(file)  # Which says how the run decides.
        for line in map(json.loads, file):
            answers += [line["event"]["time"]] * (line["event"]["is"] == "BatchFinished")
            for command in line["commands"]:
                if command["is"] == "Load" and command["context"]:
                    loads[command["context"]] += 1
                    times.append(line["event"]["time"])
                elif command["is"] == "Acquire":
                    asked.append(command["workers"])
    half = answers[len(answers) // 2]
    return {"loads": sorted(loads.values()), "late": sum(time > half for time in times), "asked": max(asked)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--routing", default="context-affinity")
    parser.add_argument("--scaling", default="fixed")
    parser.add_argument("--burst", type=int, default=0, help="items of the first app at once")
    parser.add_argument("--stream", type=int, default=0, help="items of both, by turns")
    options = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="windows-", dir=os.path.expanduser("~"))
    os.chdir(directory)
    Path("site.toml").write_text(
        SITE.format(window=WINDOW, workers=WORKERS, routing=options.routing, scaling=options.scaling)
    )
    apps = [make_app("small"), make_app("large")]
    with ContextExecutor(site="site.toml") as executor:
        begun = time.monotonic()
        futures = [(item, apps[0](item)) for item in range(options.burst)]
        if options.stream:
            eventually(lambda: executor.status().workers == WORKERS)
        for number in range(options.stream):
            futures.append((number, apps[number % 2](number)))
            time.sleep(EVERY)
        answers = [(item, finished(future, within=240).result()) for item, future in futures]
        seconds, status, kept = time.monotonic() - begun, executor.status(), executor.calls.run.directory
    print(json.dumps({
        "seconds": seconds, "wrong": sum(answer[0] != item * item for item, answer in answers),
        "most": max(beside for _, (_, beside) in answers), "dead": status.items_dead, **what_happened(kept),
    }))  # fmt: skip
    os.chdir("/")
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
