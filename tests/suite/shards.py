"""Split the suite over machines, and begin with the longest modules: a plugin that reads the recorded times.

`--shard 2/3` runs the second of three parts. A module of tests stays whole; modules are dealt out by what the last
recorded run took (`recorded.json`, which `make test-times RECORD=1` writes), dearest first, each to the lightest part.
The record also has the tests that a quick run leaves out.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

RECORDED = Path(__file__).with_name("recorded.json")
_ROOT = RECORDED.parents[2]
UNKNOWN_SECONDS = 2.0
"""What a module that is not recorded is taken to cost."""
LONG_SECONDS = 10.0
"""Modules that cost more come first."""
T = TypeVar("T")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--shard`."""
    parser.addoption("--shard", metavar="K/N", type=_shard, help="run the K-th of N parts of about the same cost")


def _shard(text: str) -> tuple[int, int]:
    own, _, of = text.partition("/")
    if not (own.isdecimal() and of.isdecimal() and 1 <= int(own) <= int(of)):
        raise pytest.UsageError(f"--shard {text}: give K/N, such as 2/3")
    return int(own), int(of)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep this part's modules, and begin with the longest: one that begins last is waited for by all."""
    recorded = record().modules
    if shard := config.getoption("--shard"):
        own, of = shard
        taken = deal({_module(item) for item in items}, recorded, of)
        config.hook.pytest_deselected(items=[item for item in items if taken[_module(item)] != own - 1])
        items[:] = [item for item in items if taken[_module(item)] == own - 1]
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = {module for module, seconds in recorded.items() if seconds >= LONG_SECONDS}
    longest = sorted((i for i in items if _module(i) in long), key=lambda i: (-recorded[_module(i)], _module(i)))
    blocks = [list(each) for _, each in itertools.groupby(longest, _module)]
    items[:] = longest_first(blocks, [item for item in items if _module(item) not in long], processes)


def _module(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@dataclass
class Record:
    """What a run took.

    :ivar modules: seconds of each module of tests.
    :ivar long: of each module the tests that take too long for a quick run, without their parameters, and the fixtures,
        in parentheses, for which that holds.
    """

    modules: dict[str, float]
    long: dict[str, list[str]]

    @classmethod
    def read(cls) -> Record:
        """Return what is kept in the checkout."""
        return cls(**json.loads(RECORDED.read_text(encoding="utf-8")))

    def update(self, newer: Record) -> None:
        """Replace what there is of the modules of another run, and drop modules that are gone."""
        for mine, other in ((self.modules, newer.modules), (self.long, newer.long)):
            for module in [each for each in mine if each in newer.modules or not (_ROOT / each).exists()]:
                del mine[module]
            mine.update(other)

    def write(self) -> None:
        """Keep it in the checkout."""
        RECORDED.write_text(json.dumps(asdict(self), indent=0, sort_keys=True) + "\n", encoding="utf-8")


@cache
def record() -> Record:
    """Return the record of this checkout, read once."""
    return Record.read()


def is_long(item: pytest.Item) -> bool:
    """Return whether a test, with one set of parameters or another, or its fixtures took too long for a quick run."""
    needs = [f"({name})" for name in getattr(item, "fixturenames", ())]
    long = record().long.get(_module(item), ())
    return any(name in long for name in [getattr(item, "originalname", item.name), *needs])


def deal(modules: Iterable[str], seconds: Mapping[str, float], parts: int) -> dict[str, int]:
    """Return which part each module belongs to; the parts cost about the same.

    >>> deal(["a", "b", "c", "d"], {"a": 9.0, "b": 5.0, "c": 4.0, "d": 1.0}, 2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    loads = [0.0] * parts
    found = {}
    for module in sorted(modules, key=lambda each: (-seconds.get(each, UNKNOWN_SECONDS), each)):
        found[module] = lightest = loads.index(min(loads))
        loads[lightest] += seconds.get(module, UNKNOWN_SECONDS)
    return found


def longest_first(longest: Sequence[Sequence[T]], others: Sequence[T], processes: int) -> list[T]:
    """Return an order in which each of some processes, to each of which xdist gives a block, begins with long modules.

    >>> longest_first([["a1", "a2"], ["b"], ["c"]], [1, 2, 3, 4], 2)
    ['a1', 'a2', 'c', 1, 'b', 2, 3, 4]
    """
    size, more = divmod(sum(map(len, longest)) + len(others), processes)
    found: list[T] = []
    left = list(others)
    for number in range(processes):
        block = [each for module in longest[number::processes] for each in module]
        room = max(0, size + (number < more) - len(block))
        found += block + left[:room]
        del left[:room]
    return found + left
