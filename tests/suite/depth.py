"""How deep a run of the suite goes: a plugin that reads `CTXFLOW_TEST_DEPTH`.

| depth | tests | examples of a property | seeds of a contract suite | drawn |
|---|---|---|---|---|
| `quick` | neither `model` nor `release` nor what was recorded as long | a fifth, at most 20 | 3 | the same each time |
| `test` (default) | all but `release` | at most 20 | 3 | the same each time |
| `release` | all | three times what it says | 12 | anew |
| `hunt` | properties and contract suites | three times what it says | 12 new ones a round | anew, after earlier finds |

What a property says is `max_examples` of its settings, 100 where it says nothing. Examples that are written down
(`@example`) are tried in every depth.
"""

from __future__ import annotations

import os
import random
import sys
import unittest
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from suite.shards import is_long

VARIABLE = "CTXFLOW_TEST_DEPTH"
DEPTHS = ("quick", "test", "release", "hunt")
FINDS = Path("build/hunt/examples")
"""Where a hunt keeps examples that failed."""
_DEAR_FIXTURES = frozenset({"wheel_file", "sdist_file", "packed", "little", "vllm_python"})
"""A wheel, a source distribution, packed environments, and an environment with vLLM."""
_STATED = 100
_FEW = 20
_MORE = 3
_FEW_SEEDS = 3
_OF_FUNCTION = "_hypothesis_internal_use_settings"
T = TypeVar("T")


def depth() -> str:
    """Return the depth of this run."""
    chosen = os.environ.get(VARIABLE, "test")
    if chosen not in DEPTHS:
        raise pytest.UsageError(f"{VARIABLE} is {chosen!r}: choose one of {', '.join(DEPTHS)}")
    return chosen


def deep() -> bool:
    """Return whether this run goes into depth."""
    return depth() in ("release", "hunt")


def some(each: T, *, deeply: T) -> T:
    """Return what an ordinary run takes, or what one in depth takes: seeds, sizes, cases.

    >>> some(range(3), deeply=range(3))
    range(0, 3)
    """
    return deeply if deep() else each


def for_release(*values: Any) -> list[Any]:
    """Return parameters of a test that only a run in depth tries.

    >>> [each.values[0] for each in for_release("slow", "full")]
    ['slow', 'full']
    """
    return [
        pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.release) for value in values
    ]


def examples(stated: int, at: str) -> int:
    """Return how many examples a property that states so many tries in a depth.

    >>> [examples(60, at) for at in DEPTHS], examples(300, "quick"), examples(4, "quick")
    ([12, 20, 180, 180], 20, 1)
    """
    return {"quick": max(1, min(stated // 5, _FEW)), "test": min(stated, _FEW)}.get(at, stated * _MORE)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the profile of properties, and the seeds of contract suites."""
    config.addinivalue_line("markers", "release: only in `make test-release`; CONTRIBUTING says what else covers it")
    config.addinivalue_line("markers", "seeded: draws from the contract suites' seeds, which a hunt chooses")
    os.environ.setdefault("CTXFLOW_CONTRACT_SEEDS", "0:12" if deep() else f"0:{_FEW_SEEDS}")
    # The time that an example takes says how busy the machine is.
    common: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    own: dict[str, Any] = {"max_examples": examples(_STATED, depth()), "derandomize": not deep(), "database": None}
    if depth() == "hunt":
        own["database"] = DirectoryBasedExampleDatabase(config.rootpath / FINDS)
    if not deep() and config.pluginmanager.hasplugin("randomly"):
        config.option.randomly_reset_seed = False  # By the order's seed; `_seed` does it by the test's name.
    settings.register_profile("ctxflow", **common, **own)
    settings.load_profile("ctxflow")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is only for a release, and give the others their examples."""
    if not deep():
        left_out = [item for item in items if _left_out(item)]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            gone = set(left_out)
            items[:] = [item for item in items if item not in gone]
    _adapt(items)


def _left_out(item: pytest.Item) -> bool:
    if item.get_closest_marker("release"):
        return True
    if depth() != "quick":
        return False
    return is_long(item) or not _DEAR_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


def _adapt(items: list[pytest.Item]) -> None:
    """Adapt what properties and state machines say of their examples themselves, which no profile does."""
    tests = [item for item in items if isinstance(item, pytest.Function)]
    held: list[tuple[Any, str]] = [(each, _OF_FUNCTION) for each in {item.function for item in tests}]
    classes = {item.cls for item in tests if item.cls is not None}
    held += [(each, "settings") for each in classes if issubclass(each, unittest.TestCase)]
    profile = settings.get_profile("ctxflow")
    for each, name in held:
        if isinstance(chosen := getattr(each, name, None), settings):
            count = examples(chosen.max_examples, depth())
            adapted = settings(chosen, max_examples=count, derandomize=profile.derandomize, database=profile.database)
            setattr(each, name, adapted)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let every test draw the same, in whatever order they come, unless the run is in depth."""
    _seed(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Let what fixtures have drawn change nothing."""
    _seed(item)


def _seed(item: pytest.Item) -> None:
    if not deep():
        random.seed(item.nodeid)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
