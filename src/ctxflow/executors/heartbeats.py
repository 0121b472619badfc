"""Which workers have fallen silent, by the driver's own monotonic clock: it is compared with no other.

A worker of which nothing was heard for a while is asked whether it is there, and lost if it does not say so. Who
answers is its context host, which runs none of the user's code. What does not live here: asking
(embedded/local_hosts.py, and taskvine/vine_workers.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

_LONGEST_LOOK = 2.0


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long an engine waits, in seconds.

    :ivar ask: for word of a worker, before it is asked whether it is there.
    :ivar answer: for the answer.
    :ivar overdue: beyond a call's timeout, which its host enforces, before the driver sees to it.
    :ivar urgent: for the host's answer then.
    :ivar leave: for a worker that was told to go.
    :ivar manager: for a sign of life of TaskVine's manager.
    :ivar start: for a manager to start.
    """

    ask: float = 6.0
    answer: float = 15.0
    overdue: float = 3.0
    urgent: float = 4.0
    leave: float = 15.0
    manager: float = 15.0
    start: float = 60.0

    @property
    def look(self) -> float:
        """How often to look."""
        return min(1.0, self.urgent / 4)


class Heartbeats:
    """The workers that are to be heard of.

    Only time counts in which this process looked, and in which answers could reach it: if it was stopped itself, or
    starved, nobody is taken for dead.

    :param ask: has a worker's host say that it is there.

    >>> asked = []
    >>> beats = Heartbeats(Patience(ask=1, answer=1.5), asked.append)
    >>> beats.watch("w1")
    >>> [beats.look(now) for now in (10.0, 11.0, 12.0)], asked
    ([[], [], []], ['w1'])
    >>> beats.heard("w1")
    >>> [beats.look(now) for now in (13.0, 14.0, 15.0)], asked
    ([[], [], ['w1']], ['w1', 'w1'])
    """

    def __init__(self, patience: Patience, ask: Callable[[str], None]) -> None:
        self.patience = patience
        self._ask = ask
        self._now = 0.0  # Of the clock that counts.
        self._looked_at: float | None = None
        self._heard_at: dict[str, float] = {}
        self._answer_by: dict[str, float] = {}  # Those that were asked.

    def watch(self, worker: str) -> None:
        """Watch a worker, which answers from now on."""
        self._heard_at[worker] = self._now

    def forget(self, worker: str) -> None:
        """Forget a worker, which is gone, or is to go."""
        self._heard_at.pop(worker, None)
        self._answer_by.pop(worker, None)

    def heard(self, worker: str) -> None:
        """Note that a worker's host said something."""
        if worker in self._heard_at:
            self._heard_at[worker] = self._now
            self._answer_by.pop(worker, None)

    def urge(self, worker: str) -> None:
        """Ask it now, and lose it soon if it does not answer."""
        if worker not in self._heard_at:
            return
        if worker not in self._answer_by:
            self._ask(worker)
        by = self._now + self.patience.urgent
        self._answer_by[worker] = min(by, self._answer_by.get(worker, by))

    def spare(self, worker: str) -> None:
        """Wait a little longer for a worker, which lives although it does not answer."""
        self._answer_by[worker] = self._now + self.patience.urgent

    def silent_for(self, worker: str) -> float:
        """Return the seconds since something was heard of a worker."""
        return self._now - self._heard_at.get(worker, self._now)

    def look(self, now: float, hearing: bool = True) -> list[str]:
        """Ask those that have said nothing for a while; gives those that did not answer.

        :param hearing: whether answers have been able to come since the last look.
        """
        if self._looked_at is not None and hearing:
            self._now += min(now - self._looked_at, _LONGEST_LOOK * self.patience.look)
        self._looked_at = now
        for worker, heard_at in self._heard_at.items():
            if worker not in self._answer_by and self._now - heard_at >= self.patience.ask:
                self._answer_by[worker] = self._now + self.patience.answer
                self._ask(worker)
        return [worker for worker, by in self._answer_by.items() if by <= self._now]
