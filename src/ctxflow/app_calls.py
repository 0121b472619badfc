"""What a run gets of an app: its declaration with some constants, and calls of it, through Parsl or not.

The apps themselves stand in apps.py, above all that is done with them; `ItemApp` is what that needs of one.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from ctxflow.app_options import Options, constants_key
from ctxflow.app_options import names as names_of
from ctxflow.digest import digest
from ctxflow.executors.contract import Pickled
from ctxflow.executors.run.declarations import Declaration, DeclaredApp
from ctxflow.executors.run.live_run import LiveRun
from ctxflow.executors.submission import CallOptions, Calls, Memoized
from ctxflow.pickling import dumps
from ctxflow.recipe import Context
from ctxflow.referents import Referents
from ctxflow.scheduler import events as ev
from ctxflow.wording import article

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


class ItemApp(AnyApp, Protocol):
    """A batch app, as maps, files of results and calls of single items need it.

    :ivar parameters: the names of an item's values, in their order.
    :ivar constants: the names of the keyword-only parameters.
    """

    parameters: list[str]
    constants: set[str]

    def check_width(self, width: int) -> None:
        """See that an item may have so many values.

        :raises TypeError: if it may not.
        """

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
        options = self.app.chosen
        context = self.app.context
        return calls.call(
            function,
            args,
            kwargs,
            CallOptions(
                context,
                context is not None,
                self.app.priority,
                self.app.deadline_on(calls.run),
                options.timeout,
                options.retries,
                options.level,
            ),
        )

    def memo_id(self) -> bytes:
        """Return what is the same for calls of the same app, and so of the same context."""
        return digest((type(self).__name__, self.app, ())).encode()


@dataclasses.dataclass(frozen=True)
class ItemCall(Memoized):
    """A call of a batch app: an item."""

    app: ItemApp
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

    def declare(self, app: AnyApp, run: LiveRun, constants: Mapping[str, Any], look_inside: bool) -> Declaration:
        """Declare the app with these constants to a run, as its code and its contexts are now.

        A name that means another object than at the last call is noticed.

        :param look_inside: notice what has changed inside of objects, too: takes a millisecond or more.
        """
        recipes = [each for each in (app.context, *(other.context for other in app.chosen.alternatives)) if each]
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
        told = digest(app.function)
        if code is None or (code.run, code.digest) != (run.id, told):
            body = dumps(app.function, f"the app {app.__name__}")
            code = self._code = _Code(run.id, told, run.pickled(body))
        return code

    def _declaration(
        self, app: AnyApp, run: LiveRun, constants: Mapping[str, Any], look_inside: bool, known: Declaration | None
    ) -> Declaration:
        """Return the app with its own context, and then with each alternative.

        :param known: what it was when it was declared last; given back if it is that still.
        """
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
            identity = (code.digest, names, errors, options.identity, app.priority, deadline)
            self._common = code.digest, names, deadline, digest(identity)
        name = f"{app.__name__}-{digest((self._common[-1], dict(constants)))[:12]}"
        if known is not None and known.id == name:
            return known
        spec = ev.AppSpec(
            name,
            app.__name__,
            context=names[0],
            batch_size=options.batch_size,
            priority=app.priority,
            deadline=deadline,
            retries=options.retries,
            max_delay=options.max_delay,
            max_error=options.max_error,
            error=options.error,
            constants=", ".join(f"{name}={_in_words(value)}" for name, value in constants.items()),
        )
        specs = [spec] + [
            dataclasses.replace(spec, id=f"{spec.id}-{n}", context=names[n], error=errors[n], alternative_of=spec.id)
            for n in range(1, len(names))
        ]
        given = run.pickled(dumps(constants, f"a constant of the app {app.__name__}")) if constants else None
        labels = names_of(app.context, options.alternatives) if app.context is not None else [""]
        apps = (
            DeclaredApp(each, "batch", code.function, timeout=options.timeout, label=label, constants=given)
            for each, label in zip(specs, labels, strict=True)
        )
        return Declaration(tuple(apps), tuple(declared))


def _in_words(constant: Any) -> str:
    """Return a constant as a report shows it: what is large or not plain by its type alone.

    >>> _in_words("Is it true?"), _in_words(range(3))
    ("'Is it true?'", 'a range')
    """
    if isinstance(constant, str):
        return repr(constant if len(constant) <= _SHOWN else f"{constant[: _SHOWN - 3]}...")
    return repr(constant) if isinstance(constant, (int, float, type(None))) else article(type(constant).__name__)
