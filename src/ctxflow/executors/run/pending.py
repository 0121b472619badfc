"""What a run has in flight: items that are not answered, with who waits for them, and commands for the engine.

Commands leave in their order and outside the run's lock, with what calls take pickled before: a value's `__reduce__`
may take long, and a disk stall under a session's kept state. Whoever submits meanwhile leaves commands here, for the
thread that waits for that.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import itertools
import operator
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeAlias

from ctxflow.executors.call_files import CallFiles, inputs_of
from ctxflow.executors.contract import CallPayload, ContextPayload, Engine, Payloads
from ctxflow.executors.run.declarations import ApplyCall, DeclaredApp
from ctxflow.executors.run.futures import CallFuture, Delivery, Sink, error_of, own_copy
from ctxflow.executors.run.session_store import News, SessionStore
from ctxflow.pickling import dumps
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.worker_state import SessionState

Telling: TypeAlias = cmd.Deliver | cmd.Bury | cmd.DeliverChunk | cmd.EndTurn | cmd.EndSession
"""The commands that are for those who wait, and for nobody else."""


class Waiting:
    """The items that are not answered yet, numbered as they come; and, through its store, the open sessions.

    :param sessions: what is held of these.
    :param contexts: what the run knows of contexts, for their names.
    """

    def __init__(self, sessions: SessionStore, contexts: Mapping[str, ContextPayload]) -> None:
        self._sessions = sessions
        self._contexts = contexts
        self._next_item = 0
        self._inputs: dict[int, Any] = {}
        self._sinks: dict[int, Sink] = {}

    def add(self, inputs: Sequence[Any], sink: Sink) -> range:
        """Add items that one sink waits for; return their numbers."""
        first = self._next_item
        items = range(first, first + len(inputs))
        self._next_item = items.stop
        self._inputs.update(zip(items, inputs, strict=True))
        self._sinks.update(dict.fromkeys(items, sink))
        return items

    def add_one(self, inputs: Any, sink: Sink) -> int:
        """Add one item; return its number."""
        item = self._next_item
        self._next_item = item + 1
        self._inputs[item] = inputs
        self._sinks[item] = sink
        return item

    def payload(
        self,
        call: cmd.Run,
        apps: Mapping[str, DeclaredApp],
        sessions: Mapping[int, SessionState],
        with_files: Container[str],
    ) -> CallPayload | Callable[[], CallPayload]:
        """Return a call's payload, or what makes it outside the lock, of what it takes now: it may be answered by then.

        :param with_files: batch apps, of whose items some have held files.
        """
        app = apps[call.app]
        if isinstance(call, cmd.Step):
            return self._sessions.payload(call, sessions, app.function, app.timeout)
        known = self._inputs
        inputs = [known[item] for item in call.items]
        if app.style == "apply":
            single: ApplyCall = inputs[0]
            return CallPayload("apply", single.function, app.insert, app.timeout, single.body, single.files)
        searched = (app.spec.alternative_of or app.spec.id) in with_files
        return functools.partial(_batch_payload, app, inputs, searched)

    def calls(self) -> list[CallFuture]:
        """Return the single calls that somebody waits for, in the order in which they were made."""
        return [sink for sink in self._sinks.values() if isinstance(sink, CallFuture)]

    def forget(self, items: Sequence[int]) -> list[int]:
        """Forget items; return those that somebody waited for."""
        gone = [item for item in items if self._sinks.pop(item, None) is not None]
        for item in gone:
            del self._inputs[item]
        return gone

    def told(self, command: Telling, event: ev.Event, context: str | None) -> Delivery | News:
        """Return what a command has to be told, and to whom; who is told waits no more, but for a session that goes on.

        :param event: from which the command came: it has the results.
        :param context: the name of the one that answered, where there were several that could.
        """
        if isinstance(command, cmd.Deliver):
            results: Any = event.results  # type: ignore[attr-defined]
            inputs = [self._inputs.pop(item) for item in command.items]
            if type(inputs[0]) is ApplyCall:
                results = [results]
            elif command.positions is not None:
                results = [results[n] for n in command.positions]
            return Delivery(command.items, [self._sinks.pop(item) for item in command.items], results, context)
        if isinstance(command, cmd.Bury):
            error = self._error(command.failure, command.context, event)
            inputs = [self._inputs.pop(item) for item in command.items]
            sinks = [self._sinks.pop(item) for item in command.items]
            return Delivery(command.items, sinks, error, inputs=inputs)
        failed = None
        if isinstance(command, cmd.EndSession) and command.failure is not None:
            failed = self._error(command.failure, command.context, event)
        return self._sessions.news(command, event, failed)

    def _error(self, failure: ev.Failure, context: str | None, event: ev.Event) -> BaseException:
        name = self._contexts[context].name if context is not None else None
        return error_of(failure, getattr(event, "exception", None), name)

    def end_all(self, error: BaseException) -> list[Delivery | News]:
        """Forget everything; return what everybody who waits is to be told, since no answer will come."""
        sinks = dict(self._sinks)
        self._sinks.clear()
        self._inputs.clear()
        sessions = [News(functools.partial(sink.over, error)) for sink in self._sessions.end_all()]
        return [*sessions, *(Delivery([item], [sink], own_copy(error)) for item, sink in sinks.items())]


Making = tuple[cmd.Run, CallPayload | Callable[[], CallPayload]]
"""A call, and its payload, or what makes that."""
_Batch = tuple[Sequence[cmd.Command], Sequence[Making], Mapping[str, ContextPayload]]


def _batch_payload(app: DeclaredApp, inputs: Sequence[Any], searched: bool) -> CallPayload:
    """Return the inputs of a batch as lists side by side, pickled together.

    :param searched: whether there may be files among them.
    """
    columns = list(zip(*inputs, strict=True))
    taken = inputs_of(itertools.chain(*columns)) if searched else ()
    files = CallFiles(taken) if taken else None
    body = dumps(columns, f"the input of {app.spec.name}", "give it plain data")
    return CallPayload("batch", app.function, False, app.timeout, body, files, app.constants)


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


@dataclasses.dataclass(slots=True)
class _Span:
    """Items that were submitted together."""

    numbers: range
    first: int  # The index of the first.
    left: int  # How many are not answered.


_START = operator.attrgetter("numbers.start")


class Spans:
    """Items that were submitted in spans of consecutive numbers, in rising order, until they are answered.

    >>> spans = Spans()
    >>> spans.add(range(7, 10), 0), spans.add(range(12, 14), 3)
    (None, None)
    >>> spans.indices([8, 9]), spans.indices([7, 12])
    ([1, 2], [0, 3])
    """

    def __init__(self) -> None:
        self._spans: list[_Span] = []  # In the order of their numbers.
        self._answered = 0  # How many are answered, but not yet forgotten.

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, numbers: range, first: int) -> None:
        """Note the numbers of items, from this index on."""
        self._spans.append(_Span(numbers, first, len(numbers)))

    def numbers(self) -> list[int]:
        """Return the numbers of all that are not answered, and of some that are."""
        return [item for span in self._spans for item in span.numbers]

    def indices(self, items: Sequence[int]) -> Sequence[int]:
        """Return the indices of items that are answered now, by their numbers."""
        span = self._spans[0]
        if items[0] not in span.numbers:
            span = self._spans[bisect.bisect_right(self._spans, items[0], key=_START) - 1]
        if min(items) not in span.numbers or max(items) not in span.numbers:
            return [self.indices((item,))[0] for item in items]
        offset = span.first - span.numbers.start
        span.left -= len(items)
        if not span.left:
            self._answered += 1
            if 2 * self._answered > len(self._spans):  # Not at each, which would take time with their square.
                self._spans = [span for span in self._spans if span.left]
                self._answered = 0
        return [item + offset for item in items]
