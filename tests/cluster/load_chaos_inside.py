"""Runs inside the testbed: contexts that are built again and again, while test_load_chaos.py kills what it likes.

It begins where an earlier one of the same folder was killed, and writes one JSON object at its end: the answers of each
context. What is in a context's file is checked byte by byte, and so is what an earlier build left.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import sys
from pathlib import Path
from typing import Any

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.scheduler.run_state import Limits
from ctxflow.sites import load_site

sys.path.append(str(Path(__file__).resolve().parents[1]))
from waiting import patience

SITE = Path(__file__).resolve().parents[2] / "site-configs" / "testbed.toml"
MANY = Limits(losses=100_000, crashes=100_000, failures=100_000, retry_seconds=0.1)
NUMBERS = (3, 5, 7, 11)
FILE_BYTES = 400_000


def app_of(number: int, level: str) -> Any:
    """An app whose context is a number, which fills its file; those of level "partial" are built for each call."""
    path = os.path.abspath(f"content-{number}")
    with open(path, "wb") as file:
        file.write(bytes([number]) * FILE_BYTES)

    @context(files={"content": path}, artifacts={"made": "CHAOS_MADE"}, preload=["fractions", "statistics"])
    def content(content: str, size: int) -> int:
        import os

        with open(content, "rb") as file:
            data = file.read()
        made = os.environ.get("CHAOS_MADE")  # There is none at level "partial".
        if made is not None:
            place = os.path.join(made, "made")
            if os.path.exists(place):
                with open(place, "rb") as file:
                    assert file.read() == data, "this is not what an earlier build made"
            else:
                with open(place, "wb") as file:
                    file.write(data)
        assert data == data[:1] * size, "this is not the file"
        return data[0]

    @batch_app(content(size=FILE_BYTES), batch_size=1, level=level)
    def times(content: int, items: list[int]) -> list[tuple[int, str]]:
        import time
        import uuid

        time.sleep(0.02)
        return [(content * item, uuid.uuid4().hex) for item in items]

    return times


def main() -> None:
    """One run, or what is left of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--items", type=int, default=20, help="of each context")
    parser.add_argument("--cache", required=True)
    given = parser.parse_args()
    os.makedirs(given.folder, exist_ok=True)
    os.chdir(given.folder)
    os.environ["CTXFLOW_ARTIFACTS"] = os.path.abspath("user")
    tier = {"name": "one", "provider": "condor", "workers": 3, "cores": 1, "gpus": 0, "memory_gb": 2, "disk_gb": 2}
    site = load_site(SITE, tiers=[tier | {"cache": given.cache, "cache_gb": 0.0012}])
    levels = ("partial", "partial", "pervasive", "pervasive")
    apps = [app_of(number, level) for number, level in zip(NUMBERS, levels, strict=True)]

    def answers(place: int) -> list[tuple[int, str]]:
        return list(apps[place].map(range(given.items), resume=f"results-{NUMBERS[place]}.jsonl"))

    with ContextExecutor(site, workers=3, limits=MANY), concurrent.futures.ThreadPoolExecutor(len(apps)) as pool:
        found = list(pool.map(answers, range(len(apps)), timeout=patience(500)))
    print(json.dumps(found))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
