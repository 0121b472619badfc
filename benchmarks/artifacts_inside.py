"""The part of artifacts.py that runs in the testbed: a worker that builds on one host, and its successor on another.

The worker builds a compiled model on host1 and answers a call; then its job is sent to host2, where its successor does
the same. It prints one JSON object: the parts of both loads, the seconds of both first calls, and what staging.jsonl
has of the artifacts. What does not live here: the model, and ratios (artifacts.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from artifacts import compiled_model, loads
from rejoin_inside import SITE, lines_of

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.sites import load_site

_PATIENCE = 240.0


def on(host: str) -> str:
    """Requirements of a job that is to run on one host."""
    return f'Machine == "{host}.testbed"'


@context(artifacts={"table": "MADE_TABLE"})
def table() -> Any:
    """Read what an earlier build left, or make it: it needs no compiler."""
    place = Path(os.environ["MADE_TABLE"], "table")
    there = place.exists()
    place.write_text("7 " * 100_000)
    return lambda: there


def measure(recipe: Any, folder: Path, hosts: Sequence[str], kept: bool) -> dict[str, Any]:
    """One run, with a worker on each host after another."""
    tier = {"name": "one", "provider": "condor", "workers": 1, "cores": 2, "gpus": 0, "memory_gb": 4, "disk_gb": 5}
    executor = ContextExecutor(site=load_site(SITE, tiers=[tier | {"requirements": on(hosts[0])}]))
    executor.run_dir = str(folder)
    calls, took = [], []
    with executor:
        assert executor.run is not None
        staging = Path(executor.run.directory) / "taskvine" / "staging.jsonl"

        @batch_app(recipe)
        def work(model: Any, items: Any) -> Any:
            import time

            place = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
            there = os.path.isdir(place) and bool(os.listdir(place))
            began = time.monotonic()
            found = model()
            return [(time.monotonic() - began, found if isinstance(found, bool) else there) for _ in items]

        def first_call() -> None:
            seconds, there = next(iter(work.map([1])))
            calls.append(seconds)
            took.append(there)

        def wait_for(what: str) -> None:
            deadline = time.monotonic() + _PATIENCE
            while not any(line["is"] == what for line in lines_of(staging)):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"there is no {what!r} in {staging}: see condor_q")
                time.sleep(0.05)

        first_call()
        for host in hosts[1:]:
            if kept:
                wait_for("artifacts")
                time.sleep(2.0)  # What the first call compiled comes after what the build made, if that was something.
            [(_, job)] = executor.engine.worker_jobs().values()
            subprocess.run(["condor_qedit", job, "Requirements", on(host)], check=True, capture_output=True)
            # With notice, so that the job is known to be evicted and is not replaced by one without the edit.
            subprocess.run(["condor_vacate_job", job], check=True, capture_output=True)
            wait_for("lost")
            first_call()
        lines = lines_of(staging)
    return {
        "loads": loads(folder),
        "calls": calls,
        "took": took,
        "hosts": [line["host"] for line in lines if line["is"] == "worker"],
        "artifacts": [line["bytes"] for line in lines if line["is"] == "artifacts"],
        "seconds": [line["seconds"] for line in lines if line["is"] == "fetched"],
    }


def main() -> None:
    """Each run in turn."""
    parser = argparse.ArgumentParser(description="A build on another host; artifacts.py starts this.")
    parser.add_argument("--without", action="store_true", help="keep no artifacts")
    parser.add_argument("--block", action="store_true", help="one layer, as artifacts.py has it")
    parser.add_argument("--table", action="store_true", help="a context that takes no compiler, in place of the model")
    parser.add_argument("--runs", type=int, default=1, choices=(1, 2), help="how many")
    given = parser.parse_args()
    recipe = table() if given.table else compiled_model(not given.without, given.block)
    with tempfile.TemporaryDirectory(prefix="ctxflow-artifacts-", dir=os.path.expanduser("~")) as folder:
        os.environ["XDG_CACHE_HOME"] = os.path.join(folder, "cache")  # Each begins with nothing.
        for number, hosts in enumerate((("host1", "host2"), ("host2",))[: given.runs]):
            print(json.dumps(measure(recipe, Path(folder, str(number)), hosts, not given.without)), flush=True)


if __name__ == "__main__":
    main()
