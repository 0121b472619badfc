# ruff: noqa: D102 - the tests' names say what they check
"""The part of the engines' contract suite that says in which directories calls and contexts' builds run.

What does not live here: the rest of the suite (engines.py).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctxflow.scheduler import events as ev
from ctxflow.testing import contract_work as work
from ctxflow.testing.contract import Contract
from ctxflow.testing.contract_run import ContractRun


class DirectoriesContract(Contract):
    """Where calls run, by `own_folders`."""

    def test_calls_and_builds_run_where_the_engine_says(
        self, run: ContractRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._needs_code()
        home = tmp_path / "home"
        home.mkdir()
        (home / "weights.txt").write_text("42")
        monkeypatch.chdir(home)
        (worker,) = run.start()
        monkeypatch.chdir(tmp_path)  # Where the driver goes later is nothing to calls.
        run.load(worker, ev.PLAIN)

        def call(function: Callable[..., Any], *args: Any) -> Any:
            run.apply(worker, function, *args)
            return pickle.loads(run.wait(ev.BatchFinished).results)

        if self.own_folders:
            for function, argument in ((work.leave, "left"), (os.chdir, "/")):
                call(function, argument)
                assert call(os.getcwd) != str(home)
                assert call(os.listdir, ".") == [], "each call finds its folder empty"
            return
        context = run.declare(work.read, "weights.txt")
        run.load(worker, context)
        run.run(worker, context, work.with_context, [1])
        assert pickle.loads(run.wait(ev.BatchFinished).results) == [("42", 1)]
        for function, argument in ((work.leave, "left"), (os.chdir, "/")):
            call(function, argument)
            assert call(os.getcwd) == str(home)
        assert sorted(os.listdir(home)) == ["left", "weights.txt"]
