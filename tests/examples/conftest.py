"""The examples are programs, not packages: their folders go on the path, as when a person runs them."""

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

sys.path.insert(0, str(EXAMPLES / "prompt_for_fact"))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """A worker computes with one thread: several that wait for each other crawl on a machine that is shared."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
