"""The event log of a run: every event with the commands it led to, one JSON object a line; and its replay.

A run that is replayed from its log with the same policies takes the same decisions, which `replay` checks.
Payloads are not in it. What does not live here: when the log is written (executors/).
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.core import Scheduler

_UNLOGGED = {"results", "exception"}
_fields: dict[type, tuple[str, ...]] = {}
_encoder = json.JSONEncoder(separators=(",", ":"), default=str)


def line(event: ev.Event, commands: Sequence[cmd.Command]) -> str:
    """One line of the log.

    >>> line(ev.ItemsSubmitted(0.5, "a", range(3)), [cmd.Release("w")])
    '{"event":{"is":"ItemsSubmitted","time":0.5,"app":"a","items":[[0,3]]},"commands":[{"is":"Release","worker":"w"}]}'
    """
    return _encoder.encode({"event": _encode(event), "commands": [_encode(command) for command in commands]})


def _encode(value: Any) -> Any:
    cls = type(value)
    names = _fields.get(cls)
    if names is None:
        names = _fields[cls] = tuple(f.name for f in dataclasses.fields(cls) if f.name not in _UNLOGGED)
    encoded: dict[str, Any] = {"is": cls.__name__}
    for name in names:
        part = getattr(value, name)
        if name == "items":
            part = _ranges(part)
        elif dataclasses.is_dataclass(part):
            part = _encode(part)
        encoded[name] = part
    return encoded


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
    for number, text in enumerate(lines, 1):
        if held is not None:
            yield _decode_line(held, number - 1)
        held = text
    if held is not None and held.endswith("\n"):
        yield _decode_line(held, -1)


def _decode_line(text: str, number: int) -> tuple[ev.Event, list[dict[str, Any]]]:
    try:
        record = json.loads(text)
        return _decode(record["event"]), record["commands"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"line {number} is no line of an event log ({error}): is this the run's events.jsonl?") from None


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


def replay(scheduler: Scheduler, lines: Iterable[str]) -> int:
    """Feed a log's events to a fresh scheduler, and check that it takes the recorded decisions.

    :returns: how many events there were.
    :raises ValueError: at the first event that leads to other commands.
    """
    count = 0
    for event, recorded in read(lines):
        count += 1
        commands = json.loads(_encoder.encode([_encode(command) for command in scheduler.handle(event)]))
        if commands != recorded:
            raise ValueError(f"event {count} ({type(event).__name__}) led to {recorded}, but now leads to {commands}")
    return count
