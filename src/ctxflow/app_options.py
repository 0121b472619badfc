"""What may be said of an app: its options and its context, checked where they are given.

What does not live here: the apps (apps.py), and what sessions' apps take (sessions.py).
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from ctxflow.alternatives import Alternative, check_share
from ctxflow.context import Context, ContextFunction
from ctxflow.executors.run import Run
from ctxflow.scheduler import events as ev

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
        ev.check_level(self.level)
        check_share("error", self.error)
        check_share("max_error", self.max_error)
        if self.max_delay is not None and not self.max_delay > 0:
            raise ValueError("max_delay is a number of seconds: give more than 0")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError("batch_size is the number of items in a batch: give 1 or more")
        if self.timeout is not None and self.timeout <= 0:
            raise ValueError("timeout is a number of seconds: give more than 0")
        if self.retries < 0:
            raise ValueError("retries is how often an item is tried again: give 0 or more")

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tells these options from others, but for the alternatives."""
        return dataclasses.astuple(dataclasses.replace(self, alternatives=()))

    def deadline_on(self, run: Run) -> float | None:
        """The deadline on the run's clock."""
        if isinstance(self.deadline, datetime.datetime):
            return run.clock() + self.deadline.timestamp() - datetime.datetime.now().timestamp()
        return None if self.deadline is None else run.clock() + self.deadline


_OPTIONS = tuple(field.name for field in dataclasses.fields(Options))


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a person gives them, if there are such.

    :raises TypeError: for one that there is not.
    """
    if unknown := sorted(set(given) - set(_OPTIONS)):
        raise TypeError(f"an app has no option {unknown[0]!r}: it takes {', '.join(_OPTIONS)}")
    return dict(given)


def check_context(context: Any) -> None:
    """See that the context of an app is a recipe, or None.

    :raises TypeError: if it is not.
    """
    if isinstance(context, ContextFunction):
        name = context.function.__name__
        raise TypeError(f"{name} is a context function, not a recipe: call it with its inputs, as in {name}(...)")
    if context is not None and not isinstance(context, Context):
        raise TypeError(
            f"the context of an app is a recipe made by a @context function, not a {type(context).__name__}"
        )
