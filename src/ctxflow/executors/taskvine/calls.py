"""The engine's calls to workers that are not answered yet.

What does not live here: what is asked and what answers mean (engine.py, stagings.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from ctxflow.executors.taskvine.link import ManagerLink
from ctxflow.executors.taskvine.worker import VineWorker
from ctxflow.host.messages import pack
from ctxflow.host.seal import SIZE, open_answer, seal_call
from ctxflow.host.vine_messages import FROM_WORKER, FromWorker, ToWorker
from ctxflow.host.wire import Head, unframe

_GREETING_BYTES = 1 << 20  # What a worker may answer first of all; it has a few thousand to say.

Reports = Sequence[FromWorker]
Then = Callable[[VineWorker, Reports], None]


class VineCalls:
    """Makes calls, and hands each answer to who waits for it. Its owner locks.

    :param key: with which calls and answers are sealed.
    :param forged: told of a worker whose answer has no seal.
    """

    def __init__(self, link: ManagerLink, key: bytes, forged: Callable[[VineWorker], None]) -> None:
        self.link = link
        self._key = key
        self._forged = forged
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[VineWorker, Then, bytes]] = {}  # The last is the call's seal.

    def number(self) -> int:
        """A number that was never used before."""
        return next(self._numbers)

    def key(self) -> str:
        """A key that was never used before."""
        return str(self.number())

    def make(
        self,
        worker: VineWorker,
        messages: Sequence[ToWorker],
        then: Then,
        inputs: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | None = None,
    ) -> int:
        """Have a worker do something.

        :param messages: the instructions, in order.
        :param then: called with the reports of the answer.
        :param inputs: name in the call's sandbox -> key of a file that the manager's process knows.
        :param outputs: likewise, what the call makes.
        :returns: the call's number.
        """
        number = next(self._numbers)
        worker.calls += 1
        sealed = seal_call(self._key, worker.name, worker.calls, b"".join(map(pack, messages)))
        self._open[number] = worker, then, sealed[:SIZE]
        head: Head = {"do": "call", "id": number, "worker": worker.name}
        if worker.calls == 1:  # Whoever it is, it has proven nothing yet.
            head["most"] = _GREETING_BYTES
        if inputs:
            head["inputs"] = inputs
        if outputs:
            head["outputs"] = outputs
        self.link.send(head, sealed)
        return number

    def answered(self, number: int, answer: bytes) -> None:
        """Hand an answer on."""
        if number not in self._open:
            return
        worker, then, seal = self._open.pop(number)
        reports = open_answer(self._key, seal, answer)
        if reports is None:
            self._forged(worker)
        else:
            then(worker, [FROM_WORKER.open(head, body) for head, body in unframe(reports)])

    def is_open(self, number: int) -> bool:
        """Whether a call is not answered yet."""
        return number in self._open

    def cancel(self, number: int) -> None:
        """Take back a call that waits for a file which will never come."""
        if self._open.pop(number, None) is not None:
            self.link.send({"do": "cancel", "calls": [number]})

    def drop(self, number: int) -> None:
        """No answer will come."""
        self._open.pop(number, None)

    def lost(self, worker: VineWorker) -> None:
        """No answer of a worker will come any more."""
        for number in [number for number, (whose, _, _) in self._open.items() if whose is worker]:
            del self._open[number]
