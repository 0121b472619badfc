"""What a policy sees of each part of a run: workers, sessions, apps, tiers, machines and regions.

A run gives proxies (scheduler/view.py), on which nothing can be set; their mappings and sequences cannot be written, or
are copies. An object stays the same as long as what it stands for is there, and always tells how that is now. Times are
seconds on the run's clock, sizes bytes, prices dollars an hour. What nobody measured is None, never a guess.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from ctxflow.topology import Topology


class ContextOnWorkerView(Protocol):
    """One context on one worker."""

    @property
    def context(self) -> str:
        """The context's id."""

    @property
    def state(self) -> str:
        """One of "staging", "loading", "ready"; "spent" if it runs a call and takes no other after it."""

    @property
    def since(self) -> float:
        """When it came into that state."""

    @property
    def last_used(self) -> float:
        """When a batch last ended on it (or when it became ready)."""


class AttemptView(Protocol):
    """A batch that runs on a worker."""

    @property
    def id(self) -> int:
        """Its number."""

    @property
    def app(self) -> str:
        """The app whose items it holds."""

    @property
    def worker(self) -> str:
        """Where it runs."""

    @property
    def items(self) -> Sequence[int]:
        """The items it was started with."""

    @property
    def started(self) -> float:
        """Since when."""


class SessionView(Protocol):
    """One session: long-lived state on a worker that makes chunks, goes idle, and comes back."""

    @property
    def id(self) -> int:
        """Its number."""

    @property
    def app(self) -> str:
        """The app that makes its chunks."""

    @property
    def context(self) -> str:
        """The id of the context that it needs."""

    @property
    def worker(self) -> str | None:
        """Who carries it, or is about to; None if nobody does."""

    @property
    def state(self) -> str:
        """One of "waiting" (for a worker), "placed" (on one), "migrating" (its state is on its way to one),
        "suspended"."""

    @property
    def target(self) -> str | None:
        """The worker that it goes to at its next chunk boundary, if it is to move."""

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do before it gets a prompt, or before chunks are taken; also while suspended."""

    @property
    def ready(self) -> bool:
        """Whether it is placed, not idle, and in no step: the next step may have its next chunk made."""

    @property
    def failed_on(self) -> frozenset[tuple[str, tuple[str, ...]]]:
        """Hosts, with a worker's GPUs, where a step of it failed, and that looked like the machine's fault."""

    @property
    def by_user(self) -> bool:
        """Whether its user suspended it: then nobody else may resume it."""

    @property
    def chunks(self) -> int:
        """How many it has delivered."""

    @property
    def chunk_seconds(self) -> float | None:
        """What its last chunk took."""

    @property
    def own_seconds(self) -> float | None:
        """Seconds that it adds to a step on the GPU model of the app's first step, estimated; None before a step.

        The estimate rests on steps that it was in, and on others that it was not in: what a step took beyond what was
        expected is put down most to those sessions of it that least is known about.
        """

    @property
    def state_bytes(self) -> int | None:
        """The size of its state when that was last kept, frozen or carried."""

    @property
    def opened(self) -> float:
        """When it was opened."""

    @property
    def last_chunk_at(self) -> float | None:
        """When its last chunk was made."""


class WorkerView(Protocol):
    """One worker."""

    @property
    def id(self) -> str:
        """Its name: a worker that comes back has another."""

    @property
    def tier(self) -> str:
        """The tier that it came from."""

    @property
    def region(self) -> str:
        """The group of workers close to it."""

    @property
    def host(self) -> str:
        """The machine it is on."""

    @property
    def gpu_model(self) -> str | None:
        """Such as "NVIDIA A10", None without a GPU."""

    @property
    def topology(self) -> Mapping[str, object] | None:
        """The machine's topology as the worker reported it."""

    @property
    def gpus(self) -> int:
        """How many GPUs it was given."""

    @property
    def slots(self) -> int:
        """How many calls it runs at a time."""

    @property
    def free_slots(self) -> int:
        """How many more assignments it could take now: slots that are not in use, and windows with room."""

    @property
    def slots_used(self) -> float:
        """How many of its slots are in use, 0 to `slots`; a window of calls in flight by the share that is taken.

        A call that no other overlaps, and a load, use a slot each; so does a window that is being emptied for other
        work. Calls that overlap with one context use one slot together, the share of it that they are of the window
        that the batching policy gives while enough is queued (`View.full_window`).
        """

    @property
    def contexts(self) -> Mapping[str, ContextOnWorkerView]:
        """The contexts on it in any state, staging and loading included, by id; but for those that are parked."""

    @property
    def parked(self) -> Collection[str]:
        """The contexts that gave way and are parked: to wake one takes less than to build it."""

    @property
    def running(self) -> Mapping[int, AttemptView]:
        """What it runs, by attempt id."""

    def in_flight(self, context: str) -> int:
        """How many calls that overlap, of items or on threads, run there with this context: one slot for all."""

    @property
    def machine(self) -> str:
        """What the batch system calls the machine that it is on."""

    @property
    def devices(self) -> Sequence[str]:
        """The ids of the GPUs that it was given."""

    @property
    def pin(self) -> int | None:
        """The number of the reservation that it was asked for by, None for others."""

    @property
    def joined(self) -> float:
        """When it joined."""

    @property
    def noticed(self) -> float | None:
        """When it was told that it will be evicted."""

    @property
    def draining(self) -> bool:
        """Whether it takes nothing new, since it was given back or is about to be."""

    @property
    def acquired(self) -> bool:
        """Whether it is one of so many that its tier was asked for.

        One that was started by hand is not given back, and one with a place of its own (`pin`) goes with that.
        """

    def seconds_per_item(self, app: str) -> float | None:
        """Measured on this worker for this app: where calls overlap, an item's share of its time.

        Of those, at the fullest its window has been lately: with fewer in flight, a share says more of the queue.
        """

    def calls_beside(self, app: str) -> float | None:
        """How many calls overlapped while `seconds_per_item` was measured, on average: their product is its time."""

    def items_done(self, app: str) -> int:
        """How many items of this app it has answered: what the measurement rests on."""

    def load_seconds(self, context: str) -> float | None:
        """Measured on this worker for this context."""

    def stage_seconds(self, context: str) -> float | None:
        """How long its files took to come to this worker, measured."""

    @property
    def sessions(self) -> Mapping[int, SessionView]:
        """The sessions that it carries, idle ones too, by number."""

    def step_seconds(self, app: str) -> Mapping[int, float]:
        """Seconds of a step by how many sessions it served, measured on this worker for this app."""


class AppView(Protocol):
    """One app with its queue. Apps that differ in context, priority or deadline are different apps."""

    @property
    def id(self) -> str:
        """Its id."""

    @property
    def context(self) -> str:
        """The id of the context that its calls need; "" for none."""

    @property
    def keeps_context(self) -> bool:
        """Whether a worker keeps its context from one call to the next (its level is "pervasive")."""

    @property
    def overlaps(self) -> bool:
        """Whether its calls, of one item each, overlap on a worker (`BatchingPolicy.window`)."""

    @property
    def concurrency(self) -> int | None:
        """The most calls at a time that its context declares to bear on a worker."""

    @property
    def priority(self) -> int:
        """Higher goes first."""

    @property
    def deadline(self) -> float | None:
        """When its results are wanted."""

    @property
    def batch_size(self) -> int | None:
        """The user's wish for the items of a batch."""

    @property
    def max_delay(self) -> float | None:
        """The longest an item may take."""

    @property
    def max_error(self) -> float | None:
        """The largest share of wrong answers that is acceptable."""

    @property
    def error(self) -> float:
        """The share of wrong answers with its context, 0 where nobody said."""

    @property
    def alternative_of(self) -> str:
        """The id of the app whose items it may answer, if the plan says so; "" for one with items of its own."""

    @property
    def backlog(self) -> int:
        """Items queued: what a routing policy compares; `can_run` heeds what loading workers have claimed of them."""

    @property
    def unclaimed(self) -> int:
        """Items queued beyond those for which a worker is already loading the context."""

    @property
    def running(self) -> int:
        """Its calls, and steps of its sessions, that run."""

    @property
    def call_seconds(self) -> float | None:
        """Seconds of a call that do not grow with its items, its way to the worker and back included; measured."""

    @property
    def call_seconds_error(self) -> float:
        """The standard error of `call_seconds`."""

    @property
    def waiting_since(self) -> float | None:
        """Since when something has been queued."""

    @property
    def arrived(self) -> int:
        """Items submitted so far."""

    @property
    def order(self) -> int:
        """Its place in the order of declaration."""

    @property
    def region(self) -> str:
        """The region from which its items come; "" for the home region."""

    @property
    def chunk_target(self) -> float | None:
        """Seconds that a chunk of its sessions may take."""

    @property
    def shared_seconds(self) -> float | None:
        """Seconds of a step that do not depend on its sessions, as `SessionView.own_seconds` are estimated."""

    def step_pace(self, gpu_model: str | None) -> float:
        """How many times as long its steps take on a GPU model as on that of its first step; 1 if nobody knows."""


class TierView(Protocol):
    """A kind of worker that the site offers."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def minimum(self) -> int:
        """Never fewer workers than this."""

    @property
    def maximum(self) -> int:
        """Never more workers than this."""

    @property
    def gpus(self) -> int:
        """GPUs of a worker."""

    @property
    def machines(self) -> str:
        """Tiers that have this in common are the same machines, cut into workers differently; "" for none."""

    @property
    def price(self) -> float | None:
        """Dollars (or GPU-hours) a worker costs an hour."""

    @property
    def boot_seconds(self) -> float | None:
        """From asking for a worker to its joining, as the site says."""

    @property
    def requested(self) -> int | None:
        """Workers that are requested of it now, None before anything was; those started by hand are besides."""

    @property
    def connected(self) -> int:
        """Workers that were requested and are there."""

    @property
    def match_rate(self) -> float | None:
        """Workers that the batch system gives an hour while some are lacking, measured."""

    @property
    def eviction_rate(self) -> float | None:
        """Evictions per worker and second, measured."""

    @property
    def lifetimes(self) -> Sequence[float] | None:
        """How long its evicted workers lived, None before there was one."""


class MachineView(Protocol):
    """A machine that workers may be on, as the batch system told when it was asked last."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def tier(self) -> str:
        """The tier whose workers may be on it."""

    @property
    def topology(self) -> Topology:
        """What it is made of, and who uses its GPUs, workers of this run among them."""


class RegionView(Protocol):
    """A group of workers close to each other."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def latency(self) -> Mapping[str, float]:
        """Seconds to other regions."""

    @property
    def bandwidth(self) -> Mapping[str, float]:
        """Bytes per second to other regions."""

    @property
    def power_price(self) -> float | None:
        """Dollars per kWh."""

    @property
    def tiers(self) -> Sequence[str]:
        """The tiers whose workers are in it, as far as the site's tiers say it."""

    @property
    def home(self) -> bool:
        """Whether items and staged files come from there."""
