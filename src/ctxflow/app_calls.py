"""Calls of apps on their way into a run, with Parsl or without: what they carry, and what tells them apart.

What does not live here: the apps (apps.py), and how a call is made (executors/submission.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ctxflow.digest import digest
from ctxflow.executors.submission import CallOptions, Calls

if TYPE_CHECKING:
    from ctxflow.apps import BatchApp, ContextApp


@dataclasses.dataclass(frozen=True)
class ContextCall:
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


@dataclasses.dataclass(frozen=True)
class ItemCall:
    """A call of a batch app: an item."""

    app: BatchApp
    constants: tuple[tuple[str, Any], ...]

    def submit(self, calls: Calls, function: Callable[..., Any], args: Any, kwargs: Any) -> Future[Any]:
        """Make the call."""
        return calls.item(self.app.declare(calls.run, dict(self.constants)), tuple(args))

    def __ctxflow_digest__(self) -> object:
        return self.app, self.constants


@dataclasses.dataclass(frozen=True)
class MapCall:
    """A map, which is one task to Parsl."""

    finished: Future[int]  # Not the map itself: Parsl keeps this, and a map that its user drops must end.

    def submit(self, calls: Calls, function: Callable[..., Any], args: Any, kwargs: Any) -> Future[Any]:
        """Nothing: its items are submitted as they are pulled."""
        return self.finished


def _register_memo() -> None:
    """Let Parsl's memoization tell calls with different contexts or constants apart."""
    from parsl.dataflow.memoization import id_for_memo

    def identify(call: Any, output_ref: bool = False) -> bytes:
        return digest((type(call).__name__, call.app, getattr(call, "constants", ()))).encode()

    for kind in (ContextCall, ItemCall):
        id_for_memo.register(kind)(identify)


_register_memo()
