#!/usr/bin/env python3
"""What a long life leaves behind: one driver with 100,000 distinct declarations, in maps, calls and sessions.

    benchmarks/long_life.py --json                     (as fast as they go: some minutes)
    benchmarks/long_life.py --json --seconds 3600      (spread over an hour)

Backs the README's word that memory does not grow with the length of a run. Each declaration is one that was never there
before: a map and calls with other constants (one in fifty of 100 KB), calls with other options, functions that are
called three times, sessions of an app made anew; now and then another context, on workers that hold as many as they
keep from the beginning. Memory (the proportional set size), descriptors and threads are looked at when a tenth is done
and at the end; figures:

- `driver_growth`, `workers_growth`: memory at the end divided by that after a tenth;
- `driver_mb`, `workers_mb`: what it is then; `log_mb`: the event log, which is on the disk;
- `descriptors_growth`, `threads_growth`, `files_growth`: of driver and workers, and files in the workers' folders;
- `seconds`: the time of all of it; `late_share`: that of the last tenth, divided by that of the second, where they go
  as fast as they can;
- `options_ratio`, `constants_ratio`: 10,000 calls of as many options (constants), divided by those of one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import psutil
from common import Figure, figure, progress, report, versions

from ctxflow import ContextExecutor, batch_app, context, context_app, idle, session_app
from ctxflow.host.linux import proportional_bytes

_AT_ONCE = 50  # Declarations whose answers are awaited together.
_CONTEXT_EVERY = 500  # Each costs a process its start.
_FILL = 50  # Contexts: more than both workers keep.


@batch_app(batch_size=1)
def shifted(numbers: list[int], *, by: Any = 0) -> list[int]:
    """Items with constants."""
    return [number + 1 for number in numbers]


def identity(value: int) -> int:
    """A call."""
    return value


@context
def number(value: int) -> int:
    """A context that is cheap to build."""
    return value


@context_app
def there(value: int) -> int:
    """What a context holds."""
    return value


def some(executor: ContextExecutor, first: int) -> int:
    """So many new declarations of each kind; gives how many those were."""
    futures, expected = [], []
    for n in range(first, first + _AT_ONCE, 5):
        futures.append(shifted(n, by=n))
        futures.append(executor.submit(identity, {"priority": -n}, n + 1))
        expected += [n + 1] * 2
        assert list(shifted.map([n], by=b"x" * 100_000 + str(n).encode() if n % 50 == 0 else str(n))) == [n + 1]

        def fresh(value: int, n: int = n) -> int:
            return value + n

        futures += [executor.submit(fresh, {}, k) for k in range(3)]
        expected += [n, n + 1, n + 2]

        @session_app(keep_every=None)
        def counting(states: list[Any], prompts: list[Any], n: int = n) -> Iterator[tuple[Any, int]]:
            for state, new in zip(states, prompts, strict=True):
                left = (new[0] if new else state) - 1
                yield (n if left else idle(n)), left

        with counting.open(2) as session:
            assert list(session) == [n, n]
    if first % _CONTEXT_EVERY == 0:
        futures.append(there.using(number(first))())
        expected.append(first)
    wait(futures)
    assert [future.result() for future in futures] == expected
    return _AT_ONCE


def total(processes: list[psutil.Process], of: Callable[[psutil.Process], int]) -> float:
    """The sum over those that are still there."""
    found = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += of(process)
    return found


def look(folder: Path) -> dict[str, float]:
    """What driver and workers have now."""
    gc.collect()
    me = psutil.Process()
    those = me.children(recursive=True)
    processes = [me, *those]
    return {
        "driver_mb": proportional_bytes(me.pid) / 2**20,
        "workers_mb": total(those, lambda each: proportional_bytes(each.pid)) / 2**20,
        "descriptors": total(processes, psutil.Process.num_fds),
        "threads": total(processes, psutil.Process.num_threads),
        "files": sum(len(folders) + len(files) for _, folders, files in os.walk(tempfile.gettempdir())),
        "log_mb": (folder / "ctxflow" / "events.jsonl").stat().st_size / 2**20,
    }


def live(declarations: int, seconds: float | None) -> tuple[dict[str, float], dict[str, float], list[float], float]:
    """One run: what there was after a tenth and at the end, the time of each tenth, and of all."""
    tenths: list[float] = []
    with tempfile.TemporaryDirectory(prefix="ctxflow-long-life-") as made:
        folder, tempfile.tempdir = Path(made), f"{made}/tmp"
        os.mkdir(tempfile.tempdir)
        executor = ContextExecutor(workers=2)
        executor.run_dir = made
        with executor:
            wait([there.using(number(-n))() for n in range(1, _FILL + 1)])
            begun = tenth_begun = time.perf_counter()
            done, early = 0, dict[str, float]()
            while done < declarations:
                done += some(executor, done)
                if seconds is not None:  # On time, whatever some took.
                    time.sleep(max(0.0, begun + seconds * done / declarations - time.perf_counter()))
                if done * 10 // declarations > len(tenths):
                    now = time.perf_counter()
                    tenths.append(now - tenth_begun)
                    tenth_begun = now
                    seen = look(folder)
                    early = early or seen
                    progress(f"{done:,} of {declarations:,}: " + ", ".join(f"{k} {v:.1f}" for k, v in seen.items()))
            tempfile.tempdir = None
            return early, seen, tenths, time.perf_counter() - begun


def calls(kind: str, different: bool, count: int) -> float:
    """Seconds of so many calls, of as many options or of one."""
    with tempfile.TemporaryDirectory(prefix="ctxflow-long-life-") as made:
        executor = ContextExecutor(workers=2)
        executor.run_dir = made
        with executor:
            wait([executor.submit(identity, {}, 0) for _ in range(20)])
            wait([shifted(0) for _ in range(20)])
            begun = time.perf_counter()
            if kind == "options":
                futures = [executor.submit(identity, {"priority": n if different else 0}, n) for n in range(count)]
            else:
                futures = [shifted(n, by=n if different else 0) for n in range(count)]
            wait(futures)
            return time.perf_counter() - begun


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--declarations", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, help="spread them over so long; else as fast as they go")
    parser.add_argument("--quick", action="store_true", help="a tenth of all, to see that it runs")
    options = parser.parse_args()
    share = 10 if options.quick else 1
    early, late, tenths, seconds = live(options.declarations // share, options.seconds)
    found: dict[str, Figure] = {"seconds": figure([seconds], "s", "lower")}
    for name in ("driver_mb", "workers_mb", "log_mb"):
        found[name] = figure([late[name]], "MB", "lower")
    for name in ("driver_mb", "workers_mb", "descriptors", "threads", "files"):
        growth = late[name] / early[name] if early[name] else 1.0
        found[name.removesuffix("_mb") + "_growth"] = figure([growth], "times", "lower")
    if options.seconds is None:
        found["late_share"] = figure([tenths[-1] / tenths[1]], "times", "lower")
    for kind in ("options", "constants"):
        ratios = []
        for turn in range(3):
            progress(f"calls of different {kind}: round {turn + 1} of 3")
            one = calls(kind, False, 10_000 // share)
            ratios.append(calls(kind, True, 10_000 // share) / one)
        found[f"{kind}_ratio"] = figure(ratios, "times", "lower")
    report("long_life", found, versions(["parsl", "psutil"]), options.json)


if __name__ == "__main__":
    main()
