"""Watches over the embedded engine's workers: their hosts answer, and their calls keep to their timeouts.

What does not live here: when a worker is asked (heartbeats.py), and what becomes of one that is lost (embedded.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ctxflow.executors.heartbeats import Heartbeats, Patience
from ctxflow.executors.host_messages import HostMessages
from ctxflow.executors.workers import Worker
from ctxflow.host.processes import activity

_LONGEST_SECONDS = 120.0  # How long a host may be busy with something else than answering.


class Vigil:
    """What is to be seen to once a second.

    :param there: the workers, by name.
    :param messages: what they are told with.
    :ivar look_at: when, by the monotonic clock, `look` is to be called.
    """

    def __init__(self, patience: Patience, there: Mapping[str, Worker], messages: HostMessages) -> None:
        self._patience = patience
        self._there = there
        self._messages = messages
        self._beats = Heartbeats(patience, self._ask)
        self._activity: dict[str, tuple[str, ...]] = {}  # Of the hosts that were asked.
        self.look_at = 0.0
        self.begun, self.heard = self._beats.watch, self._beats.heard

    def _ask(self, name: str) -> None:
        worker = self._there[name]
        self._activity[name] = activity(worker.process.pid)
        self._messages.ask(worker)

    def left(self, worker: Worker) -> None:
        """A worker is gone, or was told to go."""
        self._beats.forget(worker.name)
        self._activity.pop(worker.name, None)

    def look(self, now: float) -> list[tuple[Worker, str]]:
        """See to calls that are overdue; gives the workers that are lost, each with the reason."""
        self.look_at = now + self._patience.look
        for worker in self._there.values():
            for line in worker.lines.values():
                if (late := line.overdue(now, self._patience.overdue)) is not None:
                    line.put_off(now)
                    self._messages.end_overdue(line, *late)
                    self._beats.urge(worker.name)
        return list(self._silent(now))

    def _silent(self, now: float) -> Iterator[tuple[Worker, str]]:
        for name in self._beats.look(now):
            worker, seconds = self._there[name], self._beats.silent_for(name)
            seen = activity(worker.process.pid)
            # One that is swapped out, or waits for a slow disk, gets on all the same.
            if seen and seen != self._activity[name] and seconds < _LONGEST_SECONDS:
                self._activity[name] = seen
                self._beats.spare(name)
            else:
                yield worker, f"its host, process {worker.process.pid}, has not answered for {seconds:.0f} s"
