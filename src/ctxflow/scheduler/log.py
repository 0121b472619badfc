"""The event log of a run: every event with the commands it led to, one JSON object a line; and its replay.

A run that is replayed from its log with the same policies takes the same decisions, which `replay` checks.
Payloads are not in it. What does not live here: when the log is written (executors/).
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.core import Scheduler

_UNLOGGED = {"results", "exception"}
_quoted = json.encoder.encode_basestring_ascii
_encoder = json.JSONEncoder(separators=(",", ":"), default=str)
# Class -> its fields with what writes each, and its JSON with a place for each. A line is written for every
# event, under the run's lock: a general encoder took a fifth of a call's time.
_forms: dict[type, tuple[list[tuple[str, Callable[[Any], str]]], str]] = {}


def line(event: ev.Event, commands: Sequence[cmd.Command]) -> str:
    """One line of the log.

    >>> line(ev.ItemsSubmitted(0.5, "a", range(3)), [cmd.Release("w")])
    '{"event":{"is":"ItemsSubmitted","time":0.5,"app":"a","items":[[0,3]]},"commands":[{"is":"Release","worker":"w"}]}'
    """
    return f'{{"event":{_text(event)},"commands":[{",".join(map(_text, commands))}]}}'


def _text(value: Any) -> str:
    """An event, a command or a specification as JSON."""
    form = _forms.get(type(value))
    if form is None:
        form = _forms[type(value)] = _form(type(value))
    fields, template = form
    return template % tuple([write(getattr(value, name)) for name, write in fields])


def _form(cls: type) -> tuple[list[tuple[str, Callable[[Any], str]]], str]:
    logged = [f for f in dataclasses.fields(cls) if f.name not in _UNLOGGED]
    places = "".join(f',"{f.name}":%s' for f in logged)
    return [(f.name, _WRITERS.get(str(f.type), _part)) for f in logged], f'{{"is":"{cls.__name__}"{places}}}'


def _part(value: Any) -> str:
    kind = type(value)
    if kind is str:
        return _quoted(value)
    if kind is int or (kind is float and math.isfinite(value)):
        return repr(value)
    if value is None:
        return "null"
    return _text(value) if dataclasses.is_dataclass(value) else _encoder.encode(value)


def _items_text(items: Sequence[int]) -> str:
    if len(items) == 1:
        return f"[[{items[0]},{items[0] + 1}]]"
    return _encoder.encode(_ranges(items))


# By the annotations of fields; for those that may hold several kinds, `_part` looks.
_WRITERS: dict[str, Callable[[Any], str]] = {"str": _quoted, "int": str, "float": str, "Sequence[int]": _items_text}


def _ranges(items: Sequence[int]) -> list[list[int]]:
    """Item numbers as ranges [first, end): batches are runs of numbers most of the time.

    >>> _ranges([4, 5, 6, 9])
    [[4, 7], [9, 10]]
    """
    if len(items) > 1 and items[-1] - items[0] == len(items) - 1 and isinstance(items, range):
        return [[items[0], items[-1] + 1]]
    ranges: list[list[int]] = []
    start = previous = None
    for item in items:
        if previous is None or item != previous + 1:
            if start is not None:
                ranges.append([start, previous + 1])  # type: ignore[operator]
            start = item
        previous = item
    if start is not None:
        ranges.append([start, previous + 1])  # type: ignore[operator]
    return ranges


def read(lines: Iterable[str]) -> Iterator[tuple[ev.Event, list[dict[str, Any]]]]:
    """The events of a log, each with its commands as they were written.

    :raises ValueError: for a line that is no line of an event log, saying which; a torn last line is left out.
    """
    held: str | None = None
    number = 0
    for number, text in enumerate(lines, 1):
        if held is not None:
            yield _decode_line(held, number - 1)
        held = text
    if held is not None and held.endswith("\n"):
        yield _decode_line(held, number)


def _decode_line(text: str, number: int) -> tuple[ev.Event, list[dict[str, Any]]]:
    try:
        record = json.loads(text)
        return _decode(record["event"]), record["commands"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"line {number} is no line of an event log ({error}): is this the run's events.jsonl?"
        ) from None


def _decode(record: dict[str, Any]) -> Any:
    values = dict(record)
    cls = getattr(ev, values.pop("is"))
    hints = typing.get_type_hints(cls)
    for name, value in values.items():
        if name == "items":
            values[name] = [item for first, end in value for item in range(first, end)]
        elif dataclasses.is_dataclass(hints[name]):
            values[name] = _decode(value)
    return cls(**values)


def _defaults(command: str) -> dict[str, Any]:
    """The defaults of a command's fields: a log of an earlier version lacks fields that came later."""
    kind = getattr(cmd, command, None)
    fields = dataclasses.fields(kind) if kind is not None else ()
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def replay(scheduler: Scheduler, lines: Iterable[str]) -> int:
    """Feed a log's events to a fresh scheduler, and check that it takes the recorded decisions.

    :returns: how many events there were.
    :raises ValueError: at the first event that leads to other commands.
    """
    count = 0
    for event, recorded in read(lines):
        count += 1
        commands = [json.loads(_text(command)) for command in scheduler.handle(event)]
        if commands != [{**_defaults(command["is"]), **command} for command in recorded]:
            raise ValueError(f"event {count} ({type(event).__name__}) led to {recorded}, but now leads to {commands}")
    return count
