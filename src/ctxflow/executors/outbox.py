"""Commands on their way to the engine: in their order, outside the run's lock, with what calls take pickled before.

A value's `__reduce__` may take long, and a disk stall under a session's kept state. Whoever submits meanwhile leaves
commands here, for the thread that waits for that. What does not live here: what is commanded (run.py).
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence

from ctxflow.executors.engine import CallPayload, Engine
from ctxflow.scheduler import commands as cmd

Making = tuple[int, CallPayload | Callable[[], CallPayload]]
"""An attempt, and its payload, or what makes that."""


class Outbox:
    """Commands that the engine has not got yet.

    :param engine: gets them, from one thread at a time.
    :ivar waiting: what it is to get, the first first.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.waiting: collections.deque[tuple[Sequence[cmd.Command], Sequence[Making]]] = collections.deque()
        self._sending = threading.Lock()
        self._payloads: dict[int, CallPayload | Exception] = {}  # Of those that it gets now.

    def put(self, commands: Sequence[cmd.Command], calls: Sequence[Making]) -> None:
        """Have the engine get commands after those that wait; to be called under the run's lock."""
        self.waiting.append((commands, calls))

    @property
    def empty(self) -> bool:
        """Whether the engine has all that it was to get."""
        return not self.waiting and not self._sending.locked()

    def send(self) -> None:
        """Have the engine get what waits; what another thread is at, that one goes on with."""
        while self.waiting and self._sending.acquire(blocking=False):
            try:
                while self.waiting:
                    commands, calls = self.waiting[0]
                    for attempt, make in calls:
                        if isinstance(make, CallPayload):
                            self._payloads[attempt] = make
                            continue
                        try:
                            self._payloads[attempt] = make()
                        except Exception as error:
                            self._payloads[attempt] = error
                    self.waiting.popleft()
                    self._engine.execute(commands)
            finally:
                self._payloads.clear()  # Also of those to workers that are gone.
                self._sending.release()

    def payload(self, attempt: int) -> CallPayload:
        """What an attempt that the engine gets now is called with; raises what making it raised."""
        made = self._payloads.pop(attempt)
        if isinstance(made, Exception):
            raise made
        return made
