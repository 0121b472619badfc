#!/usr/bin/env python3
"""How a context's file gets to all workers: bytes that hosts send and receive, and the time, beside the manager alone.

    sudo benchmarks/staging.py --json

Backs the README's line on staging: "the manager sends one copy, each host receives one". It runs as root beside the
testbed, sets its hosts' links to `--link` Mbit/s and afterwards back, and reads the bytes from the interfaces'
counters; staging_inside.py is the part that runs in it. Each round starts HTCondor's jobs anew, as many on each host,
with a new file of random bytes; its clock starts when all workers have joined, and what the idle pool sends meanwhile
is taken off. A copy's ideal time is its size over the link's speed, the ideal tree's 1 + ceil(log2 hosts) of those.

- `manager_copies`: what the submit host sends, in copies of the file;
- `copies_per_host`: what a host receives, in copies, the most of all hosts;
- `time_vs_ideal_tree`: the time until all workers hold the file, in times of the ideal tree's;
- `speedup_vs_manager_only`: the time of a plain ndcctools manager that declares the file as an input of one task on
  each worker, without transfers between workers, over ctxflow's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

import common
import inside

WAYS = ("ctxflow", "manager_only")
_HOST_CORES, _HOST_GB = 6, 30  # What a host of the testbed advertises.
_IDLE_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    :ivar hosts: their names; each gets `workers / len(hosts)` workers.
    :ivar link: Mbit/s.
    """

    hosts: Sequence[str]
    workers: int
    bytes: int
    link: float
    address: str

    @property
    def per_host(self) -> int:
        """Workers on each host."""
        return self.workers // len(self.hosts)

    @property
    def copy_seconds(self) -> float:
        """The time of one copy at the link's speed.

        >>> Plan(["host1"], 1, 100_000_000, 200.0, "").copy_seconds
        4.0
        """
        return self.bytes * 8 / (self.link * 1e6)

    @property
    def ideal_seconds(self) -> float:
        """The time of the ideal tree.

        >>> Plan(["a", "b", "c", "d"], 8, 100_000_000, 200.0, "").ideal_seconds
        12.0
        """
        return (1 + math.ceil(math.log2(len(self.hosts)))) * self.copy_seconds

    def words(self, way: str) -> list[str]:
        """The command of one round."""
        machines = " || ".join(f'Machine == "{host}.testbed"' for host in self.hosts)
        options = {
            "workers": self.workers, "cores": _HOST_CORES // self.per_host, "memory": _HOST_GB * 0.9 / self.per_host,
            "requirements": machines, "address": self.address, "bytes": self.bytes,
        }  # fmt: skip
        program = f"{inside.CHECKOUT}/benchmarks/staging_inside.py"
        return inside.command("python", program, way, *(f"--{key}={value}" for key, value in options.items()))


@dataclasses.dataclass
class Traffic:
    """The bytes that hosts sent and received up to a moment."""

    time: float
    sent: dict[str, int]
    received: dict[str, int]


def traffic() -> Traffic:
    """What the interfaces' counters say now."""
    now, hosts = time.monotonic(), inside.status()["hosts"]
    sent, received = ({name: its[key] for name, its in hosts.items()} for key in ("bytes_sent", "bytes_received"))
    return Traffic(now, sent, received)


def beyond_idle(idle: tuple[Traffic, Traffic], busy: tuple[Traffic, Traffic], way: str, host: str) -> float:
    """The bytes that a host sent or received over some time, beyond what it does in so much time when idle.

    >>> still = (Traffic(0, {"a": 0}, {}), Traffic(2, {"a": 10}, {}))
    >>> beyond_idle(still, (Traffic(2, {"a": 10}, {}), Traffic(12, {"a": 1060}, {})), "sent", "a")
    1000.0
    """
    rate = (getattr(idle[1], way)[host] - getattr(idle[0], way)[host]) / (idle[1].time - idle[0].time)
    moved = getattr(busy[1], way)[host] - getattr(busy[0], way)[host]
    return float(moved - rate * (busy[1].time - busy[0].time))


class Measuring:
    """Runs rounds, and keeps what was counted in them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sent: dict[str, list[float]] = {way: [] for way in WAYS}
        self.received: dict[str, list[float]] = {way: [] for way in WAYS}

    def seconds(self, way: str) -> float:
        """The time until all workers hold a new file."""
        words = self.plan.words(way)
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
            try:
                placed = _hear(program, "joined")["hosts"]
                wanted = dict.fromkeys(self.plan.hosts, self.plan.per_host)
                if placed != wanted:
                    raise ValueError(f"the workers are not spread evenly ({placed}): is somebody else in the testbed?")
                time.sleep(1)  # What belongs to joining is over.
                first = traffic()
                time.sleep(_IDLE_SECONDS)
                before = traffic()
                _tell(program)
                _hear(program, "done")
                idle, busy = (first, before), (before, traffic())
                _tell(program)
                seconds = max(_hear(program, "times")["seconds"])
                if program.wait(60):
                    raise ValueError(f"staging_inside.py ended with exit status {program.returncode}")
            finally:
                program.terminate()
        size = self.plan.bytes
        self.sent[way].append(beyond_idle(idle, busy, "sent", "submit") / size)
        self.received[way].append(max(beyond_idle(idle, busy, "received", host) / size for host in self.plan.hosts))
        common.progress(f"{way}: {seconds:.1f} s, {self.sent[way][-1]:.2f} copies sent by the submit host")
        return float(seconds)

    def figures(self, samples: dict[str, list[float]]) -> dict[str, common.Figure]:
        """What came of all rounds."""
        ours, theirs = samples["ctxflow"], samples["manager_only"]
        ideal = self.plan.ideal_seconds
        return {
            "manager_copies": common.figure(self.sent["ctxflow"], "copies", "lower"),
            "copies_per_host": common.figure(self.received["ctxflow"], "copies", "lower"),
            "time_s": common.figure(ours, "s", "lower"),
            "time_vs_ideal_tree": common.figure([each / ideal for each in ours], "times", "lower"),
            "manager_only_time_s": common.figure(theirs, "s", "lower"),
            "manager_only_copies": common.figure(self.sent["manager_only"], "copies", "lower"),
            "speedup_vs_manager_only": common.ratio(theirs, ours),
        }


def _hear(program: subprocess.Popen[str], wanted: str) -> dict[str, Any]:
    """The next line of the program inside, which must be of a kind."""
    assert program.stdout is not None
    line = program.stdout.readline()
    if not line:
        raise ValueError(f"staging_inside.py ended before it said {wanted!r}: what it wrote is above")
    found: dict[str, Any] = json.loads(line)
    if found["is"] != wanted:
        raise ValueError(f"staging_inside.py said {found['is']!r} and not {wanted!r}")
    return found


def _tell(program: subprocess.Popen[str]) -> None:
    assert program.stdin is not None
    program.stdin.write("\n")
    program.stdin.flush()


@contextlib.contextmanager
def slowed(hosts: Sequence[str], mbit: float) -> Iterator[None]:
    """The hosts' links at another speed; afterwards as they were declared."""
    try:
        for host in hosts:
            _host("slow", host, str(mbit))
        yield
    finally:
        for host in hosts:
            _host("restore", host)


def _host(*words: str) -> None:
    subprocess.run([str(inside.TESTBED / "host"), *words], check=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How a context's file gets to all workers of the testbed.")
    parser.add_argument("--hosts", type=int, default=4, help="execute hosts (4)")
    parser.add_argument("--workers", type=int, default=8, help="as many on each host (8)")
    parser.add_argument("--megabytes", type=int, default=100, help="size of the file (100)")
    parser.add_argument("--link", type=float, default=200, help="speed of the hosts' links in Mbit/s (200)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is measured (5)")
    parser.add_argument("--quick", action="store_true", help="1 round with 20 MB: to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    if min(given.hosts, given.megabytes, given.rounds) < 1 or given.link <= 0 or given.workers % given.hosts:
        parser.error("give 1 or more hosts, megabytes and rounds, and a multiple of the hosts as workers")
    reason = inside.why_not()
    if reason:
        inside.skip(reason)
    found = {name: its for name, its in inside.status()["hosts"].items() if its["state"] in ("up", "slow")}
    hosts = [name for name in found if name != "submit"][: given.hosts]
    if len(hosts) < given.hosts:
        inside.skip(f"the testbed has {len(hosts)} hosts that are up: testbed/up --hosts {given.hosts} starts more")
    rounds, megabytes = (1, 20) if given.quick else (given.rounds, given.megabytes)
    plan = Plan(hosts, given.workers, megabytes * 10**6, given.link, found["submit"]["address"])
    measuring = Measuring(plan)
    with slowed(hosts, given.link):
        turns = {way: _bound(measuring, way) for way in WAYS}
        samples = common.interleaved(turns, rounds, "staging")
    common.report("staging", measuring.figures(samples), common.versions(()), given.json)


def _bound(measuring: Measuring, way: str) -> common.Measurement:
    return lambda: measuring.seconds(way)


if __name__ == "__main__":
    main()
