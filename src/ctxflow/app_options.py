"""What may be said of an app: its options and its context, checked where they are given.

What does not live here: the apps (apps.py), and what sessions' apps take (sessions.py).
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ctxflow.alternatives import Alternative
from ctxflow.context import Context, ContextFunction
from ctxflow.digest import digest
from ctxflow.executors.run import Run
from ctxflow.option_values import flag, number, refuse, text, whole
from ctxflow.scheduler import events as ev
from ctxflow.wording import article

Deadline = float | datetime.datetime | None


@dataclasses.dataclass(frozen=True)
class Options:
    """What may be said of an app where it is defined, and changed with `using`.

    :ivar priority: higher goes first; by default its context's, which is 0 by default.
    :ivar deadline: when the results are wanted: a time of day, or seconds from the app's first call in a run.
        Among apps of one priority the earliest deadline goes first; nothing is dropped when it has passed.
    :ivar timeout: seconds that a call (a batch, for a batch app) may take; it is stopped then. What it has yielded
        before is kept.
    :ivar retries: how often an item that raises on its own is tried again.
    :ivar batch_size: items a batch, if the batching policy is to be overruled.
    :ivar executor: the label of the executor, where several are running.
    :ivar cache: whether Parsl may answer a call from its memo or a checkpoint.
    :ivar max_delay: seconds that an item may take, and `max_error`, the largest share of wrong answers: the placement
        policy `agh` keeps to them.
    :ivar error: the share of the context's answers that are wrong.
    :ivar alternatives: other contexts that may answer items, each an `Alternative`: the placement policy `agh` divides
        the items so that the mean error stays within `max_error`. Without it the app's own context answers all.
    :ivar level: what a worker keeps of the context from one call (a batch, for a batch app) to the next; by default
        what the executor says. "pervasive": all, it is built once. To measure what that saves: "partial" keeps the
        files, and builds it for every call in a library process that ends with the call; "none" keeps nothing,
        and brings the files for every call too.
    """

    priority: int | None = None
    deadline: Deadline = None
    timeout: float | None = None
    retries: int = 0
    batch_size: int | None = None
    executor: str | None = None
    cache: bool = False
    max_delay: float | None = None
    max_error: float | None = None
    level: str | None = None
    error: float = 0.0
    alternatives: Sequence[Alternative] = ()

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None or name in _NEVER_NONE:
                object.__setattr__(self, name, check(value))

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tells these options from others, but for the alternatives."""
        return dataclasses.astuple(dataclasses.replace(self, alternatives=()))

    def deadline_on(self, run: Run) -> float | None:
        """The deadline on the run's clock."""
        if isinstance(self.deadline, datetime.datetime):
            return run.clock() + self.deadline.timestamp() - datetime.datetime.now().timestamp()
        return None if self.deadline is None else run.clock() + self.deadline


def _deadline(value: Any) -> Any:
    wanted = "seconds from the app's first call, 0 or more, or a datetime.datetime"
    return value if isinstance(value, datetime.datetime) else number("deadline", value, wanted)


def _alternatives(value: Any) -> tuple[Alternative, ...]:
    wanted = "a list of them, as in alternatives=[Alternative(small(...), error=0.1)]"
    if isinstance(value, (str, bytes, Mapping, Alternative)) or not isinstance(value, Iterable):
        raise refuse("alternatives", value, wanted, TypeError)
    found = tuple(value)
    if not all(isinstance(each, Alternative) for each in found):
        raise refuse("alternatives", value, wanted, TypeError)
    return found


def _level(value: Any) -> str:
    ev.check_level(value)
    return str(value)


def _share(name: str) -> Callable[[Any], Any]:
    return lambda value: number(name, value, "the share of answers that are wrong, 0 to 1", most=1)


def _seconds(name: str, what: str) -> Callable[[Any], Any]:
    return lambda value: number(name, value, f"seconds that {what} may take, more than 0", above=True)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "priority": lambda value: whole("priority", value, "a whole number, such as 10: higher goes first"),
    "deadline": _deadline,
    "timeout": _seconds("timeout", "a call"),
    "retries": lambda value: whole("retries", value, "how often an item is tried again, 0 or more", 0),
    "batch_size": lambda value: whole("batch_size", value, "the number of items in a batch, 1 or more", 1),
    "executor": lambda value: text("executor", value, "the label of an executor"),
    "cache": lambda value: flag("cache", value),
    "max_delay": _seconds("max_delay", "an item"),
    "max_error": _share("max_error"),
    "level": _level,
    "error": _share("error"),
    "alternatives": _alternatives,
}
_NEVER_NONE = ("retries", "cache", "error", "alternatives")


def check_context(context: Any) -> None:
    """See that the context of an app is a recipe, or None.

    :raises TypeError: if it is not.
    """
    if isinstance(context, ContextFunction):
        name = context.function.__name__
        raise TypeError(f"{name} is a context function, not a recipe: call it with its inputs, as in {name}(...)")
    if context is not None and not isinstance(context, Context):
        raise TypeError(
            f"the context of an app is a recipe made by a @context function, not {article(type(context).__name__)}"
        )


_SIMPLE = frozenset({str, int, bool, bytes, type(None)})


def constants_key(constants: Mapping[str, Any]) -> object:
    """What tells constants apart by content and types: equality would not, as 1 == True, 0.0 == -0.0, and objects
    that change stay equal to themselves.
    """
    key = []
    for name, value in sorted(constants.items()):
        kind = type(value)
        if kind not in _SIMPLE and kind is not float:
            return digest(dict(constants))
        key.append((name, kind, repr(value) if kind is float else value))
    return tuple(key)
