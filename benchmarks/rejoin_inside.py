"""The part of rejoin.py that runs in the testbed: one worker with a host's cache, which is evicted and comes back.

It says what happens in lines of JSON: "warm" when the worker has answered two calls, of which the second built its
context from files that the worker had; "rejoined" when the worker was evicted and has answered the next. Each says
what staging.jsonl has of it. After each it waits for a line, if `--wait` is given, so that bytes can be counted
outside. What does not live here: counting them (rejoin.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SITE = Path(__file__).resolve().parents[1] / "site-configs" / "testbed.toml"
_PATIENCE = 180.0
_BLOCK = 1 << 20


def say(what: str, **facts: Any) -> None:
    """Tell rejoin.py."""
    print(json.dumps({"is": what, **facts}), flush=True)


def make_model(folder: Path, size: int, seed: int) -> None:
    """Write a folder with weights of so many bytes and a small file, the same for one seed."""
    folder.mkdir()
    chance = random.Random(seed)
    (folder / "config.json").write_text(json.dumps({"seed": seed}))
    with (folder / "weights.bin").open("wb") as file:
        for begin in range(0, size, _BLOCK):
            file.write(chance.randbytes(min(_BLOCK, size - begin)))


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(given: argparse.Namespace, folder: Path) -> None:
    """One run."""
    from ctxflow import ContextExecutor, context, context_app
    from ctxflow.sites import load_site

    @context
    def model(data: str, number: int) -> str:
        import hashlib

        hasher = hashlib.blake2b()
        for path in sorted(Path(data).iterdir()):
            hasher.update(path.read_bytes())
        return hasher.hexdigest()

    def tell(model: str) -> str:
        return model

    place = folder / "model"
    make_model(place, given.bytes, given.seed)
    recipes = [model.options(files={"data": str(place)})(number=number) for number in range(2)]
    tier = {"name": "one", "provider": "condor", "workers": 1, "cores": 2, "gpus": 0, "memory_gb": 4, "disk_gb": 5}
    tier |= {"requirements": given.requirements}
    if given.cache:
        tier |= {"cache": given.cache, "cache_gb": 5}
    executor = ContextExecutor(site=load_site(SITE, tiers=[tier]))
    executor.run_dir = str(folder / "run")
    with executor:
        assert executor.run is not None
        directory = Path(executor.run.directory)
        answers = set()

        def first_result(recipe: Any) -> float:
            """Seconds from when the worker is there to the result."""
            begun = executor.run.clock()
            answers.add(context_app(recipe)(tell)().result(timeout=_PATIENCE))
            now = executor.run.clock()
            joined = [line["time"] for line in staging() if line["is"] == "worker"]
            return now - max(begun, joined[-1])

        def staging() -> list[dict[str, Any]]:
            return lines_of(directory / "taskvine" / "staging.jsonl")

        def told(since: int) -> dict[str, Any]:
            lines = staging()[since:]
            sizes = {line["digest"]: line["bytes"] for line in staging() if line["is"] == "file"}
            fetched = [sizes[line["digest"]] for line in lines if line["is"] == "fetched"]
            return {"sent_bytes": sum(fetched), "kept": sum(line["is"] == "kept" for line in lines)}

        cold = first_result(recipes[0])
        warm = first_result(recipes[1])
        seen = len(staging())
        say("warm", cold_seconds=cold, warm_seconds=warm, **told(0))
        listen(given)
        subprocess.run(["condor_vacate_job", "-fast", "-all"], check=True, capture_output=True)
        deadline = time.monotonic() + _PATIENCE
        while not any(line["is"] == "lost" for line in staging()[seen:]):
            if time.monotonic() > deadline:
                raise TimeoutError("the worker was not evicted: see condor_q")
            time.sleep(0.05)
        seconds = first_result(recipes[0])
        say("rejoined", seconds=seconds, **told(seen))
        listen(given)
        assert len(answers) == 1, f"the model was not the same each time: {answers}"


def listen(given: argparse.Namespace) -> None:
    """Wait until rejoin.py says go on."""
    if given.wait and not sys.stdin.readline():
        sys.exit("rejoin.py is gone")


def main() -> None:
    """One round."""
    parser = argparse.ArgumentParser(description="A worker that is evicted and comes back; rejoin.py starts this.")
    parser.add_argument("--bytes", type=int, default=100_000_000, help="of the model")
    parser.add_argument("--seed", type=int, default=1, help="of its content")
    parser.add_argument("--cache", help="the host's cache")
    parser.add_argument("--requirements", default="true", help="which machines, as a ClassAd")
    parser.add_argument("--wait", action="store_true", help="wait for a line after each that is said")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ctxflow-rejoin-", dir=os.path.expanduser("~")) as folder:
        measure(given, Path(folder))


if __name__ == "__main__":
    main()
