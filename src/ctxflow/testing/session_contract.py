# ruff: noqa: D102 - the tests' names say what they check
"""The engines' contract on sessions: what a step does, and how a state moves from worker to worker.

Subclass `SessionContract` beside `ctxflow.testing.engines.EngineContract`, with the same hooks.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ctxflow.executors.contract import CallPayload
from ctxflow.host.call_results import StepEntry
from ctxflow.host.call_surroundings import digest_of
from ctxflow.on_worker import idle, last
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.testing.contract_hooks import Contract, ContractRun


class SessionRun(ContractRun):
    """A run that gives its engine steps."""

    def step(
        self, worker: str, context: str, function: Callable[..., Any], *entries: StepEntry, timeout: float | None = None
    ) -> int:
        """Have a worker make a step, without waiting for it; return the attempt."""
        attempt = next(self._numbers)
        part = self._pickled(function)
        body = pickle.dumps([tuple(entry) for entry in entries])
        self._calls[attempt] = lambda: CallPayload("step", part, False, timeout, body)
        chunks = [each.made if each.makes_chunk else None for each in entries]
        orders = [cmd.Order(e.session, e.thaw, e.made, c, e.then) for e, c in zip(entries, chunks, strict=True)]
        self.execute(cmd.Step(worker, attempt, "app", context, (), orders))
        return attempt

    def stepped(
        self, worker: str, context: str, function: Callable[..., Any], *entries: StepEntry
    ) -> tuple[Sequence[Any], list[Any], list[bytes | None]]:
        """Return a step's outcomes, its chunks and the states that it kept."""
        attempt = self.step(worker, context, function, *entries)
        event = self.wait(ev.StepFinished)
        assert event.attempt == attempt and event.worker == worker and event.seconds >= 0
        results = pickle.loads(event.results) if event.results is not None else [(None, None)] * len(entries)
        chunks = [None if chunk is None else pickle.loads(chunk) for chunk, _ in results]
        return event.outcomes, chunks, [state for _, state in results]


class SessionContract(Contract):
    """Subclass it as a pytest class, and say how to make an engine."""

    runs = SessionRun

    def test_a_step_makes_a_chunk_of_each_session(self, run: SessionRun) -> None:
        worker, context = self._ready(run)
        outcomes, chunks, _ = run.stepped(worker, context, _add, _first(1, 10), _first(2, 20))
        assert [dict(outcome) for outcome in outcomes] == [{"made": 1}, {"made": 1}]
        self._check(chunks, [110, 120])
        outcomes, chunks, _ = run.stepped(worker, context, _add, StepEntry(2, "", 1, True, ""))
        self._check(chunks, [220])

    def test_a_state_that_is_kept_can_be_gone_on_from_anywhere(self, run: SessionRun) -> None:
        first, second, context = self._ready_twice(run)
        outcomes, _, states = run.stepped(first, context, _add, _first(1, 10, "leave"))
        assert set(outcomes[0]) == {"made", "kept"}
        thawed = StepEntry(1, "kept", 1, True, "", (), states[0] or b"")
        _, chunks, _ = run.stepped(second, context, _add, thawed)
        self._check(chunks, [210])

    def test_a_frozen_state_is_carried_and_verified(self, run: SessionRun) -> None:
        first, second, context = self._ready_twice(run)
        outcomes, _, _ = run.stepped(first, context, _add, _first(1, 10, "freeze"))
        digest, size = outcomes[0]["frozen"]
        run.execute(cmd.Carry(second, first, 1, 1, digest, size))
        arrived = run.wait(ev.StateArrived)
        assert (arrived.worker, arrived.session, arrived.made) == (second, 1, 1)
        outcomes, chunks, _ = run.stepped(second, context, _add, StepEntry(1, "frozen", 1, True, "", (), b"", digest))
        assert dict(outcomes[0]) == {"made": 1}
        self._check(chunks, [210])

    def test_a_frozen_state_stays_where_it_is(self, run: SessionRun) -> None:
        worker, context = self._ready(run)
        run.stepped(worker, context, _add, _first(1, 10))
        outcomes, _, _ = run.stepped(worker, context, _add, StepEntry(1, "", 1, False, "freeze"))
        digest = outcomes[0]["frozen"][0]
        _, chunks, _ = run.stepped(worker, context, _add, StepEntry(1, "frozen", 1, True, "", (), b"", digest))
        self._check(chunks, [210])

    def test_a_frozen_state_is_brought_out_of_the_cache_as_it_is(self, run: SessionRun) -> None:
        worker, context = self._ready(run)
        outcomes, _, _ = run.stepped(worker, context, _add, _first(1, 10, "freeze"))
        out = StepEntry(1, "frozen", 1, False, "leave", (), b"", outcomes[0]["frozen"][0])
        outcomes, _, states = run.stepped(worker, context, _raise, out)
        assert set(outcomes[0]) == {"kept"}
        self._check([pickle.loads(states[0])] if states[0] else [], [(10, 1)])
        if self.executes:
            outcomes, _, _ = run.stepped(worker, context, _raise, out)
            assert set(outcomes[0]) == {"lost"}, "it is there no more"

    def test_a_state_that_is_not_what_was_frozen_is_lost(self, run: SessionRun) -> None:
        self._needs_code()
        worker, context = self._ready(run)
        run.stepped(worker, context, _add, _first(1, 10, "freeze"))
        wrong = StepEntry(1, "frozen", 1, True, "", (), b"", digest_of(b"another"))
        outcomes, chunks, _ = run.stepped(worker, context, _add, wrong, _first(2, 20))
        assert "digest" in outcomes[0]["lost"] and dict(outcomes[1]) == {"made": 1}
        assert chunks == [None, 120]

    def test_a_state_that_is_nowhere_does_not_arrive(self, run: SessionRun) -> None:
        self._needs_code()
        first, second, _ = self._ready_twice(run)
        run.execute(cmd.Carry(second, first, 7, 3, "", 1))
        lost = run.wait(ev.StateLost)
        assert (lost.worker, lost.session, lost.made) == (second, 7, 3) and "cannot be brought" in lost.message

    def test_turns_and_sessions_end(self, run: SessionRun) -> None:
        self._needs_code()
        worker, context = self._ready(run)
        outcomes, chunks, _ = run.stepped(worker, context, _end, _first(1, "idle"), _first(2, "last"))
        assert [dict(outcome) for outcome in outcomes] == [{"idle": 1, "made": 1}, {"last": 1, "made": 1}]
        assert chunks == ["idle", "last"]

    def test_what_cannot_be_pickled_harms_its_session_alone(self, run: SessionRun) -> None:
        self._needs_code()
        worker, context = self._ready(run)
        entries = [_first(n, what, "keep") for n, what in enumerate(("chunk", "state", "neither"))]
        outcomes, chunks, _ = run.stepped(worker, context, _unpicklable, *entries)
        assert [sorted(outcome) for outcome in outcomes] == [["failure"], ["failure"], ["kept", "made"]]
        assert "lock" in outcomes[1]["failure"]["message"] and chunks[2] == "neither"

    def test_what_the_function_raises_fails_the_step_and_not_the_states_beside_it(self, run: SessionRun) -> None:
        self._needs_code()
        worker, context = self._ready(run)
        run.stepped(worker, context, _add, _first(1, 10))
        attempt = run.step(worker, context, _raise, _first(2, 20))
        failed = run.wait(ev.BatchFailed)
        assert failed.attempt == attempt and not failed.lost_context and failed.failure.error == "ValueError"
        _, chunks, _ = run.stepped(worker, context, _add, StepEntry(1, "", 1, True, ""))
        assert chunks == [210]
        outcomes, _, _ = run.stepped(worker, context, _add, StepEntry(2, "", 1, True, ""))
        assert "lost" in outcomes[0]

    def test_a_dropped_state_is_gone(self, run: SessionRun) -> None:
        self._needs_code()
        worker, context = self._ready(run)
        run.stepped(worker, context, _add, _first(1, 10))
        run.stepped(worker, context, _add, StepEntry(1, "", 1, False, "drop"))
        outcomes, _, _ = run.stepped(worker, context, _add, StepEntry(1, "", 1, True, ""))
        assert "lost" in outcomes[0]

    def test_a_worker_with_notice_leaves_after_the_steps_that_it_was_given_then(self, run: SessionRun) -> None:
        worker, context = self._ready(run)
        run.stepped(worker, context, _add, _first(1, 10))
        self.notify(run.engine, worker)
        run.wait(ev.EvictionNotice)
        outcomes, _, states = run.stepped(worker, context, _add, StepEntry(1, "", 1, False, "leave"))
        assert set(outcomes[0]) == {"kept"}
        self._check([pickle.loads(states[0])] if states[0] else [], [(10, 1)])
        assert run.wait(ev.WorkerLost).evicted

    def _ready(self, run: SessionRun) -> tuple[str, str]:
        context = run.declare(_hundred)
        return run.ready(context), context

    def _ready_twice(self, run: SessionRun) -> tuple[str, str, str]:
        first, second = run.start(2)
        context = run.declare(_hundred)
        run.load(first, context)
        run.load(second, context)
        return first, second, context

    def _check(self, found: Any, expected: Any) -> None:
        if self.executes:
            assert found == expected


def _first(session: int, prompt: Any, then: str = "") -> StepEntry:
    """Return the first chunk of a session, with a prompt."""
    return StepEntry(session, "anew", 0, True, then, (pickle.dumps(prompt),))


# What the suite's contexts and steps do; workers import it from here.


def _hundred() -> int:
    return 100


def _add(context: int, states: Sequence[Any], prompts: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Any]]:
    """Yield each session's nth chunk: n hundred and its first prompt."""
    for state, new in zip(states, prompts, strict=True):
        base, count = state or (new[0], 0)
        yield base + context * (count + 1), (base, count + 1)


def _end(context: int, states: Sequence[Any], prompts: Sequence[Sequence[Any]]) -> list[tuple[Any, None]]:
    return [({"idle": idle, "last": last}[new[0]](new[0]), None) for new in prompts]


def _unpicklable(context: int, states: Sequence[Any], prompts: Sequence[Sequence[Any]]) -> list[tuple[Any, Any]]:
    what = itertools.chain.from_iterable(prompts)
    return [(threading.Lock() if e == "chunk" else e, threading.Lock() if e == "state" else 0) for e in what]


def _raise(context: int, states: Sequence[Any], prompts: Sequence[Sequence[Any]]) -> None:
    raise ValueError("not this one")
