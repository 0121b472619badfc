"""Which TaskVine call each of the host's reports answers.

A TaskVine call brings instructions, which are carried out one after another: each that ends in a report of its
own is waited for, and the call is answered after the last, or after the first that fails. What does not live
here: carrying them out (host.py, vine_library.py), and reading and writing (vine_protocol.py).
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from ctxflow.host.vine_protocol import Request
from ctxflow.host.wire import Head, frame

_FAILURES = ("failed", "raised", "died")


class Call:
    """A TaskVine call that is not answered yet.

    :ivar seal: of the call, to which its answer's is bound.
    :ivar rest: its instructions that are still to be carried out.
    :ivar reports: what its answer will hold, framed.
    :ivar context: of the instruction that it waits for, None if that is about none.
    :ivar outputs: names in its sandbox of the files that it must leave there.
    :ivar parts: results of that instruction that came before its end, framed, as far as nobody has confirmed them;
        the first `told` of them are in the answer to the last `listen`.
    """

    __slots__ = ("context", "outputs", "parts", "reports", "request", "rest", "seal", "told")

    def __init__(self, request: Request, instructions: list[tuple[Head, bytes]], seal: bytes) -> None:
        self.request = request
        self.seal = seal
        self.rest = collections.deque(instructions)
        self.reports: list[bytes] = []
        self.context: str | None = None
        self.outputs: list[str] = []
        self.parts: list[bytes] = []
        self.told = 0

    def refuse(self, message: str) -> None:
        """Nothing more of it is carried out."""
        self.rest.clear()
        self.reports.append(frame({"is": "refused", "message": message}))


class Calls:
    """The open TaskVine calls.

    :param carry_out: starts one instruction of a call; says whether that is all there is to it, else `finish`
        is called later, or `report` with its report.
    :param answer: sends a call's answer.
    """

    def __init__(self, carry_out: Callable[[Call, Head, bytes], bool], answer: Callable[[Call], None]) -> None:
        self._carry_out = carry_out
        self._answer = answer
        self._running: dict[int, Call] = {}  # By the number that the driver gave the context's call.
        self._loading: dict[str, tuple[str, Call]] = {}  # By context: the load's key, and the call.
        self._staging: dict[str, list[Call]] = {}  # By context.
        self._current: Call | None = None  # Whose instruction is being carried out.
        self._listening: Call | None = None
        self._kept: list[bytes] = []  # Reports that nobody asked for, until somebody listens.

    def begin(self, call: Call) -> None:
        """Take a call, and carry out what can be."""
        while call.rest:
            head, body = call.rest.popleft()
            self._current = call
            try:
                done = self._carry_out(call, head, body)
            finally:
                self._current = None
            if not done:
                return
        self._answer(call)

    def finish(self, call: Call, head: Head, body: bytes = b"") -> None:
        """The instruction that a call waits for has ended with this report."""
        # What was told may arrive later than this answer, so that it comes twice; the driver counts it once.
        call.reports += [*call.parts, frame(head, body)]
        call.parts.clear()
        call.told = 0
        call.context = None
        if head["is"] in _FAILURES:
            call.rest.clear()
        if call.rest:
            self.begin(call)
        else:
            self._answer(call)

    # --- what is waited for

    def wait_for_call(self, call: Call, number: int, context: str) -> None:
        """A call waits for the end of a context's call."""
        call.context = context
        self._running[number] = call

    def wait_for_load(self, call: Call, context: str, key: str) -> None:
        """A call waits until a context is built; who waited for what it was before waits in vain."""
        self._end_waits(context)
        call.context = context
        self._loading[context] = (key, call)

    def wait_for_staging(self, call: Call, context: str) -> None:
        """A call waits until a context's files are there."""
        self._staging.setdefault(context, []).append(call)

    def listen(self, call: Call) -> None:
        """A call waits for the next report that nobody asked for; it confirms what the one before brought."""
        if self._listening is not None:
            self._answer(self._listening)
        else:
            for running in self._running.values():
                del running.parts[: running.told]
                running.told = 0
        self._listening = call
        self._tell()

    # --- reports

    def report(self, head: Head, body: bytes) -> None:
        """Hand a report of the host to the call that waits for it."""
        kind = head["is"]
        if kind == "part":
            call = self._running.get(head["call"])
            if call is not None:
                call.parts.append(frame(head, body))
                self._tell()
        elif kind in ("finished", "raised"):
            self._settle(self._running.pop(head["call"], None), head, body)
        elif kind == "died":
            self._died(head, body)
        elif kind in ("ready", "failed"):
            self._built(head, body)
        elif kind == "staged":
            self._settle(self._staged(head["context"]), head, body)
        elif kind == "unloaded":
            self._end_waits(head["context"])
            self._settle(None, head, body)
        else:
            self._settle(None, head, body)

    def _settle(self, call: Call | None, head: Head, body: bytes) -> None:
        if call is not None:
            self.finish(call, head, body)
        elif self._current is not None:
            self._current.reports.append(frame(head, body))
        else:
            self._kept.append(frame(head, body))
            self._tell()

    def _tell(self) -> None:
        if self._listening is None:
            return
        untold = [running for running in self._running.values() if len(running.parts) > running.told]
        if self._kept or untold:
            call, self._listening = self._listening, None
            for running in untold:
                call.reports += running.parts[running.told :]
                running.told = len(running.parts)
            call.reports += self._kept
            self._kept.clear()
            self._answer(call)

    def _died(self, head: Head, body: bytes) -> None:
        """Each call that it cost gets a copy; a library process that was idle is news."""
        unknown = []
        for number in head["calls"]:
            call = self._running.pop(number, None)
            if call is None:
                unknown.append(number)
            else:
                self.finish(call, {**head, "calls": [number]}, body)
        if unknown or not head["calls"]:
            self._settle(None, {**head, "calls": unknown}, body)

    def _built(self, head: Head, body: bytes) -> None:
        context = head["context"]
        key, call = self._loading.get(context, (None, None))
        if call is not None and key == head.get("key", ""):
            del self._loading[context]
            if head["is"] == "failed":
                self._end_waits(context)
            self.finish(call, head, body)
        else:
            self._settle(self._staged(context) if "key" not in head else None, head, body)

    def _staged(self, context: str) -> Call | None:
        """The first call that waits for a context's files: stagings of one context are alike."""
        calls = self._staging.get(context)
        if not calls:
            return None
        call = calls.pop(0)
        if not calls:
            del self._staging[context]
        return call

    def _end_waits(self, context: str) -> None:
        """What waited for a context's library process waits in vain: answered with what there is."""
        ended = [number for number, call in self._running.items() if call.context == context]
        calls = [self._running.pop(number) for number in ended]
        if context in self._loading:
            calls.append(self._loading.pop(context)[1])
        for call in calls:
            call.rest.clear()
            self._answer(call)
