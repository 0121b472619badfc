"""Which workers this machine has, how many are wanted, and who takes the place of one that is gone.

What does not live here: starting and ending one (local_worker.py), and what they are told (local_hosts.py).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ctxflow.executors.contract import EngineFailed
from ctxflow.executors.embedded.gpus import GpuShares, Share
from ctxflow.executors.embedded.local_worker import LocalWorker, share
from ctxflow.host.call_surroundings import AROUND
from ctxflow.host.facts import Device
from ctxflow.host.library_process import KeptLogs
from ctxflow.host.machine_errors import advice, none_left
from ctxflow.wording import counted

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
