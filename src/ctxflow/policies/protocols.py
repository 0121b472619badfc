"""The protocols that policies implement, the read-only view of the run that they decide on, and what they decide.

A policy sees the view and nothing else of the scheduler; how each worker, app, ... is shown is in views.py.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ctxflow.policies.views import (
    AppView,
    AttemptView,
    MachineView,
    RegionView,
    SessionView,
    TierView,
    WorkerView,
)


class View(Protocol):
    """What a policy may know of the run, read-only."""

    @property
    def now(self) -> float:
        """The time of the event being handled."""

    @property
    def random(self) -> random.Random:
        """The run's seeded generator: the only randomness a policy may use."""

    @property
    def workers(self) -> Mapping[str, WorkerView]:
        """Those connected, by id."""

    @property
    def free(self) -> Mapping[str, WorkerView]:
        """Those that could take a call now, by id, longest free first."""

    @property
    def apps(self) -> Mapping[str, AppView]:
        """All declared apps, but for those that nobody has used for a while."""

    @property
    def contexts(self) -> Collection[str]:
        """The ids of all declared contexts."""

    @property
    def attempts(self) -> Mapping[int, AttemptView]:
        """All running batches."""

    @property
    def tiers(self) -> Mapping[str, TierView]:
        """The site's tiers."""

    @property
    def machines(self) -> Mapping[str, MachineView]:
        """The machines on which workers can be asked for, by tier and name; none before somebody wanted one there.

        A machine has, for each tier that its workers may be of, the GPUs that will do for these.
        """

    @property
    def reserved(self) -> Mapping[str, Sequence[str]]:
        """The ids of the GPUs that are kept for workers that have not joined yet, by machine."""

    @property
    def regions(self) -> Mapping[str, RegionView]:
        """The site's regions."""

    @property
    def forecast(self) -> Mapping[str, float] | None:
        """Items expected per second by app, where there is a forecast."""

    @property
    def preferred(self) -> Sequence[str]:
        """The tiers that the plan has workers on, those that do most for their price first; none without a plan."""

    @property
    def releases_idle(self) -> bool:
        """Whether the scaling policy gives back workers for which there is no work, as it says itself."""

    def batch_size(self, app: AppView, worker: WorkerView) -> int:
        """Items that the batching policy would give this worker's next batch of the app; 0 if it holds them back.

        Of an app whose calls overlap, those that it would have in flight, its *window*.
        """

    def full_window(self, app: AppView, worker: WorkerView) -> int:
        """Calls of the app that one slot of the worker takes at a time, 1 or more, while more is queued than all take.

        Of an app of items, the window that the batching policy gives then (a short queue is shared out: `batch_size`
        says less); on threads, the context's `concurrency`; 1 where calls do not overlap.
        """

    def room(self, app: AppView, worker: WorkerView) -> int:
        """Items of the app that an assignment to the worker could begin, or load the context for, with nothing drained.

        Places left in its window; or a window, or the next batch's items (1 if the batching policy holds them back), if
        a slot is not in use; else 0.
        """

    def drains(self, app: AppView, worker: WorkerView) -> bool:
        """Whether a free worker is drained first if it is assigned the app: no slot is unused, and no place is its own.

        What it has in flight of other contexts then ends, and nothing joins it meanwhile. Asks no policy, so it may be
        asked of many.
        """

    def can_run(self, app: AppView, worker: WorkerView) -> bool:
        """Whether a free worker could run the app now, or load its context for it.

        Not if the plan, its GPUs or its memory forbid it, if it failed to build the context before (while
        there are others), or if other workers are loading the context for all that waits.
        """

    def gives_way(self, app: AppView, worker: WorkerView) -> Sequence[str]:
        """The contexts that a free worker would unload or park to load the app's; none if it has room or holds it."""

    def permits(self, app: AppView, tier: TierView) -> bool:
        """Whether workers of the tier could run the app at all: they have the GPUs, and the plan allows it."""

    def able(self, app: AppView, tier: TierView) -> bool:
        """Whether workers of the tier have what the app's context needs, whatever the plan; none if it is broken."""

    def answered(self, attempt: AttemptView) -> bool:
        """Whether somebody else has answered a batch that still runs."""

    def holders(self, context: str) -> int:
        """How many workers have the context in any state (`ContextOnWorkerView.state`)."""

    # The following are kept up to date, and found without a look at all workers. They change with each assignment that
    # is carried out: a generator takes what it needs of them into a list before it yields.

    def holding(self, context: str) -> Collection[WorkerView]:
        """The workers that have the context in any state, longest first."""

    def built_on(self, context: str) -> Collection[WorkerView]:
        """The workers on which a load of the context was measured (`WorkerView.load_seconds`)."""

    def measured_on(self, app: str) -> Collection[WorkerView]:
        """The workers on which items of the app were measured (`WorkerView.seconds_per_item`), or steps of sessions."""

    def hosts(self, tier: str, gpu_model: str | None = "*") -> int:
        """How many hosts have workers of the tier, with that GPU model; "*" for any."""

    def free_holders(self, context: str) -> Iterable[WorkerView]:
        """The free workers on which the context is ready, longest free first."""

    def free_parked(self, context: str) -> Iterable[WorkerView]:
        """The free workers on which the context is parked."""

    def free_by_load(self) -> Iterable[WorkerView]:
        """The free workers, those that hold the fewest contexts first, of these the longest free."""

    @property
    def free_slots(self) -> int:
        """The free slots of all free workers (`WorkerView.free_slots`)."""

    @property
    def in_flight(self) -> int:
        """The calls of all workers that overlap with others of their context (`WorkerView.in_flight`)."""

    @property
    def sessions(self) -> Mapping[int, SessionView]:
        """All sessions that are open, by number, oldest first."""

    def can_carry(self, session: SessionView, worker: WorkerView) -> bool:
        """Whether a worker may carry a session: it stays, and holds the session's context or could load it.

        Also if it carries it now: not where the plan wants the context on fewer workers, or on other tiers.
        """

    def state_room(self, app: AppView, worker: WorkerView) -> int | None:
        """Bytes that the states of the app's sessions may take on a worker, None if nobody knows.

        What is left of its GPUs' memory beside what the context was measured to take when it was built; for a context
        without GPUs, what is left of the host's memory that it declares, and must not exceed.
        """

    def capacity(self, app: AppView, worker: WorkerView) -> int:
        """K: the most sessions whose chunks a step of the worker makes while it meets the app's chunk target."""


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """A worker's next call is to be this app's; the context is loaded there first if it is not."""

    worker: str
    app: str


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A placement: which contexts may be where, and the bounds per tier.

    :ivar tiers: context id -> tiers on which it may be loaded; a context not named may be anywhere.
    :ivar workers: tier -> (fewest, most) workers; a tier not named keeps the site's bounds.
    :ivar holders: (context, tier) -> the most workers of the tier that hold the context; a pair not named may be held
        by all. Workers beyond that unload it when their call ends, as do those that may not hold it at all.
    :ivar shares: (app, context) -> the share of the app's items that it answers, for apps that name alternatives; one
        that is not named here has all its items answered by its own context.
    :ivar order: tiers, in the order in which workers should be held while fewer are wanted than the plan allows.
    :ivar margins: (context, tier) -> the shares by which its items are planned to take longer than was measured: of
        workers' time, and of delays that have a limit.
    :ivar reasons: what is impossible, and which constraint makes it so, a sentence each.
    """

    tiers: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    workers: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    holders: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    shares: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    order: Sequence[str] = ()
    margins: Mapping[tuple[str, str], tuple[float, float]] = dataclasses.field(default_factory=dict)
    reasons: Sequence[str] = ()

    def permits(self, context: str, tier: str) -> bool:
        """Whether the context may be loaded on that tier."""
        return context not in self.tiers or tier in self.tiers[context]


class RoutingPolicy(Protocol):
    """Which ready work goes to which free slot, now."""

    def assign(self, view: View, ready: Sequence[AppView]) -> Iterable[Assignment]:
        """Choose; called with at least one free worker and one app with a backlog.

        Assignments are carried out one by one as they are yielded, so that the view, `can_run` and backlogs are up to
        date in a generator; one that is not possible, or for which `batch_size` is 0, has no effect.

        :param ready: apps with a backlog; where more than 64 have one, the most urgent of each context.
        """


class WarmingPolicy(Protocol):
    """What a routing policy may have besides (optional): to have idle workers load contexts ahead of demand."""

    def warm(self, view: View) -> Iterable[Assignment]:
        """Workers that load an app's context now, without work for it; asked on ticks, while workers are free.

        Taken one by one, so that what an assignment led to can be seen in the view before the next; one that is not
        possible has no effect. Such a load claims no items, and what it loads is unloaded like any idle context when
        another needs the room.
        """


class BatchingPolicy(Protocol):
    """How many items a worker's next batch takes."""

    @property
    def linger(self) -> float:
        """Seconds after which a queue for which `size` said 0 is asked again."""

    def size(self, view: View, app: AppView, worker: WorkerView) -> int:
        """The items of the next batch, 0 to hold the app's work back for now.

        After 0 it is asked again when more items come, or else when the app has waited for `linger` seconds,
        and then (if it still says 0) every tenth of a second.
        """

    def duplicate(self, view: View, worker: WorkerView) -> int | None:
        """The attempt that an otherwise idle worker should run a second time, or None.

        Asked when a worker comes free and nothing is queued, and of all idle workers on ticks.
        """

    def window(self, view: View, app: AppView, worker: WorkerView) -> int:
        """Return the most items of an app that a worker has in flight at a time, 1 or more, where calls overlap.

        Asked of apps of items (`AppView.overlaps`) before each item is given, so it must be quick. Optional: where a
        policy does not have it, that of the policy `fixed` is used, with its defaults.
        """

    def finished(self, view: View, app: AppView, worker: WorkerView, seconds: float, tokens: int | None) -> None:
        """Learn that a worker answered an item of such an app, in so many seconds in flight; optional.

        :param tokens: that a model read and wrote for it, None where nobody counted.
        """

    def coalesced(self, view: View, app: AppView, worker: WorkerView) -> int:
        """Return K, the most sessions of an app whose chunks one step of the worker makes, 1 or more.

        Optional: where a policy does not have it, that of the policy `coalescing` is used, with its defaults.
        """


class PlacementPolicy(Protocol):
    """Which contexts go on which tiers."""

    def plan(self, view: View) -> Plan:
        """The placement from now on; asked for on ticks, and when a tier, a context or a worker is new."""


Planning = Callable[[], Any]
"""What is to be computed for a plan. It looks at nothing but frozen data that it has, and gives the same each time: it
is called on another thread while the run goes on, and again when the run is replayed from its log."""


class PlanningPolicy(Protocol):
    """What a placement policy may have besides (optional), whose plans take long: they are computed beside the run."""

    def planning(self, view: View) -> Planning | None:
        """What to compute for another plan, from the run as it is now; None if it is not time for one.

        Asked after each `plan`, but not while something is computed.
        """

    def planned(self, made: Any) -> None:
        """What the last `planning` gave when it was called: from now on `plan` gives the plan that follows from it.

        Not called if it raised.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class PlaceRequest:
    """A context that needs more GPUs than a worker has, or GPUs that are close together, and has no worker."""

    app: str  # The most urgent one that waits for it.
    priority: int
    gpus: int
    affinity: str | None = None  # One of `ctxflow.recipe.AFFINITIES`.
    later: tuple[PlaceRequest, ...] = ()  # What other contexts may ask for afterwards: one each, if they have no room.


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """Where a worker of its own goes, and which workers are preempted for it."""

    machine: str
    tier: str
    devices: tuple[str, ...]  # The ids of its GPUs as the machine's topology has them, neighbours beside each other.
    victims: tuple[str, ...] = ()  # The workers to preempt; none if there is room.
    aligned: bool = True  # Whether the GPUs are as close together as the machine allows.


class PreemptionPolicy(Protocol):
    """Which workers are preempted when a context that waits needs a worker of its own."""

    @property
    def reserves(self) -> bool:
        """Whether it ever makes room: where it does not, contexts that need it are refused when they are declared."""

    @property
    def patience(self) -> float:
        """Seconds that the batch system may take to give the GPUs that were made free."""

    @property
    def grace(self) -> float:
        """Seconds that victims may take to finish what they run."""

    @property
    def idle(self) -> float:
        """Seconds without work after which the worker is given back."""

    def victims(self, view: View, request: PlaceRequest) -> Room | None:
        """The place and the workers to preempt for it, None if it fits nowhere."""


class ScalingPolicy(Protocol):
    """How many workers of each tier to hold."""

    def target(self, view: View) -> Mapping[str, int]:
        """Return tier -> number of workers wanted.

        Called on ticks, when a tier or a plan is new, and when items arrive while no worker is free. When a worker
        joins, it is called only if its tier exceeds its last target, or if the last call is a second ago.

        A plan bounds the numbers, and says which tiers it prefers (`View.preferred`); within the bounds the policy
        decides. A policy that releases workers without work has an attribute `releases_idle = True` (optional): plans
        then allow it more of them for a shorter time.
        """


class SessionPolicy(Protocol):
    """Which worker carries which session."""

    def place(self, view: View) -> Mapping[int, str | None]:
        """Session -> the worker that is to carry it, None to suspend it. A session that is not named stays as it is.

        One that is elsewhere migrates at its next chunk boundary; one that was suspended resumes, unless its user
        suspended it. Asked on ticks, and when a session or a worker comes, goes or changes.
        """


class Trial(NamedTuple):  # Made for each call, and made sooner than a frozen dataclass is.
    """Something that a worker was tried with, and whether it passed.

    :ivar kind: "call": it answered a batch (passed); or it failed one all of whose items others answered then. "miss":
        it failed one just now, and nobody knows yet whose fault that is. "build": it built a context, or could not.
        "crash": a failed call ended its library process, or the worker, without notice.
    :ivar subject: the app of a call, the context of a build, by id; `name`: in words; "" of a crash.
    :ivar attempt: the number of the attempt; of one that failed, in a "miss" and in the "call" that may follow; 0 if
        there is none, or nothing can follow.
    :ivar item_seconds: of a batch that was answered, None where nobody measured.
    :ivar message: what was said of the failure; `machine`: whether it looks like the machine's, in a "miss".
    """

    worker: WorkerView
    kind: str
    subject: str
    name: str
    passed: bool
    attempt: int = 0
    item_seconds: float | None = None
    message: str = ""
    machine: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """A host, or a worker with its GPUs, is to get no work for a while."""

    host: str
    cause: str  # In words that go on after the name: "...".
    worker: str = ""  # The one worker of the host that is meant; "" for all of the host.
    jobs: bool = False  # No job is to begin there; workers that are there work on.
    tier: str = ""  # Of these jobs.
    told: bool = False  # It is only reported: it keeps its work.


class HealthPolicy(Protocol):
    """Which hosts and workers are bad, by what they were tried with."""

    @property
    def probation(self) -> float:
        """Seconds after which one that was found bad is tried again; twice as long each time that it is found so."""

    def observe(self, view: View, trial: Trial) -> None:
        """Something was tried: called at the end of each attempt and build, so it may look at nothing else."""

    def doubts(self, view: View, worker: WorkerView, app: AppView) -> bool:
        """Whether a failure on a worker is to tell against its host rather than against the items.

        An item that failed there gets a second opinion elsewhere, and a worker in doubt gives none, where others can.
        """

    def judge(self, view: View) -> Sequence[Verdict]:
        """Those that are found bad now; asked on ticks. Each is named once: from then on no work goes there."""


class JobHealthPolicy(Protocol):
    """What a health policy may have besides: which hosts are bad by jobs that end before their workers join."""

    def tried_job(self, view: View, tier: str, machine: str, passed: bool, message: str = "") -> None:
        """A job's worker has joined, or the job ended before that, on a machine as the batch system calls it."""
