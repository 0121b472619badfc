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
from pathlib import Path
from typing import Any

from artifacts import loads, recipe

from ctxflow import ContextExecutor, batch_app
from ctxflow.sites import load_site

SITE = Path(__file__).resolve().parents[1] / "site-configs" / "testbed.toml"
_PATIENCE = 240.0


def on(host: str) -> str:
    """Requirements of a job that is to run on one host."""
    return f'Machine == "{host}.testbed"'


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def measure(kept: bool, folder: Path) -> dict[str, Any]:
    """One run."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # Each run begins with nothing.
    tier = {"name": "one", "provider": "condor", "workers": 1, "cores": 2, "gpus": 0, "memory_gb": 4, "disk_gb": 5}
    executor = ContextExecutor(site=load_site(SITE, tiers=[tier | {"requirements": on("host1")}]))
    executor.run_dir = str(folder / "run")
    calls = []
    with executor:
        assert executor.run is not None
        staging = Path(executor.run.directory) / "taskvine" / "staging.jsonl"

        @batch_app(recipe(kept))
        def work(model: Any, items: Any) -> Any:
            import time

            import torch

            began = time.monotonic()
            with torch.no_grad():
                model()
            return [time.monotonic() - began for _ in items]

        def wait_for(what: str, seconds: float) -> None:
            deadline = time.monotonic() + seconds
            while not any(line["is"] == what for line in lines_of(staging)):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"there is no {what!r} in {staging}: see condor_q")
                time.sleep(0.05)

        calls.append(float(next(iter(work.map([1])))))
        if kept:
            wait_for("artifacts", 30)
            time.sleep(2.0)  # What the first call compiled comes after what the build made, if that was something.
        [(_, job)] = executor.engine.worker_jobs().values()
        subprocess.run(["condor_qedit", job, "Requirements", on("host2")], check=True, capture_output=True)
        subprocess.run(["condor_vacate_job", "-fast", job], check=True, capture_output=True)
        wait_for("lost", _PATIENCE)
        calls.append(float(next(iter(work.map([1])))))
        lines = lines_of(staging)
    return {
        "loads": loads(folder / "run"),
        "calls": calls,
        "hosts": [line["host"] for line in lines if line["is"] == "worker"],
        "artifacts": [line["bytes"] for line in lines if line["is"] == "artifacts"],
        "seconds": [line["seconds"] for line in lines if line["is"] == "fetched"],
    }


def main() -> None:
    """One run of each kind."""
    parser = argparse.ArgumentParser(description="A build on another host; artifacts.py starts this.")
    parser.add_argument("--without", action="store_true", help="keep no artifacts")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ctxflow-artifacts-", dir=os.path.expanduser("~")) as folder:
        print(json.dumps(measure(not given.without, Path(folder))))


if __name__ == "__main__":
    main()
