"""What a run has in flight: items that are not answered, who waits for them, and how answers get there."""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import functools
import itertools
import operator
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from ctxflow.executors.call_files import inputs_of
from ctxflow.executors.contract import CallFiles, CallPayload, ContextPayload, threads_for
from ctxflow.executors.declarations import ApplyCall, DeclaredApp
from ctxflow.executors.futures import CallFuture, error_of, own_copy
from ctxflow.executors.session_store import SessionStore
from ctxflow.ownership import InterruptibleCondition
from ctxflow.pickling import dumps
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.worker_state import SessionState

AnswerCommand: TypeAlias = cmd.Deliver | cmd.Bury | cmd.DeliverChunk | cmd.EndTurn | cmd.EndSession
"""The commands that are for those who wait, and for nobody else."""
Answer: TypeAlias = Callable[[], object]
"""Tells somebody who waits what there is; to be called without the run's lock, since code of the user's may run."""


class Waiting:
    """The items that are not answered, with what each is and who waits for it, by number; and the open sessions."""

    def __init__(self, sessions: SessionStore, contexts: Mapping[str, ContextPayload]) -> None:
        self._sessions = sessions
        self._contexts = contexts
        self.next_item = 0
        self.inputs: dict[int, Any] = {}
        self.sinks: dict[int, Sink] = {}

    def payload(
        self,
        call: cmd.Run,
        apps: Mapping[str, DeclaredApp],
        sessions: Mapping[int, SessionState],
        with_files: Container[str],
    ) -> CallPayload | Callable[[], CallPayload]:
        """Return a call's payload, or what makes it of its inputs outside the lock: it may be answered by then."""
        app = apps[call.app]
        if isinstance(call, cmd.Step):
            return self._sessions.payload(call, sessions, app.function, app.timeout)
        known = self.inputs
        inputs = [known[item] for item in call.items]
        context = self._contexts[app.spec.context]
        if app.style == "apply":
            single: ApplyCall = inputs[0]
            function, body, files = single.function, single.body, single.files
            threads = threads_for(context, files)
            return CallPayload("apply", function, app.insert, app.timeout, body, files, threads=threads)
        if app.style == "item":
            return functools.partial(_item_payload, app, inputs[0])
        searched = (app.spec.alternative_of or app.spec.id) in with_files
        return functools.partial(_batch_payload, app, inputs, searched, context)

    def calls(self) -> list[CallFuture]:
        """Return the single calls that somebody waits for, in the order in which they were made."""
        return [sink for sink in self.sinks.values() if isinstance(sink, CallFuture)]

    def forget(self, items: Sequence[int]) -> list[int]:
        """Forget items; return those that somebody waited for."""
        gone = [item for item in items if self.sinks.pop(item, None) is not None]
        for item in gone:
            del self.inputs[item]
        return gone

    def answer(self, command: AnswerCommand, event: ev.Event, context: str | None) -> Answer:
        """Return what tells those who wait what a command says; they wait no more, but for a session that goes on.

        :param context: the name of the one that answered, where several could.
        """
        if isinstance(command, cmd.Deliver):
            results: Any = event.results  # type: ignore[attr-defined]
            inputs = [self.inputs.pop(item) for item in command.items]
            if type(inputs[0]) is ApplyCall:
                results = [results]
            elif command.positions is not None:
                results = [results[n] for n in command.positions]
            sinks = [self.sinks.pop(item) for item in command.items]
            if context is None and sinks.count(sinks[0]) == len(sinks):  # Nearly always.
                return functools.partial(sinks[0].deliver, command.items, results)
            return functools.partial(_tell, command.items, sinks, results, context)
        if isinstance(command, cmd.Bury):
            error = self._error(command.failure, command.context, event)
            inputs = [self.inputs.pop(item) for item in command.items]
            sinks = [self.sinks.pop(item) for item in command.items]
            return functools.partial(_tell, command.items, sinks, error, inputs=inputs)
        failed = None
        if isinstance(command, cmd.EndSession) and command.failure is not None:
            failed = self._error(command.failure, command.context, event)
        return self._sessions.news(command, event, failed)

    def _error(self, failure: ev.Failure, context: str | None, event: ev.Event) -> BaseException:
        name = self._contexts[context].name if context is not None else None
        return error_of(failure, getattr(event, "exception", None), name)

    def end_all(self, error: BaseException) -> list[Answer]:
        """Forget everything; return what everybody who waits is to be told, since no answer will come."""
        sinks = dict(self.sinks)
        self.sinks.clear()
        self.inputs.clear()
        sessions = [functools.partial(sink.over, error) for sink in self._sessions.end_all()]
        return [*sessions, *(functools.partial(sink.fail, [item], own_copy(error)) for item, sink in sinks.items())]


def _tell(
    items: Sequence[int],
    sinks: Sequence[Sink],
    results: Sequence[Any] | BaseException,
    context: str | None = None,
    inputs: Sequence[Any] = (),
) -> None:
    """Tell who waits for items their results, or one error: together where one waits for all, else one by one.

    :param context: the name of the one that answered, where several could.
    """
    if sinks.count(sinks[0]) < len(sinks):
        for n, sink in enumerate(sinks):
            own = own_copy(results) if isinstance(results, BaseException) else results[n : n + 1]
            _tell(items[n : n + 1], [sink], own, context, inputs[n : n + 1])
        return
    if context is not None:
        sinks[0].note(items, context)
    if isinstance(results, BaseException):
        sinks[0].fail(items, results, inputs)
    else:
        sinks[0].deliver(items, results)


Making = tuple[cmd.Run, CallPayload | Callable[[], CallPayload]]
"""A call, and its payload, or what makes that."""
Unsent = tuple[Sequence[cmd.Command], Sequence[Making], Mapping[str, ContextPayload]]


def _batch_payload(app: DeclaredApp, inputs: Sequence[Any], searched: bool, context: ContextPayload) -> CallPayload:
    """Return a batch's payload: the inputs as lists side by side, `searched` for files, pickled together."""
    columns = list(zip(*inputs, strict=True))
    taken = inputs_of(itertools.chain(*columns)) if searched else ()
    files = CallFiles(taken) if taken else None
    body = dumps(columns, f"the input of {app.spec.name}", "give it plain data")
    threads = threads_for(context, files)
    return CallPayload("batch", app.function, False, app.timeout, body, files, app.constants, threads)


_MARKS = 256, 1024, 4096, 16384  # Characters after which a beginning is one that others may share.
_MOST_PARTS, _DEEPEST = 1000, 16  # Of an item that are looked at: the parts, and those within each other.
_OVER = object()


def beginning(values: Sequence[Any]) -> tuple[int, ...]:
    """Return how an item begins, as `ItemsSubmitted.prefixes` has it: by its text, or that of a request of OpenAI's.

    >>> beginning(("a question",))
    ()
    >>> first, second = [("/v1/completions", {"prompt": "x" * 300 + end}) for end in "ab"]
    >>> beginning(first) == beginning(second), len(beginning(first))
    (True, 1)
    """
    text, size = [], 0
    for part in _texts(values):
        text.append(part[: _MARKS[-1] - size])
        size += len(text[-1])
        if size >= _MARKS[-1]:
            break
    whole = "".join(text) if size >= _MARKS[0] else ""
    return tuple(zlib.crc32(whole[:mark].encode(errors="replace")) for mark in _MARKS if mark <= size)


def beginnings(inputs: Sequence[Sequence[Any]]) -> Sequence[tuple[int, ...]]:
    """Return how items begin; nothing if all are short."""
    found = [beginning(values) for values in inputs]
    return found if any(found) else ()


def _texts(values: Sequence[Any]) -> Iterator[str]:
    """Yield the texts in values, in order; not all of them where there are very many parts, or within each other."""
    open_ones = [iter(values)]
    for _ in range(_MOST_PARTS):
        value = next(open_ones[-1], _OVER)
        if value is _OVER:
            open_ones.pop()
            if not open_ones:
                return
        elif isinstance(value, str):
            yield value
        elif len(open_ones) > _DEEPEST:
            continue
        elif isinstance(value, Mapping):
            known = [value[name] for name in ("messages", "prompt", "input", "content", "text") if name in value]
            open_ones.append(iter(known or value.values()))
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], (str, Mapping, list, tuple)):
            open_ones.append(iter(value))  # Others are numbers, such as a prompt's tokens.


def _item_payload(app: DeclaredApp, values: Sequence[Any]) -> CallPayload:
    """Return the payload of a call for one item."""
    body = dumps(tuple(values), f"the input of {app.spec.name}", "give it plain data")
    return CallPayload("item", app.function, False, app.timeout, body, None, app.constants)


class Sink(Protocol):
    """Something that waits for answers to items."""

    def deliver(self, items: Sequence[int], results: Sequence[Any]) -> None:
        """Take the answers to these items."""

    def fail(self, items: Sequence[int], error: BaseException, inputs: Sequence[Any] = ()) -> None:
        """Take the error of items that are dead; `inputs` are what they were, where that is known."""

    def note(self, items: Sequence[int], context: str) -> None:
        """Note which context answers these items, before they are delivered; of apps with alternatives."""


class Stream:
    """The answers to many items, collected as they come for one consumer, who takes them out.

    :ivar contexts: item -> the name of the context that answered it, for apps with alternatives.
    """

    def __init__(self) -> None:
        self.contexts: dict[int, str] = {}
        self._changed = InterruptibleCondition()
        self.arrived: collections.deque[tuple[Sequence[int], Sequence[Any]]] = collections.deque()
        self._listener: Callable[[], None] | None = None

    def deliver(self, items: Sequence[int], results: Sequence[Any]) -> None:
        """Take the answers to some of the items."""
        with self._changed.lock:
            self.arrived.append((items, results))
            self._changed.notify_all()
            listener, self._listener = self._listener, None
        if listener is not None:
            listener()

    async def arrival(self) -> None:
        """Wait for an answer to arrive, in a coroutine."""
        import asyncio

        loop = asyncio.get_running_loop()
        come: asyncio.Future[None] = loop.create_future()

        def tell() -> None:
            if not come.done():
                come.set_result(None)

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits any more.
                loop.call_soon_threadsafe(tell)

        with self._changed.lock:
            if self.arrived:
                return
            self._listener = wake
        await come

    def wait(self, timeout: float = 1.0) -> None:
        """Wait for an answer to arrive, for so many seconds at most."""
        self._changed.wait_for(lambda: self.arrived, timeout)

    def fail(self, items: Sequence[int], error: BaseException, inputs: Sequence[Any] = ()) -> None:
        """Answer items that are dead with the failure, each with one of its own."""
        if inputs:
            own = [error, *(own_copy(error) for _ in inputs[1:])]
            self.deliver(items, [Failed(*each) for each in zip(own, inputs, strict=True)])
        else:
            self.deliver(items, [Failed(error)] * len(items))

    def note(self, items: Sequence[int], context: str) -> None:
        """Note which context answers them."""
        self.contexts.update(dict.fromkeys(items, context))

    def take(self, timeout: float) -> Iterator[tuple[Sequence[int], Sequence[Any]]]:
        """Yield what has arrived, after waiting as `wait` does."""
        if timeout:
            self.wait(timeout)
        while self.arrived:
            yield self.arrived.popleft()


class Failed:
    """Stands for the answer of a dead item in a stream, and what that was, where it is known."""

    __slots__ = ("error", "item")

    def __init__(self, error: BaseException, item: tuple[Any, ...] = ()) -> None:
        self.error = error
        self.item = item


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
