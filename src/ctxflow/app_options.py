"""Options of apps: each is checked where it is given, as are an app's context and the alternatives to it.

How items are divided among alternatives is decided in policies/, and followed in scheduler/.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ctxflow.context import ContextFunction
from ctxflow.digest import digest
from ctxflow.executors.run.live_run import LiveRun
from ctxflow.option_values import flag, number, refuse, text, whole
from ctxflow.recipe import Context
from ctxflow.scheduler import events as ev
from ctxflow.wording import article


@dataclasses.dataclass(frozen=True)
class Alternative:
    """A context that may answer an app's items in place of its own: another model, or the same at another precision.

    The app's function gets whichever of them answers.

    :ivar error: the share of its answers that are wrong, 0 to 1.
    :ivar name: what results call it; by default the context's name, with a number where another has that too.
    :raises TypeError: if the context is no recipe.
    :raises ValueError: if the error is no share.
    """

    context: Context
    error: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.context, ContextFunction) or not isinstance(self.context, Context):
            raise TypeError(
                "an alternative is a recipe made by a @context function: Alternative(small(...), error=0.1)"
            )
        number("error", self.error, "the share of its answers that are wrong, 0 to 1", most=1)
        if not isinstance(self.name, str):
            raise refuse("name", self.name, "text: what results call this alternative", TypeError)


def check_alternatives(
    own: Context | None, error: float, alternatives: Sequence[Alternative], max_error: float | None
) -> None:
    """See that an app and its alternatives make sense together.

    Where no plan divides its items, all go to the app's own context: so that has to keep the limit by itself.

    :raises TypeError: without a context of the app's own.
    :raises ValueError: if the own context answers too much wrong.
    """
    if max_error is not None and error > max_error:
        raise ValueError(
            f"the app's own context has error={error:g}, above max_error={max_error:g}: make a better one the app's "
            "own, and this one an alternative"
        )
    if alternatives and own is None:
        raise TypeError("alternatives= stand in for an app's context: give the app one")


def names(own: Context, alternatives: Sequence[Alternative]) -> list[str]:
    """Return what results call an app's own context and its alternatives; names differ.

    >>> recipe = Context("model", print)
    >>> names(recipe, [Alternative(recipe), Alternative(recipe, name="int8")])
    ['model', 'model-2', 'int8']
    """
    found = [own.name]
    for each in alternatives:
        name = each.name or each.context.name
        found.append(f"{name}-{len(found) + 1}" if name in found else name)
    return found


def read_errors(path: str | Path) -> dict[str, float]:
    """Return the error of each model in an evaluation file, such as prompt_for_fact writes; of its best template.

    :raises OSError, ValueError, KeyError, TypeError: if it is no such file.

    >>> import json, tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    ...     entries = [{"model": "small", "error": 0.3}, {"model": "small", "error": 0.25}]
    ...     json.dump({"evaluations": entries}, file), file.flush()
    ...     read_errors(file.name)
    (None, None)
    {'small': 0.25}
    """
    best: dict[str, float] = {}
    for entry in json.loads(Path(path).read_text(encoding="utf-8"))["evaluations"]:
        if entry["error"] is not None:
            best[entry["model"]] = min(float(entry["error"]), best.get(entry["model"], 1.0))
    return best


if TYPE_CHECKING:
    from typing_extensions import TypeVar as DefaultTypeVar

    Result = DefaultTypeVar("Result", default=Any)
else:
    Result = TypeVar("Result")

Level = Literal["pervasive", "partial", "none"]
Deadline = float | datetime.datetime | None


@dataclasses.dataclass(frozen=True)
class Options:
    """What may be said of an app where it is defined, and changed with `options`.

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
    level: Level | None = None
    error: float = 0.0
    alternatives: Sequence[Alternative] = ()

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None or name in _NEVER_NONE:
                object.__setattr__(self, name, check(value))

    @property
    def identity(self) -> tuple[Any, ...]:
        """Return a key that tells these options from others, alternatives aside."""
        return dataclasses.astuple(dataclasses.replace(self, alternatives=()))

    def deadline_on(self, run: LiveRun) -> float | None:
        """Return the deadline on the run's clock."""
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


def _level(value: Any) -> Any:
    ev.check_level(value)
    return value


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
    """Return a key that tells constants apart by content and types.

    Equality would not, as 1 == True, 0.0 == -0.0, and objects that change stay equal to themselves.
    """
    key = []
    for name, value in sorted(constants.items()):
        kind = type(value)
        if kind not in _SIMPLE and kind is not float:
            return digest(dict(constants))
        key.append((name, kind, repr(value) if kind is float else value))
    return tuple(key)
