"""How a run stands at a moment, in figures, and how many workers of each tier it may have.

The site bounds the workers; so do a person who has the run leave a tier or a host from another terminal (`ctxflow
drain`, by a file of the run's directory that only this user may have written), the factory, and limits.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ctxflow.causes import ShortfallCause, lasting
from ctxflow.errors import counted
from ctxflow.executors.contract import Bounded, ContextPayload, Engine, LimitReached
from ctxflow.factory.limits import reached
from ctxflow.files import NotOwnError, read_own, tell_once, write_private
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.dispatch import first_needed
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.worker_state import SessionState, Worker

logger = logging.getLogger("ctxflow")
NAME = "drain.json"


@dataclasses.dataclass(frozen=True)
class TierStatus:
    """A tier at a moment.

    :ivar joined: workers that are connected; `asked`, those that were asked for last, None if none ever was.
    :ivar worker_seconds: for how long workers were connected, over all; `gpu_seconds`, that times their GPUs.
    :ivar price: of a worker's hour, None if the site does not say.
    :ivar reason: why fewer are there than were asked for, in words; "" if that is not known, or they are.
    """

    joined: int
    asked: int | None
    worker_seconds: float
    gpu_seconds: float
    price: float | None
    reason: str = ""

    @property
    def cost(self) -> float | None:
        """What its workers cost so far; None if the tier has no price."""
        return None if self.price is None else self.price * self.worker_seconds / 3600


@dataclasses.dataclass(frozen=True)
class Status:
    """A run at a moment: items by state, workers, contexts, and what went wrong and was mended.

    :ivar time: seconds since the run began.
    :ivar retried_items: how often an item went back to the queue.
    :ivar contexts: name -> how many workers are staging, loading or waking it, hold it ready, or parked.
    :ivar loads: how often a context was built or began to be.
    :ivar tiers: name -> its workers; also tiers that the site does not name, of workers started by hand.
    :ivar sessions: how many of those that are open do what, of `SESSION_STATES`; empty where there never was one.
    :ivar chunks: that sessions made and got; `migrations`, how often one went from worker to worker.
    :ivar limits: what is used of each limit of GPU-hours and cost (see `ctxflow.factory.limits.standing`).
    :ivar causes: why something does not run, or less than was asked for.
    """

    time: float
    items_submitted: int
    items_queued: int
    items_running: int
    items_done: int
    items_dead: int
    items_cancelled: int
    retried_items: int
    batches: int
    workers: int
    workers_joined: int
    workers_lost: int
    evictions: int
    crashes: int
    loads: int
    contexts: Mapping[str, Mapping[str, int]]
    tiers: Mapping[str, TierStatus]
    sessions: Mapping[str, int]
    chunks: int
    migrations: int
    limits: Sequence[Mapping[str, Any]] = ()
    causes: Sequence[ShortfallCause] = ()


SESSION_STATES = ("running", "waiting", "migrating", "idle", "suspended")
"""On a worker with something to do; with something to do and no worker; between two; with nothing to do; and asleep."""


@dataclasses.dataclass(frozen=True)
class SessionStatus:
    """How a session stands.

    :ivar state: "waiting" (for a worker), "placed" (on one), "migrating" (to one), "suspended".
    :ivar state_bytes: the size of its state when that was last kept, frozen or carried.
    """

    state: str
    worker: str | None
    idle: bool
    chunks: int
    chunk_seconds: float | None
    state_bytes: int | None

    @classmethod
    def of(cls, session: SessionState) -> SessionStatus:
        """Return how the scheduler's session stands now."""
        return cls(*(getattr(session, field.name) for field in dataclasses.fields(cls)))


def awaiting_text(state: RunState) -> str:
    """Return what a run says that waits for workers before its first call."""
    asked = sum(tier.asked or 0 for tier in state.tiers.values())
    return (
        f"waiting for {first_needed(state):,} of {counted(asked, 'worker')} before the first call "
        f"(start_when = {state.start_when:g}), {len(state.workers):,} here: "
        "lower start_when if so many do not come"
    )


def status_of(
    state: RunState,
    contexts: Mapping[str, ContextPayload],
    now: float,
    causes: Sequence[ShortfallCause] = (),
    limits: Sequence[Mapping[str, Any]] = (),
) -> Status:
    """Return the figures of a run's state; `contexts` has their names, `causes` what its engine and people tell."""
    counters = state.counters
    queued = sum(app.backlog for app in state.apps.values())
    by_state: dict[str, dict[str, int]] = {}
    for worker in state.workers.values():
        shown = {held.context: held.state if held.building else "ready" for held in worker.contexts.values()}
        for context, how in {**shown, **dict.fromkeys(worker.parked, "parked")}.items():
            counts = by_state.setdefault(contexts[context].name, {})
            counts[how] = counts.get(how, 0) + 1
    return Status(
        time=now,
        items_submitted=counters.submitted,
        items_queued=queued,
        items_running=len(state.open) - queued,
        items_done=counters.done,
        items_dead=counters.dead,
        items_cancelled=counters.cancelled,
        retried_items=counters.retried,
        batches=counters.batches,
        workers=len(state.workers),
        workers_joined=counters.joined,
        workers_lost=counters.lost,
        evictions=counters.evicted,
        crashes=counters.crashes,
        loads=counters.loads,
        contexts=by_state,
        tiers=_tiers(state, now, causes),
        sessions=_sessions(state),
        chunks=counters.chunks,
        migrations=counters.migrations,
        limits=limits,
        causes=[*causes, *causes_of(state, time.time())],
    )


def causes_of(state: RunState, wall: float) -> list[ShortfallCause]:
    """Return what the scheduler knows of why less runs: whom it gives no work, and until when.

    :param wall: the time, in seconds since 1970.
    """
    found = []
    if state.awaiting and state.ready:
        found.append(ShortfallCause("start", awaiting_text(state)))
    for each in state.wards.unproven.values():
        found.append(ShortfallCause("unproven", each.text, each.message, host=each.host))
    for unit in state.wards.slow:
        found.append(ShortfallCause("slow", f"{unit.what} keeps its work", unit.cause, host=unit.host))
    for unit in state.wards.units:
        if unit.by_hand:
            text = f"{unit.what} is drained, until `ctxflow drain {unit.host} --undo`"
            found.append(ShortfallCause("drain", text, host=unit.host))
        else:
            text = f"{unit.what} gets no {'new workers' if unit.jobs else 'work'}"
            until = round(wall + unit.until - state.now)
            found.append(ShortfallCause("quarantine", text, unit.cause, host=unit.host, until=until))
    return found


def _sessions(state: RunState) -> dict[str, int]:
    """Return how many sessions are in each of `SESSION_STATES`."""
    if not state.sessions and not state.counters.steps:
        return {}
    counts = dict.fromkeys(SESSION_STATES, 0)
    for session in state.sessions.values():
        active = "running" if session.state == "placed" else session.state
        counts["suspended" if session.suspending else "idle" if session.idle else active] += 1
    return counts


def _tiers(state: RunState, now: float, causes: Sequence[ShortfallCause]) -> dict[str, TierStatus]:
    """Return each tier's workers, those that were lost in its times."""
    here: dict[str, list[Worker]] = {name: [] for name in state.tiers}
    for worker in state.workers.values():
        here.setdefault(worker.tier, []).append(worker)
    found = {}
    for name, workers in here.items():
        tier = state.tiers.get(name)
        found[name] = TierStatus(
            joined=len(workers),
            asked=tier.asked if tier is not None else None,
            worker_seconds=(tier.worker_seconds if tier else 0.0) + sum(now - each.joined for each in workers),
            gpu_seconds=(tier.gpu_seconds if tier else 0.0) + sum((now - each.joined) * each.gpus for each in workers),
            price=tier.spec.price if tier is not None else None,
            reason=lasting(causes, name),
        )
    return found


def figures_of(status: Status) -> dict[str, Any]:
    """Return what `ctxflow.observe.progress.Progress` says of workers and sessions: from `workers` to `migrations`."""
    tiers = {
        name: {
            **{key: getattr(tier, key) for key in ("joined", "asked", "cost", "reason")},
            "gpu_hours": tier.gpu_seconds / 3600,
            "worker_hours": tier.worker_seconds / 3600,
        }
        for name, tier in status.tiers.items()
    }
    costs = [tier["cost"] for tier in tiers.values() if tier["worker_hours"]]
    counts = ("workers", "evictions", "crashes", "loads", "chunks", "migrations")
    return {
        **{name: getattr(status, name) for name in counts},
        "tiers": tiers,
        "contexts": {
            name: {"warm" if state == "ready" else state: count for state, count in counts.items()}
            for name, counts in status.contexts.items()
            if name  # Library processes without a context have none.
        },
        "gpu_hours": sum(tier["gpu_hours"] for tier in tiers.values()),
        "worker_hours": sum(tier["worker_hours"] for tier in tiers.values()),
        "cost": None if not costs or None in costs else sum(costs),
        "sessions": dict(status.sessions),
        "limits": [dict(each) for each in status.limits],
        "causes": [dataclasses.asdict(each) for each in status.causes],
    }


def drained(directory: str) -> tuple[list[str], list[str]]:
    """Return the hosts and the tiers that a run is asked to leave.

    :raises OSError: if others may have written that.
    """
    try:
        told: Any = json.loads(read_own(os.path.join(directory, NAME)))
    except (FileNotFoundError, ValueError):
        return [], []
    if not isinstance(told, dict):
        return [], []
    return [str(each) for each in told.get("hosts", [])], [str(each) for each in told.get("tiers", [])]


def ask(directory: str, hosts: Iterable[str], tiers: Iterable[str]) -> None:
    """Ask a run to leave these hosts and tiers, and no others.

    :raises OSError: if its directory cannot be written.
    """
    path = os.path.join(directory, NAME)
    write_private(path, json.dumps({"hosts": sorted(set(hosts)), "tiers": sorted(set(tiers))}) + "\n")


class DrainRequests:
    """Follows which hosts and `tiers` a run is asked to leave."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._sign: tuple[int, int] | None = None
        self._asked: tuple[list[str], list[str]] = [], []
        self._told = self._asked
        self._hosts: set[str] = set()
        self.tiers: set[str] = set()

    def look(self) -> None:
        """Read what is asked, if that has changed; on a thread that may wait for a disk."""
        try:
            found = os.stat(os.path.join(self._directory, NAME))
            sign = found.st_mtime_ns, found.st_ino
            if sign != self._sign:
                self._sign = sign
                self._asked = drained(self._directory)
        except NotOwnError as error:
            tell_once(error)
        except OSError:
            pass

    def events(self, state: RunState, now: float) -> list[ev.Event]:
        """Return what is new in what was read last."""
        if self._asked == self._told:
            return []
        self._told = hosts, tiers = self._asked
        told: list[ev.Event] = [ev.HostDrained(now, host) for host in sorted(set(hosts) - self._hosts)]
        told += [ev.HostDrained(now, host, drained=False) for host in sorted(self._hosts - set(hosts))]
        self._hosts = set(hosts)
        for name in sorted(set(tiers) & set(state.tiers) - self.tiers):
            logger.warning("tier %s is drained: its workers leave when they have nothing to do", name)
        for name in sorted(self.tiers - set(tiers)):
            logger.warning("tier %s is used again", name)
        self.tiers = set(tiers) & set(state.tiers)
        return told


class TierBounds:
    """Remembers what the site offers, and tells what has changed."""

    def __init__(self) -> None:
        self._offered: dict[str, ev.TierSpec] = {}

    def events(
        self, state: RunState, now: float, left: Collection[str], maxima: Mapping[str, int], none: bool = False
    ) -> list[ev.Event]:
        """Return what the scheduler has to hear.

        :param left: the tiers that are to have no workers.
        :param maxima: tier -> how many workers there may be, where that is bounded besides.
        :param none: whether no tier may have any.
        """
        told: list[ev.Event] = []
        for name, tier in state.tiers.items():
            own = self._offered.setdefault(name, tier.spec)
            most = 0 if none or name in left else min(own.maximum, maxima.get(name, own.maximum))
            spec = dataclasses.replace(own, minimum=min(own.minimum, most), maximum=most)
            if spec != tier.spec:
                told.append(ev.TierOffered(now, spec))
        return told


class WorkerBounds:
    """All that bounds a live run's workers besides its site: what a person asks, a factory's numbers, and limits."""

    def __init__(self, engine: Engine, directory: str) -> None:
        self._engine = engine
        self._drains = DrainRequests(directory)
        self._tiers = TierBounds()
        self._limit = ""  # What is said of a limit, once it is reached.

    def look(self) -> None:
        """Read what a person asks; on a thread that may wait for a disk."""
        self._drains.look()

    def causes(self) -> list[ShortfallCause]:
        """Return what a person, or a limit, keeps from having workers."""
        texts = {name: f"tier {name} is drained, until `ctxflow drain {name} --undo`" for name in self._drains.tiers}
        limit = [ShortfallCause("limit", self._limit)] if self._limit else []
        return [*(ShortfallCause("drain", texts[name], tier=name) for name in sorted(texts)), *limit]

    def events(self, state: RunState, now: float) -> list[ev.Event]:
        """Return what the scheduler has to hear.

        :raises LimitReached: if there are no workers any more, and something is not answered.
        """
        told = self._drains.events(state, now)
        maxima: Mapping[str, int] = {}
        if isinstance(self._engine, Bounded):
            maxima = self._engine.maxima()
            limit = reached(self._engine.limits())
            if limit and not self._limit:
                logger.warning("%s; no worker is asked for, and those that run end what they do and leave", limit)
            self._limit = limit
        if self._limit and not state.workers and state.open:
            own = "_per_run" in self._limit  # Else the next run has none left either.
            how = "" if own else "raise it in the factory's site file, send the factory SIGHUP, and "
            raise LimitReached(
                f"{self._limit}; its workers were given back with {counted(len(state.open), 'item')} not answered: "
                f"{how}call the same again, which goes on from what is kept"
            )
        return told + self._tiers.events(state, now, self._drains.tiers, maxima, none=bool(self._limit))
