"""The event log of a run: every event with the commands it led to, one JSON object a line; and its replay.

The first line says how the run decides: its policies with their options, its limits, its seed, from how many workers on
it gave calls. From it and the events `replay` takes every decision again, and checks that it is the same.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ctxflow.installing import __version__
from ctxflow.policies.registry import FAMILIES, described
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.core import Scheduler
from ctxflow.scheduler.run_state import Limits, Policies, RunState


def _plain(value: Any) -> Any:
    """Return what is inside of lists as data: an order of a step as its fields, all else in words."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else str(value)


LOG_VERSION = 2
"""The version of what is written, in each log's first line. It goes up when a log would lead to other decisions than
those that were recorded, or cannot be read any more; logs that do not say it are of version 1."""

_UNLOGGED = {"results", "exception", "planning"}
_SETUP = '{"run":'
_quoted = json.encoder.encode_basestring_ascii
_encoder = json.JSONEncoder(separators=(",", ":"), default=_plain)
# Class -> its fields with what writes each, and its JSON with a place for each. A line is written for every
# event, under the run's lock: a general encoder took a fifth of a call's time.
_forms: dict[type, tuple[list[tuple[str, Callable[[Any], str]]], str]] = {}


def line(event: ev.Event, commands: Sequence[cmd.Command]) -> str:
    """Return one line of the log.

    >>> line(ev.ItemsSubmitted(0.5, "a", range(3)), [])
    '{"event":{"is":"ItemsSubmitted","time":0.5,"app":"a","items":[[0,3]],"prefixes":[]},"commands":[]}'
    """
    return f'{{"event":{_text(event)},"commands":[{",".join(map(_text, commands))}]}}'


def _text(value: Any) -> str:
    """Return an event, a command or a specification as JSON."""
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
    """Return item numbers as ranges [first, end): batches are runs of numbers most of the time.

    >>> _ranges([4, 5, 6, 9])
    [[4, 7], [9, 10]]
    """
    if isinstance(items, range) and len(items) > 1 and items.step == 1:
        return [[items.start, items.stop]]
    ranges: list[list[int]] = []
    for item in items:
        if ranges and item == ranges[-1][1]:
            ranges[-1][1] += 1
        else:
            ranges.append([item, item + 1])
    return ranges


@dataclasses.dataclass(frozen=True)
class RunSetup:
    """How a run decides, as its log's first line has it.

    :ivar policies: family -> {"policy": name, and its options}, or {"object": the class of one made by the program}.
    :ivar level: how much of a context workers kept where an app did not say; contexts in the log have their own.
    :ivar simulated: whether it was a run in virtual time, without workers.
    """

    policies: Mapping[str, Mapping[str, Any]]
    limits: Limits = dataclasses.field(default_factory=Limits)
    seed: int = 0
    start_when: float = 0.0
    level: str = ev.PERVASIVE
    simulated: bool = False

    def scheduler(self) -> Scheduler:
        """Return a fresh scheduler that decides so.

        :raises ValueError: if a policy was an object of the program's, which a log cannot hold.
        """
        for family, choice in self.policies.items():
            if "object" in choice:
                raise ValueError(
                    f"the run's {family} policy was an object of {choice['object']}, which its log cannot hold: make "
                    "the scheduler yourself, and give it to `replay`"
                )
        before = {"health": "none"}  # Logs from before there was that family.
        policies = Policies.chosen({**before, **{family: dict(choice) for family, choice in self.policies.items()}})
        return Scheduler(policies, self.limits, self.seed, self.start_when)


def first_line(scheduler: Scheduler, level: str = ev.PERVASIVE, simulated: bool = False) -> str:
    """Return the first line of the log of a run that this scheduler decides.

    :param simulated: whether it runs in virtual time, without workers.

    >>> first_line(Scheduler(Policies.chosen({"batching": "opportunistic"})))[:72]
    '{"run":{"ctxflow":"0.1.0","policies":{"routing":{"policy":"context-affin'
    """
    state = scheduler.state
    policies = {
        family: state.policies.choices.get(family) or described(family, getattr(state.policies, family))
        for family in FAMILIES
    }
    setup = RunSetup(policies, state.limits, state.seed, state.start_when, level, simulated)
    return _encoder.encode({"run": {"ctxflow": __version__, **dataclasses.asdict(setup), "log": LOG_VERSION}})


def read_setup(text: str) -> RunSetup | None:
    """Return how a run decides, from its log's first line; None if that is an event, as in logs of earlier versions.

    :raises ValueError: if it is no line of an event log, or one of another version (`LOG_VERSION`).

    >>> read_setup(first_line(Scheduler(Policies.chosen({})))).start_when
    0.0
    """
    try:
        record = json.loads(text)
        if "event" in record:
            return None
        run = record["run"]
        version, writer = run.get("log", 1), run["ctxflow"]
        if version == LOG_VERSION:
            simulated = bool(run.get("simulated"))  # Logs of earlier versions do not say.
            limits = Limits(**run["limits"])
            return RunSetup(run["policies"], limits, run["seed"], run["start_when"], run["level"], simulated)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"line 1 is no line of an event log ({error}): is this the run's events.jsonl?") from None
    raise ValueError(
        f"this log is of version {version}, written by ctxflow {writer}, and ctxflow {__version__} replays version "
        f"{LOG_VERSION} alone: replay it with the ctxflow that wrote it"
    )


def read(lines: Iterable[str]) -> Iterator[tuple[ev.Event, list[dict[str, Any]]]]:
    """Return the events of a log, each with its commands as they were written.

    :raises ValueError: for a line that is no line of an event log, saying which; a torn last line is left out.
    """
    held: str | None = None
    number = 0
    for number, text in enumerate(lines, 1):
        if held is not None:
            yield _decode_line(held, number - 1)
        held = text
        if number == 1 and text.startswith(_SETUP):
            read_setup(text)
            held = None
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
    for name, value in values.items():
        if name == "items":
            values[name] = [item for first, end in value for item in range(first, end)]
        elif name == "beside":
            values[name] = tuple(item for first, end in value for item in range(first, end))
        elif name == "devices":
            values[name] = tuple(value)
        elif name == "prefixes":
            values[name] = tuple(map(tuple, value))
        elif isinstance(value, dict) and "is" in value:
            values[name] = _decode(value)
    return cls(**values)


def _completed(record: Any) -> Any:
    """Return a command as it was written, with the defaults of fields that an earlier version's log lacks."""
    if not isinstance(record, dict) or "is" not in record:
        return record
    kind = getattr(cmd, record["is"], None)
    fields = dataclasses.fields(kind) if kind is not None else ()
    found = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    defaults = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
    return {**defaults, **{name: _completed(value) for name, value in record.items()}}


def replay(lines: Iterable[str], scheduler: Scheduler | None = None) -> int:
    """Feed a log's events to a fresh scheduler, and check that it takes the recorded decisions.

    :param scheduler: by default one made from the log's first line.
    :returns: how many events there were.
    :raises ValueError: at the first event that leads to other commands; and if no scheduler is given and the log does
        not say how its run decides.
    """
    return sum(1 for _ in replayed(lines, scheduler))


def replayed(lines: Iterable[str], scheduler: Scheduler | None = None) -> Iterator[tuple[ev.Event, RunState]]:
    """Replay step by step: yield each event with the run's state after it, one object that goes on changing."""
    lines = iter(lines)
    if scheduler is None:
        first = next(lines, "")
        setup = read_setup(first)
        if setup is None:
            raise ValueError(
                "this log was written by an earlier version of ctxflow, which did not note the run's policies: make a "
                "scheduler with them, and give it to `replay`"
            )
        scheduler = setup.scheduler()
    for count, (event, recorded) in enumerate(read(lines), 1):
        commands = [json.loads(_text(command)) for command in scheduler.handle(event)]
        if commands != [_completed(command) for command in recorded]:
            raise ValueError(f"event {count} ({type(event).__name__}) led to {recorded}, but now leads to {commands}")
        yield event, scheduler.state
