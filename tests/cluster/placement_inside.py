"""Runs inside the testbed: two models whose demand turns round half way, on a site that places them by plan.

It writes one JSON object a line: when demand changes, on the run's clock, and at last what came of it. Its event log is
copied to where it is told.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from ctxflow import ContextExecutor, batch_app, context

sys.path.append(str(Path(__file__).resolve().parents[1]))
from waiting import finished

WEIGHTS = {"small": 200_000, "large": 5_000_000}  # Bytes.
# Seconds of building; by tier, of an item; items a second, before and after the change.
LOAD_SECONDS = {"small": 0.2, "large": 1.0}
GPUS = {"small": 1, "large": 2}
ITEM_SECONDS = {
    "small": {"single": 0.3, "pair": 0.25, "whole": 0.2},
    "large": {"pair": 0.6, "whole": 0.3},
}
DEMAND = {"small": (6.0, 1.0), "large": (0.5, 3.0)}
EVERY = 0.5  # Seconds between submissions.


def tell(**what: object) -> None:
    """Write a line."""
    print(json.dumps(what), flush=True)


def make_app(model: str, folder: Path):
    """The app of a model: an item takes as long as it does on the worker's tier."""
    weights = folder / model
    weights.write_bytes(os.urandom(WEIGHTS[model]))
    load_seconds, item_seconds = LOAD_SECONDS[model], ITEM_SECONDS[model]

    def build(weights: str) -> float:
        assert os.path.getsize(weights)
        time.sleep(load_seconds)
        return item_seconds.get(os.environ.get("CTXFLOW_TIER", ""), 0.3)

    build.__name__ = model
    recipe = context(gpus=GPUS[model], files={"weights": str(weights)})(build)

    @batch_app(recipe(), batch_size=4)
    def ask(seconds: float, items: list[int]) -> list[int]:
        time.sleep(seconds * len(items))
        return [item * item for item in items]

    return ask


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--site", required=True)
    parser.add_argument("--log", required=True, help="where the event log goes")
    parser.add_argument("--seconds", type=float, nargs=2, required=True, help="before and after the change")
    options = parser.parse_args()
    logging.basicConfig(format="%(relativeCreated)d %(name)s %(levelname)s %(message)s")
    folder = Path(tempfile.mkdtemp(prefix="placement-", dir=os.path.expanduser("~")))
    os.chdir(folder)
    apps = {model: make_app(model, folder) for model in WEIGHTS}
    executor = ContextExecutor(site=options.site)
    futures = []
    with executor:
        for part, seconds in enumerate(options.seconds):
            tell(part=part, time=executor.status().time)
            begun, sent = time.monotonic(), dict.fromkeys(apps, 0)
            while (elapsed := time.monotonic() - begun) < seconds:
                for model, app in apps.items():
                    more = int((elapsed + EVERY) * DEMAND[model][part]) - sent[model]
                    sent[model] += more
                    futures += [(item, app(item)) for item in range(more)]
                time.sleep(EVERY)
        ended = executor.status().time
        wrong = [item for item, future in futures if finished(future).result() != item * item]
        status, directory = executor.status(), Path(executor.calls.run.directory)
    shutil.copy(directory / "events.jsonl", options.log)
    tell(ended=ended, items=len(futures), wrong=wrong, done=status.items_done, dead=status.items_dead)
    os.chdir("/")
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
