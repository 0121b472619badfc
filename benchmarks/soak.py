#!/usr/bin/env python3
"""A long life among kills: one driver whose processes are killed in bursts, and what it has to show for it afterwards.

    benchmarks/soak.py --minutes 30 --json

A program of a user's kind (items through `map` against a context, calls without one, short sessions) runs on this
machine. Every few seconds comes a burst: ten times a second a quarter of all processes below the driver are ended with
kill -9, whatever they are and do: descendants of that driver, held by a descriptor, so nobody else's. Measured is what
is left of the program's promises:

- `wrong`: results that are not those of a quiet process, or that came twice or never;
- `blamed`: items that were given up as the likely cause of the ends of their processes;
- `broken`: contexts that were called broken;
- `memory_growth`, `descriptor_growth`: the driver's own at the end (the median of the last tenth), in times of those
  after the first tenth; `files_growth`: files in the run's folder and its scratch, likewise.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import psutil

from ctxflow import ContextExecutor, batch_app, context, session_app

_BATCH = 20_000  # Items of one map.
_CHUNKS = 6
_SECOND = 1.0


# --- the program


@context
def table() -> dict[int, int]:
    """A fifth of a second of building, and something that results depend on."""
    time.sleep(0.2)
    return {n: n * n % 251 for n in range(251)}


@batch_app(table())
def looked_up(squares: dict[int, int], items: list[int]) -> list[int]:
    """One small figure an item."""
    return [squares[n % 251] + n for n in items]


def cubed(n: int) -> int:
    """A call without a context."""
    return n**3


@session_app(table())
def counted(squares: dict[int, int], states: list[Any], prompts: list[list[int]]) -> Iterator[tuple[Any, Any]]:
    """A session whose chunks can only be right in their order, each once."""
    for state, new in zip(states, prompts, strict=True):
        number = (state or 0) + sum(new)
        yield squares[number % 251], number + 1


class Tally:
    """What became of what was asked, written down once a second by the driver.

    :param folder: where the run keeps its files.
    """

    def __init__(self, folder: Path) -> None:
        self.done = self.wrong = self.sessions = 0
        self.failures: collections.Counter[str] = collections.Counter()
        self._folder = folder
        self._process = psutil.Process()
        self._next = 0.0

    def check(self, got: Any, wanted: Any) -> None:
        """Count a result."""
        self.done += 1
        self.wrong += got != wanted

    def failed(self, error: BaseException) -> None:
        """Count what was given up, by what it says."""
        self.failures[f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"] += 1

    def say(self) -> None:
        """One line of JSON a second."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _SECOND
        line = {
            "done": self.done,
            "wrong": self.wrong,
            "sessions": self.sessions,
            "failures": dict(self.failures),
            "memory": self._process.memory_info().rss,
            "descriptors": self._process.num_fds(),
            "files": sum(len(names) for _, _, names in os.walk(self._folder)),
        }
        print(json.dumps(line), flush=True)


def drive(seconds: float, workers: int, folder: Path) -> None:
    """Run the program until its time is over."""
    tally, until, first = Tally(folder), time.monotonic() + seconds, 0
    os.chdir(folder)  # Where the run's folder is made.
    with ContextExecutor(workers=workers) as executor:
        while time.monotonic() < until:
            numbers = range(first, first + _BATCH)
            calls = [executor.submit(cubed, {}, n) for n in numbers[:50]]
            seen = 0
            for n, got in zip(numbers, looked_up.map(numbers, on_error="return"), strict=False):
                seen += 1
                if isinstance(got, BaseException):
                    tally.failed(got)
                else:
                    tally.check(got, n * n % 251 + n)
                tally.say()
            tally.wrong += _BATCH - seen
            for n, call in zip(numbers, calls, strict=False):
                with _failures_counted(tally):
                    tally.check(call.result(), n**3)
                tally.say()
            with _failures_counted(tally), counted.open(first) as session:
                chunks = [session.take(600) for _ in range(_CHUNKS)]
                tally.check(chunks, [(first + k) ** 2 % 251 for k in range(_CHUNKS)])
                tally.sessions += 1
            first += _BATCH


@contextlib.contextmanager
def _failures_counted(tally: Tally) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Whatever a call was given up with is a figure.
        tally.failed(error)


# --- the killer


class Killer:
    """Ends a quarter of a driver's processes ten times a second, in bursts.

    :param driver: which is never ended itself.
    """

    def __init__(self, driver: int, seed: int) -> None:
        self.kills = self.bursts = 0
        self._driver = psutil.Process(driver)
        self._random = random.Random(seed)
        self._until = 0.0  # Of the burst.
        self._next = time.monotonic() + 5.0

    def strike(self) -> None:
        """Take one step; called ten times a second."""
        now = time.monotonic()
        if now >= self._next:
            self.bursts += 1
            self._until = now + self._random.uniform(0.3, 3.0)
            self._next = self._until + self._random.uniform(2.0, 8.0)
        if now < self._until:
            below = self._driver.children(recursive=True)
            for victim in self._random.sample(below, (len(below) + 3) // 4):
                self._end(victim)

    def _end(self, victim: psutil.Process) -> None:
        with contextlib.suppress(OSError, psutil.Error):
            held = os.pidfd_open(victim.pid)
            try:
                if victim.is_running():  # The descriptor is of the process that was listed, so it ends no other.
                    signal.pidfd_send_signal(held, signal.SIGKILL)
                    self.kills += 1
            finally:
                os.close(held)


def soak(seconds: float, workers: int, seed: int) -> tuple[list[dict[str, Any]], Killer, float]:
    """Run the driver beside the killer; gives the driver's lines, and how long it took to end after its time."""
    with tempfile.TemporaryDirectory(prefix="ctxflow-soak-") as folder:
        words = [
            sys.executable,
            os.path.abspath(__file__),
            "--drive",
            folder,
            "--minutes",
            str(seconds / 60),
            "--workers",
            str(workers),
        ]
        said = Path(folder) / "said"
        with open(said, "wb") as out:
            driver = subprocess.Popen(words, stdout=out, stdin=subprocess.DEVNULL)
        killer, began, told = Killer(driver.pid, seed), time.monotonic(), 0
        while driver.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                if time.monotonic() < began + seconds:
                    killer.strike()
            if time.monotonic() > began + seconds + 600:
                driver.kill()
                raise SystemExit("the driver did not end within ten minutes of its time")
            if killer.kills >= told + 100:
                told = killer.kills
                common.progress(f"{time.monotonic() - began:.0f} s, {killer.kills} kills in {killer.bursts} bursts")
            time.sleep(0.1)
        late = time.monotonic() - began - seconds
        if driver.returncode:
            raise SystemExit(f"the driver ended with exit status {driver.returncode}: what it said is above")
        return [json.loads(line) for line in said.read_text().splitlines()], killer, late


def growth(lines: list[dict[str, Any]], what: str) -> float:
    """The median of the last tenth over that of the second tenth."""
    tenth = max(1, len(lines) // 10)
    values = [float(line[what]) for line in lines]
    return statistics.median(values[-tenth:]) / max(1.0, statistics.median(values[tenth : 2 * tenth] or values))


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=None, help="of the killer; by default another one each time")
    parser.add_argument("--quick", action="store_true", help="one minute")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    seconds = 60.0 if options.quick else options.minutes * 60
    if options.drive:
        drive(seconds, options.workers, options.drive)
        return
    seed = options.seed if options.seed is not None else random.randrange(1 << 30)
    common.progress(f"seed {seed}")
    lines, killer, late = soak(seconds, options.workers, seed)
    last = lines[-1]
    for sentence, times in last["failures"].items():
        common.progress(f"{times} times: {sentence}")
    broken = sum(times for sentence, times in last["failures"].items() if "ContextError" in sentence)
    counts = {
        "items": (last["done"], "items", "higher"),
        "kills": (killer.kills, "processes", "higher"),
        "wrong": (last["wrong"], "results", "lower"),
        "blamed": (sum(last["failures"].values()) - broken, "items", "lower"),
        "broken": (broken, "items", "lower"),
        "sessions": (last["sessions"], "sessions", "higher"),
        "memory_growth": (growth(lines, "memory"), "times", "lower"),
        "descriptor_growth": (growth(lines, "descriptors"), "times", "lower"),
        "files_growth": (growth(lines, "files"), "times", "lower"),
        "late": (late, "s", "lower"),
    }
    figures = {name: common.figure([float(value)], unit, better) for name, (value, unit, better) in counts.items()}
    common.report("soak", figures, common.versions(["psutil"]), options.json)


if __name__ == "__main__":
    main()
