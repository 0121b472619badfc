"""Calls of apps on their way into a run, with Parsl or without: what they carry, and what tells them apart.

What does not live here: the apps (apps.py), and how a call is made (executors/submission.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ctxflow.digest import digest
from ctxflow.executors.submission import CallOptions, Calls, Memoized

if TYPE_CHECKING:
    from ctxflow.apps import BatchApp, ContextApp


@dataclasses.dataclass(frozen=True)
class ContextCall(Memoized):
    """A call of a context app."""

    app: ContextApp

    def submit(self, calls: Calls, function: Callable[..., Any], args: Any, kwargs: Any) -> Future[Any]:
        """Make the call."""
        options = self.app.options
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
        """Of the app, and so of its context."""
        return digest((type(self).__name__, self.app, ())).encode()


@dataclasses.dataclass(frozen=True)
class ItemCall(Memoized):
    """A call of a batch app: an item."""

    app: BatchApp
    constants: tuple[tuple[str, Any], ...]

    def submit(self, calls: Calls, function: Callable[..., Any], args: Any, kwargs: Any) -> Future[Any]:
        """Make the call."""
        return calls.item(self.app.declare(calls.run, dict(self.constants)), tuple(args))

    def memo_id(self) -> bytes:
        """Of the app and its constants."""
        return digest((type(self).__name__, self.app, self.constants)).encode()

    def __ctxflow_digest__(self) -> object:
        return self.app, self.constants


@dataclasses.dataclass(frozen=True)
class MapCall:
    """A map, which is one task to Parsl."""

    finished: Future[int]  # Not the map itself: Parsl keeps this, and a map that its user drops must end.

    def submit(self, calls: Calls, function: Callable[..., Any], args: Any, kwargs: Any) -> Future[Any]:
        """Nothing: its items are submitted as they are pulled."""
        return self.finished
