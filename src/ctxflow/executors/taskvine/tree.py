"""How each worker gets each file: the spanning tree over hosts, as a pure table of who has, gets and awaits what.

Reports go in, orders come out. What does not live here: moving the bytes and the cap per source (TaskVine),
hard-linking (the context host), noticing that a worker is gone (the manager), any clock.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class _Transfer:
    digest: str
    worker: str
    generation: int


class Seed(_Transfer):
    """The manager sends the file to this worker, which makes it a TaskVine temp file of this generation."""


class Fetch(_Transfer):
    """This worker gets the temp file through TaskVine into its own cache (at once, if it is the seeder)."""


class Cancel(_Transfer):
    """This worker's outstanding fetch can never end, since the last replica is gone: take it back."""


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
    changes nothing. Orders are to be carried out in the order given; a lost worker's name is never used again.

    Cost: what waits on that host; when a seed ends or the last replica is gone, the hosts that have to do with the file.

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
        """Ask for a file; asking again changes nothing, unless the file was given up or forgotten.

        `host` is an opaque key of the machine and disk on which hard links work: ValueError if a worker's changes.
        """
        if self._host_of.setdefault(worker, host) != host:
            raise ValueError(f"worker {worker} is on host {self._host_of[worker]!r}: ask with that host, not {host!r}")
        self._digests_of.setdefault(worker, set()).add(digest)
        file = self._files.setdefault(digest, _File(digest))
        siblings = file.hosts.setdefault(host, _Siblings())
        if worker in siblings.holders or worker in siblings.outstanding or worker in siblings.waiting:
            return []
        siblings.waiting[worker] = None
        return self._serve(file, host)

    def seeded(self, worker: str, digest: str, generation: int) -> list[Order]:
        """Take the report that a seed ended well: the worker has the temp file, though not yet in its own cache."""
        if self._end(worker, digest, generation, Seed) is None:
            return []
        file = self._files[digest]
        file.replicas.add(worker)
        return [self._give(file, Fetch(digest, worker, generation)), *self._serve_all(file)]

    def arrived(self, worker: str, digest: str, path: str, generation: int | None = None) -> list[Order]:
        """Take the report that a fetch or link ended well: the file is in the worker's own cache at `path`.

        `generation` is the fetch's, None for a link; a fetch reported without it is taken for the outstanding one.
        """
        order = self._end(worker, digest, generation, Fetch, Link)
        if order is None:
            return []
        file, host = self._files[digest], self._host_of[worker]
        if isinstance(order, Fetch):
            file.replicas.add(worker)
        file.hosts[host].holders[worker] = path
        return self._serve(file, host)

    def failed(self, worker: str, digest: str, how: How, generation: int | None = None) -> list[Order]:
        """Take the report that an order failed; `generation` is as in `arrived`.

        After a link the worker fetches instead, and these two never link again, unless the source has forgotten the
        file. After a seed or fetch the file is given up for this worker; who waited for it gets another chance.
        """
        order = self._end(worker, digest, generation, _KINDS[how])
        if order is None:
            return []
        file, host, siblings = self._files[digest], self._host_of[worker], self._siblings(worker, digest)
        if isinstance(order, Seed):
            return self._serve_all(file)
        if isinstance(order, Fetch):
            return self._serve(file, host)
        for source in [holder for holder, path in siblings.holders.items() if path == order.path]:
            self._unlinkable.setdefault(worker, set()).add(source)
            self._unlinkable.setdefault(source, set()).add(worker)
        if file.replicas:
            return [self._give(file, Fetch(digest, worker, file.generation)), *self._serve(file, host)]
        siblings.waiting[worker] = None
        return self._serve(file, host)

    def forget(self, worker: str, digest: str) -> list[Order]:
        """Take the report that the file left the worker's own cache: siblings cannot link from it any more.

        TaskVine's copy is another: the worker stays a replica until it is lost or the temp file is retired.
        """
        self._siblings(worker, digest).holders.pop(worker, None)
        return []

    def lost(self, worker: str) -> list[Order]:
        """Take the report that the worker is gone, with all that it had."""
        orders: list[Order] = []
        for digest in sorted(self._digests_of.pop(worker, ())):
            file, siblings = self._files[digest], self._siblings(worker, digest)
            seeding, last = file.seeder == worker, file.replicas == {worker}
            self._end(worker, digest, None, Seed, Fetch, Link)
            siblings.holders.pop(worker, None)
            siblings.waiting.pop(worker, None)
            file.replicas.discard(worker)
            if last:
                orders += self._start_over(file)
            elif seeding:
                orders += self._serve_all(file)
            else:
                orders += self._serve(file, self._host_of[worker])
            if not (siblings.holders or siblings.outstanding or siblings.waiting):
                file.hosts.pop(self._host_of[worker], None)
        self._host_of.pop(worker, None)
        for sibling in self._unlinkable.pop(worker, ()):
            self._unlinkable[sibling].discard(worker)
        return orders

    def retire(self, digest: str) -> list[Order]:
        """Give up the temp file, taken back to free its disk (see `idle`) or found unusable: the next is seeded."""
        file = self._files.get(digest)
        if file is None or not file.replicas:
            return []
        file.replicas.clear()
        return self._start_over(file)

    def has(self, worker: str, digest: str) -> bool:
        """Whether the file is in the worker's own cache."""
        return worker in self._siblings(worker, digest).holders

    def idle(self, digest: str) -> bool:
        """Whether nobody holds, gets or awaits the file, so that its temp file may be taken back and retired."""
        hosts = self._files[digest].hosts.values() if digest in self._files else ()
        return not any(siblings.holders or siblings.outstanding or siblings.waiting for siblings in hosts)

    def validate(self) -> None:
        """Check the table's invariants, for tests (AssertionError)."""
        for file in self._files.values():
            assert not (file.seeder and file.replicas), "a seed beside replicas"
            assert file.replicas <= self._host_of.keys(), "a replica on a lost worker"
            for host, siblings in file.hosts.items():
                workers = [*siblings.holders, *siblings.outstanding, *siblings.waiting]
                assert len(workers) == len(set(workers)), "a worker in two states"
                assert all(self._host_of[worker] == host for worker in workers), "a worker on another host"
                assert not siblings.waiting or siblings.outstanding or file.seeder, "somebody waits for nothing"
                for worker, order in siblings.outstanding.items():
                    assert isinstance(order, Link) or order.generation == file.generation, "an earlier generation"
                    assert isinstance(order, Seed) == (worker == file.seeder), "a seed beside another"
                    assert file.replicas or not isinstance(order, Fetch), "a fetch that can never end"

    def _siblings(self, worker: str, digest: str) -> _Siblings:
        """Those of this worker's host; of no effect where there are none."""
        hosts = self._files[digest].hosts if digest in self._files else {}
        return hosts.get(self._host_of.get(worker), _Siblings())

    def _choose(self, file: _File, siblings: _Siblings, worker: str) -> Task | None:
        """The order that gets this worker the file now, None if it should wait."""
        unlinkable = self._unlinkable.get(worker, ())
        source = next((holder for holder in siblings.holders if holder not in unlinkable), None)
        if source is not None:
            return Link(file.digest, worker, siblings.holders[source])
        if any(sibling not in unlinkable for sibling in siblings.outstanding):
            return None
        if file.replicas:
            return Fetch(file.digest, worker, file.generation)
        return None if file.seeder is not None else Seed(file.digest, worker, file.generation + 1)

    def _give(self, file: _File, order: Task) -> Task:
        """Note the order as outstanding."""
        file.hosts[self._host_of[order.worker]].outstanding[order.worker] = order
        if isinstance(order, Seed):
            file.seeder, file.generation = order.worker, order.generation
        return order

    def _end(self, worker: str, digest: str, generation: int | None, *kinds: type) -> Task | None:
        """Take the worker's outstanding order out, if it is the one meant."""
        siblings = self._siblings(worker, digest)
        order = siblings.outstanding.get(worker)
        if not isinstance(order, kinds) or generation not in {None, getattr(order, "generation", None)}:
            return None
        if isinstance(order, Seed):
            self._files[digest].seeder = None
        return siblings.outstanding.pop(worker)

    def _serve(self, file: _File, host: Hashable) -> list[Order]:
        """Orders for those of this host who need wait no longer.

        Where nobody holds the file, the first who must still wait ends it: what it waits for brings us back here.
        """
        siblings, orders = file.hosts.get(host, _Siblings()), list[Order]()
        for worker in siblings.waiting:
            order = self._choose(file, siblings, worker)
            if order is not None:
                orders.append(self._give(file, order))
            elif not siblings.holders:
                break
        for given in orders:
            del siblings.waiting[given.worker]
        return orders

    def _serve_all(self, file: _File) -> list[Order]:
        """The same on every host, first where nobody holds the file: a seed does the most good there."""
        hosts = sorted(file.hosts, key=lambda host: bool(file.hosts[host].holders))
        return [order for host in hosts for order in self._serve(file, host)]

    def _start_over(self, file: _File) -> list[Order]:
        """The last replica is gone: take the fetches back, and get the file to those who want it in another way."""
        orders: list[Order] = []
        for siblings in file.hosts.values():
            for fetch in [order for order in siblings.outstanding.values() if isinstance(order, Fetch)]:
                del siblings.outstanding[fetch.worker]
                siblings.waiting[fetch.worker] = None
                orders.append(Cancel(file.digest, fetch.worker, fetch.generation))
        return orders + self._serve_all(file)
