"""Which workers this machine has, how many are wanted, who replaces one that is gone, and which GPUs each has."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ctxflow.errors import counted
from ctxflow.executors.contract import EngineFailed
from ctxflow.executors.embedded.local_worker import LocalWorker, share
from ctxflow.host.call_surroundings import AROUND
from ctxflow.host.library_process import KeptLogs
from ctxflow.host.linux import advice, none_left
from ctxflow.topology import Topology, of_gpus, ordered, position, to_graph, used_by
from ctxflow.topology.machine import Device, read_machine

logger = logging.getLogger("ctxflow")
_LOOK_SECONDS = 1.0
_MOST_LOGS = 50  # Of workers that have ended.
_STILLBIRTHS = 5  # Workers that may fail to start in a row, beside one for each place.


class LocalWorkers:
    """The workers of this machine; all calls are made under the engine's lock.

    :param places: how many workers the machine is shared among.
    :param devices: its GPUs. :param gpus_per_worker: how many each worker has.
    :param rejoin_seconds: how long after the loss of a worker another takes its place.
    :param slowdowns: factor by which the first, second, ... worker is slower.
    :ivar there: by name. :ivar wanted: how many, beside those that were asked for with devices of their own.
    :ivar failure: why none can be started any more, once that is clear.
    :ivar next_at: when `start_due` is to be called next, on the run's clock; None for never.
    """

    def __init__(
        self,
        places: int,
        devices: Sequence[Device],
        gpus_per_worker: int,
        rejoin_seconds: float,
        slowdowns: Sequence[float],
    ) -> None:
        self.there: dict[str, LocalWorker] = {}
        self.wanted = 0
        self.failure: EngineFailed | None = None
        self.rejoin_seconds = rejoin_seconds
        self.shares = GpuShares(devices, places, gpus_per_worker)
        self._places = places
        self._has_gpus = bool(devices)
        self._slowdowns = list(slowdowns)
        self._begun = 0
        self._kept_logs = KeptLogs(_MOST_LOGS)
        self._respawn_at: list[float] = []  # When the next ones are started.
        self.next_at: float | None = None
        self._undead: list[LocalWorker] = []  # With processes that were killed and do not end: they keep their GPUs.
        self._look_at = 0.0
        self._told = False  # That there are no descriptors for another.
        self._stillborn = 0  # Workers that ended before they joined, since the last one that joined.

    def open(self, scratch: str, logs: str, clock: Callable[[], float], begun: Callable[[LocalWorker], None]) -> None:
        """Say where workers keep their files and their output, and who is told of each that begins."""
        self._scratch, self._logs, self._clock, self._tell = scratch, logs, clock, begun

    def want(self, count: int) -> None:
        """Have so many; those that are too many go by themselves, when they are released."""
        self.wanted = count
        for _ in range(count - self._places_taken()):
            self.spawn()

    def ask(self, pin: int, devices: Sequence[str]) -> None:
        """Have one with devices of its own, as soon as they are free."""
        self.shares.ask(pin, devices)
        self._spawn_pinned()

    def forgo(self, pin: int) -> list[LocalWorker]:
        """Give up a request, and return its workers that are there, to be released."""
        self.shares.forgo(pin)
        return [worker for worker in self.there.values() if worker.pin == pin]

    def machine(self) -> dict[str, Any] | None:
        """Return the machine's topology as data, with who has which GPU; None if it has none."""
        held = [(device, worker) for worker in self.there.values() for each in worker.shares for device in each]
        return self.shares.machine({device.id: worker.name for device, worker in held})

    def joined(self, worker: LocalWorker) -> None:
        """It is up: workers can be started here."""
        worker.joined = True
        self._stillborn = 0

    def left(self, worker: LocalWorker) -> None:
        """It has ended, or was ended: see to its successor."""
        del self.there[worker.name]
        if worker.devices and (remains := worker.remains()):
            logger.warning(
                "process %d of the worker %s was killed and does not end: its GPUs are used again when it is gone",
                remains[0],
                worker.name,
            )
            self._undead.append(worker)
            self._schedule()
            return
        self._give_back(worker)

    def _give_back(self, worker: LocalWorker) -> None:
        self.shares.give_back(worker.shares)
        self._spawn_pinned()
        if worker.pin is not None or self._places_taken() >= self.wanted:
            return
        if worker.joined or worker.evicted:
            self._respawn(self.rejoin_seconds if worker.pause is None else worker.pause)
        else:
            self._not_born(worker.last_words())

    def start_due(self) -> None:
        """Start those whose time has come."""
        if self._undead and self._look_at <= self._clock():
            self._look_at = self._clock() + _LOOK_SECONDS
            for worker in [worker for worker in self._undead if not worker.remains()]:
                self._undead.remove(worker)
                self._give_back(worker)
        while self._respawn_at and self._respawn_at[0] <= self._clock():
            del self._respawn_at[0]
            if self._ordinary() < self.wanted:
                self.spawn()
        self._schedule()

    def _schedule(self) -> None:
        self.next_at = min(self._respawn_at[:1] + [self._look_at] * bool(self._undead), default=None)

    def spawn(self) -> None:
        """Start one."""
        devices = self.shares.take()
        self._begin(devices, [devices])

    def _places_taken(self) -> int:
        """By workers that are there, that are about to be, and that do not end."""
        return self._ordinary() + len(self._respawn_at) + sum(worker.pin is None for worker in self._undead)

    def _ordinary(self) -> int:
        return sum(worker.pin is None for worker in self.there.values())

    def _spawn_pinned(self) -> None:
        """Start the workers that wait for their devices, where those are free now."""
        for pin, devices, shares in self.shares.granted():
            self._begin(devices, shares, pin)

    def _begin(self, devices: Share, shares: list[Share], pin: int | None = None) -> None:
        number = self._begun
        self._begun += 1
        name = f"local-{number + 1}"
        variables = share(devices, self._has_gpus, self._places, len(shares))
        if number < len(self._slowdowns):
            variables[AROUND] = "ctxflow.testing.slow_calls:slowed"
            variables["CTXFLOW_SLOWDOWN"] = str(self._slowdowns[number])
        try:
            worker = LocalWorker(name, devices, self._scratch, self._log_of(name), variables)
        except OSError as error:
            self.shares.give_back(shares)
            if none_left(error) and not self._told:
                self._told = True
                logger.warning("workers cannot be started (%s)%s", error, advice(error))
            self._not_born(f"{error}{advice(error)}")
            return
        worker.shares, worker.pin = shares, pin
        self.there[worker.name] = worker
        self._kept_logs.add(self._log_of(name), list(map(self._log_of, self.there)))
        self._tell(worker)

    def _log_of(self, name: str) -> str:
        return os.path.join(self._logs, name)

    def _not_born(self, reason: str) -> None:
        """A worker did not come up: try again, ever more slowly, and at last give up."""
        self._stillborn += 1
        nobody = not any(worker.joined for worker in self.there.values())
        if nobody and self._stillborn >= _STILLBIRTHS + self._places:
            self.failure = EngineFailed(
                f"{counted(self._stillborn, 'worker')} in a row did not start, so that nothing can run: {reason}; see "
                "that the machine has memory, processes and descriptors left, or run "
                f"`{sys.executable} -c 'import ctxflow.host.context_host'` "
                "to see whether that program can be imported"
            )
            return
        self._respawn(self.rejoin_seconds * 2 ** min(5, self._stillborn))

    def _respawn(self, seconds: float) -> None:
        self._respawn_at.append(self._clock() + seconds)
        self._respawn_at.sort()
        self._schedule()


Share = list[Device]


class GpuShares:
    """Who may have which GPUs.

    :param devices: all there are; neighbours in the machine's topology are dealt out together.
    :param workers: how many shares there are, of `each` GPUs.
    :ivar devices: those that are dealt out.

    >>> shares = GpuShares([Device("a"), Device("b"), Device("c")], workers=3, each=1)
    >>> first = shares.take()
    >>> shares.ask(7, ["b", "a"])
    >>> list(shares.granted())
    []
    >>> shares.give_back([first])
    >>> [(pin, [device.id for device in devices]) for pin, devices, _ in shares.granted()]
    [(7, ['b', 'a'])]
    """

    def __init__(self, devices: Sequence[Device], workers: int, each: int) -> None:
        by_id = {device.id: device for device in devices}
        in_order = [by_id[name] for name in ordered(topology_of(devices), by_id)]
        self._free = [in_order[n * each : (n + 1) * each] for n in range(workers)]
        self.devices = in_order[: workers * each]
        self._topology = topology_of(self.devices)
        self._asked: dict[int, Sequence[str]] = {}

    def take(self) -> Share:
        """Return a share for a worker; one without GPUs if all are taken."""
        return self._free.pop(0) if self._free else []

    def give_back(self, shares: Sequence[Share]) -> None:
        """Shares of a worker that is gone."""
        self._free += shares

    def ask(self, pin: int, names: Sequence[str]) -> None:
        """Want these GPUs for one worker, once nobody has them."""
        self._asked[pin] = names

    def forgo(self, pin: int) -> None:
        """They are not wanted any more."""
        self._asked.pop(pin, None)

    def granted(self) -> Iterator[tuple[int, Share, list[Share]]]:
        """Yield what was asked for and can be had: the number, the GPUs in the order asked for, their shares."""
        for pin, names in list(self._asked.items()):
            by_id = {device.id: device for device in self.devices if device.id in names}
            shares = [share for share in self._free if any(device.id in by_id for device in share)]
            if by_id and {device.id for share in shares for device in share}.issuperset(by_id):
                del self._asked[pin]
                self._free = [share for share in self._free if share not in shares]
                yield pin, [by_id[name] for name in names if name in by_id], shares

    def machine(self, users: Mapping[str, str] | None = None) -> dict[str, Any] | None:
        """Return the machine's topology as data, with the GPUs that are dealt out; None if there are none.

        :param users: who uses them, by the GPU's id.
        """
        return to_graph(used_by(self._topology, users or {})) if self.devices else None


def topology_of(devices: Sequence[Device]) -> Topology:
    """This machine's, with these devices and no others, by their ids; one that no driver knows is near no NUMA node."""
    names = [device.id for device in devices]
    try:
        found = read_machine() if names else Topology("")
    except ValueError:  # The kernel tells nothing, as in some containers.
        found = Topology("")
    known = of_gpus(found, names)
    chosen = {position(known, name): name for name in names}
    gpus = [(known.gpus[place], name) for place, name in chosen.items() if place is not None]
    named = tuple(dataclasses.replace(gpu, uuid=None if name.isdigit() else name) for gpu, name in gpus)
    return dataclasses.replace(known, gpus=tuple(sorted(named, key=lambda gpu: gpu.index)))
