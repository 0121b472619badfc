"""Simulated staging: files come from a shared filesystem, the internet or the driver, and spread from worker to worker.

Links share their bandwidth evenly among their transfers.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ctxflow.executors.simulated import SimulatedMachine, Timers

if TYPE_CHECKING:
    from ctxflow.simulator.workload_file import ContextEntry, WorkloadFile

_BYTES = 1e9 / 8  # A second, of 1 Gbit/s.


@dataclasses.dataclass(slots=True, eq=False)
class LinkTransfer:
    """A transfer in flight over a link."""

    size: float
    ends: float
    done: Callable[[], None]
    running: bool = True


class FairLink:
    """Processor sharing: n transfers get 1/n of the bandwidth each, and none more than `per_transfer`; bytes a second.

    All transfers get the same rate, so the bytes that one which was there all the time would have got are a clock for
    all of them: each ends when that clock has advanced by its size. Joining and leaving cost O(log n), not O(n).
    """

    def __init__(self, timers: Timers, bandwidth: float, per_transfer: float = math.inf) -> None:
        self.moved = 0.0
        self._timers, self._bandwidth, self._per_transfer = timers, bandwidth, per_transfer
        self._served = self._looked = 0.0
        self._count = 0
        self._heap: list[tuple[float, int, LinkTransfer]] = []
        self._order = itertools.count()
        self._plan = 0

    @property
    def rate(self) -> float:
        """Bytes a second that each transfer gets now."""
        return min(self._per_transfer, self._bandwidth / max(1, self._count))

    def send(self, size: float, done: Callable[[], None]) -> LinkTransfer:
        """Begin a transfer of so many bytes; `done` is called at its end."""
        self._advance()
        transfer = LinkTransfer(size, self._served + size, done)
        heapq.heappush(self._heap, (transfer.ends, next(self._order), transfer))
        self._count += 1
        self._plan_next()
        return transfer

    def cancel(self, transfer: LinkTransfer) -> None:
        """End a transfer early; what it moved counts. Without effect on one that has ended."""
        if not transfer.running:
            return
        self._advance()
        transfer.running = False
        self.moved += transfer.size - (transfer.ends - self._served)
        self._count -= 1
        self._plan_next()

    def _advance(self) -> None:
        now = self._timers.now
        self._served += (now - self._looked) * self.rate
        self._looked = now

    def _plan_next(self) -> None:
        """Set the timer for the next transfer's end; an earlier timer no longer counts."""
        self._plan += 1
        while self._heap and not self._heap[0][2].running:
            heapq.heappop(self._heap)
        if self._heap:
            wait = max(0.0, self._heap[0][0] - self._served) / self.rate
            self._timers.at(self._timers.now + wait, self._end_next, self._plan)

    def _end_next(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        ends, _, transfer = heapq.heappop(self._heap)
        self._served = max(self._served, ends)
        transfer.running = False
        self._count -= 1
        self.moved += transfer.size
        self._plan_next()
        transfer.done()


@dataclasses.dataclass(frozen=True)
class Origin:
    """A place that files come from, in bytes a second for all transfers and for one.

    :ivar operations: files that it can open a second, for all together; infinity where that is no limit.
    """

    bandwidth: float
    per_reader: float = math.inf
    operations: float = math.inf


@dataclasses.dataclass(frozen=True)
class Part:
    """Files of a context that go together.

    :ivar size: bytes. :ivar origin: the name of the place that they come from.
    :ivar files: how many files must be opened there.
    :ivar shared: whether workers that have them send them on; else each gets them from the origin.
    :ivar unpacking: seconds from their arrival until they can be used.
    """

    name: str
    size: float
    origin: str
    files: int = 1
    shared: bool = True
    unpacking: float = 0.0


@dataclasses.dataclass(eq=False)
class _Fetch:
    """What a worker awaits of one context."""

    host: str
    done: Callable[[], None]
    left: int
    cancelled: bool = False
    transfers: list[tuple[FairLink, LinkTransfer]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class _Copy:
    """A shared part on a host, or in flight to it.

    :ivar order: of those of a part. `source`: the host that sends it; None for the origin. `receivers`: to whom it
        sends itself now.
    :ivar waiting: fetches of the host's workers that await it.
    """

    host: str
    users: set[_Fetch]
    order: int
    there: bool = False
    source: _Copy | None = None
    link: FairLink | None = None
    transfer: LinkTransfer | None = None
    receivers: list[_Copy] = dataclasses.field(default_factory=list)
    waiting: list[_Fetch] = dataclasses.field(default_factory=list)


class TreeStaging:
    """Staging of files once from their origins, and then from worker to worker.

    A host has a file once, whichever of its workers fetched it, and sends a shared part to at most `fan_out` others at
    a time over its own link, which they share; the origin sends it to `from_origin` at a time. Hosts that find no free
    source wait in line. A lost worker's files go with it, unless hosts keep them, and transfers from its host begin
    anew from elsewhere.

    :param files: context -> its parts; a context that is not named has no files. :param origins: by name.
    :param peer_bandwidth: of a host's link, in bytes a second.
    :param fan_out: how many others a host sends a part to at a time.
    :param from_origin: how many transfers of a shared part its origin makes at a time.
    :param cache: whether a host keeps, unpacked, what its workers had, for the next worker there.
    :raises ValueError: for a part whose origin is not given.
    """

    def __init__(
        self,
        files: Mapping[str, Sequence[Part]],
        origins: Mapping[str, Origin],
        peer_bandwidth: float = 1.25e9,
        fan_out: int = 3,
        from_origin: int = 1,
        cache: bool = False,
    ) -> None:
        for part in (part for parts in files.values() for part in parts):
            if part.origin not in origins:
                raise ValueError(f"the origin {part.origin!r} of {part.name!r} is not given: there are {list(origins)}")
        self._files, self._origins, self._peer_bandwidth = files, origins, peer_bandwidth
        self._fan_out, self._from_origin, self._cache = fan_out, from_origin, cache
        self._kept: set[tuple[str, str]] = set()  # Hosts, and the parts that they keep.
        self._fetches: dict[tuple[str, str], _Fetch] = {}
        self._of_worker: dict[str, set[str]] = {}
        self._trees: dict[str, _Tree] = {}

    def attach(self, timers: Timers) -> None:
        """Use a simulation's clock."""
        self._timers = timers
        self._links = {name: FairLink(timers, o.bandwidth, o.per_reader) for name, o in self._origins.items()}
        self._opening = {name: FairLink(timers, o.operations) for name, o in self._origins.items()}
        self._peers: dict[str, FairLink] = {}

    @property
    def moved(self) -> dict[str, float]:
        """Bytes that came from each origin, and from "peers"."""
        found = {name: link.moved for name, link in self._links.items()}
        return {**found, "peers": sum(link.moved for link in self._peers.values())}

    def peer_link(self, host: str) -> FairLink:
        """Return the link over which a host sends."""
        if host not in self._peers:
            self._peers[host] = FairLink(self._timers, self._peer_bandwidth, self._peer_bandwidth)
        return self._peers[host]

    def fetch(self, worker: str, machine: SimulatedMachine, context: str, done: Callable[[], None]) -> None:
        """Bring a context's files to a worker."""
        self._of_worker.setdefault(worker, set()).add(context)
        parts = self._files.get(context, ())
        fetch = _Fetch(machine.host_name, done, len(parts))
        if not parts:
            done()
            return
        self._fetches[worker, context] = fetch
        for part in parts:
            if part.shared:
                self._tree(part).want(fetch, self.keeps(fetch.host, part))
            elif self.keeps(fetch.host, part):
                self.arrived(fetch, part)
            else:
                link = self._links[part.origin]
                self.open_files(part, lambda part=part, link=link: self._read(fetch, part, link))  # type: ignore[misc]

    def open_files(self, part: Part, then: Callable[[], None]) -> None:
        """Open a part's files at its origin, which takes its share of what the origin can open."""
        if self._origins[part.origin].operations < math.inf:
            self._opening[part.origin].send(part.files, then)
        else:
            then()

    def _read(self, fetch: _Fetch, part: Part, link: FairLink) -> None:
        if not fetch.cancelled:
            fetch.transfers.append((link, link.send(part.size, lambda: self.arrived(fetch, part))))

    def arrived(self, fetch: _Fetch, part: Part) -> None:
        """Note that a part is on a fetch's worker."""
        unpacking = 0.0 if self.keeps(fetch.host, part) else part.unpacking
        self._timers.at(self._timers.now + unpacking, self._unpacked, fetch, part)

    def keeps(self, host: str, part: Part) -> bool:
        """Return whether a host has a part from an earlier worker, or another one that is there."""
        return (host, part.name) in self._kept

    def _unpacked(self, fetch: _Fetch, part: Part) -> None:
        if self._cache and not fetch.cancelled:
            self._kept.add((fetch.host, part.name))
        fetch.left -= 1
        if not fetch.left and not fetch.cancelled:
            fetch.done()

    def _tree(self, part: Part) -> _Tree:
        if part.name not in self._trees:
            self._trees[part.name] = _Tree(part, self, self._links[part.origin], self._fan_out, self._from_origin)
        return self._trees[part.name]

    def remove(self, worker: str, context: str) -> None:
        """Remove a context's files from a worker, and what its host keeps of them, or cancel their transfers."""
        fetch = self._fetches.get((worker, context))
        if fetch is not None:
            self._kept.difference_update((fetch.host, part.name) for part in self._files[context])
        self._release(worker, context)

    def _release(self, worker: str, context: str) -> None:
        fetch = self._fetches.pop((worker, context), None)
        if fetch is None:
            return
        fetch.cancelled = True
        for link, transfer in fetch.transfers:
            link.cancel(transfer)
        for part in self._files[context]:
            if part.shared:
                self._trees[part.name].release(fetch)

    def lost(self, worker: str) -> None:
        """Remove a lost worker with all its files, but for those that its host keeps."""
        for context in sorted(self._of_worker.pop(worker, ())):
            self._release(worker, context)


class _Tree:
    """The distribution tree of one shared part: hosts that have it, transfers in flight, and hosts that wait."""

    def __init__(self, part: Part, staging: TreeStaging, origin: FairLink, fan_out: int, from_origin: int) -> None:
        self._part, self._staging, self._origin, self._fan_out = part, staging, origin, fan_out
        self._free_at_origin = from_origin
        self._copies: dict[str, _Copy] = {}
        self._senders: dict[str, _Copy] = {}  # Hosts that could send to one more, longest free first.
        self._line: collections.deque[_Copy] = collections.deque()
        self._order = itertools.count()

    def want(self, fetch: _Fetch, kept: bool = False) -> None:
        """Bring the part to a worker's host, unless it is there, or was `kept` there."""
        copy = self._copies.get(fetch.host)
        if copy is None:
            copy = self._copies[fetch.host] = _Copy(fetch.host, set(), next(self._order), there=kept)
            if kept:
                self._senders[copy.host] = copy
                self._pump()
            else:
                self._line.append(copy)
        copy.users.add(fetch)
        if copy.there:
            self._staging.arrived(fetch, self._part)
        else:
            copy.waiting.append(fetch)
            self._pump()

    def release(self, fetch: _Fetch) -> None:
        """Note that a worker needs it no longer; with the last worker of a host, the host's copy goes."""
        copy = self._copies.get(fetch.host)
        if copy is None or fetch not in copy.users:
            return
        copy.users.discard(fetch)
        copy.waiting = [other for other in copy.waiting if other is not fetch]
        if copy.users:
            return
        del self._copies[fetch.host]
        self._senders.pop(fetch.host, None)
        self._stop(copy)
        interrupted = sorted(copy.receivers, key=lambda other: other.order)
        for other in interrupted:
            self._stop(other)
        self._line.extendleft(reversed(interrupted))
        self._pump()

    def _stop(self, copy: _Copy) -> None:
        """End the transfer to a host, if there is one."""
        if copy.link is not None:
            if copy.transfer is not None:
                copy.link.cancel(copy.transfer)
            self._free(copy.source, copy)
        copy.link = copy.transfer = copy.source = None

    def _free(self, source: _Copy | None, receiver: _Copy) -> None:
        """Free a receiver's slot of a source."""
        if source is None:
            self._free_at_origin += 1
            return
        source.receivers.remove(receiver)
        if self._copies.get(source.host) is source:
            self._senders[source.host] = source

    def _pump(self) -> None:
        """Start the transfers of those who wait from free sources, peers before the origin."""
        while self._line and (self._senders or self._free_at_origin):
            copy = self._line.popleft()
            if self._copies.get(copy.host) is copy:
                self._send(copy)

    def _send(self, copy: _Copy) -> None:
        source = next(iter(self._senders.values()), None)
        copy.source = source
        if source is None:
            self._free_at_origin -= 1
            copy.link = self._origin
            self._staging.open_files(self._part, lambda: self._start(copy, self._origin))
            return
        source.receivers.append(copy)
        if len(source.receivers) >= self._fan_out:
            del self._senders[source.host]
        copy.link = self._staging.peer_link(source.host)
        self._start(copy, copy.link)

    def _start(self, copy: _Copy, link: FairLink) -> None:
        if copy.link is link and copy.transfer is None and self._copies.get(copy.host) is copy:
            copy.transfer = link.send(self._part.size, lambda: self._arrived(copy))

    def _arrived(self, copy: _Copy) -> None:
        source, copy.link, copy.transfer, copy.source = copy.source, None, None, None
        copy.there = True
        self._senders[copy.host] = copy
        self._free(source, copy)
        for fetch in copy.waiting:
            self._staging.arrived(fetch, self._part)
        copy.waiting = []
        self._pump()


def staging_of(workload: WorkloadFile, fan_out: int) -> TreeStaging:
    """Return the staging of a workload's contexts, over its links."""
    links = workload.links
    files = {
        context.name: [
            Part(
                context.name, context.files_gb * 1e9, context.origin, context.files, context.shared,
                context.unpack_seconds,
            )
        ]
        for context in workload.contexts
        if has_files(context)
    }  # fmt: skip
    origins = {
        "driver": Origin(links.driver * _BYTES),
        "filesystem": Origin(
            links.filesystem * _BYTES, links.filesystem_reader * _BYTES, links.filesystem_opens or math.inf
        ),
        "internet": Origin(links.internet * _BYTES),
    }
    return TreeStaging(files, origins, links.peers * _BYTES, fan_out, cache=workload.cache)


def has_files(context: ContextEntry) -> bool:
    """Return whether anything is staged for a context."""
    return context.files_gb > 0 or context.unpack_seconds > 0
