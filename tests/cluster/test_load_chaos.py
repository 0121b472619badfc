"""Two runs at once, of two users, with one cache on each host, while zygotes, library processes, hosts and drivers are
killed at random moments, the cache's disk is full, and bytes in it are flipped.

`CTXFLOW_CHAOS=full` loads 500 times, which takes minutes, and prints what was killed.
"""

from __future__ import annotations

import collections
import json
import os
import random
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import pytest
from driver import HOSTS, INSIDE, TESTBED, processes_left

from waiting import joined, patience

if TYPE_CHECKING:
    from conftest import Testbed

FULL = os.environ.get("CTXFLOW_CHAOS") == "full"
ITEMS, ACTS = (400, 400) if FULL else (40, 20)
SEED = int(os.environ.get("CTXFLOW_CHAOS_SEED", "1"))
NUMBERS = (3, 5, 7, 11)
CACHE = "/var/lib/condor/chaos-cache"
LIMIT = 1500 if FULL else 500

# Runs on a host as root: kills one process of a kind, if there is one, or flips a byte of an entry; prints what it did.
ACT = """
import contextlib, glob, os, random, signal, sys

how, luck = sys.argv[1], random.Random(float(sys.argv[2]))
if how == "flip":
    found = [path for path in glob.glob(sys.argv[3] + "/*/kept/*/content*") if os.path.isfile(path)]
    for path in luck.sample(found, min(1, len(found))):
        with open(path, "r+b") as file:
            file.seek(os.path.getsize(path) // 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
        print(how)
else:
    victims = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/comm") as file, open(f"/proc/{pid}/cmdline") as words:
                name, line = file.read().strip(), words.read()
        except OSError:
            continue
        kind = name.partition("-")[2] if name.startswith("ctxflow-") else ""
        for part, its in (("host.zygote", "zygote"), ("host.library", "library"), ("vine_library", "host")):
            kind = kind or (its if part in line else "")
        if kind == how:
            victims.append(int(pid))
    for pid in luck.sample(victims, min(1, len(victims))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            print(how)
"""
WAYS = {"zygote": 6, "library": 6, "host": 2, "flip": 4, "driver": 1}


class Run:
    """One user's run, which is begun again when its driver is killed."""

    def __init__(self, user: str, folder: str) -> None:
        self.user, self.drivers, self.said, self.stopped = user, 0, "", False
        self._words = ["python", "-u", str(INSIDE / "load_chaos_inside.py"), folder]
        self._words += ["--items", str(ITEMS), "--cache", CACHE]
        self._driver: subprocess.Popen[str] | None = None
        self.errors = ""
        self._thread = threading.Thread(target=self._go, daemon=True)
        self._thread.start()

    def _go(self) -> None:
        while not self.stopped:
            self.drivers += 1
            self._driver = subprocess.Popen(
                [str(TESTBED / "run"), "--user", self.user, *self._words],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/",
            )  # fmt: skip
            self.said, errors = self._driver.communicate()
            self.errors += errors
            if self._driver.returncode not in (-9, 137):
                return

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        self.stopped = True
        if self._driver is not None:
            self._driver.terminate()
        joined(self._thread)


def act(testbed: Testbed, how: str, chance: random.Random, runs: list[Run]) -> str:
    """Do one thing to one of the runs; return what was done, "" for nothing."""
    if how == "driver":
        run = chance.choice([each for each in runs if not each.ended] or runs)
        words = f"pkill -9 -o -u {run.user} -f [l]oad_chaos_inside && echo driver || true"
        return testbed.run("bash", "-c", words, user="root")
    host = chance.choice(HOSTS)
    return testbed.run("python3", "-", how, str(chance.random()), CACHE, user="root", host=host, text=ACT)


@pytest.mark.release
@pytest.mark.cluster
@pytest.mark.timeout(LIMIT + 100)
def test_two_users_runs_go_on_whatever_is_killed_and_altered(testbed: Testbed) -> None:
    """Every item is answered once, from its context's own file; nothing is left, and what was altered is told."""
    for host in HOSTS:
        testbed.run("mkdir", "-p", CACHE, user="root", host=host)
        testbed.run("mount", "-t", "tmpfs", "-o", "size=2m,mode=1777", "tmpfs", CACHE, user="root", host=host)
    chance, done, began = random.Random(SEED), collections.Counter[str](), time.monotonic()
    runs = [Run(user, f"/home/{user}/load-chaos-{SEED}") for user in ("alice", "bob")]
    try:
        while not all(run.ended for run in runs):
            assert time.monotonic() < began + patience(LIMIT), f"{done}: {[run.errors[-2000:] for run in runs]}"
            # Each way has its share, however seldom there is something to kill: else drivers die again and again.
            open_ways = [how for how, weight in WAYS.items() if done[how] < ACTS * weight / sum(WAYS.values())]
            if open_ways:
                how = chance.choices(open_ways, [WAYS[each] for each in open_ways])[0]
                done[act(testbed, how, chance, runs)] += 1
            time.sleep(chance.uniform(0.0, 0.2))
    finally:
        for run in runs:
            run.stop()
        for host in HOSTS:
            testbed.run("umount", "-l", CACHE, user="root", host=host)
        for user in ("alice", "bob"):
            # Parsl imports Work Queue, whose folder a killed driver leaves.
            folders = f"find /tmp -maxdepth 1 -user {user} -name 'wq-py-staging-*' -delete"
            testbed.run("bash", "-c", f"rm -rf ~/load-chaos-{SEED}; {folders}", user=user)
    for run in runs:
        answered = json.loads(run.said.splitlines()[-1]) if run.said else run.errors[-4000:]
        assert [[answer for answer, _ in each] for each in answered] == [
            [number * item for item in range(ITEMS)] for number in NUMBERS
        ], run.errors[-2000:]
        assert len({mark for each in answered for _, mark in each}) == ITEMS * len(NUMBERS)
    testbed.clear()  # Jobs of a killed driver stay in the queue until its lease is over, as test_factory.py has it.
    testbed.eventually(lambda: not processes_left(testbed))
    del done[""]
    told = sum(run.errors.count("not as it was put there") for run in runs)
    print(
        f"{done} in {time.monotonic() - began:.0f} s; drivers: {[run.drivers for run in runs]}; told: {told}; lost: 0"
    )
    assert done["zygote"] and done["library"]
