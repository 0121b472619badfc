# ruff: noqa: D102 - the tests' names say what they check
"""The part of the engines' contract suite that is about contexts: their files, builds, failures, and directories."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctxflow.files import digest_path
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.testing import contract_work as work
from ctxflow.testing.contract_hooks import Contract, ContractRun


class ContextsContract(Contract):
    """What becomes of contexts, and where calls and builds run (`own_folders`)."""

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

    # --- contexts

    def test_loading_is_measured(self, run: ContractRun) -> None:
        (worker,) = run.start()
        ready = run.load(worker, run.declare(work.slow, 0.2))
        assert ready.seconds >= 0.2
        assert ready.memory is None or ready.memory > 0

    def test_staged_files_have_local_paths_under_their_names(self, run: ContractRun, tmp_path: Path) -> None:
        (worker,) = run.start()
        (tmp_path / "weights.bin").write_text("42")
        context = run.declare(
            work.read, files={"weights": (str(tmp_path / "weights.bin"), digest_path(str(tmp_path / "weights.bin")))}
        )
        assert run.stage(worker, context).context == context
        run.load(worker, context)
        run.run(worker, context, work.with_context, [1])
        self._answers(run.wait(ev.BatchFinished), [("42", 1)])

    def test_files_stay_where_a_context_is_unloaded(self, run: ContractRun, tmp_path: Path) -> None:
        (worker,) = run.start()
        (tmp_path / "weights.bin").write_text("42")
        files = {"weights": (str(tmp_path / "weights.bin"), digest_path(str(tmp_path / "weights.bin")))}
        context = run.declare(work.read, files=files, level=ev.PARTIAL)
        run.stage(worker, context)
        for _ in range(2):
            run.load(worker, context)
            run.run(worker, context, work.with_context, [1])
            self._answers(run.wait(ev.BatchFinished), [("42", 1)])
            run.execute(cmd.Unload(worker, context))
            run.wait(ev.ContextUnloaded)

    def test_files_go_with_a_context_of_which_nothing_is_kept(self, run: ContractRun, tmp_path: Path) -> None:
        (worker,) = run.start()
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights" / "model.bin").write_text("42")
        files = {"weights": (str(tmp_path / "weights"), digest_path(str(tmp_path / "weights")))}
        context = run.declare(work.read_model, files=files, level=ev.NONE)
        kept = run.declare(work.read_model, files=files)
        run.load(worker, ev.PLAIN)
        run.stage(worker, kept)
        for _ in range(2):
            run.stage(worker, context)
            run.load(worker, context)
            run.run(worker, context, work.there, [1])
            finished = run.wait(ev.BatchFinished)
            run.execute(cmd.Unload(worker, context, files=True))
            run.wait(ev.ContextUnloaded)
            if self.executes:
                [(place, content, links)] = pickle.loads(finished.results)
                assert (content, links) == ("42", 1), "the files are this context's alone"
                run.apply(worker, os.path.exists, place)
                self._answers(run.wait(ev.BatchFinished), False)
        run.load(worker, kept)
        run.run(worker, kept, work.there, [1])
        finished = run.wait(ev.BatchFinished)
        assert not self.executes or pickle.loads(finished.results)[0][1] == "42", "another context's files stay"

    def test_a_context_of_which_nothing_is_kept_is_brought_again_at_once(
        self, run: ContractRun, tmp_path: Path
    ) -> None:
        (worker,) = run.start()
        (tmp_path / "weights.bin").write_text("42")
        files = {"weights": (str(tmp_path / "weights.bin"), digest_path(str(tmp_path / "weights.bin")))}
        context = run.declare(work.read, files=files, level=ev.NONE)
        run.stage(worker, context)
        run.load(worker, context)
        attempt = run.run(worker, context, work.sleep_with_context, [60])
        run.execute(
            cmd.Abandon(worker, attempt, context), cmd.Unload(worker, context, files=True), cmd.Stage(worker, context)
        )
        run.wait(ev.ContextStaged)
        run.load(worker, context)
        run.run(worker, context, work.with_context, [1])
        self._answers(run.wait(ev.BatchFinished), [("42", 1)])
        # What was not loaded is removed all the same.
        run.execute(cmd.Unload(worker, context), cmd.Unload(worker, context, files=True))
        run.wait(ev.ContextUnloaded)
        run.stage(worker, context)

    def test_files_that_are_not_there_fail_the_context(self, run: ContractRun, tmp_path: Path) -> None:
        self._needs_code()
        (worker,) = run.start()
        context = run.declare(work.read, files={"weights": (str(tmp_path / "missing"), "digest")})
        run.execute(cmd.Stage(worker, context))
        assert "missing" in run.wait(ev.ContextFailed).failure.message

    def test_a_context_that_raises_fails_with_its_traceback_and_may_be_tried_again(self, run: ContractRun) -> None:
        self._needs_code()
        (worker,) = run.start()
        for _ in range(2):
            context = run.declare(work.broken)
            run.execute(cmd.Load(worker, context))
            failure = run.wait(ev.ContextFailed).failure
            assert (failure.kind, failure.error, failure.machine) == ("exception", "ZeroDivisionError", False)
            assert "in broken" in failure.traceback
            assert "printed first" in failure.output
        run.load(worker, run.declare(work.slow, 0))

    def test_a_failure_says_whether_it_looks_like_the_machines(self, run: ContractRun) -> None:
        self._needs_code()
        worker = run.ready()
        run.run(worker, ev.PLAIN, work.lose_device, [1])
        assert run.wait(ev.BatchFailed).failure.machine
        run.run(worker, ev.PLAIN, work.complain, ["x"])
        assert not run.wait(ev.BatchFailed).failure.machine
        run.execute(cmd.Load(worker, run.declare(work.lose_device)))
        assert run.wait(ev.ContextFailed).failure.machine

    def test_a_context_that_takes_too_long_fails(self, run: ContractRun) -> None:
        self._needs_code()
        (worker,) = run.start()
        run.execute(cmd.Load(worker, run.declare(work.slow, 60, timeout=0.5)))
        assert run.wait(ev.ContextFailed).failure.kind == "timeout"

    def test_unloading_ends_the_context_and_it_can_be_loaded_again_at_once(self, run: ContractRun) -> None:
        context = run.declare(work.slow, 0)
        worker = run.ready(context)
        run.execute(cmd.Unload(worker, context), cmd.Load(worker, context))
        assert run.wait(ev.ContextUnloaded).context == context
        run.wait(ev.ContextReady)
        run.run(worker, context, work.with_context, [1])
        self._answers(run.wait(ev.BatchFinished), [(0, 1)])

    def test_a_worker_holds_several_contexts(self, run: ContractRun) -> None:
        (worker,) = run.start()
        contexts = [run.declare(work.slow, number / 1000) for number in (1, 2)]
        for context in contexts:
            run.load(worker, context)
        for number, context in enumerate(contexts, 1):
            run.run(worker, context, work.with_context, [0])
            self._answers(run.wait(ev.BatchFinished), [(number / 1000, 0)])
