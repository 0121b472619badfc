"""Watches over TaskVine's workers: they answer, their calls keep to their timeouts, and who is told to go does.

TaskVine itself notices a vine_worker that is cut off or stopped; what it does not see is a context host that hangs.
Each host of which nothing was heard for some seconds is asked by a call of its own: those that answer calls anyway cost
nothing. What does not live here: what becomes of a worker that is lost (engine.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ctxflow.executors.heartbeats import Heartbeats, Patience
from ctxflow.executors.taskvine.calls import Reports, VineCalls
from ctxflow.executors.taskvine.worker import VineWorker
from ctxflow.host.messages import Ping


class Watch:
    """What is to be seen to once a second. Its owner locks.

    :param heard: called with the reports of each answer.
    :ivar look_at: when, by the monotonic clock, `look` is to be called.
    """

    def __init__(self, patience: Patience, calls: VineCalls, heard: Callable[[VineWorker, Reports], None]) -> None:
        self._patience = patience
        self._calls = calls
        self._heard = heard
        self._workers: dict[str, VineWorker] = {}  # Those that have told what they are, and are to stay.
        self._leaving: dict[str, tuple[VineWorker, float]] = {}  # Those that were told to go, and by when.
        self._beats = Heartbeats(patience, self._ask)
        self.look_at = 0.0
        self.heard = self._beats.heard

    def _ask(self, name: str) -> None:
        self._calls.make(self._workers[name], [Ping()], self._heard)

    def greeted(self, worker: VineWorker) -> None:
        """A worker has told what it is, and answers from now on."""
        self._workers[worker.name] = worker
        self._beats.watch(worker.name)

    def dismissed(self, worker: VineWorker) -> None:
        """A worker was told to go."""
        self._leaving.setdefault(worker.name, (worker, time.monotonic() + self._patience.leave))
        self._forget(worker)

    def lost(self, worker: VineWorker) -> None:
        """A worker is gone."""
        self._leaving.pop(worker.name, None)
        self._forget(worker)

    def _forget(self, worker: VineWorker) -> None:
        self._workers.pop(worker.name, None)
        self._beats.forget(worker.name)

    def look(self, now: float, hearing: bool) -> list[tuple[VineWorker, str]]:
        """The workers that are lost, each with the reason.

        :param hearing: whether answers can come: the manager may be busy with a large file.
        """
        self.look_at = now + self._patience.look
        for worker in self._workers.values():
            if worker.due and self._has_overdue(worker, now):
                self._beats.urge(worker.name)
        return [*self._silent(now, hearing), *self._still_there(now)]

    def _has_overdue(self, worker: VineWorker, now: float) -> bool:
        """Whether a call has taken longer than its timeout: once its host has answered, that sees to it."""
        for call in [call for call in worker.due if not self._calls.is_open(call)]:
            del worker.due[call]
        overdue = [call for call, due in worker.due.items() if due + self._patience.overdue <= now]
        for call in overdue:
            del worker.due[call]
        return bool(overdue)

    def _silent(self, now: float, hearing: bool) -> Iterator[tuple[VineWorker, str]]:
        for name in self._beats.look(now, hearing):
            yield self._workers[name], f"its context host has not answered for {self._beats.silent_for(name):.0f} s"

    def _still_there(self, now: float) -> Iterator[tuple[VineWorker, str]]:
        for worker, by in list(self._leaving.values()):
            if by <= now:
                yield worker, f"it was told to go {self._patience.leave:.0f} s ago, and is still there"
