"""What each test costs: a plugin that writes CPU seconds into the junit file, and a table of the last run.

The plugin gives each test the property `cpu`: seconds of its setup, call and teardown, with all processes that it has
started. Fixtures that take long have one each, `fixture NAME`, with CPU and wall seconds. What lives beside a test,
such as a pool that idles, counts for the test that runs.
"""

from __future__ import annotations

import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from suite import starts
from suite.meter import Meter
from suite.shards import RECORDED, Record

FIXTURE_SECONDS = 0.3
"""From how many seconds, of CPU or wall, a fixture is noted."""
DEAREST = 50
COLLECTION = "(collection)"
"""What collecting is noted as, among the fixtures of the first test of each process."""
RECORDED_DEPTH = "test"
QUICK_SECONDS = 0.2
"""What a test may cost at most to be in a quick run."""


def pytest_configure(config: pytest.Config) -> None:
    """Measure in each process that runs tests; not in one that only gives them out."""
    if config.getoption("dist", "no") == "no" or hasattr(config, "workerinput"):
        config.pluginmanager.register(TimesPlugin(), "ctxflow-times")


class TimesPlugin:
    """Notes CPU seconds with each test's report."""

    def __init__(self) -> None:
        self._meter = Meter()
        self._begun = 0.0
        self._item: pytest.Item | None = None
        self._collected: tuple[float, float] | None = None
        self._started = time.monotonic()

    def pytest_collection_finish(self) -> None:
        """Note what collecting takes, which each process does: the first test has it, like a fixture."""
        self._collected = self._meter.seconds(), time.monotonic() - self._started

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Begin a test's account."""
        self._item, self._begun = item, self._meter.seconds()
        if self._collected is not None:
            item.user_properties.append((f"fixture {COLLECTION}", "{:.3f} {:.3f}".format(*self._collected)))
            self._collected = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Close the account before the last report, which has it."""
        if call.when == "teardown":
            item.user_properties.append(("cpu", f"{self._meter.seconds() - self._begun:.3f}"))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Note what a dear fixture takes; those that it asks for are set up before."""
        wall, cpu = time.monotonic(), self._meter.seconds()
        try:
            return (yield)
        finally:
            wall, cpu = time.monotonic() - wall, self._meter.seconds() - cpu
            if self._item is not None and max(wall, cpu) >= FIXTURE_SECONDS:
                self._item.user_properties.append((f"fixture {fixturedef.argname}", f"{cpu:.3f} {wall:.3f}"))

    def pytest_sessionfinish(self) -> None:
        """End the account."""
        self._meter.close()


@dataclass
class Test:
    """What one test took, in seconds."""

    __test__ = False
    name: str
    room: str
    cpu: float
    wall: float
    fixtures: list[tuple[str, float, float]] = field(default_factory=list)


def read(files: Iterable[Path]) -> list[Test]:
    """Return the tests of junit files."""
    found = []
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            own = [(each.get("name", ""), each.get("value", "")) for each in case.iter("property")]
            fixtures = [(name[8:], *map(float, value.split())) for name, value in own if name.startswith("fixture ")]
            module = case.get("classname", "")
            cpu = sum(float(value) for name, value in own if name == "cpu")
            name = f"{module}::{case.get('name')}"
            found.append(Test(name, room(module), cpu, float(case.get("time", 0)), fixtures))  # type: ignore[arg-type]
    return found


def room(module: str) -> str:
    """Return the folder that a test is accounted to.

    >>> room("tests.policies.routing.test_torta"), room("tests.test_apps"), room("src.ctxflow.host.wire")
    ('tests/policies', 'tests', 'src')
    """
    top, *rest = module.split(".")
    return f"tests/{rest[0]}" if top == "tests" and len(rest) > 1 and not rest[0].startswith("test_") else top


def table(tests: list[Test], started: list[tuple[str, int, float]]) -> str:
    """Return the whole table as text."""
    rooms: dict[str, list[Test]] = defaultdict(list)
    for test in tests:
        rooms[test.room].append(test)
    lines = [f"{'room':<22}{'tests':>7}{'CPU s':>9}{'wall s':>9}"]
    for name, own in sorted(rooms.items(), key=lambda each: -sum(test.cpu for test in each[1])):
        lines.append(f"{name:<22}{len(own):>7}{sum(t.cpu for t in own):>9.1f}{sum(t.wall for t in own):>9.1f}")
    lines.append(f"{'all':<22}{len(tests):>7}{sum(t.cpu for t in tests):>9.1f}{sum(t.wall for t in tests):>9.1f}")
    lines += ["", f"The {DEAREST} dearest tests{'':<6}CPU s   wall s"]
    lines += [
        f"{test.cpu:>29.1f}{test.wall:>9.1f}  {test.name}"
        for test in sorted(tests, key=lambda each: -each.cpu)[:DEAREST]
    ]
    lines += ["", f"{'start-ups':<40}{'count':>7}{'CPU s':>9}{'wall s':>9}"]
    lines += [f"{name:<40}{count:>7}{cpu:>9.1f}" for name, count, cpu in started if cpu >= 1]
    fixtures: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for test in tests:
        for name, cpu, wall in test.fixtures:
            fixtures[name].append((cpu, wall))
    for name, each in sorted(fixtures.items(), key=lambda entry: -sum(cpu for cpu, _ in entry[1]))[:DEAREST]:
        sums = f"{sum(cpu for cpu, _ in each):>9.1f}{sum(wall for _, wall in each):>9.1f}"
        lines.append(f"{'fixture ' + name:<40}{len(each):>7}{sums}")
    return "\n".join(lines)


def show(folder: Path, record: bool = False) -> int:
    """Print the table of the last run; keep what it took where `record` is set."""
    files = sorted(folder.glob("*.xml"))
    if not files:
        print(f"No run has left its times in {folder}: run make test first.")
        return 2
    tests = read(files)
    print(table(tests, starts.totals(folder / "starts")))
    if record:
        if any(ElementTree.parse(file).find(f"testsuite[@name='{RECORDED_DEPTH}']") is None for file in files):
            print("Only an ordinary run is recorded: others leave tests out, or try more cases. Run make test first.")
            return 2
        newer, kept = record_of(tests), Record.read()
        kept.update(newer)
        kept.write()
        print(f"Recorded {len(newer.modules)} modules in {RECORDED.name}.")
    return 0


def record_of(tests: Iterable[Test]) -> Record:
    """Return what each module costs: CPU seconds, or a third of the wall seconds of tests that mostly wait."""
    modules: dict[str, float] = defaultdict(float)
    long: dict[str, set[str]] = defaultdict(set)
    for test in tests:
        classname, _, name = test.name.partition("::")
        file = "/".join(part for part in classname.split(".") if not part[:1].isupper()) + ".py"
        cost = max(test.cpu, test.wall / 3)
        modules[file] += cost
        if cost > QUICK_SECONDS:
            long[file].add(name.partition("[")[0])
        dear = [name for name, own, waited in test.fixtures if max(own, waited / 3) > QUICK_SECONDS]
        long[file].update(f"({each})" for each in dear if each != COLLECTION)
    return Record(
        {file: round(seconds, 1) for file, seconds in modules.items()},
        {file: sorted(names) for file, names in long.items() if names},
    )
