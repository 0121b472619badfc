"""What the engine asks of models: how long things take, and where files come from.

What does not live here: any particular one (ctxflow.simulator), but that of files that are everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ctxflow.executors.simulated.machines import Machine


class Times(Protocol):
    """How long things take, in seconds; each draws from the engine's seeded generator, or not at all."""

    def match(self, machine: Machine, generator: random.Random) -> float:
        """From asking for a worker, or the machine's coming free, until the worker has joined."""

    def load(self, context: str, machine: Machine, generator: random.Random) -> float:
        """Building a context whose files are there."""

    def dispatch(self, machine: Machine, generator: random.Random) -> float:
        """A call's way to its worker and its answer's way back, in which the worker does nothing for the app."""

    def call(self, app: str, machine: Machine, items: Sequence[int], generator: random.Random) -> float:
        """Running a batch."""


class Timers(Protocol):
    """The virtual clock."""

    now: float

    def at(self, time: float, action: Callable[..., None], *values: Any) -> None:
        """Have something done at a time, after all that is due before."""


class Staging(Protocol):
    """Where files come from. Worker ids are never used twice."""

    def attach(self, timers: Timers) -> None:
        """Use this clock from now on."""

    def fetch(self, worker: str, machine: Machine, context: str, done: Callable[[], None]) -> None:
        """Bring a context's files to a worker, at once if they are there; `done` is not called if they are removed."""

    def remove(self, worker: str, context: str) -> None:
        """Take a context's files off a worker, or stop bringing them."""

    def lost(self, worker: str) -> None:
        """A worker is gone with all its files, and with what it was sending."""


class NoStaging:
    """Files that are everywhere already."""

    def attach(self, timers: Timers) -> None:
        """Need no clock."""

    def fetch(self, worker: str, machine: Machine, context: str, done: Callable[[], None]) -> None:
        """Be done."""
        done()

    def remove(self, worker: str, context: str) -> None:
        """Keep nothing."""

    def lost(self, worker: str) -> None:
        """Keep nothing."""
