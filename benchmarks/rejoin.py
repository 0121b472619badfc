#!/usr/bin/env python3
"""A worker that is evicted and comes back to its host: what is sent to it, and when its first result is there.

    sudo benchmarks/rejoin.py --json

It runs as root beside the testbed, and reads bytes from the counters of the host's interface; rejoin_inside.py is the
part that runs in it. One worker on one host is sent a model of random bytes, answers, and is killed by HTCondor, which
starts its job again there: with a host's cache (`cache` of a tier), and in turn without one. Each round has another
model, so that the first start of each is cold.

- `rejoin_bytes`: bytes of the model's files that were sent to the worker that came back;
- `rejoin_received_mb`: all that its host received from before the eviction until the first result, less what it does
  when idle: the worker's program, which HTCondor brings with each job, and messages;
- `rejoin_s`: from its joining to its first result; `warm_s`: from a call to its result, on a worker that has the files
  and builds the context; `cold_s`: from the first joining to the first result;
- `rejoin_vs_warm`: the ratio of the first two. `without_...`: the same without the cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from typing import Any

import common
import inside
from staging import Traffic, beyond_idle, traffic

WAYS = ("cache", "without")
_IDLE_SECONDS = 2.0


class Rounds:
    """Runs rounds, and keeps what was counted in them."""

    def __init__(self, host: str, size: int, cache: str) -> None:
        self._host, self._size, self._cache = host, size, cache
        self._seed = int(time.time())
        self.found: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}

    def once(self, way: str) -> float:
        """Seconds from the joining of the worker that came back to its first result."""
        self._seed += 1
        words = ["--wait", "--bytes", str(self._size), "--seed", str(self._seed)]
        words += ["--requirements", f'Machine == "{self._host}.testbed"']
        words += ["--cache", self._cache] if way == "cache" else []
        command = inside.command("python", f"{inside.CHECKOUT}/benchmarks/rejoin_inside.py", *words)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
            try:
                warm = _hear(program, "warm")
                time.sleep(1)  # What it ends with is over.
                first = traffic()
                time.sleep(_IDLE_SECONDS)
                before = traffic()
                _tell(program)
                rejoined = _hear(program, "rejoined")
                received = self._received((first, before), traffic())
                _tell(program)
                if program.wait(60):
                    raise ValueError(f"rejoin_inside.py ended with exit status {program.returncode}")
            finally:
                program.terminate()
        values = {
            "bytes": rejoined["sent_bytes"], "received_mb": received / 1e6, "rejoin_s": rejoined["seconds"],
            "warm_s": warm["warm_seconds"], "cold_s": warm["cold_seconds"],
        }  # fmt: skip
        for name, value in values.items():
            self.found[way].setdefault(name, []).append(value)
        return float(rejoined["seconds"])

    def _received(self, idle: tuple[Traffic, Traffic], after: Traffic) -> float:
        return beyond_idle(idle, (idle[1], after), "received", self._host)

    def figures(self) -> dict[str, common.Figure]:
        """What came of all rounds."""
        ours, without = self.found["cache"], self.found["without"]
        return {
            "rejoin_bytes": common.figure(ours["bytes"], "bytes", "lower"),
            "rejoin_received_mb": common.figure(ours["received_mb"], "MB", "lower"),
            "rejoin_s": common.figure(ours["rejoin_s"], "s", "lower"),
            "warm_s": common.figure(ours["warm_s"], "s", "lower"),
            "cold_s": common.figure(ours["cold_s"], "s", "lower"),
            "rejoin_vs_warm": common.figure(_ratios(ours), "times", "lower"),
            "without_rejoin_bytes": common.figure(without["bytes"], "bytes", "lower"),
            "without_rejoin_received_mb": common.figure(without["received_mb"], "MB", "lower"),
            "without_rejoin_s": common.figure(without["rejoin_s"], "s", "lower"),
            "without_rejoin_vs_warm": common.figure(_ratios(without), "times", "lower"),
        }


def _ratios(found: dict[str, list[float]]) -> list[float]:
    return [back / warm for back, warm in zip(found["rejoin_s"], found["warm_s"], strict=True)]


def _hear(program: subprocess.Popen[str], wanted: str) -> dict[str, Any]:
    """The next line of the program inside, which must be of a kind."""
    assert program.stdout is not None
    line = program.stdout.readline()
    found: dict[str, Any] = json.loads(line or "{}")
    if found.get("is") != wanted:
        raise ValueError(f"rejoin_inside.py said {line!r} and not {wanted!r}: what it wrote is above")
    return found


def _tell(program: subprocess.Popen[str]) -> None:
    assert program.stdin is not None
    program.stdin.write("\n")
    program.stdin.flush()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="A worker that is evicted and comes back to its host.")
    parser.add_argument("--megabytes", type=int, default=200, help="size of the model (200)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is measured (5)")
    parser.add_argument("--cache", default="/home/alice/cache", help="the folder of the host's cache")
    parser.add_argument("--quick", action="store_true", help="1 round with 20 MB: to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    if min(given.megabytes, given.rounds) < 1:
        parser.error("give 1 or more megabytes and rounds")
    reason = inside.why_not()
    if reason:
        inside.skip(reason)
    hosts = [name for name, its in inside.status()["hosts"].items() if its["state"] == "up" and name != "submit"]
    if not hosts:
        inside.skip("the testbed has no host that is up: testbed/up starts some")
    rounds, megabytes = (1, 20) if given.quick else (given.rounds, given.megabytes)
    measuring = Rounds(hosts[0], megabytes * 10**6, given.cache)
    common.interleaved({way: _bound(measuring, way) for way in WAYS}, rounds, "rejoin")
    common.report("rejoin", measuring.figures(), common.versions(()), given.json)


def _bound(measuring: Rounds, way: str) -> common.Measurement:
    return lambda: measuring.once(way)


if __name__ == "__main__":
    main()
