"""Loads of contexts while zygotes, library processes, hosts and the driver are killed at random moments.

`CTXFLOW_CHAOS=full` loads 500 times, which takes minutes, and prints what was killed.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from executor_helpers import marked

import forked
from ctxflow.host.linux import python_path
from waiting import nothing_left

FULL = os.environ.get("CTXFLOW_CHAOS") == "full"
LOADS, KILLS = (500, 500) if FULL else (30, 15)
SEED = int(os.environ.get("CTXFLOW_CHAOS_SEED", "1"))
NUMBERS = (3, 5, 7, 11)
"""What is in the contexts' files, all of one name; the first two contexts are built for each call anew."""

PROGRAM = """
import concurrent.futures, json, os, sys, time
from ctxflow import ContextExecutor, batch_app, context
from ctxflow.errors import ContextError
from ctxflow.scheduler.run_state import Limits

MANY = Limits(losses=100_000, crashes=100_000, failures=100_000, retry_seconds=0.1)
apps, items = [], int(sys.argv[1])

def note(kind):
    with open(kind, "ab", 0) as file:
        file.write(b".")

here = os.getcwd()

def of(number, level, modules):
    @context(files={"content": os.path.join(here, str(number), "content")}, preload=modules)
    def content(content):
        import decimal, json
        with open(os.path.join(here, "loads"), "ab", 0) as file:
            file.write(b".")
        with open(content) as file:
            return decimal.Decimal(json.load(file))

    @batch_app(content(), batch_size=1, level=level)
    def times(content, items):
        import time
        time.sleep(0.01)
        return [int(content * item) for item in items]

    return times

apps = [
    of(number, "partial" if place < 2 else "pervasive", ([], ["fractions"], ["statistics", "ipaddress"])[place % 3])
    for place, number in enumerate(json.loads(sys.argv[2]))
]

@context()
def fails():
    raise ValueError("it never can")

@batch_app(fails())
def never(nothing, items):
    return items

def answers(number, app):
    return list(app.map(range(items), resume=os.path.join("results", f"{number}.jsonl")))

def descriptors():
    return len(os.listdir("/proc/self/fd"))

if __name__ == "__main__":
    with ContextExecutor(workers=1):
        pass
    before = descriptors()
    with ContextExecutor(workers=3, limits=MANY):
        try:
            never(1).result()
        except ContextError as error:
            failed = any(why in str(error) for why in ("it never can", "was killed by SIGKILL")) or str(error)
        with concurrent.futures.ThreadPoolExecutor(len(apps)) as pool:
            found = list(pool.map(answers, range(len(apps)), apps))
    print(json.dumps({"found": found, "failed": failed, "leaked": descriptors() - before}))
"""
_ZYGOTE, _LIBRARY, _HOST, _DRIVER = "zygote", "library", "host", "driver"


def kind_of(pid: int) -> str:
    """What a process of the run is, "" if it is of no interest or gone."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/comm") as file:
            name = file.read().strip()
        if name.startswith("ctxflow-"):
            return name.partition("-")[2]
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
        return {b"ctxflow.host.zygote": _ZYGOTE, b"ctxflow.host.library": _LIBRARY, b"ctxflow.host": _HOST}.get(
            words[2] if len(words) > 2 else b"", ""
        )
    return ""


def kill_one(chance: random.Random, mark: str, driver: int) -> str:
    """Kill one of the processes of a run, of a kind that is drawn; return its kind, "" if there is none."""
    kinds = {pid: _DRIVER if pid == driver else kind_of(pid) for pid in marked(mark)}
    if set(kinds.values()) <= {"", _DRIVER}:
        return ""  # It has just begun.
    kind = chance.choices([_ZYGOTE, _LIBRARY, _HOST, _DRIVER], [6, 6, 3, 0.5])[0]
    found = [pid for pid, its in kinds.items() if its == kind]
    if not found:
        return ""
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(found), signal.SIGKILL)
    return kind


def test_loads_go_on_whatever_is_killed(tmp_path: Path) -> None:
    """Every item is answered once, from its context's own file; nothing is left."""
    (tmp_path / "program.py").write_text(PROGRAM)
    for folder in ("tmp", "home", "results"):
        (tmp_path / folder).mkdir()
    for number in NUMBERS:
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "content").write_text(str(number))
    mark = f"chaos-{os.getpid()}-{time.monotonic_ns()}"
    variables = {**os.environ, **python_path(), "TMPDIR": str(tmp_path / "tmp"), "HOME": str(tmp_path / "home")}
    variables |= {"OMP_NUM_THREADS": "1"}
    chance, killed, drivers, began = random.Random(SEED), collections.Counter[str](), 0, time.monotonic()
    items = LOADS // 2
    words = [sys.executable, "program.py", str(items), json.dumps(NUMBERS)]
    while True:
        drivers += 1
        # Only this driver's hosts are killed: those of earlier ones are still removing their folders.
        variables["MARK"] = f"{mark}-{drivers}"
        errors = (tmp_path / f"errors-{drivers}").open("wb")
        driver = forked.Popen(words, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=errors)
        assert driver.stdout is not None
        while driver.poll() is None:
            time.sleep(chance.uniform(0.02, 0.4))
            if killed.total() - killed[""] < KILLS:  # Then it may end in peace.
                killed[kill_one(chance, variables["MARK"], driver.pid)] += 1
        said = driver.stdout.read()
        driver.stdout.close()
        errors.close()
        if driver.returncode == 0:
            break
        assert driver.returncode == -signal.SIGKILL, (tmp_path / f"errors-{drivers}").read_text()
    seconds = time.monotonic() - began
    answered = json.loads(said)
    assert answered["found"] == [[number * item for item in range(items)] for number in NUMBERS]
    assert answered["failed"] is True
    assert answered["leaked"] <= 0
    nothing_left(lambda: [pid for number in range(drivers) for pid in marked(f"{mark}-{number + 1}")])
    assert not list((tmp_path / "tmp").iterdir()) and not list((tmp_path / "home").iterdir())
    loads = (tmp_path / "loads").stat().st_size
    del killed[""]
    assert loads >= LOADS and killed.total()
    print(f"{loads} loads by {drivers} drivers in {seconds:.0f} s; killed: {dict(killed)}; lost: 0")
