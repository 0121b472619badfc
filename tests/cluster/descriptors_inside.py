"""Runs inside the testbed: runs whose driver, or a worker, has few file descriptors, or none for a while; side by side.

    python descriptors_inside.py [few|none|filled]

Writes as JSON what became of each: whether all rows were answered in order, what was said of it, and the error.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from ctxflow import ContextExecutor, CtxflowError, batch_app, context
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier

sys.path.append(str(Path(__file__).resolve().parents[1]))
from waiting import eventually, happened, output

ROWS, WORKERS = 200, {"few": 33, "none": 1, "filled": 3}
LIMITS = {"few": 33, "none": 24, "filled": 256}
FULL_SECONDS = 5.0


def fill() -> list[int]:
    """Open files until there are no descriptors left."""
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return taken


def fill_for_a_while(filled: threading.Event | None = None) -> None:
    taken = fill()
    if filled is not None:
        filled.set()
    time.sleep(FULL_SECONDS)
    for each in taken:
        os.close(each)


@context()
def place():
    return 1


@batch_app(place(), batch_size=2)
def slow(one, items):
    import resource
    import threading

    if items[0] == 20 and "descriptors" in os.environ.get("FILLS", ""):
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        threading.Thread(target=fill_for_a_while).start()
    time.sleep(0.02 * len(items))
    return items


def lose_a_worker_meanwhile(results: list[int]) -> None:
    eventually(lambda: len(results) >= ROWS // 5)
    processes = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    victim = next(each for each in processes if each.name() == "vine_worker" and "10.77.0.1:" in str(each.cmdline()))
    filled = threading.Event()
    filling = threading.Thread(target=fill_for_a_while, args=[filled])
    filling.start()
    happened(filled)
    os.kill(victim.pid, signal.SIGKILL)
    filling.join()


def one(how: str) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ctxflow").addHandler(handler)
    kind = "local" if how == "filled" else "condor"
    fills = {"FILLS": "descriptors"} if how == "filled" else {}
    needs = {"cores": 1, "memory_gb": 1, "gpus": 0, "disk_gb": 1}
    tier = Tier(name="small", provider=kind, workers=WORKERS[how], env=fills, **needs)
    site = Site(
        engine="taskvine",
        python_environment="/opt/ctxflow",
        tiers=(tier,),
        taskvine={"address": "10.77.0.1"},
        start_when=0.0,
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if how == "filled" else LIMITS[how]
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMITS[how], hard))
    results: list[int] = []
    error = ""
    try:
        with ContextExecutor(site=site):
            if how == "filled":
                mapped = slow.map(range(ROWS))
                threading.Thread(target=lose_a_worker_meanwhile, args=(results,), daemon=True).start()
                results.extend(next(mapped) for _ in range(ROWS))
            else:
                results.extend(slow.map(range(ROWS)))
    except CtxflowError as raised:
        error = str(raised)
    print(json.dumps({"right": results == list(range(ROWS)), "said": said, "error": error}))


def main() -> None:
    if len(sys.argv) > 1:
        one(sys.argv[1])
        return
    pipe = subprocess.PIPE
    runs = {how: subprocess.Popen([sys.executable, __file__, how], stdout=pipe, text=True) for how in WORKERS}
    found = {how: output(run)[0].splitlines() for how, run in runs.items()}
    print(json.dumps({how: json.loads(lines[-1]) for how, lines in found.items()}))


if __name__ == "__main__":
    main()
