"""TaskVine's workers as the engine knows them: what each is, its calls, whether it answers, and why it is gone.

TaskVine itself notices a vine_worker that is cut off or stopped, but not a context host that hangs: a host that has
been silent for some seconds is asked by a call of its own. Those that answer calls anyway cost nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence

from ctxflow.executors.protocol import Heartbeats, Patience
from ctxflow.executors.taskvine.manager_messages import CancelCall, SubmitCall
from ctxflow.executors.taskvine.manager_process import ManagerLink
from ctxflow.factory.acquirer import Acquirer
from ctxflow.factory.exchange import FactoryClient
from ctxflow.factory.provider import JobChange, tail, why_gone
from ctxflow.host.library_messages import BuildContext, CallFinished, CallRaised
from ctxflow.host.messages import (
    FROM_WORKER,
    FromWorker,
    LibraryDied,
    LibraryEnded,
    Ping,
    ToWorker,
    WorkerFacts,
)
from ctxflow.host.vine_protocol import SEAL_BYTES, open_answer, seal_call
from ctxflow.host.wire import pack, unframe
from ctxflow.installing import __version__
from ctxflow.scheduler import events as ev
from ctxflow.sites.site_model import Site, Tier, region_of

logger = logging.getLogger("ctxflow")
_GREETING_BYTES = 1 << 20  # What a worker may answer first of all; it has a few thousand to say.
_REASON_SECONDS = 10.0  # How long the batch system may take to say why: its job has first to end, to the last process.
_FACTORY_SECONDS = 1.0  # And how much longer where its word comes by way of a factory.
_MOST_TOLD = 10_000  # Jobs of which it is known how they ended before their workers were missed.


@dataclasses.dataclass
class VineWorker:
    """One worker that is connected.

    :ivar name: its feature, which calls are pinned to.
    :ivar job: the job that it is, None if it was started by hand.
    :ivar calls: how many it was sent: each has the next number in its seal.
    :ivar keys: context -> the key of its latest load, which tells reports about it from those about earlier ones.
    :ivar due: number of an open call -> when it times out, on this machine's monotonic clock.
    :ivar reason: why it was given up, if it was.
    :ivar functions: those that its host was given.
    :ivar coming: of each call that brings it some, those that calls still need.
    :ivar unneeded: those that it was given and has not been told yet to forget.
    :ivar forgotten: context -> how often its files were removed.
    :ivar builds: context -> its load, which waits for what builds made elsewhere.
    :ivar items: the calls that overlap, which are in no TaskVine call of their own -> their contexts.
    """

    name: str
    host: str
    address: str
    since: float  # When it connected, on the run's clock.
    ip: str = ""  # Where it connects from; its address is a name, by which TaskVine knows it.
    tier: str = ""
    job: str | None = None
    place: str = ""
    cache: str = ""  # Its host's, on its machine.
    kept: str = ""  # Its host's cache, which outlives it.
    alike: str = ""  # The same for machines on which compilers make the same.
    transfer_port: int | None = None  # Where it serves files to its peers.
    answers: bool = False  # From when it has reported what it is, and may stay, until it is lost.
    joined: bool = False
    leaving: bool = False  # It was released, or had notice: nobody is to blame for its end.
    noticed: bool = False
    running: int = 0
    calls: int = 0
    reason: str = ""
    due: dict[int, float] = dataclasses.field(default_factory=dict)
    keys: dict[str, str] = dataclasses.field(default_factory=dict)
    functions: set[str] = dataclasses.field(default_factory=set)
    unneeded: list[str] = dataclasses.field(default_factory=list)
    coming: list[set[str]] = dataclasses.field(default_factory=list)
    forgotten: dict[str, int] = dataclasses.field(default_factory=dict)
    items: dict[int, str] = dataclasses.field(default_factory=dict)
    builds: dict[str, BuildContext] = dataclasses.field(default_factory=dict)

    @property
    def listens(self) -> bool:
        """Whether peers know where it serves them; not so of one whose connection comes through a tunnel."""
        return bool(self.ip and self.transfer_port) and not self.ip.startswith(("127.", "::1"))

    def answered(self, report: FromWorker) -> None:
        """Note that calls that overlap have ended."""
        if isinstance(report, (CallFinished, CallRaised)):
            self.items.pop(report.call, None)
        elif isinstance(report, (LibraryDied, LibraryEnded)):
            self.forget_items(report.context)

    def forget_items(self, context: str) -> None:
        """Note that the library process of a context is gone, or is to go."""
        self.items = {call: whose for call, whose in self.items.items() if whose != context}

    def learn(self, facts: WorkerFacts, tiers: Sequence[Tier]) -> None:
        """Note what its host has reported."""
        self.host, self.job = facts.host, facts.job
        names = [tier.name for tier in tiers]
        self.tier = facts.tier if facts.tier in names else names[0]
        self.cache, self.kept, self.transfer_port = facts.cache, facts.kept, facts.port
        self.alike = facts.alike
        # Hard links work between workers of one machine whose directories are on one file system.
        self.place = f"{facts.host}:{facts.device}"

    def spec(self, facts: WorkerFacts, site: Site) -> ev.WorkerSpec:
        """Return what the scheduler is told of it."""
        tier = next(each for each in site.tiers if each.name == self.tier)
        return ev.WorkerSpec(
            self.name,
            host=self.host,
            tier=self.tier,
            region=region_of(site.regions, site.home, self.tier, self.host, facts.region),
            slots=site.slots,
            gpus=max(tier.gpus, facts.gpus),
            gpu_model=facts.gpu_model,
            memory=facts.memory if facts.pin is not None else min(tier.memory, facts.memory),
            gpu_memory=facts.gpu_memory,
            acquired=self.job is not None,
            topology=facts.topology,
            machine=facts.machine or "",
            devices=tuple(facts.devices),
            pin=None if facts.pin is None else int(facts.pin),
        )


def refusal(facts: WorkerFacts, python: str | None) -> str | None:
    """Return why a worker cannot be used, in a sentence; None if it can.

    :param python: the version that library processes have, where it is not the host's own.

    >>> refusal(WorkerFacts(host="n1", ctxflow="0.0.1", python="3.11.2"), None)  # doctest: +ELLIPSIS
    'the worker on n1 runs ctxflow 0.0.1, and this is ctxflow ...: start it with the line that `ctxflow ...
    """
    host = facts.host
    if facts.problem:
        return f"the worker on {host} cannot be used: {facts.problem}"
    if facts.ctxflow != __version__:
        return (
            f"the worker on {host} runs ctxflow {facts.ctxflow}, and this is ctxflow {__version__}: start it with "
            "the line that `ctxflow worker-command` prints"
        )
    theirs, ours = str(python or facts.python), platform.python_version()
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        return (
            f"the worker on {host} has Python {theirs}, and this is Python {ours}: they must agree up to the second "
            "number, so name an environment of the site with Python " + ".".join(ours.split(".")[:2])
        )
    return None


Reports = Sequence[FromWorker]
Then = Callable[[VineWorker, Reports], None]


class VineCalls:
    """Makes calls, sealed with a key, and passes each answer to its callback. Its owner locks.

    :param forged: called with a worker whose answer has no seal.
    """

    def __init__(self, link: ManagerLink, key: bytes, forged: Callable[[VineWorker], None]) -> None:
        self.link = link
        self._key = key
        self._forged = forged
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[VineWorker, Then, bytes]] = {}  # The last is the call's seal.

    def number(self) -> int:
        """Return a number that was never used before."""
        return next(self._numbers)

    def make(
        self,
        worker: VineWorker,
        messages: Sequence[ToWorker],
        then: Then,
        inputs: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | None = None,
    ) -> int:
        """Send a worker instructions, in order; return the call's number.

        :param then: called with the reports of the answer.
        :param inputs: name in the call's sandbox -> key of a file that the manager's process knows.
        :param outputs: likewise, what the call makes.
        """
        number = next(self._numbers)
        worker.calls += 1
        sealed = seal_call(self._key, worker.name, worker.calls, b"".join(map(pack, messages)))
        self._open[number] = worker, then, sealed[:SEAL_BYTES]
        most = _GREETING_BYTES if worker.calls == 1 else None  # Whoever it is, it has proven nothing yet.
        self.link.send(SubmitCall(number, worker.name, most, inputs or {}, outputs or {}, sealed))
        return number

    def answered(self, number: int, answer: bytes) -> None:
        """Pass an answer on."""
        if number not in self._open:
            return
        worker, then, seal = self._open.pop(number)
        reports = open_answer(self._key, seal, answer)
        if reports is None:
            self._forged(worker)
        else:
            then(worker, [FROM_WORKER.open(head, body) for head, body in unframe(reports)])

    def is_open(self, number: int) -> bool:
        """Return whether a call is not answered yet."""
        return number in self._open

    def cancel(self, number: int) -> None:
        """Cancel a call that waits for a file which will never come."""
        if self._open.pop(number, None) is not None:
            self.link.send(CancelCall(number))

    def drop(self, number: int) -> None:
        """Forget a call that will not be answered."""
        self._open.pop(number, None)

    def lost(self, worker: VineWorker) -> None:
        """Forget the calls of a worker that is gone."""
        for number in [number for number, (whose, _, _) in self._open.items() if whose is worker]:
            del self._open[number]


class Watch:
    """Finds workers that do not answer, or do not leave, once a second. Its owner locks.

    :param heard: called with the reports of each answer.
    :ivar look_at: when, by the monotonic clock, `look` is to be called.
    """

    def __init__(self, patience: Patience, calls: VineCalls, heard: Then) -> None:
        self._patience, self._calls, self._heard = patience, calls, heard
        self._workers: dict[str, VineWorker] = {}  # Those that have told what they are, and are to stay.
        self._leaving: dict[str, tuple[VineWorker, float]] = {}  # Those that were told to go, and by when.
        self._beats = Heartbeats(patience, self._ask)
        self.look_at = 0.0
        self.heard = self._beats.heard

    def _ask(self, name: str) -> None:
        self._calls.make(self._workers[name], [Ping()], self._heard)

    def greeted(self, worker: VineWorker) -> None:
        """Watch a worker from now on, which has answered its first call."""
        self._workers[worker.name] = worker
        self._beats.watch(worker.name)

    def dismissed(self, worker: VineWorker) -> None:
        """Note that a worker was told to leave."""
        self._leaving.setdefault(worker.name, (worker, time.monotonic() + self._patience.leave))
        self._forget(worker)

    def lost(self, worker: VineWorker) -> None:
        """Forget a worker that is gone."""
        self._leaving.pop(worker.name, None)
        self._forget(worker)

    def _forget(self, worker: VineWorker) -> None:
        self._workers.pop(worker.name, None)
        self._beats.forget(worker.name)

    def look(self, now: float, hearing: bool) -> list[tuple[VineWorker, str]]:
        """Return the workers that are lost, each with the reason; `hearing`: whether answers can come."""
        self.look_at = now + self._patience.look
        for worker in self._workers.values():
            if worker.due and self._has_overdue(worker, now):
                self._beats.urge(worker.name)
        lost = [
            (self._workers[name], f"its context host has not answered for {self._beats.silent_for(name):.0f} s")
            for name in self._beats.look(now, hearing)
        ]
        told = f"it was told to go {self._patience.leave:.0f} s ago, and is still there"
        return lost + [(worker, told) for worker, by in self._leaving.values() if by <= now]

    def _has_overdue(self, worker: VineWorker, now: float) -> bool:
        """Return whether a call has taken longer than its timeout, which its host ends as soon as it answers."""
        for call in [call for call in worker.due if not self._calls.is_open(call)]:
            del worker.due[call]
        overdue = [call for call, due in worker.due.items() if due + self._patience.overdue <= now]
        for call in overdue:
            del worker.due[call]
        return bool(overdue)


class Losses:
    """Workers that are gone, until it is known why, or time is up: nothing in an evicted one is to blame."""

    def __init__(self, acquirer: Acquirer | FactoryClient, clock: Callable[[], float]) -> None:
        self._acquirer = acquirer
        self._patience = _REASON_SECONDS + (_FACTORY_SECONDS if isinstance(acquirer, FactoryClient) else 0.0)
        self._clock = clock
        self._waiting: list[tuple[float, VineWorker]] = []
        self._explained: list[tuple[VineWorker, bool]] = []
        # Of a job: when something ended it, whether it was evicted, and whether it began again since.
        self._told: dict[tuple[str, str], tuple[float, bool, bool]] = {}

    def add(self, worker: VineWorker) -> None:
        """Note that a worker is gone; one that was given up, or released, is not waited for."""
        told = self._told.pop((worker.tier, worker.job), None) if worker.job is not None else None
        if worker.leaving:
            self._explained.append((worker, True))
        elif told is not None and told[0] > worker.since:
            self._explained.append((worker, told[1]))
        elif worker.job is None or worker.reason:
            self._explained.append((worker, False))
        else:
            self._waiting.append((self._clock() + self._patience, worker))
            self._acquirer.look()

    def heard(self, tier: str, change: JobChange) -> None:
        """Note a job's change."""
        before, was_evicted, again = self._told.get((tier, change.job), (0.0, False, False))
        if change.resumed:  # Whatever ends its worker later is something else.
            self._told.pop((tier, change.job), None)
        elif change.state == "running" and was_evicted:
            self._told[tier, change.job] = before, True, True
        if change.state not in ("evicted", "ended", "held"):
            return
        # A job that is evicted may be held, or end, without having begun again: it is evicted all the same.
        evicted = change.state == "evicted" or change.by_hand or (was_evicted and not again)
        for entry in [entry for entry in self._waiting if (entry[1].tier, entry[1].job) == (tier, change.job)]:
            self._waiting.remove(entry)
            self._explained.append((entry[1], evicted))
            return
        self._told.pop((tier, change.job), None)
        self._told[tier, change.job] = self._clock(), evicted, False
        if len(self._told) > _MOST_TOLD:  # The oldest is of a job whose worker never was here.
            del self._told[next(iter(self._told))]

    def due(self) -> float:
        """Return the seconds until the next is reported without a reason."""
        if self._explained:
            return 0.0
        return max(0.0, self._waiting[0][0] - self._clock()) if self._waiting else float("inf")

    def explained(self) -> list[tuple[VineWorker, bool]]:
        """Return those that can be reported now, each with whether it was evicted."""
        now = self._clock()
        while self._waiting and self._waiting[0][0] <= now:
            worker = self._waiting.pop(0)[1]
            self._explained.append((worker, False))
            if worker.job is not None:
                # To the batch system it may run on, out of reach or stopped, for as long as the run lasts.
                self._acquirer.remove(worker.tier, worker.job)
        found, self._explained = self._explained, []
        return found

    def events(self) -> list[ev.Event]:
        """Return the events of jobs' changes, and of the losses that they explain."""
        found: list[ev.Event] = []
        for tier, change in self._acquirer.take():
            self.heard(tier, change)
            found += events_of_job(self._clock(), tier, change, self._acquirer.pin_of(tier, change.job))
        for worker, evicted in self.explained():
            if not evicted and not worker.reason:
                self._warn(worker)
            found.append(ev.WorkerLost(self._clock(), worker.name, evicted, worker.reason))
        return found

    def _warn(self, worker: VineWorker) -> None:
        whose = f"tier {worker.tier}, " + (f"job {worker.job}" if worker.job is not None else "started by hand")
        words = tail(self._acquirer.output(worker.tier, worker.job)) if worker.job is not None else ""
        why = f": {said}" if (said := why_gone(words)) else ", and nobody says why"
        logger.warning("the worker on %s (%s) is gone%s; what it ran is tried again", worker.host, whose, why)


def events_of_job(now: float, tier: str, change: JobChange, pin: int | None = None) -> list[ev.Event]:
    """Return the events that a change of a worker's job stands for; none if it only waits, or ended after it joined.

    :param pin: the number of the `AcquireAt` that it was submitted for, None for others.

    >>> events_of_job(2.0, "a10", JobChange("7.0", "held", "the disk is full"))
    [JobHeld(time=2.0, tier='a10', job='7.0', reason='the disk is full')]
    """
    if change.state == "running" and not change.resumed:
        return [ev.JobStarted(now, tier, change.job, change.waited, pin)]
    if change.state == "evicted":
        return [ev.JobEvicted(now, tier, change.job, change.reason)]
    found: list[ev.Event] = []
    if change.state == "held":
        found.append(ev.JobHeld(now, tier, change.job, change.reason))
    if change.failed and change.host:
        found.append(ev.JobFailed(now, tier, change.job, change.host, change.reason))
    return found
