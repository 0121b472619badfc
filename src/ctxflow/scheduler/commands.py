"""What the scheduler wants done: frozen commands, carried out by an engine, the factory or the run.

Engines carry out Stage, Load, Unload, Park, Wake, Run, Step, Carry, Abandon, Interrupt, Drain, Acquire, AcquireAt,
Forgo, Exclude, Survey and Release; the run itself MakePlan and the rest, which tell who waits, or a person, but for
Place and Quarantine, which are for the log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ctxflow.policies.protocols import Plan, Planning
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
class Park(Command):
    """Have a built context that runs nothing give up its GPU memory, and keep its library process.

    What is built on the worker after that waits until it is done. Answered with `ContextParked`, or `ParkFailed`.
    """

    worker: str
    context: str


@dataclasses.dataclass(frozen=True, slots=True)
class Wake(Command):
    """Have a parked context take calls again. Answered with `ContextWoken`, or `ParkFailed`."""

    worker: str
    context: str


@dataclasses.dataclass(frozen=True, slots=True)
class Run(Command):
    """Run a batch on a worker that holds its context."""

    worker: str
    attempt: int
    app: str
    context: str
    items: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """What a step does with one session, in this order.

    :ivar thaw: where its state comes from: "" if the library process has it, "anew" if it has none yet, "kept" if it
        is the one kept beside its worker, "frozen" if it is in the worker's cache. A frozen state that makes no chunk
        and is to leave goes from the cache to where states are kept, as it is.
    :ivar made: how many chunks that state has made.
    :ivar chunk: the chunk to make, counted from 0; None for none.
    :ivar then: "keep": keep the state beside the worker too; "leave": the same, and have the library process forget it;
        "freeze": write it to the worker's cache, and have the library process forget it; "drop": forget it wherever
        it is on the worker; "" for nothing.
    """

    session: int
    thaw: str = ""
    made: int = 0
    chunk: int | None = None
    then: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Step(Run):
    """Make the next chunks of several sessions in one call, and do what else is to be done with their states."""

    orders: Sequence[Order] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Carry(Command):
    """Bring a session's state from the cache of the worker `source` to that of `worker`.

    Answered with `StateArrived` or `StateLost`, unless one of the two is lost.

    :ivar made: how many chunks it has made.
    """

    worker: str
    source: str
    session: int
    made: int
    digest: str
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Abandon(Command):
    """End a running batch by force, and with it its context's library process and what else that runs."""

    worker: str
    attempt: int
    context: str


@dataclasses.dataclass(frozen=True, slots=True)
class Interrupt(Command):
    """Interrupt a batch that nobody waits for, running or not begun.

    It is answered soon, as any other that ends: as a failure of the kind "cancelled", unless it was quicker. Where it
    goes on for more than a second it costs its worker the context.
    """

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
class Drain(Command):
    """A worker gets nothing new: calls that answer their items one by one end after the item in flight."""

    worker: str


@dataclasses.dataclass(frozen=True, slots=True)
class Survey(Command):
    """Find out which machines a tier's workers may be on, and who uses their GPUs: `MachinesFound` answers, always."""

    tier: str


@dataclasses.dataclass(frozen=True, slots=True)
class AcquireAt(Command):
    """Have one worker on this machine with these GPUs, beside those of `Acquire`; it joins with this `pin`.

    :ivar devices: their ids, as the machine's topology has them, in the order in which the worker gets them.
    """

    pin: int
    tier: str
    machine: str
    devices: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Forgo(Command):
    """The worker of an `AcquireAt` is not wanted any more: what waits is taken back, and nothing starts again."""

    pin: int
    tier: str


@dataclasses.dataclass(frozen=True, slots=True)
class Exclude(Command):
    """From now on a tier's workers are not to be asked for on these hosts, and on no others besides.

    An engine whose batch system cannot be told so leaves it: workers that come from there all the same are given back.

    :ivar hosts: all of them, as the batch system calls them.
    """

    tier: str
    hosts: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Quarantine(Command):
    """A host, or one worker of it with its GPUs, gets no work until a time. For the log: others carry it out.

    :ivar worker: the one that is meant; "" for all of the host.
    :ivar cause: why, in words.
    :ivar until: a time; now for one that is only reported as slow, and keeps its work.
    """

    host: str
    worker: str
    devices: Sequence[str]
    cause: str
    until: float


@dataclasses.dataclass(frozen=True, slots=True)
class Note(Command):
    """Tell a person something that was decided, or (`trouble`) that went wrong."""

    text: str
    trouble: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Deliver(Command):
    """These items of an attempt are answered, for the first and only time.

    :ivar positions: where they are among the results that came, if they are not all of them.
    """

    attempt: int
    items: Sequence[int]
    positions: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class DeliverChunk(Command):
    """A session's chunk was made for the first time.

    :ivar position: which of the step's orders made it.
    """

    session: int
    chunk: int
    position: int


@dataclasses.dataclass(frozen=True, slots=True)
class EndTurn(Command):
    """A session that has got so many prompts makes no more chunks before it gets another."""

    session: int
    prompts: int


@dataclasses.dataclass(frozen=True, slots=True)
class EndSession(Command):
    """A session is over: by itself or by its user, unless there is a failure."""

    session: int
    failure: Failure | None = None
    context: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Bury(Command):
    """These items are dead: no answer will come. `context`: the broken one, if that is why."""

    items: Sequence[int]
    failure: Failure
    context: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class MakePlan(Command):
    """Compute a plan, beside all else, one at a time: `PlanMade` answers, always. The log has not what is computed."""

    planning: Planning = dataclasses.field(repr=False, compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Place(Command):
    """This plan holds from now on. Nothing is to be carried out: it is for whoever reads the log, and for its replay.

    :ivar tiers: (context, the tiers on which it may be loaded).
    :ivar workers: (tier, fewest, most).
    :ivar holders: (context, tier, the most workers that hold it there).
    :ivar shares: (app, context, the share of the app's items that it answers).
    :ivar margins: (context, tier, the shares by which its items are planned to take longer: of work, of a delay).
    :ivar reasons: what is impossible, and why.
    """

    tiers: Sequence[tuple[str, Sequence[str]]]
    workers: Sequence[tuple[str, int, int]]
    holders: Sequence[tuple[str, str, int]]
    shares: Sequence[tuple[str, str, float]] = ()
    reasons: Sequence[str] = ()
    margins: Sequence[tuple[str, str, float, float]] = ()

    @classmethod
    def of(cls, plan: Plan) -> Place:
        """Return what a plan says, in the order of names.

        >>> Place.of(Plan(workers={"fast": (0, 2)}, holders={("c", "fast"): 2}))
        Place(tiers=(), workers=(('fast', 0, 2),), holders=(('c', 'fast', 2),), shares=(), reasons=(), margins=())
        """
        return cls(
            tuple((context, tuple(sorted(tiers))) for context, tiers in sorted(plan.tiers.items())),
            tuple((tier, *bounds) for tier, bounds in sorted(plan.workers.items())),
            tuple((*pair, count) for pair, count in sorted(plan.holders.items())),
            tuple((*pair, share) for pair, share in sorted(plan.shares.items())),
            tuple(plan.reasons),
            tuple((*pair, *margin) for pair, margin in sorted(plan.margins.items())),
        )
