"""The part of staging.py that runs in the testbed: brings one file to all workers, by the tree or by the manager alone.

It is told what to do by its arguments, and says what happens in lines of JSON: "joined" when all workers are there,
"done" when all hold the file. After "joined" it waits for a line, so that the bytes can be counted outside; after
"done" too, since its own end would be counted. What does not live here: counting, and the links' speeds (staging.py).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SITE = Path(__file__).resolve().parents[1] / "site-configs" / "testbed.toml"
_PATIENCE = 240.0


def say(what: str, **facts: Any) -> None:
    """Tell staging.py."""
    print(json.dumps({"is": what, **facts}), flush=True)


def listen() -> None:
    """Wait until staging.py says go on."""
    if not sys.stdin.readline():
        sys.exit("staging.py is gone")


def hurry(deadline: float, what: str) -> None:
    """Wait for a moment.

    :raises TimeoutError: when the deadline is over.
    """
    if time.monotonic() > deadline:
        raise TimeoutError(f"{what} within {_PATIENCE:.0f} s: see condor_q, and what the workers say")
    time.sleep(0.05)


def ctxflow_round(given: argparse.Namespace, path: str, folder: str) -> None:
    """A context with the file, on all workers of a site."""
    from ctxflow import ContextExecutor, context, context_app
    from ctxflow.sites import load_site

    @context
    def holder(data: str) -> int:
        return os.path.getsize(data)

    def size(held: int) -> int:
        return held

    recipe = holder.options(files={"data": path})()
    recipe.id  # noqa: B018 - the digest of the file is taken here, and by no clock.
    tier = {"name": "half", "provider": "condor", "workers": given.workers, "cores": given.cores, "gpus": 0}
    tier |= {"memory_gb": given.memory, "disk_gb": 5, "requirements": given.requirements}
    executor = ContextExecutor(site=load_site(SITE, tiers=[tier]))
    executor.run_dir = os.path.join(folder, "run")
    with executor:
        assert executor.run is not None
        deadline = time.monotonic() + _PATIENCE
        while executor.connected_workers < given.workers:
            hurry(deadline, f"{executor.connected_workers} of {given.workers} workers joined")
        directory = Path(executor.run.directory)
        say(
            "joined",
            hosts=_counted(line["host"] for line in _lines(directory / "taskvine" / "staging.jsonl", "worker")),
        )
        listen()
        begun = executor.run.clock()
        calls = [context_app(recipe)(size)() for _ in range(given.workers)]
        deadline = time.monotonic() + _PATIENCE
        while executor.status().contexts.get("holder", {}).get("ready", 0) < given.workers:
            hurry(deadline, f"{executor.status().contexts} hold the file")
        say("done")
        assert {call.result() for call in calls} == {os.path.getsize(path)}, "the file did not arrive whole"
        listen()
    staged = [line["event"]["time"] for line in _lines(directory / "events.jsonl", "ContextStaged", "event")]
    assert len(staged) == given.workers, f"{len(staged)} workers say that they hold the file"
    say("times", seconds=[each - begun for each in staged])


def manager_only_round(given: argparse.Namespace, path: str, folder: str) -> None:
    """An ordinary input of one task on each of plain vine_workers, without transfers between them."""
    import ndcctools.taskvine as vine

    from ctxflow.factory import CondorProvider, WorkerJob

    provider = CondorProvider()
    os.mkdir(os.path.join(folder, "jobs"), 0o700)
    provider.start(os.path.join(folder, "jobs"))
    words = ["vine_worker", "--cores", str(given.cores), "--memory", str(int(1000 * given.memory)), "--disk", "5000"]
    words += ["--gpus", "0", "--single-shot", "--parent-death", "--idle-timeout", "600"]
    needs = {"cores": given.cores, "memory": int(given.memory * 1e9), "disk": 5 * 10**9}
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(vine.Manager(port=0, run_info_path=os.path.join(folder, "run")))
        stack.callback(provider.stop)
        manager.disable_peer_transfers()
        for number in range(given.workers):
            command = [*words, "--feature", f"worker{number}", given.address, str(manager.port)]
            provider.submit(WorkerJob("half", command, options={"requirements": given.requirements}, **needs), 1)
        deadline = time.monotonic() + _PATIENCE
        while manager.stats.workers_connected < given.workers:
            manager.wait(1)
            hurry(deadline, f"{manager.stats.workers_connected} of {given.workers} workers joined")
        say("joined", hosts=_counted(each["hostname"] for each in manager.status("workers")))
        listen()
        seconds = _send(vine, manager, path, given.workers)
        say("done")
        listen()
        say("times", seconds=seconds)


def _send(vine: Any, manager: Any, path: str, workers: int) -> list[float]:
    """Seconds until each worker holds the file."""
    begun = time.monotonic()
    seconds: list[float] = []
    file = manager.declare_file(path, cache=True)
    for number in range(workers):
        task = vine.Task(f"test $(stat -c %s data) = {os.path.getsize(path)}")
        task.add_input(file, "data")
        task.add_feature(f"worker{number}")
        manager.submit(task)
    while len(seconds) < workers:
        ended = manager.wait(5)
        if ended is not None:
            assert ended.successful() and ended.exit_code == 0, f"a task failed: {ended.result}"
            seconds.append(time.monotonic() - begun)
        elif time.monotonic() > begun + _PATIENCE:
            raise TimeoutError(f"{len(seconds)} of {workers} workers hold the file after {_PATIENCE:.0f} s")
    return seconds


def _counted(hosts: Iterable[str]) -> Mapping[str, int]:
    return collections.Counter(host.partition(".")[0] for host in hosts)


def _lines(path: Path, kind: str, part: str = "") -> list[dict[str, Any]]:
    """The lines of a log that are of a kind."""
    with open(path) as file:
        found = [json.loads(line) for line in file]
    told = [line for line in found if not part or part in line]  # An event log's first line is no event.
    return [line for line in told if (line[part] if part else line)["is"] == kind]


def main() -> None:
    """One round."""
    parser = argparse.ArgumentParser(description="Bring one file to all workers; staging.py starts this.")
    parser.add_argument("way", choices=["ctxflow", "manager_only"])
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--cores", type=int, required=True, help="of a worker")
    parser.add_argument("--memory", type=float, required=True, help="of a worker, in GB")
    parser.add_argument("--requirements", required=True, help="which machines, as a ClassAd")
    parser.add_argument("--address", required=True, help="of this machine")
    parser.add_argument("--bytes", type=int, required=True, help="of the file")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="ctxflow-staging-", dir=Path.home()) as folder:
        path = os.path.join(folder, "weights.bin")
        with open(path, "wb") as file:
            file.write(os.urandom(given.bytes))
        {"ctxflow": ctxflow_round, "manager_only": manager_only_round}[given.way](given, path, folder)


if __name__ == "__main__":
    main()
