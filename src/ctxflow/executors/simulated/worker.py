"""A worker as the simulated engine knows it: its library processes and its calls.

What does not live here: what it does with commands (engine.py), and the machine that it is on (machines.py, market.py).
"""

from __future__ import annotations

import dataclasses
import math

from ctxflow.executors.simulated.market import Place


class Library:
    """A context's library process on a worker; calls on it take turns."""

    __slots__ = ("busy_until", "ready")

    def __init__(self) -> None:
        self.ready = False
        self.busy_until = 0.0


@dataclasses.dataclass(slots=True)
class Call:
    """A call on its way.

    :ivar salvaged: whether its app answers its items one by one.
    """

    context: str
    items: int
    begins: float
    seconds: float
    salvaged: bool

    def done(self, time: float) -> int:
        """How many items are done by then, if they take equally long."""
        share = (time - self.begins) / self.seconds if self.seconds else 1.0
        return max(0, min(self.items, math.floor(share * self.items + 1e-9)))


@dataclasses.dataclass(slots=True, eq=False)
class Worker:
    """A worker on its machine, with its contexts by id, since when each is brought, and its calls by attempt."""

    id: str
    place: Place
    joined: float
    libraries: dict[str, Library] = dataclasses.field(default_factory=dict)
    staging: dict[str, float] = dataclasses.field(default_factory=dict)
    calls: dict[int, Call] = dataclasses.field(default_factory=dict)
