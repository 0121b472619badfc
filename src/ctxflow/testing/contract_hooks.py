"""The base of the engines' contract suites: the hooks for a plug-in's author, and a run that drives an engine.

The suites are engines.py, contract_contexts.py and session_contract.py.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ctxflow.executors.contract import CallPayload, ContextPayload, Engine, Payloads, Pickled
from ctxflow.pickling import dumps
from ctxflow.recipe import Context
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

PATIENCE = 30.0
"""Seconds after which a test gives up on an event; no test waits that long for one that comes."""

E = TypeVar("E", bound=ev.Event)


class ContractRun:
    """Drive an engine in the place of a run: give it payloads, and collect what it reports.

    :param engine: not started yet.
    :param directory: for the run's files.
    """

    def __init__(self, engine: Engine, directory: str, tier: str) -> None:
        self.id = "contract"
        self.directory = directory
        self.engine = engine
        self.events: list[ev.Event] = []
        self._tier = tier
        self._origin = time.monotonic()
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
        self.engine.execute(sent, Payloads(calls, self._contexts))

    def declare(self, function: Callable[..., Any], *args: Any, **options: Any) -> str:
        """Make a context known; gives its id."""
        files = options.pop("files", {})
        recipe = Context(function.__name__, function, args, files={name: path for name, (path, _) in files.items()})
        name = f"{function.__name__}-{next(self._numbers)}"
        payload = ContextPayload(
            name,
            function.__name__,
            recipe.dumps(),
            files,
            {},
            options.get("timeout"),
            options.get("memory"),
            options.get("level", ev.PERVASIVE),
        )
        self._contexts[name] = payload
        return name

    def start(self, workers: int = 1) -> list[str]:
        """Start the engine, and give the workers that joined."""
        self.engine.start(self)
        self.execute(cmd.Acquire(self._tier, workers))
        self.until(lambda: len(self.all(ev.WorkerJoined)) >= workers)
        return [event.worker.id for event in self.all(ev.WorkerJoined)]

    def ready(self, context: str = ev.PLAIN) -> str:
        """Start the engine with one worker that has built a context; gives the worker."""
        (worker,) = self.start()
        self.load(worker, context)
        return worker

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
        """Have a batch run, without waiting for it; gives the attempt."""
        part, given = self._pickled(function), None
        if constants is not None:
            name = "-".join(map(str, (function.__name__, *constants.values())))
            given = self._functions.setdefault(name, Pickled(name, dumps(dict(constants), "the constants")))
        attempt = next(self._numbers)

        def payload() -> CallPayload:
            body = dumps([tuple(column) for column in columns], "the input")
            return CallPayload("batch", part, False, timeout, body, constants=given)

        self._calls[attempt] = payload
        items = range(len(columns[0]))
        self.execute(cmd.Run(worker, attempt, "app", context, items))
        return attempt

    def _pickled(self, function: Callable[..., Any]) -> Pickled:
        name = function.__name__
        return self._functions.setdefault(name, Pickled(name, dumps(function, "the function")))

    def apply(self, worker: str, function: Callable[..., Any], *args: Any) -> int:
        """Have a single call run without a context; gives the attempt."""
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
            assert time.monotonic() < deadline, (
                f"it never came; there were {len(self.events)} events, last {self.events[-5:]}"
            )
            self.events.extend(self.engine.poll(0.5))

    def wait(self, kind: type[E]) -> E:
        """Return the next event of a kind, which is then taken away with all before it."""
        self.until(lambda: bool(self.all(kind)))
        event = self.all(kind)[0]
        del self.events[: self.events.index(event) + 1]
        return event


class Contract:
    """The base of the suites; an engine's own subclass fills in the hooks, which say how to make one and what it can.

    :cvar runs: what stands in for a run.
    """

    tier = "local"
    executes = True
    """Whether contexts are built, files brought and functions run for real; without it only events are looked at."""
    own_folders = False
    """Whether each call has a folder of its own; else calls and builds run in the directory where it was started."""
    runs: type[ContractRun] = ContractRun

    def make(self) -> Engine:
        """Return a new engine, not started, that takes at least 2 workers."""
        raise NotImplementedError

    def notify(self, engine: Any, worker: str) -> None:
        """Give a worker notice that it will be taken away."""
        pytest.skip("this engine's workers cannot be given notice")

    @pytest.fixture
    def run(self, tmp_path: Path) -> Iterator[ContractRun]:
        """Yield a run whose engine is stopped afterwards."""
        run = self.runs(self.make(), str(tmp_path / "run"), self.tier)
        yield run
        run.engine.stop()

    def _needs_code(self) -> None:
        if not self.executes:
            pytest.skip("this engine runs no functions")

    def _answers(self, event: ev.BatchFinished, expected: Any) -> None:
        if self.executes:
            assert pickle.loads(event.results) == expected
