"""What the engines' contract suites have in common: the hooks by which a plug-in's author says what an engine can.

What does not live here: the suites (engines.py, sessions.py), and what stands in for a run (contract_run.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctxflow.executors.engine import Engine
from ctxflow.testing.contract_run import ContractRun


class Contract:
    """A suite is a subclass; the hooks, which an engine's own subclass fills in, say how to make one and what it can.

    :cvar runs: what stands in for a run.
    """

    tier = "local"
    executes = True
    """Whether contexts are built, files brought and functions run for real; without it only events are looked at."""
    own_folders = False
    """Whether each call has a folder of its own; else calls and builds run in the directory where it was started."""
    runs: type[ContractRun] = ContractRun

    def make(self) -> Engine:
        """A new engine, not started, that takes at least 2 workers."""
        raise NotImplementedError

    def notify(self, engine: Any, worker: str) -> None:
        """Give a worker notice that it will be taken away."""
        pytest.skip("this engine's workers cannot be given notice")

    @pytest.fixture
    def run(self, tmp_path: Path) -> Iterator[ContractRun]:
        """A run whose engine is stopped afterwards."""
        run = self.runs(self.make(), str(tmp_path / "run"), self.tier)
        yield run
        run.engine.stop()

    def _needs_code(self) -> None:
        if not self.executes:
            pytest.skip("this engine runs no functions")
