"""What the scheduler wants done: frozen commands, carried out by an engine, the factory or the run.

Engines carry out Stage, Load, Unload, Run, Abandon, Acquire and Release; the run itself Deliver and Bury; Place is for
the log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ctxflow.policies.protocols import Plan
from ctxflow.scheduler.events import Failure


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """Something to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stage(Command):
    """Bring a context's files to a worker's cache."""

    worker: str
    context: str


@dataclasses.dataclass(frozen=True, slots=True)
class Load(Command):
    """Build a context on a worker, whose files are staged."""

    worker: str
    context: str


@dataclasses.dataclass(frozen=True, slots=True)
class Unload(Command):
    """End the library process of a context, if there is one; `files`: and take its files off the worker."""

    worker: str
    context: str
    files: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Run(Command):
    """Run a batch on a worker that holds its context."""

    worker: str
    attempt: int
    app: str
    context: str
    items: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Abandon(Command):
    """Stop a running batch, whose answer nobody wants."""

    worker: str
    attempt: int
    context: str


@dataclasses.dataclass(frozen=True, slots=True)
class Acquire(Command):
    """Hold this many workers of a tier."""

    tier: str
    workers: int


@dataclasses.dataclass(frozen=True, slots=True)
class Release(Command):
    """Give a worker back."""

    worker: str


@dataclasses.dataclass(frozen=True, slots=True)
class Deliver(Command):
    """These items of an attempt are answered, for the first and only time.

    :ivar positions: where they are among the results that came, if they are not all of them.
    """

    attempt: int
    items: Sequence[int]
    positions: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Bury(Command):
    """These items are dead: no answer will come. `context`: the broken one, if that is why."""

    items: Sequence[int]
    failure: Failure
    context: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Place(Command):
    """This plan holds from now on. Nothing is to be carried out: it is for whoever reads the log, and for its replay.

    :ivar tiers: (context, the tiers on which it may be loaded).
    :ivar workers: (tier, fewest, most).
    :ivar holders: (context, tier, the most workers that hold it there).
    :ivar shares: (app, context, the share of the app's items that it answers).
    :ivar reasons: what is impossible, and why.
    """

    tiers: Sequence[tuple[str, Sequence[str]]]
    workers: Sequence[tuple[str, int, int]]
    holders: Sequence[tuple[str, str, int]]
    shares: Sequence[tuple[str, str, float]] = ()
    reasons: Sequence[str] = ()

    @classmethod
    def of(cls, plan: Plan) -> Place:
        """What a plan says, in the order of names.

        >>> Place.of(Plan(workers={"fast": (0, 2)}, holders={("c", "fast"): 2}))
        Place(tiers=(), workers=(('fast', 0, 2),), holders=(('c', 'fast', 2),), shares=(), reasons=())
        """
        return cls(
            tuple((context, tuple(sorted(tiers))) for context, tiers in sorted(plan.tiers.items())),
            tuple((tier, *bounds) for tier, bounds in sorted(plan.workers.items())),
            tuple((*pair, count) for pair, count in sorted(plan.holders.items())),
            tuple((*pair, share) for pair, share in sorted(plan.shares.items())),
            tuple(plan.reasons),
        )
