"""An app as a run gets it: its options, each checked where it is given, its declaration, and calls of it.

How items are divided among alternatives is decided in policies/.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from ctxflow.context import ContextFunction
from ctxflow.digest import digest
from ctxflow.errors import article
from ctxflow.executors.contract import Pickled
from ctxflow.executors.declarations import Declaration, DeclaredApp
from ctxflow.executors.live_run import LiveRun
from ctxflow.executors.submission import CallOptions, Calls, Memoized
from ctxflow.files import text_of
from ctxflow.option_values import flag, number, refuse, text, whole
from ctxflow.pickling import Referents, dumps
from ctxflow.recipe import Context
from ctxflow.scheduler import events as ev


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
    """Refuse alternatives to no context, and an own context that does not keep `max_error`: it may get all."""
    if max_error is not None and error > max_error:
        raise ValueError(
            f"the app's own context has error={error:g}, above max_error={max_error:g}: make a better one the app's "
            "own, and this one an alternative"
        )
    if alternatives and own is None:
        raise TypeError("alternatives= stand in for an app's context: give the app one")


def names_of(own: Context, alternatives: Sequence[Alternative]) -> list[str]:
    """Return what results call an app's own context and its alternatives; names differ.

    >>> recipe = Context("model", print)
    >>> names_of(recipe, [Alternative(recipe), Alternative(recipe, name="int8")])
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

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     entries = b'{"model": "small", "error": 0.3}, {"model": "small", "error": 0.25}'
    ...     _ = file.write(b'{"evaluations": [' + entries + b"]}"), file.flush()
    ...     read_errors(file.name)
    {'small': 0.25}
    """
    best: dict[str, float] = {}
    for entry in json.loads(text_of(path))["evaluations"]:
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
    """What may be said of an app where it is defined, and changed with `options`; `batch_app` describes each."""

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
        """Return a key that distinguishes these options from others, alternatives aside."""
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
    """Refuse, with a `TypeError`, the context of an app that is neither a recipe nor None."""
    if isinstance(context, ContextFunction):
        name = context.function.__name__
        raise TypeError(f"{name} is a context function, not a recipe: call it with its inputs, as in {name}(...)")
    if context is not None and not isinstance(context, Context):
        raise TypeError(
            f"the context of an app is a recipe made by a @context function, not {article(type(context).__name__)}"
        )


_SIMPLE = frozenset({str, int, bool, bytes, type(None)})


def constants_key(constants: Mapping[str, Any]) -> object:
    """Return a key that distinguishes constants by content and types: equality would not, as 1 == True, 0.0 == -0.0."""
    key = []
    for name, value in sorted(constants.items()):
        kind = type(value)
        if kind not in _SIMPLE and kind is not float:
            return digest(dict(constants))
        key.append((name, kind, repr(value) if kind is float else value))
    return tuple(key)


_SHOWN = 400  # Characters of a constant in a report.


class AnyApp(Protocol):
    """An app, as calls of it need it."""

    __name__: str
    function: Callable[..., Any]
    context: Context | None
    chosen: Options

    @property
    def priority(self) -> int:
        """Return the priority: higher goes first."""

    def deadline_on(self, run: LiveRun) -> float | None:
        """Return the deadline on a run's clock."""


class MappedApp(AnyApp, Protocol):
    """A batch app, as maps, files of results and calls of single items need it; see `ctxflow.apps.BatchApp`."""

    style: str
    parameters: list[str]
    constants: set[str]

    def check_width(self, width: int) -> None:
        """Refuse an item of so many values, if it may not have them, with a `TypeError`."""

    def constants_hint(self) -> str:
        """Return which constants a call may have, for a message."""

    def declare(self, run: LiveRun, constants: Mapping[str, Any], look_inside: bool = False) -> Declaration:
        """Declare it with these constants to a run."""


@dataclasses.dataclass(frozen=True)
class ContextCall(Memoized):
    """A call of a context app."""

    app: AnyApp

    def submit(self, calls: Calls, function: Callable[..., Any], args: Any, kwargs: Any) -> Future[Any]:
        """Make the call."""
        app, chosen = self.app, self.app.chosen
        limits = app.priority, app.deadline_on(calls.run), chosen.timeout, chosen.retries, chosen.level
        return calls.call(function, args, kwargs, CallOptions(app.context, app.context is not None, *limits))

    def memo_id(self) -> bytes:
        """Return what is the same for calls of the same app, and so of the same context."""
        return digest((type(self).__name__, self.app, ())).encode()


@dataclasses.dataclass(frozen=True)
class ItemCall(Memoized):
    """A call of a batch app: an item."""

    app: MappedApp
    constants: tuple[tuple[str, Any], ...]

    def submit(self, calls: Calls, function: Callable[..., Any], args: Any, kwargs: Any) -> Future[Any]:
        """Make the call."""
        return calls.item(self.app.declare(calls.run, dict(self.constants)), tuple(args))

    def memo_id(self) -> bytes:
        """Return what is the same for calls of the same app with the same constants."""
        return digest((type(self).__name__, self.app, self.constants)).encode()

    def __ctxflow_digest__(self) -> object:
        return self.app, self.constants


@dataclasses.dataclass(frozen=True)
class MapCall:
    """A map, which is one task to Parsl."""

    finished: Future[int]  # Not the map itself: Parsl keeps this, and a map that its user drops must end.

    def submit(self, calls: Calls, function: Callable[..., Any], args: Any, kwargs: Any) -> Future[Any]:
        """Submit nothing: the map's items are submitted as they are pulled."""
        return self.finished


@dataclasses.dataclass(frozen=True)
class _Code:
    """An app's function as it was pickled for a run."""

    run: str
    digest: str
    function: Pickled


def recipes_of(app: AnyApp) -> list[Context]:
    """Return the recipe of the app's own context, if it has one, and those of its alternatives."""
    return [each for each in (app.context, *(other.context for other in app.chosen.alternatives)) if each]


class Variants:
    """An app's declarations, one for each run and each set of constants, while anything holds them."""

    def __init__(self) -> None:
        # Held by the run, until it forgets them, and by maps.
        self._known: weakref.WeakValueDictionary[Any, Declaration] = weakref.WeakValueDictionary()
        self._referents: Referents | None = None  # Once it was declared.
        self._code: _Code | None = None
        self._common: tuple[str, list[str], float | None, str] = ("", [], None, "")  # Of all, and its digest.

    def __len__(self) -> int:
        return len(self._known)

    def declare(self, app: MappedApp, run: LiveRun, constants: Mapping[str, Any], look_inside: bool) -> Declaration:
        """Declare the app with these constants to a run, as its code and its contexts are now.

        :param look_inside: notice also what has changed inside of objects, not only names that mean other objects:
            takes a millisecond or more.
        """
        recipes = recipes_of(app)
        if self._referents is None or self._referents.changed():
            self._known.clear()
            self._code, self._referents = None, Referents(app.function)
        if look_inside:
            for recipe in recipes:
                recipe.look_again()
        key = (run.id, constants_key(constants), *(recipe.id for recipe in recipes))
        known = self._known.get(key)
        if known is None or look_inside:
            known = self._known[key] = run.declare(self._declaration(app, run, constants, look_inside, known))
        return known

    def _pickled(self, app: AnyApp, run: LiveRun, look_inside: bool) -> _Code:
        """Return the app's function, pickled without constants, for as long as it is what it was."""
        code = self._code
        if code is not None and code.run == run.id and not look_inside:
            return code
        found = digest(app.function)
        if code is None or (code.run, code.digest) != (run.id, found):
            body = dumps(app.function, f"the app {app.__name__}")
            code = self._code = _Code(run.id, found, run.pickled(body))
        return code

    def _declaration(
        self, app: MappedApp, run: LiveRun, constants: Mapping[str, Any], look_inside: bool, known: Declaration | None
    ) -> Declaration:
        """Return the app with its own context, and then with each alternative; `known` if it is that still."""
        run.prepare_pickling()
        code = self._pickled(app, run, look_inside)
        options = app.chosen
        contexts = [(app.context, options.error), *((each.context, each.error) for each in options.alternatives)]
        declared = [run.declare_context(context, options.level) for context, _ in contexts]
        names = [context.spec.id for context in declared]
        if len(set(names)) < len(names):
            raise ValueError(f"the context of {app.__name__} and its alternatives differ: name each recipe once")
        deadline = app.deadline_on(run)
        errors = [error for _, error in contexts]
        if self._common[:-1] != (code.digest, names, deadline):
            identity = (
                code.digest,
                names,
                errors,
                options.identity,
                app.priority,
                deadline,
                *([] if app.style == "batch" else [app.style]),
            )
            self._common = code.digest, names, deadline, digest(identity)
        name = f"{app.__name__}-{digest((self._common[-1], dict(constants)))[:12]}"
        if known is not None and known.id == name:
            return known
        spec = ev.AppSpec(
            name, app.__name__, context=names[0], batch_size=options.batch_size, priority=app.priority,
            deadline=deadline, retries=options.retries, max_delay=options.max_delay, max_error=options.max_error,
            error=options.error,
            constants=", ".join(f"{name}={_in_words(value)}" for name, value in constants.items()),
            batch=app.style == "batch", overlaps=app.style == "item",
        )  # fmt: skip
        specs = [spec] + [
            dataclasses.replace(spec, id=f"{spec.id}-{n}", context=names[n], error=errors[n], alternative_of=spec.id)
            for n in range(1, len(names))
        ]
        given = run.pickled(dumps(constants, f"a constant of the app {app.__name__}")) if constants else None
        labels = names_of(app.context, options.alternatives) if app.context is not None else [""]
        apps = (
            DeclaredApp(each, app.style, code.function, timeout=options.timeout, label=label, constants=given)
            for each, label in zip(specs, labels, strict=True)
        )
        return Declaration(tuple(apps), tuple(declared))


def _in_words(constant: Any) -> str:
    """Return a constant as a report shows it: what is large or not plain by its type alone."""
    if isinstance(constant, str):
        return repr(constant if len(constant) <= _SHOWN else f"{constant[: _SHOWN - 3]}...")
    return repr(constant) if isinstance(constant, (int, float, type(None))) else article(type(constant).__name__)
