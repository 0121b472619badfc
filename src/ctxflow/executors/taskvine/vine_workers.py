"""TaskVine's workers as the engine knows them: what each is and whether it may stay, its calls, and whether it answers.

TaskVine itself notices a vine_worker that is cut off or stopped; what it does not see is a context host that hangs.
Each host of which nothing was heard for some seconds is asked by a call of its own: those that answer calls anyway cost
nothing. What does not live here: what is asked and what answers mean (engine.py, vine_hosts.py, stagings.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from ctxflow.executors.protocol import Heartbeats, Patience
from ctxflow.executors.taskvine.link import ManagerLink
from ctxflow.executors.taskvine.manager_messages import CancelCall, SubmitCall
from ctxflow.host.library_messages import BuildFailed, CallRaised, ContextBuilt
from ctxflow.host.messages import LibraryDied, Ping
from ctxflow.host.seal import SIZE, open_answer, seal_call
from ctxflow.host.vine_messages import FROM_WORKER, FromWorker, ToWorker, WorkerFacts
from ctxflow.host.wire import pack, unframe
from ctxflow.installing import __version__
from ctxflow.scheduler import events as ev
from ctxflow.sites.site_model import Site, Tier, region_of


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
    transfer_port: int | None = None  # Where it serves files to its peers.
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

    def is_late(self, report: FromWorker) -> bool:
        """Return whether a report is about an earlier load of its context."""
        if not isinstance(report, (ContextBuilt, BuildFailed, LibraryDied, CallRaised)):
            return False
        return report.key is not None and self.keys.get(report.context) != report.key

    def learn(self, facts: WorkerFacts, tiers: Sequence[Tier]) -> None:
        """Take note of what its host told."""
        self.host = facts.host
        self.job = facts.job
        names = [tier.name for tier in tiers]
        self.tier = facts.tier if facts.tier in names else names[0]
        self.cache = facts.cache
        self.transfer_port = facts.port
        # Hard links work between workers of one machine whose directories are on one file system.
        self.place = f"{facts.host}:{facts.device}"

    def spec(self, facts: WorkerFacts, site: Site) -> ev.WorkerSpec:
        """Return what the scheduler hears of it."""
        tier = next(each for each in site.tiers if each.name == self.tier)
        memory = facts.memory if facts.pin is not None else min(tier.memory, facts.memory)
        return ev.WorkerSpec(
            self.name,
            host=self.host,
            tier=self.tier,
            region=region_of(site.regions, site.home, self.tier, self.host, facts.region),
            slots=site.slots,
            gpus=max(tier.gpus, facts.gpus),
            gpu_model=facts.gpu_model,
            memory=memory,
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


_GREETING_BYTES = 1 << 20  # What a worker may answer first of all; it has a few thousand to say.

Reports = Sequence[FromWorker]
Then = Callable[[VineWorker, Reports], None]


class VineCalls:
    """Makes calls, and hands each answer to who waits for it. Its owner locks.

    :param key: with which calls and answers are sealed.
    :param forged: told of a worker whose answer has no seal.
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

    def key(self) -> str:
        """Return a key that was never used before."""
        return str(self.number())

    def make(
        self,
        worker: VineWorker,
        messages: Sequence[ToWorker],
        then: Then,
        inputs: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | None = None,
    ) -> int:
        """Have a worker do something.

        :param messages: the instructions, in order.
        :param then: called with the reports of the answer.
        :param inputs: name in the call's sandbox -> key of a file that the manager's process knows.
        :param outputs: likewise, what the call makes.
        :returns: the call's number.
        """
        number = next(self._numbers)
        worker.calls += 1
        sealed = seal_call(self._key, worker.name, worker.calls, b"".join(map(pack, messages)))
        self._open[number] = worker, then, sealed[:SIZE]
        most = _GREETING_BYTES if worker.calls == 1 else None  # Whoever it is, it has proven nothing yet.
        self.link.send(SubmitCall(number, worker.name, most, inputs or {}, outputs or {}, sealed))
        return number

    def answered(self, number: int, answer: bytes) -> None:
        """Hand an answer on."""
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
        """Take back a call that waits for a file which will never come."""
        if self._open.pop(number, None) is not None:
            self.link.send(CancelCall(number))

    def drop(self, number: int) -> None:
        """No answer will come."""
        self._open.pop(number, None)

    def lost(self, worker: VineWorker) -> None:
        """No answer of a worker will come any more."""
        for number in [number for number, (whose, _, _) in self._open.items() if whose is worker]:
            del self._open[number]


class Watch:
    """What is to be seen to once a second. Its owner locks.

    :param heard: called with the reports of each answer.
    :ivar look_at: when, by the monotonic clock, `look` is to be called.
    """

    def __init__(self, patience: Patience, calls: VineCalls, heard: Callable[[VineWorker, Reports], None]) -> None:
        self._patience = patience
        self._calls = calls
        self._heard = heard
        self._workers: dict[str, VineWorker] = {}  # Those that have told what they are, and are to stay.
        self._leaving: dict[str, tuple[VineWorker, float]] = {}  # Those that were told to go, and by when.
        self._beats = Heartbeats(patience, self._ask)
        self.look_at = 0.0
        self.heard = self._beats.heard

    def _ask(self, name: str) -> None:
        self._calls.make(self._workers[name], [Ping()], self._heard)

    def greeted(self, worker: VineWorker) -> None:
        """A worker has told what it is, and answers from now on."""
        self._workers[worker.name] = worker
        self._beats.watch(worker.name)

    def dismissed(self, worker: VineWorker) -> None:
        """A worker was told to go."""
        self._leaving.setdefault(worker.name, (worker, time.monotonic() + self._patience.leave))
        self._forget(worker)

    def lost(self, worker: VineWorker) -> None:
        """A worker is gone."""
        self._leaving.pop(worker.name, None)
        self._forget(worker)

    def _forget(self, worker: VineWorker) -> None:
        self._workers.pop(worker.name, None)
        self._beats.forget(worker.name)

    def look(self, now: float, hearing: bool) -> list[tuple[VineWorker, str]]:
        """Return the workers that are lost, each with the reason.

        :param hearing: whether answers can come: the manager may be busy with a large file.
        """
        self.look_at = now + self._patience.look
        for worker in self._workers.values():
            if worker.due and self._has_overdue(worker, now):
                self._beats.urge(worker.name)
        return [*self._silent(now, hearing), *self._still_there(now)]

    def _has_overdue(self, worker: VineWorker, now: float) -> bool:
        """Return whether a call has taken longer than its timeout: once its host has answered, that sees to it."""
        for call in [call for call in worker.due if not self._calls.is_open(call)]:
            del worker.due[call]
        overdue = [call for call, due in worker.due.items() if due + self._patience.overdue <= now]
        for call in overdue:
            del worker.due[call]
        return bool(overdue)

    def _silent(self, now: float, hearing: bool) -> Iterator[tuple[VineWorker, str]]:
        for name in self._beats.look(now, hearing):
            yield self._workers[name], f"its context host has not answered for {self._beats.silent_for(name):.0f} s"

    def _still_there(self, now: float) -> Iterator[tuple[VineWorker, str]]:
        for worker, by in list(self._leaving.values()):
            if by <= now:
                yield worker, f"it was told to go {self._patience.leave:.0f} s ago, and is still there"
