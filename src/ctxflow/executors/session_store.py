"""What a run holds of its sessions: their prompts, their kept states, and who waits for their chunks.

Not thread-safe: the run locks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ctxflow.executors.contract import CallPayload, Pickled
from ctxflow.files import written_whole
from ctxflow.host.call_results import StepEntry
from ctxflow.host.call_surroundings import digest_of
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.worker_state import SessionState

logger = logging.getLogger("ctxflow")


class ChunkSink(Protocol):
    """Something that waits for a session's chunks."""

    def chunk(self, number: int, value: bytes) -> None:
        """Take the session's next chunk, pickled."""

    def turn_over(self, prompts: int) -> None:
        """Note that it makes no more chunks before it gets another prompt than these."""

    def over(self, error: BaseException | None) -> None:
        """Note that it makes no more chunks at all."""


@dataclasses.dataclass
class _Held:
    """What is held of one session.

    :ivar waiting: prompts that no chunk has got.
    :ivar begun: how many chunks were begun at some time; only one that was not gets the prompts that wait.
    :ivar given: chunk -> the prompts that it has got, if any, for those that may have to be made again.
    :ivar kept: how many chunks the kept state has made, its size and its digest.
    """

    sink: ChunkSink
    waiting: list[bytes] = dataclasses.field(default_factory=list)
    begun: int = 0
    given: dict[int, list[bytes]] = dataclasses.field(default_factory=dict)
    kept: tuple[int, str] | None = None


class SessionStore:
    """The sessions of a run, and their kept states in files of its directory, where they outlive any worker."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._held: dict[int, _Held] = {}

    def add(self, session: int, sink: ChunkSink, prompts: Sequence[bytes]) -> None:
        """Add a session that is opened, with its first prompts."""
        self._held[session] = _Held(sink, list(prompts))

    def prompt(self, session: int, prompt: bytes) -> bool:
        """Give a session a prompt; return False if it is over."""
        held = self._held.get(session)
        if held is not None:
            held.waiting.append(prompt)
        return held is not None

    def payload(
        self, step: cmd.Step, states: Mapping[int, SessionState], function: Pickled | None, timeout: float | None
    ) -> Callable[[], CallPayload]:
        """Return what makes a step's payload outside the run's lock, where it reads kept states."""
        entries = [(self._entry(order, states), self._held.get(order.session)) for order in step.orders]

        def make() -> CallPayload:
            whole = [tuple(self._with_state(entry, held)) for entry, held in entries]
            return CallPayload("step", function, False, timeout, pickle.dumps(whole, pickle.HIGHEST_PROTOCOL))

        return make

    def _entry(self, order: cmd.Order, states: Mapping[int, SessionState]) -> StepEntry:
        makes_chunk = order.chunk is not None
        entry = StepEntry(order.session, order.thaw, order.made, makes_chunk, order.then)
        held = self._held.get(order.session)
        if held is None:
            return entry
        if order.chunk is not None:
            if order.chunk >= held.begun:
                held.begun = order.chunk + 1
                if held.waiting:
                    held.given[order.chunk], held.waiting = held.waiting, []
            entry = entry._replace(prompts=held.given.get(order.chunk, ()))
        if order.thaw == "frozen" and (frozen := states[order.session].frozen) is not None:
            entry = entry._replace(digest=frozen.digest)
        return entry

    def _with_state(self, entry: StepEntry, held: _Held | None) -> StepEntry:
        if entry.thaw != "kept" or held is None:
            return entry
        return entry._replace(state=self._read(entry.session, entry.made, held))

    def _path(self, session: int) -> str:
        return os.path.join(self._directory, f"{session}.state")

    def _read(self, session: int, made: int, held: _Held) -> bytes:
        """Return the kept state; none if it is not what was kept, which the worker then finds out."""
        try:
            with open(self._path(session), "rb") as file:
                state = file.read()
        except OSError as error:
            if session in self._held:  # Else it was closed meanwhile.
                logger.error("the kept state of a session cannot be read: %s", error)
            return b""
        return state if held.kept == (made, digest_of(state)) else b""

    def opened(self, event: ev.StepFinished, orders: Sequence[cmd.Order]) -> ev.StepFinished:
        """Keep the states that came with a step, open its chunks, and drop from the event what could not be kept."""
        results: list[tuple[bytes | None, bytes | None]] = pickle.loads(event.results)
        outcomes = [dict(outcome) for outcome in event.outcomes]
        for order, outcome, (_, state) in zip(orders, outcomes, results, strict=True):
            made = order.made + ("made" in outcome)
            if state is not None and not self._keep(order.session, made, state):
                outcome.pop("kept", None)
        return dataclasses.replace(event, outcomes=outcomes, results=[chunk for chunk, _ in results])

    def _keep(self, session: int, made: int, state: bytes) -> bool:
        held = self._held.get(session)
        if held is None or (held.kept is not None and held.kept[0] > made):
            return False
        path = self._path(session)
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            with written_whole(Path(path), sync=False) as file:
                file.write(state)
        except OSError as error:
            logger.warning("the state of a session cannot be kept, so that more would be done again: %s", error)
            return False
        held.kept = made, digest_of(state)
        for chunk in [chunk for chunk in held.given if chunk < made]:
            del held.given[chunk]
        return True

    def news(
        self, command: cmd.DeliverChunk | cmd.EndTurn | cmd.EndSession, event: ev.Event, error: BaseException | None
    ) -> Callable[[], None]:
        """Return what passes a session's command, or its error, on to who waits for it; to be called without a lock."""
        held = self._held[command.session]
        if isinstance(command, cmd.DeliverChunk):
            value = event.results[command.position]  # type: ignore[attr-defined]
            return functools.partial(held.sink.chunk, command.chunk, value)
        if isinstance(command, cmd.EndTurn):
            return functools.partial(held.sink.turn_over, command.prompts)
        del self._held[command.session]
        with contextlib.suppress(OSError):
            os.unlink(self._path(command.session))
        return functools.partial(held.sink.over, error)

    def end_all(self) -> list[ChunkSink]:
        """Forget all sessions, and return who still waits."""
        sinks = [held.sink for held in self._held.values()]
        self._held.clear()
        shutil.rmtree(self._directory, ignore_errors=True)
        return sinks
