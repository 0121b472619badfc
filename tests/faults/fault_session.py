"""Run chosen tests in this process, in a chosen order, and write down how each went and what it reached.

Run as the first process of a PID namespace with the path of an order (`Order` as JSON): pytest then runs in a child,
and this process only reaps what others leave, until pytest ends and the namespace with it.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import re
import signal
import sys
import time
import zlib
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import pytest


@dataclass(frozen=True)
class Order:
    """What a session is to do.

    :param arguments: pytest's.
    :param tests: the tests to run, in this order; None for all that are collected.
    :param done: tests to leave out.
    :param first_failure: whether to end at the first failure.
    :param journal: the file that gets a line for each test that starts or ends.
    :param array: the file of the probes' array; None where nothing is recorded.
    """

    arguments: list[str]
    journal: str
    tests: list[str] | None = None
    done: list[str] | None = None
    first_failure: bool = False
    array: str | None = None

    def write(self, path: Path) -> None:
        """Write it down for another process."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def packed(reached: bytes) -> str:
    """Return an array of bytes as text, a bit for each."""
    bits = bytearray(len(reached) // 8 + 1)
    for found in re.finditer(rb"[^\0]", reached):
        bits[found.start() // 8] |= 1 << found.start() % 8
    return base64.b85encode(zlib.compress(bytes(bits))).decode()


def unpacked(text: str) -> bytes:
    """Return the bits of `packed`: `bits[n // 8] >> n % 8 & 1` tells whether probe n was reached."""
    return zlib.decompress(base64.b85decode(text))


class Recorder:
    """A plug-in of pytest that chooses and orders tests, and keeps the journal."""

    def __init__(self, order: Order, journal: IO[str]) -> None:
        self._order = order
        self._journal = journal
        self._array: mmap.mmap | None = None
        self._outcome = "passed"
        if order.array is not None:
            with Path(order.array).open("r+b") as file:
                self._array = mmap.mmap(file.fileno(), 0)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests to run, in the order's order."""
        done = set(self._order.done or [])
        if self._order.tests is None:
            items[:] = [item for item in items if item.nodeid not in done]
        else:
            places = {name: place for place, name in enumerate(self._order.tests)}
            items[:] = sorted((item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Write down that a test starts, and once it has ended how, after how long, and what was reached meanwhile."""
        if self._array is not None:
            self._array[:] = bytes(len(self._array))
        self._outcome, began = "passed", time.monotonic()
        self._write(starts=item.nodeid)
        result = yield
        reached = {} if self._array is None else {"reached": packed(self._array[:])}
        seconds = round(time.monotonic() - began, 3)
        self._write(test=item.nodeid, outcome=self._outcome, seconds=seconds, **reached)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst outcome of a test's setup, call and teardown."""
        if report.failed:
            self._outcome = "failed"
        elif report.skipped and self._outcome == "passed":
            self._outcome = "skipped"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write down what cannot be imported."""
        if report.failed:
            self._write(broken=report.nodeid)

    def _write(self, **line: Any) -> None:
        self._journal.write(json.dumps(line) + "\n")
        self._journal.flush()


def run(order: Order) -> int:
    """Run pytest as ordered, and return its exit status."""
    arguments = [*order.arguments, *(["--maxfail=1"] if order.first_failure else [])]
    with Path(order.journal).open("a", encoding="utf-8") as journal:
        return int(pytest.main(arguments, plugins=[Recorder(order, journal)]))


def main() -> int:
    """Run pytest in a child, and reap until it ends."""
    order = Order(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    child = os.fork()
    if not child:
        os.setsid()
        sys.argv, sys.path[0] = ["pytest"], os.getcwd()  # As `python -m pytest` has it.
        return run(order)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        ended, status = os.wait()
        if ended == child:
            os._exit(os.waitstatus_to_exitcode(status) % 256)


if __name__ == "__main__":
    sys.exit(main())
