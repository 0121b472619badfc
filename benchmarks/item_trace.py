#!/usr/bin/env python3
"""How much of ctxflow one item enters in the driver, from `map` to its result, on a warm embedded engine.

    benchmarks/item_trace.py --json
    benchmarks/item_trace.py --show        also names the files and functions, for those who shorten the way

Counts ctxflow's files and functions that are entered on any thread of the driver, in two cases:

- `item`: a map that runs is handed one more item, until its result is taken.
- `map_of_one`: a map of one item over a list, from the call of `map` until its result is taken and the map has ended.

Functions are counted by their code; comprehensions and what `dataclasses` generates do not count. What happens beside
the item, such as a status line once a second, is left out: a function counts if it is entered in each of the rounds.
It uses nothing but ctxflow's public names, so that it runs on earlier versions too.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import ctxflow
from ctxflow import ContextExecutor, batch_app

ROOT = os.path.dirname(os.path.abspath(ctxflow.__file__)) + os.sep
# What reports the figures is that of the tree which is measured.
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(ROOT))), "benchmarks"))
import common  # noqa: E402

WARM_UP = 50
SETTLED = 0.05  # Seconds from one round to the next, for what follows an answer.

Entered = set[tuple[str, str, int]]
"""Functions: file below the package, name, first line."""


class Trace:
    """Notes which of ctxflow's functions are entered, while it records; threads that start later are heard too."""

    def __init__(self) -> None:
        self._recording = False
        self._codes: set[Any] = set()
        threading.setprofile(self._heard)
        sys.setprofile(self._heard)

    def _heard(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and self._recording:
            self._codes.add(frame.f_code)

    def of(self, work: Callable[[], object]) -> Entered:
        """Return what is entered on any thread while some work is done."""
        self._codes = set()
        self._recording = True
        try:
            work()
        finally:
            self._recording = False
        time.sleep(SETTLED)
        return {
            (code.co_filename[len(ROOT) :], getattr(code, "co_qualname", code.co_name), code.co_firstlineno)
            for code in self._codes
            if code.co_filename.startswith(ROOT) and code.co_name not in _COMPREHENSIONS
        }


_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<module>")


@batch_app
def echo(values: Any) -> Any:
    """The no-op."""
    return values


def in_each(trace: Trace, work: Callable[[], object], rounds: int) -> Entered:
    """Return what is entered in each of some rounds."""
    found = trace.of(work)
    for _ in range(rounds - 1):
        found &= trace.of(work)
    return found


def measure(rounds: int) -> dict[str, Entered]:
    """Return what an item enters in either case."""
    trace = Trace()
    found = {}
    with ContextExecutor(workers=1):
        fed: queue.SimpleQueue[int | None] = queue.SimpleQueue()

        def items() -> Iterator[int]:
            while (value := fed.get()) is not None:
                yield value

        fed.put(0)
        results = iter(echo.map(items()))
        next(results)

        def one_more() -> None:
            fed.put(1)
            next(results)

        for _ in range(WARM_UP):
            one_more()
        time.sleep(SETTLED)
        found["item"] = in_each(trace, one_more, rounds)
        fed.put(None)
        list(results)
        for _ in range(WARM_UP):
            list(echo.map([1]))
        time.sleep(SETTLED)
        found["map_of_one"] = in_each(trace, lambda: list(echo.map([1])), rounds)
    sys.setprofile(None)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="How many files and functions one item of a map enters.")
    parser.add_argument("--rounds", type=int, default=10, help="how often each case is traced (10)")
    parser.add_argument("--quick", action="store_true", help="3 rounds: to see that it runs")
    parser.add_argument("--show", action="store_true", help="name the files and functions on stderr")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds is how often it is traced: give 1 or more")
    rounds = 3 if given.quick else given.rounds
    figures = {}
    for case, entered in measure(rounds).items():
        files = sorted({file for file, _, _ in entered})
        figures[f"{case}_files"] = common.figure([len(files)] * rounds, "files", "lower")
        figures[f"{case}_functions"] = common.figure([len(entered)] * rounds, "functions", "lower")
        if given.show:
            for file in files:
                names = ", ".join(name for each, name, _ in sorted(entered) if each == file)
                print(f"{case}: {file}: {names}", file=sys.stderr)
    common.report("item_trace", figures, common.versions(()), given.json)


if __name__ == "__main__":
    main()
