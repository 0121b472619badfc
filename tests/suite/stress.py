"""Run the suite again and again on a busy machine, and say of each failure how often, and when, it comes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from suite import parts
from suite.hunt import failures

BUSY = "while True: pass"
HELD = """
import sys, time
block = bytearray(int(float(sys.argv[1]) * 1e9))
while True:
    for at in range(0, len(block), 4096):
        block[at] = 1
    time.sleep(1)
"""


@dataclass(frozen=True)
class Run:
    """One run: its order's seed, its seconds, how busy the machine was at its end, and what failed."""

    seed: int
    seconds: float
    load: float
    failed: dict[str, str]


def run(count: int, loops: int, gigabytes: float, names: Sequence[str], seed: int) -> int:
    """Run parts of the suite some times; return 1 if anything failed in any of them."""
    runs: list[Run] = []
    with beside(loops, gigabytes):
        for number in range(count):
            begun = time.monotonic()
            status = parts.run(names, parts.How(seed=str(seed + number)))
            found: dict[str, str] = {}
            for name in names:
                found |= failures(parts.BUILD / "times" / f"{name}.xml")
            if status and not found:
                found["a part as a whole"] = f"exit status {status}: see {parts.BUILD}"
            runs.append(Run(seed + number, time.monotonic() - begun, os.getloadavg()[1], found))
            _keep(runs[-1])
            print(table(runs), flush=True)
            if status == 130:
                break
    return int(any(each.failed for each in runs))


@contextlib.contextmanager
def beside(loops: int, gigabytes: float) -> Iterator[None]:
    """Keep cores and memory busy."""
    words = [[sys.executable, "-c", BUSY]] * loops + [[sys.executable, "-c", HELD, str(gigabytes)]] * (gigabytes > 0)
    running = [subprocess.Popen(each, start_new_session=True) for each in words]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def _keep(done: Run) -> None:
    """Keep the logs of a run in which something failed."""
    if done.failed:
        folder = parts.BUILD / "stress" / str(done.seed)
        folder.mkdir(parents=True, exist_ok=True)
        for log in parts.BUILD.glob("*.log"):
            (folder / log.name).write_bytes(log.read_bytes())


def table(runs: Sequence[Run]) -> str:
    """Return each failure once, with its rate and its seeds, beside the runs without it.

    >>> print(table([Run(1, 60.0, 2.0, {}), Run(2, 90.0, 6.0, {"tests.test_a::test_b": "assert 1 == 2"})]))
    2 runs, 60 to 90 s; load 2.0 to 6.0
    FAILED 1 of 2  tests.test_a::test_b
        seeds 2; 90 s where it failed, 60 s elsewhere; load 6.0 and 2.0
        assert 1 == 2
    """
    seconds, loads = [each.seconds for each in runs], [each.load for each in runs]
    lines = [f"{len(runs)} runs, {min(seconds):.0f} to {max(seconds):.0f} s; load {min(loads):.1f} to {max(loads):.1f}"]
    with_it: dict[str, list[Run]] = defaultdict(list)
    for each in runs:
        for name in each.failed:
            with_it[name].append(each)
    for name, own in sorted(with_it.items(), key=lambda each: -len(each[1])):
        others = [each for each in runs if name not in each.failed] or own
        lines.append(f"FAILED {len(own)} of {len(runs)}  {name}")
        lines.append(
            f"    seeds {', '.join(str(each.seed) for each in own)}; "
            f"{_mean([each.seconds for each in own]):.0f} s where it failed, "
            f"{_mean([each.seconds for each in others]):.0f} s elsewhere; "
            f"load {_mean([each.load for each in own]):.1f} and {_mean([each.load for each in others]):.1f}"
        )
        lines.append("    " + own[0].failed[name].strip().splitlines()[0])
    return "\n".join(lines)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
