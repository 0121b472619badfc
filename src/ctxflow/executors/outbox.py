"""Commands on their way to the engine: in their order, outside the run's lock, with what calls take pickled before.

A value's `__reduce__` may take long, and a disk stall under a session's kept state. Whoever submits meanwhile leaves
commands here, for the thread that waits for that. What does not live here: what is commanded (run.py).
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Mapping, Sequence

from ctxflow.executors.engine import CallPayload, ContextPayload, Engine, Payloads
from ctxflow.scheduler import commands as cmd

Making = tuple[cmd.Run, CallPayload | Callable[[], CallPayload]]
"""A call, and its payload, or what makes that."""
_Batch = tuple[Sequence[cmd.Command], Sequence[Making], Mapping[str, ContextPayload]]


class Outbox:
    """Commands that the engine has not got yet.

    :param engine: gets them, from one thread at a time.
    :param failed: called with each call whose payload cannot be made, which the engine does not get, and the error.
    :ivar waiting: what the engine is to get, in this order.
    """

    def __init__(self, engine: Engine, failed: Callable[[cmd.Run, Exception], None]) -> None:
        self._engine = engine
        self._failed = failed
        self.waiting: collections.deque[_Batch] = collections.deque()
        self._sending = threading.Lock()

    def put(
        self, commands: Sequence[cmd.Command], calls: Sequence[Making], contexts: Mapping[str, ContextPayload]
    ) -> None:
        """Have the engine get commands after those that wait; to be called under the run's lock."""
        self.waiting.append((commands, calls, contexts))

    def send(self) -> None:
        """Have the engine get what waits; what another thread is at, that one goes on with."""
        while self.waiting and self._sending.acquire(blocking=False):
            try:
                while self.waiting:
                    commands, calls, contexts = self.waiting[0]
                    made: dict[int, CallPayload] = {}
                    for command, make in calls:
                        try:
                            made[command.attempt] = make if isinstance(make, CallPayload) else make()
                        except Exception as error:
                            commands = [each for each in commands if each is not command]
                            self._failed(command, error)
                    self.waiting.popleft()
                    self._engine.execute(commands, Payloads(made, contexts))
            finally:
                self._sending.release()
