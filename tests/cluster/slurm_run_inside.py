"""Runs inside the testbed: one program, on workers that Slurm, HTCondor or a person starts, some of them taken away.

    python slurm_run_inside.py slurm|condor|hand [--take] | --die

It writes what came of it as JSON. With `--take`, workers of Slurm are taken away meanwhile: in three ways by the
program itself, then by somebody else, after it wrote a line. With `--die` a run on Slurm is killed, and its workers
are watched.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from parsl.providers import SlurmProvider

from ctxflow import ContextExecutor, batch_app, context
from ctxflow.executors.taskvine import vine_workers
from ctxflow.factory.parsl_provider import ParslProvider
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier

sys.path.append(str(Path(__file__).resolve().parents[1]))
from waiting import eventually, exited, patience

BATCH = 5
SECONDS = 0.1  # An item takes.
WORKERS = 3
WINDOW = 200  # Items on their way at a time, where their number is open.


@context(gpus=1)
def place():
    devices = os.environ["CUDA_VISIBLE_DEVICES"]
    model = call("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", f"--id={devices}").strip()
    return os.uname().nodename, devices, model


@batch_app(place(), batch_size=BATCH)
def answer(where, items, *, log):
    time.sleep(SECONDS * len(items))
    # Calls on several hosts append to it: what is small enough stays whole.
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, (" ".join(map(str, items)) + "\n").encode())
    os.close(descriptor)
    return [(item * item, where) for item in items]


def site(kind: str) -> Site:
    small = {"cores": 1, "memory_gb": 1, "gpus": 1}
    tier = {  # Slurm's nodes have 12 GB in /tmp: as documented, no disk is said.
        "slurm": Tier(name="gpu", provider="slurm", workers=WORKERS, options={"grace": 30}, **small),
        "condor": Tier(name="gpu", provider="condor", workers=WORKERS, disk_gb=5, **small),
        "hand": Tier(name="gpu", provider="local", workers=0, **small),
    }[kind]
    return Site(name=kind, engine="taskvine", python_environment="/opt/ctxflow", tiers=(tier,))


def call(*words: str) -> str:
    return subprocess.run(words, capture_output=True, check=True, text=True).stdout


def running() -> list[str]:
    """Ids of this user's jobs that run in Slurm."""
    return call("squeue", "--me", "--noheader", "--states=running", "--format=%i").split()


def take(executor: ContextExecutor) -> None:
    """Take three workers away: with notice, cancelled, and put back into the queue."""
    eventually(lambda: executor.status().workers == WORKERS)
    noticed, cancelled, requeued = running()
    call("scancel", "--signal=USR1", "--batch", noticed)
    eventually(lambda: executor.status().workers_lost == 1)
    call("scancel", cancelled)
    eventually(lambda: executor.status().workers_lost == 2)
    call("scontrol", "requeue", requeued)
    eventually(lambda: executor.status().workers_lost == 3)
    eventually(lambda: executor.status().workers == WORKERS)
    print("ready", flush=True)
    eventually(lambda: executor.status().workers_lost >= 3 + WORKERS)


def open_numbers(taking: Future[None]) -> Iterator[int]:
    """At least 600, and more until all workers are taken."""
    return itertools.takewhile(lambda number: number < 600 or not taking.done(), itertools.count())


def by_hand(run_id: str) -> list[subprocess.Popen[bytes]]:
    """Workers that a person starts, each on a machine that was lent to them."""
    line = shlex.split(call(sys.executable, "-m", "ctxflow", "worker-command", run_id))
    lent = ["srun", "--quiet", "--ntasks=1", "--mem=1g", "--gpus-per-node=1"]
    return [
        subprocess.Popen([*lent, *line], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(WORKERS)
    ]


def run(kind: str, taken: bool, dying: bool) -> dict[str, object]:
    """The program; gives what came of it."""
    log = Path("computed").absolute()
    log.touch()
    if taken:
        vine_workers._REASON_SECONDS = patience(60)  # In which Slurm says that a worker was taken.
    with ContextExecutor(site=site(kind)) as executor, ThreadPoolExecutor(1) as aside:
        people = by_hand(executor.calls.run.id) if kind == "hand" else []
        taking = aside.submit(take, executor) if taken else None
        numbers = open_numbers(taking) if taking else range(60)
        results = answer.map(numbers, log=str(log), on_error="return", window=WINDOW)
        if dying:
            eventually(lambda: executor.status().workers == WORKERS)
            print("ready", flush=True)
            signal.pause()
        answers = list(results)
        if taking:
            taking.result()
        status = executor.status()
    for worker in people:
        exited(worker)
    items = range(len(answers))
    computed = collections.Counter(map(int, log.read_text().split()))
    return {
        "items": len(items),
        "right": [value for value, _ in answers] == [item * item for item in items],
        "places": sorted({tuple(where) for _, where in answers}),
        "missing": [item for item in items if not computed[item]],
        "twice": sum(times - 1 for times in computed.values()),
        "status": {name: getattr(status, name) for name in ("items_done", "items_dead", "evictions", "crashes")},
        "lost": status.workers_lost,
    }


def killed() -> dict[str, object]:
    """Kill a run's driver; return its workers as they were before, and after how long they are gone."""
    command = [sys.executable, __file__, "slurm", "--dying"]
    provider = ParslProvider(SlurmProvider(exclusive=False))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout and driver.stdout.readline() == "ready\n"
            found = provider.find()
        finally:
            driver.kill()
    begun = time.monotonic()
    eventually(lambda: not provider.find())
    return {"status": driver.returncode, "found": [job.state for job in found], "seconds": time.monotonic() - begun}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", nargs="?")
    parser.add_argument("--take", action="store_true")
    parser.add_argument("--die", action="store_true")
    parser.add_argument("--dying", action="store_true")
    asked = parser.parse_args()
    print(json.dumps(killed() if asked.die else run(asked.kind, asked.take, asked.dying)))


if __name__ == "__main__":
    main()
