# ruff: noqa: D102 - the tests' names say what they check
"""The base of the engines' contract suites: a plug-in's hooks, a run that drives an engine, the tests of contexts."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ctxflow.executors.contract import CallPayload, ContextPayload, Engine, Payloads, Pickled, threads_for
from ctxflow.files import digest_path
from ctxflow.pickling import dumps
from ctxflow.recipe import Context
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.testing import worker_calls as work
from ctxflow.testing.evictions import patience

PATIENCE = patience(30.0)  # Seconds after which a test gives up on an event.

E = TypeVar("E", bound=ev.Event)


class ContractRun:
    """Drive an engine (not started yet) in the place of a run: give it payloads, and collect what it reports.

    :ivar events: what the engine has reported and no `wait` has removed.
    """

    def __init__(self, engine: Engine, directory: str, tier: str) -> None:
        self.id, self.directory, self.engine = "contract", directory, engine
        self.events: list[ev.Event] = []
        self._workers: list[str] = []
        self._pending: dict[int, tuple[str, str]] = {}  # Calls without an answer -> where they run.
        self._building: set[tuple[str, str]] = set()
        self._built: set[tuple[str, str]] = set()
        self._started = False
        self._altered = False  # Something has happened to workers that another scene might see.
        self._tier, self._origin = tier, time.monotonic()
        self._contexts: dict[str, ContextPayload] = {ev.PLAIN: ContextPayload(ev.PLAIN, "", b"", {}, {}, None, None)}
        self._functions: dict[str, Pickled] = {}
        self._calls: dict[int, Callable[[], CallPayload]] = {}
        self._numbers = itertools.count(1)

    def clock(self) -> float:
        """Return seconds since the run began."""
        return time.monotonic() - self._origin

    def execute(self, *commands: cmd.Command) -> None:
        """Have the engine carry out commands, with what they need; a call whose inputs cannot be sent fails."""
        calls, sent = {}, list(commands)
        for call in [command for command in commands if isinstance(command, cmd.Run)]:
            try:
                calls[call.attempt] = self._calls[call.attempt]()
            except Exception as error:
                sent.remove(call)
                failure = ev.Failure("input", type(error).__name__, str(error))
                self.events.append(ev.BatchFailed(self.clock(), call.worker, call.attempt, failure, exception=error))
        for command in sent:
            self._note_command(command)
        self.engine.execute(sent, Payloads(calls, self._contexts))

    def _note_command(self, command: cmd.Command) -> None:
        match command:
            case cmd.Run(worker, attempt, _, context):
                self._pending[attempt] = worker, context
            case cmd.Abandon(_, attempt):
                self._pending.pop(attempt, None)
            case cmd.Load(worker, context) | cmd.Wake(worker, context) | cmd.Park(worker, context):
                self._building.add((worker, context))
            case cmd.Release():
                self._altered = True

    def poll(self, timeout: float) -> None:
        """Collect what the engine reports within some seconds."""
        for event in self.engine.poll(timeout):
            self.events.append(event)
            self._note_event(event)

    def _note_event(self, event: ev.Event) -> None:
        match event:
            case ev.WorkerJoined():
                self._workers.append(event.worker.id)
            case ev.EvictionNotice():
                self._altered = True
            case ev.WorkerLost():
                self._altered = True
                self._workers.remove(event.worker)
            case ev.ContextReady() | ev.ContextWoken() | ev.ContextParked():
                self._building.discard((event.worker, event.context))
                self._built.add((event.worker, event.context))
            case ev.ContextFailed() | ev.ContextUnloaded() | ev.ParkFailed():
                self._building.discard((event.worker, event.context))
                self._built.discard((event.worker, event.context))
            case ev.BatchFailed() if event.lost_context:
                self._built.discard(self._pending.pop(event.attempt, ("", "")))
            case ev.BatchFailed() | ev.BatchFinished() | ev.BatchEnded() | ev.StepFinished():
                self._pending.pop(event.attempt, None)

    def settle(self) -> bool:
        """Unload all contexts, and return whether the engine and its workers can serve another scene.

        They cannot where a worker was lost or released, where a call or a build has not ended, or if anything else is
        reported within a moment.
        """
        if not self._workers or self._altered or self._pending or self._building:
            return False
        self.execute(*(cmd.Unload(worker, context) for worker, context in sorted(self._built)))
        deadline = time.monotonic() + PATIENCE
        while self._built and not self._altered and time.monotonic() < deadline:
            self.poll(0.5)
        self.events.clear()
        self.poll(0.0)
        return not (self._built or self.events or self._altered)

    def declare(self, function: Callable[..., Any], *args: Any, **options: Any) -> str:
        """Make a context known, and return its id."""
        files = options.pop("files", {})
        recipe = Context(function.__name__, function, args, files={name: path for name, (path, _) in files.items()})
        name = f"{function.__name__}-{next(self._numbers)}"
        limits = options.get("timeout"), options.get("memory"), options.get("level", ev.PERVASIVE)
        payload = ContextPayload(
            name, function.__name__, recipe.dumps(), files, {}, *limits, options.get("concurrency")
        )
        self._contexts[name] = dataclasses.replace(payload, park=options.get("park", True))
        return name

    def start(self, workers: int = 1) -> list[str]:
        """Start the engine, unless another scene has, and give as many of its workers."""
        if not self._started:
            self.engine.start(self)
            self._started = True
        if len(self._workers) > workers:
            surplus = self._workers[workers:]
            self.execute(cmd.Acquire(self._tier, workers), *map(cmd.Release, surplus))
            self.until(lambda: len(self._workers) == workers)
            self._altered = False
            self.events.clear()
        else:
            self.execute(cmd.Acquire(self._tier, workers))
            self.until(lambda: len(self._workers) >= workers)
            self.events = [event for event in self.events if not isinstance(event, ev.WorkerJoined)]
        return list(self._workers)

    def ready(self, context: str = ev.PLAIN) -> str:
        """Start the engine with one worker that has built a context, and return the worker."""
        (worker,) = self.start()
        self.load(worker, context)
        return worker

    def built(self) -> tuple[str, str]:
        """Start the engine with one worker that has built a context whose value is 0; return both."""
        context = self.declare(work.slow, 0)
        return self.ready(context), context

    def stage(self, worker: str, context: str) -> ev.ContextStaged:
        """Bring a context's files to a worker."""
        self.execute(cmd.Stage(worker, context))
        return self.wait(ev.ContextStaged)

    def load(self, worker: str, context: str) -> ev.ContextReady:
        """Build a context on a worker."""
        self.execute(cmd.Load(worker, context))
        return self.wait(ev.ContextReady)

    def run(
        self,
        worker: str,
        context: str,
        function: Callable[..., Any],
        *columns: Sequence[Any],
        timeout: float | None = None,
        constants: Mapping[str, Any] | None = None,
    ) -> int:
        """Have a batch run, without waiting for it; return the attempt."""
        part, given = self._pickled(function), None
        if constants is not None:
            name = "-".join(map(str, (function.__name__, *constants.values())))
            given = self._functions.setdefault(name, Pickled(name, dumps(dict(constants), "the constants")))
        attempt, threads = next(self._numbers), threads_for(self._contexts[context])

        self._calls[attempt] = lambda: CallPayload(
            "batch", part, False, timeout, dumps([tuple(each) for each in columns], "the input"), None, given, threads
        )
        self.execute(cmd.Run(worker, attempt, "app", context, range(len(columns[0]))))
        return attempt

    def _pickled(self, function: Callable[..., Any]) -> Pickled:
        name = function.__name__
        return self._functions.setdefault(name, Pickled(name, dumps(function, "the function")))

    def apply(self, worker: str, function: Callable[..., Any], *args: Any) -> int:
        """Have a single call run without a context; return the attempt."""
        attempt = next(self._numbers)
        body = dumps((function, args, {}), "the call")
        self._calls[attempt] = lambda: CallPayload("apply", None, False, None, body)
        self.execute(cmd.Run(worker, attempt, "app", ev.PLAIN, range(1)))
        return attempt

    def all(self, kind: type[E]) -> list[E]:
        """Return the events of a kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def until(self, condition: Callable[[], bool]) -> None:
        """Poll until something holds."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            seen = f"there were {len(self.events)} events, last {self.events[-5:]}"
            assert time.monotonic() < deadline, f"it never came; {seen}"
            self.poll(0.5)

    def only(self, kind: type[E]) -> E:
        """Return the first event of a kind, of which there is no other by then."""
        self.until(lambda: bool(self.all(kind)))
        (event,) = self.all(kind)
        return event

    def wait(self, kind: type[E]) -> E:
        """Return the next event of a kind, and remove it.

        Those of other kinds stay: an engine need not report what happens to two contexts in the order of the commands.
        """
        self.until(lambda: bool(self.all(kind)))
        event = self.all(kind)[0]
        self.events.remove(event)
        return event


class Contract:
    """The base of the suites; an engine's own subclass fills in the hooks, which say how to make one and what it can.

    :cvar executes: whether contexts are built, files brought and functions run for real; else only events are checked.
    :cvar own_folders: whether each call has a folder of its own, or runs in the directory where the engine was started.
    :cvar runs: what stands in for a run.
    """

    tier, executes, own_folders = "local", True, False
    runs: type[ContractRun] = ContractRun

    def make(self) -> Engine:
        """Return a new engine, not started, that takes at least 2 workers."""
        raise NotImplementedError

    def notify(self, engine: Any, worker: str) -> None:
        """Give a worker notice that it will be taken away."""
        pytest.skip("this engine's workers cannot be given notice")

    @pytest.fixture(scope="class")
    def kept(self) -> Iterator[list[ContractRun]]:
        """Yield where a run is kept from one scene of a class to the next."""
        kept: list[ContractRun] = []
        yield kept
        _stop(kept)

    @pytest.fixture
    def run(self, kept: list[ContractRun], tmp_path: Path) -> Iterator[ContractRun]:
        """Yield a run: that of the scene before if its engine is as it was, as starts are dear; else a new one."""
        run = kept.pop() if kept else self._new(tmp_path)
        yield run
        if run.settle():
            kept.append(run)
        else:
            run.engine.stop()

    @pytest.fixture
    def new_run(self, kept: list[ContractRun], tmp_path: Path) -> Iterator[ContractRun]:
        """Yield a run whose engine no other scene has, and beside which there is no other."""
        _stop(kept)
        run = self._new(tmp_path)
        yield run
        run.engine.stop()

    def _new(self, folder: Path) -> ContractRun:
        return self.runs(self.make(), str(folder / "run"), self.tier)

    def _needs_code(self) -> None:
        if not self.executes:
            pytest.skip("this engine runs no functions")

    def _answers(self, event: ev.BatchFinished, expected: Any) -> None:
        if self.executes:
            assert pickle.loads(event.results) == expected

    def _gives(self, run: ContractRun, expected: Any, worker: str, context: str, *call: Any, **options: Any) -> None:
        """Run a batch, and check its results."""
        run.run(worker, context, *call, **options)
        self._answers(run.wait(ev.BatchFinished), expected)


def _stop(kept: list[ContractRun]) -> None:
    while kept:
        kept.pop().engine.stop()


def _weights(file: Path, root: Path | None = None) -> dict[str, tuple[str, str]]:
    """Write weights that no worker has; return their file, or the directory that it is in, as a context's files."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"42\n{os.urandom(8).hex()}")
    return {"weights": (str(root or file), digest_path(str(root or file)))}


class ContextsContract(Contract):
    """What becomes of contexts, and where calls and builds run (`own_folders`)."""

    def test_calls_and_builds_run_where_the_engine_says(
        self, new_run: ContractRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._needs_code()
        home = tmp_path / "home"
        home.mkdir()
        (home / "weights.txt").write_text("42")
        monkeypatch.chdir(home)
        (worker,) = new_run.start()
        monkeypatch.chdir(tmp_path)  # Where the driver goes later is nothing to calls.
        new_run.load(worker, ev.PLAIN)

        def call(function: Callable[..., Any], *args: Any) -> Any:
            new_run.apply(worker, function, *args)
            return pickle.loads(new_run.wait(ev.BatchFinished).results)

        if self.own_folders:
            for function, argument in ((work.leave, "left"), (os.chdir, "/")):
                call(function, argument)
                assert call(os.getcwd) != str(home)
                assert call(os.listdir, ".") == [], "each call finds its folder empty"
            return
        context = new_run.declare(work.read, "weights.txt")
        new_run.load(worker, context)
        new_run.run(worker, context, work.with_context, [1])
        assert pickle.loads(new_run.wait(ev.BatchFinished).results) == [("42", 1)]
        for function, argument in ((work.leave, "left"), (os.chdir, "/")):
            call(function, argument)
            assert call(os.getcwd) == str(home)
        assert sorted(os.listdir(home)) == ["left", "weights.txt"]

    def test_loading_is_measured(self, run: ContractRun) -> None:
        (worker,) = run.start()
        ready = run.load(worker, run.declare(work.slow, 0.2))
        assert ready.seconds >= 0.2
        assert ready.memory is None or ready.memory > 0

    def test_staged_files_have_local_paths_under_their_names(self, run: ContractRun, tmp_path: Path) -> None:
        (worker,) = run.start()
        context = run.declare(work.read, files=_weights(tmp_path / "weights.bin"))
        assert run.stage(worker, context).context == context
        run.load(worker, context)
        self._gives(run, [("42", 1)], worker, context, work.with_context, [1])

    def test_files_stay_where_a_context_is_unloaded(self, run: ContractRun, tmp_path: Path) -> None:
        (worker,) = run.start()
        files = _weights(tmp_path / "weights.bin")
        context = run.declare(work.read, files=files, level=ev.PARTIAL)
        run.stage(worker, context)
        for _ in range(2):
            run.load(worker, context)
            self._gives(run, [("42", 1)], worker, context, work.with_context, [1])
            run.execute(cmd.Unload(worker, context))
            run.wait(ev.ContextUnloaded)

    def test_files_go_with_a_context_of_which_nothing_is_kept(self, run: ContractRun, tmp_path: Path) -> None:
        (worker,) = run.start()
        files = _weights(tmp_path / "weights" / "model.bin", tmp_path / "weights")
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
        files = _weights(tmp_path / "weights.bin")
        context = run.declare(work.read, files=files, level=ev.NONE)
        run.stage(worker, context)
        run.load(worker, context)
        attempt = run.run(worker, context, work.sleep_with_context, [60])
        run.execute(
            cmd.Abandon(worker, attempt, context), cmd.Unload(worker, context, files=True), cmd.Stage(worker, context)
        )
        run.wait(ev.ContextStaged)
        run.load(worker, context)
        self._gives(run, [("42", 1)], worker, context, work.with_context, [1])
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
        worker, context = run.built()
        run.execute(cmd.Unload(worker, context), cmd.Load(worker, context))
        assert run.wait(ev.ContextUnloaded).context == context
        run.wait(ev.ContextReady)
        self._gives(run, [(0, 1)], worker, context, work.with_context, [1])

    def test_a_worker_holds_several_contexts(self, run: ContractRun) -> None:
        (worker,) = run.start()
        contexts = [run.declare(work.slow, number / 1000) for number in (1, 2)]
        for context in contexts:
            run.load(worker, context)
        for number, context in enumerate(contexts, 1):
            self._gives(run, [(number / 1000, 0)], worker, context, work.with_context, [0])
