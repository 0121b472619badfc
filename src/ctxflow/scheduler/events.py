"""What can happen to a run: frozen events, each carrying its time in seconds on the run's clock.

With the specifications that some of them declare. The scheduler knows items by number only: it gets no payloads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

PLAIN = ""
"""The context id of calls that need no context."""

NONE, PARTIAL, PERVASIVE = LEVELS = ("none", "partial", "pervasive")
"""How much of a context a worker keeps from one call to the next: nothing; its files; its files and what was built.

The three that the paper compares (Pervasive Context Management, section 6: pv1; pv2 and pv3; pv4).
"""


def check_level(level: str | None) -> None:
    """See that a level is one, or None.

    :raises ValueError: if it is not, saying which there are.
    """
    if level is not None and level not in LEVELS:
        raise ValueError(f"level={level!r} is not known: write {', '.join(map(repr, LEVELS[:-1]))} or {PERVASIVE!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class ContextSpec:
    """What the scheduler needs to know of a context. Sizes in bytes, None where unknown.

    :ivar files: whether it has files that must be staged.
    :ivar level: how much of it a worker keeps from one call to the next, one of `LEVELS`.
    :ivar affinity: how close together its GPUs have to be, one of `ctxflow.recipe.AFFINITIES`, or None.
    :ivar concurrency: the most calls that its library process runs at a time; None if nobody said: one of a batch app,
        as many of an app of items as the batching policy's window.
    """

    id: str
    name: str
    files: bool = False
    gpus: int = 0
    memory: int | None = None
    gpu_memory: int | None = None
    level: str = PERVASIVE
    affinity: str | None = None
    concurrency: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AppSpec:
    """A kind of call: what it runs with, how its items may be batched, and how urgent they are.

    :ivar batch: whether items may share a call (a batch app), or each is a call of its own.
    :ivar batch_size: the user's wish for the items of a batch.
    :ivar deadline: when the results are wanted, on the run's clock.
    :ivar retries: how often an item that raises on its own is tried again.
    :ivar error: the share of wrong answers with its context.
    :ivar alternative_of: an app declared before, whose items it may answer with its own context: nothing is submitted
        to it, the plan divides that app's items.
    :ivar sessions: whether it has no items, but sessions, which make chunks.
    :ivar chunk_target: seconds that a chunk may take, None if that does not matter.
    :ivar constants: what its calls have in common, in words, which tell it from others of its name.
    :ivar keep_every: after how many chunks a session's state is kept beside its worker, None for never.
    :ivar overlaps: whether its calls, of one item each, overlap on a worker, as many as the batching policy's window.
    :ivar region: from which its items come, and where its answers go; "" for the driver's.
    """

    id: str
    name: str
    context: str = PLAIN
    batch: bool = True
    batch_size: int | None = None
    priority: int = 0
    deadline: float | None = None
    retries: int = 0
    max_delay: float | None = None
    max_error: float | None = None
    error: float = 0.0
    alternative_of: str = ""
    sessions: bool = False
    chunk_target: float | None = None
    keep_every: int | None = None
    constants: str = ""
    overlaps: bool = False
    region: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker said of itself when it joined. Sizes in bytes, None where unknown.

    :ivar machine: what the batch system calls its host, where that is another name.
    :ivar devices: the ids of its GPUs.
    :ivar topology: its machine's, as `ctxflow.topology.to_graph` writes it.
    :ivar pin: the number of the `AcquireAt` that it was asked for by; None for others.
    """

    id: str
    host: str = "localhost"
    tier: str = "default"
    region: str = "default"
    slots: int = 1
    gpus: int = 0
    gpu_model: str | None = None
    memory: int | None = None
    gpu_memory: int | None = None
    topology: Mapping[str, Any] | None = None
    acquired: bool = True  # Else it was started by hand, beside those that are asked for.
    machine: str = ""
    devices: Sequence[str] = ()
    pin: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TierSpec:
    """A kind of worker that the site offers.

    :ivar gpu_memory: bytes on each GPU, None if the site does not say.
    :ivar machines: tiers of one name here are the same machines, cut into workers differently.
    :ivar machine_gpus: the GPUs of one of its machines, where workers can be asked for on a machine of one's choice;
        0 where they cannot.
    """

    name: str
    minimum: int = 0
    maximum: int = 1
    gpus: int = 0
    price: float | None = None
    boot_seconds: float | None = None
    gpu_memory: int | None = None
    machines: str = ""
    machine_gpus: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class RegionSpec:
    """A group of workers close to each other. Seconds and bytes a second to others, by name; dollars a kWh.

    :ivar tiers: the tiers whose workers are in it, as far as tiers say it.
    :ivar home: whether items and staged files come from there.
    """

    name: str
    latency: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bandwidth: Mapping[str, float] = dataclasses.field(default_factory=dict)
    power_price: float | None = None
    tiers: Sequence[str] = ()
    home: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why something failed, as data.

    :ivar kind: "exception" (the user's code raised), "contract" (the app did not give one result for each item),
        "crash" (the library process died), "timeout", "input" (could not be sent), "memory" (no room for the context),
        "lost" (workers, or a library process that somebody stopped, were lost with it), or "cancelled" (interrupted, or
        ended for another one, which is not its fault).
    :ivar output: the last lines that the call printed.
    :ivar host: where, if not on the driver's machine.
    :ivar machine: whether it looks like the machine's fault (see `ctxflow.host.linux`).
    """

    kind: str
    error: str
    message: str
    traceback: str = ""
    output: str = ""
    worker: str = ""
    host: str = ""
    machine: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at a time."""

    time: float


@dataclasses.dataclass(frozen=True, slots=True)
class TierOffered(Event):
    """The site offers a tier (or changes its bounds)."""

    tier: TierSpec


@dataclasses.dataclass(frozen=True, slots=True)
class HostDrained(Event):
    """A person wants a host left: what runs there ends, nothing new begins. Not `drained`: it is used again."""

    host: str
    drained: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class RegionOffered(Event):
    """The site has a region; it is told before the tiers are."""

    region: RegionSpec


@dataclasses.dataclass(frozen=True, slots=True)
class ContextDeclared(Event):
    """A context may be needed from now on."""

    context: ContextSpec


@dataclasses.dataclass(frozen=True, slots=True)
class AppDeclared(Event):
    """An app may be called from now on."""

    app: AppSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Retired(Event):
    """Nobody has used these apps, and these contexts, for a while: those that are not in use now are forgotten.

    They are declared anew before they are used again. Alternatives go with the app whose they are.
    """

    apps: Sequence[str]
    contexts: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ItemsSubmitted(Event):
    """Items wait for an app; their numbers are new, and go up.

    :ivar prefixes: how each begins, where calls overlap, by numbers that it shares with those that begin alike: of
        longer beginnings after those of shorter ones, none if it is short. Empty if nobody says.
    """

    app: str
    items: Sequence[int]
    prefixes: Sequence[Sequence[int]] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ItemsCancelled(Event):
    """Nobody waits for these items any more; `stop` interrupts batches that hold nothing else."""

    items: Sequence[int]
    stop: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerJoined(Event):
    """A worker is there and takes calls."""

    worker: WorkerSpec


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerLost(Event):
    """A worker is gone. `evicted`: taken back, as far as somebody knows, so that nobody in it is to blame.

    :ivar reason: why it was given up, if it did not end by itself.
    """

    worker: str
    evicted: bool = False
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class EvictionNotice(Event):
    """A worker will be taken back soon: it gets nothing new."""

    worker: str


@dataclasses.dataclass(frozen=True, slots=True)
class JobStarted(Event):
    """A worker's job runs; its worker is about to join.

    :ivar waited: seconds from asking for it, or from its last eviction, to running; None where nobody knows.
    :ivar pin: the number of the `AcquireAt` that it was asked for by; None for others.
    """

    tier: str
    job: str
    waited: float | None = None
    pin: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class JobEvicted(Event):
    """The batch system took a job's machine. If its worker had joined, a `WorkerLost` comes besides."""

    tier: str
    job: str
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class JobHeld(Event):
    """A job will not run before somebody sees to the reason."""

    tier: str
    job: str
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class JobFailed(Event):
    """A job ended, or was put on hold by the batch system, before its worker had joined.

    :ivar host: the machine where it was, as the batch system calls it.
    """

    tier: str
    job: str
    host: str
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class MachinesFound(Event):
    """The answer to a `Survey`: the machines that a tier's workers may be on.

    :ivar machines: by name, each one's topology as `ctxflow.topology.to_graph` writes it, with who uses which GPU.
    :ivar reason: why there are none, where the batch system cannot be asked.
    """

    tier: str
    machines: Mapping[str, Mapping[str, Any]]
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class PlanMade(Event):
    """The answer to `MakePlan`.

    :ivar results: what was computed. Not in the log: without it, as in a replay, the scheduler computes it again.
    :ivar failure: why nothing could be computed, else None.
    """

    results: Any = dataclasses.field(default=None, repr=False, compare=False)
    failure: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ContextStaged(Event):
    """A context's files are in the worker's cache."""

    worker: str
    context: str


@dataclasses.dataclass(frozen=True, slots=True)
class ContextReady(Event):
    """A context is built; its memory in bytes, as measured (docs/glossary.md, "memory of a context").

    :ivar seconds: from the start of its library process on. :ivar parts: what of them went into which part of the load,
        for the log alone, as is `started`, how the process was started ("forked", "spawned" and
        perhaps why); empty where nobody says.
    :ivar parks: whether it may be parked. Logs of earlier versions do not say so, and nothing was parked.
    """

    worker: str
    context: str
    seconds: float
    memory: int | None = None
    gpu_memory: int | None = None
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict, repr=False)
    started: str = dataclasses.field(default="", repr=False)
    parks: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ContextParked(Event):
    """A context is parked: what that took, the host's memory that it holds now, and what it has left on each GPU."""

    worker: str
    context: str
    seconds: float
    memory: int | None = None
    gpu_memory: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ContextWoken(Event):
    """A parked context takes calls again; as `ContextReady`."""

    worker: str
    context: str
    seconds: float
    memory: int | None = None
    gpu_memory: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ParkFailed(Event):
    """A context could not be parked or woken; its library process has ended."""

    worker: str
    context: str
    failure: Failure


@dataclasses.dataclass(frozen=True, slots=True)
class ContextFailed(Event):
    """A context could not be built (or staged)."""

    worker: str
    context: str
    failure: Failure


@dataclasses.dataclass(frozen=True, slots=True)
class ContextUnloaded(Event):
    """A context is no longer on a worker.

    :ivar failure: why, where its library process ended by itself while it ran nothing; for people alone.
    """

    worker: str
    context: str
    failure: Failure | None = dataclasses.field(default=None, repr=False, compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class BatchFinished(Event):
    """An attempt answered all its items. `results` is the engine's, not the scheduler's: it is not logged.

    :ivar tokens: that a model read and wrote for them, None where nobody counted; `cached_tokens`: those of prompts
        that an engine found in its cache, likewise, for the log alone.
    """

    worker: str
    attempt: int
    seconds: float
    results: Any = dataclasses.field(default=None, repr=False, compare=False)
    tokens: int | None = dataclasses.field(default=None, repr=False)
    cached_tokens: int | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class ItemsFinished(Event):
    """An attempt that goes on answered some of its items: `count` of them from its `first` on, counted from 0.

    What comes twice counts once. `results` is the engine's, as `BatchFinished`'s; `tokens` likewise.
    """

    worker: str
    attempt: int
    first: int
    count: int
    results: Any = dataclasses.field(default=None, repr=False, compare=False)
    tokens: int | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class BatchEnded(Event):
    """An attempt that answered with `ItemsFinished` has ended; what it did not answer, it did not begin."""

    worker: str
    attempt: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class BatchFailed(Event):
    """An attempt failed: all that it did not answer before.

    :ivar lost_context: the library process went with it.
    :ivar beside: other attempts that it went for, which failed as this one did; all others only lost their context.
    :ivar at: where it answers its items one by one, the first that it did not answer, counted from 0.
    """

    worker: str
    attempt: int
    failure: Failure
    lost_context: bool = False
    exception: Any = dataclasses.field(default=None, repr=False, compare=False)
    at: int | None = None
    beside: Sequence[int] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class SessionOpened(Event):
    """A session begins, with so many prompts; its number is new. Chunks are wanted up to the `wanted`th."""

    session: int
    app: str
    wanted: int
    prompts: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class SessionPrompted(Event):
    """A session has got a prompt, for the next chunk that was not begun."""

    session: int


@dataclasses.dataclass(frozen=True, slots=True)
class ChunksWanted(Event):
    """Chunks of a session are wanted up to the `wanted`th: who takes them has taken others."""

    session: int
    wanted: int


@dataclasses.dataclass(frozen=True, slots=True)
class SessionSuspended(Event):
    """A session is to make no chunks and to leave its worker, until it is resumed."""

    session: int


@dataclasses.dataclass(frozen=True, slots=True)
class SessionResumed(Event):
    """A suspended session is to go on, on whichever worker."""

    session: int


@dataclasses.dataclass(frozen=True, slots=True)
class SessionClosed(Event):
    """Nobody wants anything of a session any more."""

    session: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepFinished(Event):
    """A step has ended. `results` is the engine's, as `BatchFinished`'s.

    :ivar seconds: what it took.
    :ivar outcomes: what came of each of the step's orders, in their order. "made": it made its chunk; "idle" and
        "last": what the app said with that; "kept": the bytes of its state, which is kept beside its worker now;
        "frozen": [digest, bytes] of its state, which is in the worker's cache and no longer in the library process;
        "lost": why the state that it was to go on from cannot be had; "failure": what is wrong with the session
        itself. Each only where it is so.
    """

    worker: str
    attempt: int
    seconds: float
    outcomes: Sequence[Mapping[str, Any]]
    results: Any = dataclasses.field(default=None, repr=False, compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class StateArrived(Event):
    """A session's state, with so many chunks made, is in the cache of the worker that it was carried to."""

    worker: str
    session: int
    made: int


@dataclasses.dataclass(frozen=True, slots=True)
class StateLost(Event):
    """A session's state could not be carried to a worker."""

    worker: str
    session: int
    made: int
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time passed."""
