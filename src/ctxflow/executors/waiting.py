"""What a run has not answered yet: the items' inputs, who waits for each, and what these are told in the end.

What does not live here: when something is answered (scheduler/), what is held of sessions (sessions.py), and how
answers are taken (futures.py). Not thread-safe: the run locks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ctxflow.executors.declarations import ApplyCall
from ctxflow.executors.engine import ContextPayload
from ctxflow.executors.futures import CallFuture, Delivery, Sink, error_of, own_copy
from ctxflow.executors.sessions import News, SessionStore
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

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
        """Items come, all for one who waits; gives their numbers."""
        first = self._next_item
        items = range(first, first + len(inputs))
        self._next_item = items.stop
        self._inputs.update(zip(items, inputs, strict=True))
        self._sinks.update(dict.fromkeys(items, sink))
        return items

    def add_one(self, inputs: Any, sink: Sink) -> int:
        """One item comes; gives its number."""
        item = self._next_item
        self._next_item = item + 1
        self._inputs[item] = inputs
        self._sinks[item] = sink
        return item

    def inputs(self, items: Sequence[int]) -> list[Any]:
        """What these items are called with."""
        inputs = self._inputs
        return [inputs[item] for item in items]

    def calls(self) -> list[CallFuture]:
        """The single calls that somebody waits for, in the order in which they were made."""
        return [sink for sink in self._sinks.values() if isinstance(sink, CallFuture)]

    def forget(self, items: Sequence[int]) -> list[int]:
        """Nobody waits for these any more; gives those for which somebody did."""
        gone = [item for item in items if self._sinks.pop(item, None) is not None]
        for item in gone:
            del self._inputs[item]
        return gone

    def told(self, command: Telling, event: ev.Event, context: str | None) -> Delivery | News:
        """What a command has to be told, and to whom; who is told waits no more, but for a session that goes on.

        :param event: from which the command came: it has the results.
        :param context: the name of the one that answered, where there were several that could.
        """
        if isinstance(command, cmd.Deliver):
            return self._answered(command, event, context)
        if isinstance(command, cmd.Bury):
            error = self._error(command.failure, command.context, event)
            inputs = [self._inputs.pop(item) for item in command.items]
            return Delivery(command.items, self._take_sinks(command.items), error, inputs=inputs)
        failed = None
        if isinstance(command, cmd.EndSession) and command.failure is not None:
            failed = self._error(command.failure, command.context, event)
        return self._sessions.news(command, event, failed)

    def _answered(self, command: cmd.Deliver, event: ev.Event, context: str | None) -> Delivery:
        results: Any = event.results  # type: ignore[attr-defined]
        inputs = [self._inputs.pop(item) for item in command.items]
        if type(inputs[0]) is ApplyCall:
            results = [results]
        elif command.positions is not None:
            results = [results[n] for n in command.positions]
        return Delivery(command.items, self._take_sinks(command.items), results, context)

    def _error(self, failure: ev.Failure, context: str | None, event: ev.Event) -> BaseException:
        name = self._contexts[context].name if context is not None else None
        return error_of(failure, getattr(event, "exception", None), name)

    def _take_sinks(self, items: Sequence[int]) -> list[Sink]:
        pop = self._sinks.pop
        return [pop(item) for item in items]

    def end_all(self, error: BaseException) -> list[Delivery | News]:
        """No answer will come any more: everybody who waits, to be told why."""
        sinks = dict(self._sinks)
        self._sinks.clear()
        self._inputs.clear()
        sessions = [News(functools.partial(sink.over, error)) for sink in self._sessions.end_all()]
        return [*sessions, *(Delivery([item], [sink], own_copy(error)) for item, sink in sinks.items())]
