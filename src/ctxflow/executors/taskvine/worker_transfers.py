"""What goes from worker to worker: contexts' files along a tree, sessions' states one at a time.

`PeerGroups` and `Tree` only decide, as tables of who reaches whom, and who has, gets and awaits what: `stagings.py`
carries that out. Files go along a tree within each group.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from ctxflow.executors.contract import RunServices
from ctxflow.executors.taskvine.manager_messages import DeclareFile, DeclareTemp, Undeclare
from ctxflow.executors.taskvine.vine_workers import Reports, VineCalls, VineWorker
from ctxflow.host.messages import FileFailed, SendState, TakeState
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

# --- who reaches whom

_TRIED = 2  # Groups with which a host is tried, the largest first, before it is one of its own.
_MOST_APART = 10_000  # Pairs that are remembered.


class PeerGroups:
    """Groups of hosts that reach one another: no network is assumed, and TaskVine finds out too late.

    (It tries a pair for 5 minutes, or ends the worker that has the file.) A host is tried with one of the largest
    groups, in both directions; where none will do, it is in a group of its own, and the manager sends it its files.
    A pair that failed is not tried again. Hosts are forgotten with their last workers.

    :param allowed: whether hosts send one another anything.

    >>> groups = PeerGroups()
    >>> groups.found("n1"), groups.candidates("n2")
    (0, ['n1'])
    >>> groups.join("n2", "n1")
    0
    >>> groups.apart("n3", "n1")
    >>> groups.candidates("n3"), groups.found("n3"), groups.candidates("n3")
    ([], 1, [])
    """

    def __init__(self, allowed: bool = True) -> None:
        self._allowed = allowed
        self._group_of: dict[str, int] = {}
        self._hosts: dict[int, dict[str, None]] = {}
        self._apart: dict[frozenset[str], None] = {}
        self._founded = 0

    def of(self, host: str) -> int | None:
        """Return a host's group, None if it is not known yet."""
        return self._group_of.get(host)

    @property
    def proven(self) -> bool:
        """Whether all hosts are in one group, and more than one."""
        return len(self._hosts) == 1 and len(self._group_of) > 1

    def candidates(self, host: str) -> list[str]:
        """Return hosts with which this one is still to be tried, one of each group; none once it has a group."""
        if host in self._group_of or not self._allowed:
            return []
        largest = sorted(self._hosts.values(), key=len, reverse=True)[:_TRIED]
        return [
            next(iter(hosts)) for hosts in largest if not any(frozenset((host, each)) in self._apart for each in hosts)
        ]

    def join(self, host: str, other: str) -> int:
        """Note that a host and one that has a group reach each other; return the group."""
        group = self._group_of[host] = self._group_of[other]
        self._hosts[group][host] = None
        return group

    def apart(self, host: str, other: str) -> None:
        """Note that two hosts do not reach each other."""
        self._apart[frozenset((host, other))] = None
        if len(self._apart) > _MOST_APART:
            del self._apart[next(iter(self._apart))]

    def found(self, host: str) -> int:
        """Put a host into a group of its own; return that."""
        group = self._group_of[host] = self._founded
        self._founded += 1
        self._hosts[group] = {host: None}
        return group

    def leave(self, host: str) -> int | None:
        """Forget a host, whose last worker is gone; return its group if that was the last of it."""
        group = self._group_of.pop(host, None)
        if group is None:
            return None
        del self._hosts[group][host]
        if self._hosts[group]:
            return None
        del self._hosts[group]
        return group


# --- the tree of contexts' files


@dataclass(frozen=True)
class _Transfer:
    digest: str
    worker: str
    generation: int


class Seed(_Transfer):
    """The manager sends the file to this worker, which makes it a TaskVine temp file of this generation."""


class Fetch(_Transfer):
    """This worker gets the temp file through TaskVine into its own cache (at once if it is the seeder)."""


class Cancel(_Transfer):
    """Cancel this worker's outstanding fetch, which can never end, since the last replica is gone."""


@dataclass(frozen=True)
class Link:
    """This worker hard-links the file from a sibling's cache: the path that the sibling reported."""

    digest: str
    worker: str
    path: str


Task = Seed | Fetch | Link  # what a worker carries out, and reports
Order = Task | Cancel
How = Literal["seed", "fetch", "link"]
_KINDS: dict[How, type] = {"seed": Seed, "fetch": Fetch, "link": Link}


@dataclass
class _Siblings:
    """The workers of one host that have to do with one file, each in at most one of the three."""

    holders: dict[str, str] = field(default_factory=dict)  # worker -> path in its cache
    outstanding: dict[str, Task] = field(default_factory=dict)
    waiting: dict[str, None] = field(default_factory=dict)  # in order of asking


@dataclass
class _File:
    digest: str
    generation: int = 0  # of the latest seed; every seed has its own
    seeder: str | None = None  # while its seed is outstanding
    replicas: set[str] = field(default_factory=set)  # live workers that seeded or fetched this generation
    hosts: dict[Hashable, _Siblings] = field(default_factory=dict)


class Tree:
    """Decides how each worker gets each file: one seed per file, one fetch per host, links for the siblings.

    Guarantees: at most one seed of a file is outstanding, and at most one transfer per host and file except where a
    hard link failed; no order is repeated while outstanding; if every order ends in a report, each worker that asked
    gets the file, fails or is lost; a report that matches no outstanding order (an earlier generation, a lost worker)
    changes nothing, nor does asking again for what was not given up. A file leaves a worker's cache only with the
    worker. Carry orders out as they are listed; never reuse a lost worker's name. Cost: what waits on that host; all
    its hosts when a seed or generation ends.

    >>> tree = Tree()
    >>> tree.want("w1", "host-a", "d")
    [Seed(digest='d', worker='w1', generation=1)]
    >>> tree.want("w2", "host-a", "d"), tree.seeded("w1", "d", 1)
    ([], [Fetch(digest='d', worker='w1', generation=1)])
    >>> tree.arrived("w1", "d", "/cache/1/d")
    [Link(digest='d', worker='w2', path='/cache/1/d')]
    """

    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        self._host_of: dict[str, Hashable] = {}
        self._digests_of: dict[str, set[str]] = {}
        self._unlinkable: dict[str, set[str]] = {}  # worker -> siblings with whom a hard link failed

    def want(self, worker: str, host: Hashable, digest: str) -> list[Order]:
        """Ask for a file; `host` is a key of machine and disk on which hard links work (ValueError if it changes)."""
        siblings = self._enter(worker, host, digest)
        if worker in siblings.holders or worker in siblings.outstanding or worker in siblings.waiting:
            return []
        siblings.waiting[worker] = None
        return self._serve(self._files[digest], siblings)

    def _enter(self, worker: str, host: Hashable, digest: str) -> _Siblings:
        """Return the entry of this worker's host, which is made if need be."""
        if self._host_of.setdefault(worker, host) != host:
            raise ValueError(f"worker {worker} is on host {self._host_of[worker]!r}: ask with that host, not {host!r}")
        self._digests_of.setdefault(worker, set()).add(digest)
        return self._files.setdefault(digest, _File(digest)).hosts.setdefault(host, _Siblings())

    def seeded(self, worker: str, digest: str, generation: int) -> list[Order]:
        """Note that a seed succeeded: the worker has the temp file, though not yet in its own cache."""
        if self._end(worker, digest, generation, Seed) is None:
            return []
        file = self._files[digest]
        file.replicas.add(worker)
        self._siblings(worker, digest).outstanding[worker] = own = Fetch(digest, worker, generation)
        return [own, *self._serve_all(file)]

    def arrived(self, worker: str, digest: str, path: str, generation: int | None = None) -> list[Order]:
        """Note that a fetch or link succeeded: the file is in the worker's own cache at `path`.

        `generation` is the fetch's, None for a link; a fetch reported without it is taken for the outstanding one.
        """
        order = self._end(worker, digest, generation, Fetch, Link)
        if order is None:
            return []
        file, siblings = self._files[digest], self._siblings(worker, digest)
        if isinstance(order, Fetch):
            file.replicas.add(worker)
        siblings.holders[worker] = path
        return self._serve(file, siblings)

    def found(self, worker: str, host: Hashable, digest: str, path: str) -> list[Order]:
        """Note that a worker has a file that nobody sent it: from its host's cache, at `path` of its own cache now."""
        siblings = self._enter(worker, host, digest)
        if worker in siblings.outstanding:
            return []
        siblings.waiting.pop(worker, None)
        siblings.holders[worker] = path
        return self._serve(self._files[digest], siblings)

    def failed(self, worker: str, digest: str, how: How, generation: int | None = None) -> list[Order]:
        """Note that an order failed; `generation` is as in `arrived`.

        After a link the worker fetches instead, and these two never link again, unless the source was lost. After a
        seed or fetch the file is given up for this worker; who waited for it gets another chance.
        """
        order = self._end(worker, digest, generation, _KINDS[how])
        if order is None:
            return []
        file, siblings = self._files[digest], self._siblings(worker, digest)
        if isinstance(order, Seed):
            return self._serve_all(file)
        if isinstance(order, Fetch):
            return self._serve(file, siblings)
        for source in [holder for holder, path in siblings.holders.items() if path == order.path]:
            self._unlinkable.setdefault(worker, set()).add(source)
            self._unlinkable.setdefault(source, set()).add(worker)
        if not file.replicas:
            siblings.waiting[worker] = None
            return self._serve(file, siblings)
        siblings.outstanding[worker] = fetch = Fetch(digest, worker, file.generation)
        return [fetch]

    def lost(self, worker: str) -> list[Order]:
        """Note that the worker is gone, with all that it had."""
        orders: list[Order] = []
        for digest in sorted(self._digests_of.pop(worker, ())):
            file, siblings = self._files[digest], self._siblings(worker, digest)
            everywhere = file.seeder == worker or file.replicas == {worker}
            self._end(worker, digest, None, Seed, Fetch, Link)
            siblings.holders.pop(worker, None)
            siblings.waiting.pop(worker, None)
            file.replicas.discard(worker)
            orders += self._serve_all(file) if everywhere else self._serve(file, siblings)
            if siblings == _Siblings():
                file.hosts.pop(self._host_of[worker], None)
        self._host_of.pop(worker, None)
        for sibling in self._unlinkable.pop(worker, ()):
            self._unlinkable[sibling].discard(worker)
        return orders

    def generations(self) -> Iterator[tuple[str, int]]:
        """Yield each file that was seeded, and its latest generation."""
        return ((file.digest, file.generation) for file in self._files.values() if file.generation)

    def has(self, worker: str, digest: str) -> bool:
        """Return whether the file is in the worker's own cache."""
        return worker in self._siblings(worker, digest).holders

    def _siblings(self, worker: str, digest: str) -> _Siblings:
        """Return the entry of this worker's host; an empty one of no effect where there is none."""
        hosts = self._files[digest].hosts if digest in self._files else {}
        return hosts.get(self._host_of.get(worker), _Siblings())

    def _choose(self, file: _File, siblings: _Siblings, worker: str) -> Task | None:
        """Return the order that gets this worker the file now (a seed is noted at once), None if it should wait."""
        unlinkable = self._unlinkable.get(worker, ())
        source = next((holder for holder in siblings.holders if holder not in unlinkable), None)
        if source is not None:
            return Link(file.digest, worker, siblings.holders[source])
        if siblings.outstanding or file.seeder is not None:
            return None
        if file.replicas:
            return Fetch(file.digest, worker, file.generation)
        file.seeder, file.generation = worker, file.generation + 1
        return Seed(file.digest, worker, file.generation)

    def _end(self, worker: str, digest: str, generation: int | None, *kinds: type) -> Task | None:
        """Remove and return the worker's outstanding order, if it is the one meant."""
        siblings = self._siblings(worker, digest)
        order = siblings.outstanding.get(worker)
        if not isinstance(order, kinds) or generation not in {None, getattr(order, "generation", None)}:
            return None
        if isinstance(order, Seed):
            self._files[digest].seeder = None
        return siblings.outstanding.pop(worker)

    def _serve(self, file: _File, siblings: _Siblings) -> list[Order]:
        """Return orders for those of one host who need wait no longer."""
        orders: list[Order] = []
        for worker in siblings.waiting:
            order = self._choose(file, siblings, worker)
            if order is not None:
                siblings.outstanding[worker] = order
                orders.append(order)
            elif not siblings.holders:
                break  # The others wait for the same.
        for given in orders:
            del siblings.waiting[given.worker]
        return orders

    def _serve_all(self, file: _File) -> list[Order]:
        """Return orders for every host, seeds first where they do the most good; cancel fetches that cannot end."""
        orders: list[Order] = []
        for siblings in file.hosts.values() if not file.replicas else ():
            for fetch in [order for order in siblings.outstanding.values() if isinstance(order, Fetch)]:
                del siblings.outstanding[fetch.worker]
                siblings.waiting[fetch.worker] = None
                orders.append(Cancel(file.digest, fetch.worker, fetch.generation))
        for siblings in sorted(file.hosts.values(), key=lambda siblings: bool(siblings.holders)):
            orders += self._serve(file, siblings)
        return orders


@dataclass(eq=False)
class _Carrying:
    """A state in flight.

    :ivar temp: the key of its file, "" within a host. :ivar path: where that is on this machine, if it goes by way
        of it. :ivar call: the one that waits for it.
    """

    command: cmd.Carry
    temp: str = ""
    path: str = ""
    call: int = 0


class StateTransfers:
    """Brings frozen states of sessions to other workers. Its owner locks.

    Within a host a state is moved. Between hosts a call on the source writes it as a TaskVine temp file, which TaskVine
    sends to where a call asks for it; through this machine where these do not reach each other.

    :param reach: whether two workers do.
    """

    def __init__(
        self,
        run: RunServices,
        calls: VineCalls,
        report: Callable[[ev.Event], None],
        reach: Callable[[VineWorker, VineWorker], bool],
    ) -> None:
        self._run, self._calls, self._report, self._reach = run, calls, report, reach
        self._carrying: dict[_Carrying, None] = {}

    def carry(self, source: VineWorker | None, target: VineWorker, command: cmd.Carry) -> None:
        """Bring a state from one worker to another."""
        if source is None:
            self._lost(command, f"the worker {command.source} is gone")
            return
        carrying = _Carrying(command)
        self._carrying[carrying] = None
        if source.place == target.place:
            self._take(carrying, target, TakeState(command.session, command.made, cache=source.cache))
            return
        name = f"ctxflow-state-{command.session}-{command.made}"
        number = self._calls.number()
        carrying.temp = f"state {command.session} {command.made} {number}"
        if self._reach(source, target):
            self._calls.link.send(DeclareTemp(carrying.temp))
        else:
            carrying.path = os.path.join(self._run.directory, "taskvine", f"state-{number}")
            self._calls.link.send(DeclareFile(carrying.temp, carrying.path))

        def sent(_: VineWorker, reports: Reports) -> None:
            if carrying not in self._carrying:  # The target was lost meanwhile.
                self._forget(carrying)
                return
            problem = _problem(reports)
            if problem is not None:
                self._end(carrying, problem)
            else:
                self._take(carrying, target, TakeState(command.session, command.made, input=name))

        message = SendState(command.session, command.made, name)
        self._calls.make(source, [message], sent, outputs={name: carrying.temp})

    def _take(self, carrying: _Carrying, target: VineWorker, message: TakeState) -> None:
        def taken(_: VineWorker, reports: Reports) -> None:
            self._end(carrying, _problem(reports))

        inputs = {message.input: carrying.temp} if message.input else None
        carrying.call = self._calls.make(target, [message], taken, inputs)

    def _end(self, carrying: _Carrying, problem: str | None) -> None:
        self._forget(carrying)
        command = carrying.command
        if problem is None:
            self._report(ev.StateArrived(self._run.clock(), command.worker, command.session, command.made))
        else:
            self._lost(command, problem)

    def _lost(self, command: cmd.Carry, problem: str) -> None:
        message = f"the state of a session cannot be brought to its worker: {problem}"
        self._report(ev.StateLost(self._run.clock(), command.worker, command.session, command.made, message))

    def _forget(self, carrying: _Carrying) -> None:
        self._carrying.pop(carrying, None)
        if carrying.temp:
            self._calls.link.send(Undeclare(carrying.temp))
        if carrying.path:
            with contextlib.suppress(OSError):
                os.unlink(carrying.path)

    def lost(self, worker: str) -> None:
        """Forget what came from a worker that is gone, or went to it; the scheduler knows."""
        for carrying in list(self._carrying):
            if worker in (carrying.command.source, carrying.command.worker):
                if carrying.call:
                    self._calls.cancel(carrying.call)
                self._forget(carrying)


def _problem(reports: Reports) -> str | None:
    return next((report.trouble.message for report in reports if isinstance(report, FileFailed)), None)
