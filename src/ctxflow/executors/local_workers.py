"""Which workers this machine has, how many are wanted, who replaces one that is gone, and which GPUs each has."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ctxflow.errors import counted
from ctxflow.executors.channel_host import HOSTS_OF, HostGuard, start_host
from ctxflow.executors.contract import EngineFailed
from ctxflow.factory.provider import tail
from ctxflow.host.call_surroundings import AROUND
from ctxflow.host.forking import ForkedProcess, Zygote, environment_key
from ctxflow.host.library_process import KeptLogs
from ctxflow.host.library_start import library_variables
from ctxflow.host.linux import (
    ChildProcess,
    advice,
    ended_within,
    kill_session,
    kill_tree,
    none_left,
    python_path,
    session_members,
)
from ctxflow.host.wire import Channel
from ctxflow.scheduler import events as ev
from ctxflow.topology import Topology, of_gpus, ordered, position, to_graph, used_by
from ctxflow.topology.machine import Device, read_machine

logger = logging.getLogger("ctxflow")
_LOOK_SECONDS = 1.0
_MOST_LOGS = 50  # Of workers that have ended.
_ZYGOTE_SECONDS = 30.0  # How long a worker waits for imports before it is started without them.
_MOST_ZYGOTES = 5  # Of a run, should they end, or the driver change its variables.
_FAILED_STARTS = 5  # Workers that may fail to start in a row, beside one for each place.
_KILL_SECONDS = 2.0  # How long what was killed is waited for; what hangs in the kernel ends later, or never.
_ALL_THREADS = "OMP_NUM_THREADS"
_THREAD_VARIABLES = (_ALL_THREADS, "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCH_NUM_THREADS")

Share = list[Device]


class LocalWorkers:
    """The workers of this machine, which `places` share; all calls are made under the engine's lock.

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
        self._unkillable: list[
            LocalWorker
        ] = []  # With processes that were killed and do not end: they keep their GPUs.
        self._look_at = 0.0
        self._warned = False  # That there are no descriptors for another.
        self._guard: HostGuard | None = None  # From the first worker on.
        self._zygote: Zygote | None = None
        self._zygotes = 0  # That were started.
        # To the kernel, what a thread has started dies with that one: it may be a user's.
        self._starter = concurrent.futures.ThreadPoolExecutor(1, "ctxflow-start")
        self._failed_starts = 0  # Workers that ended before they joined, since the last one that joined.

    def open(
        self,
        scratch: str,
        logs: str,
        clock: Callable[[], float],
        begun: Callable[[LocalWorker], None],
        watch: Callable[[Zygote, bool], None],
    ) -> None:
        """Set where workers keep their files and their output, and what is called.

        :param begun: with each worker that begins.
        :param watch: with each zygote, when its `line` is to be watched, and when no more.
        """
        self._scratch, self._logs, self._clock, self._tell, self._watch = scratch, logs, clock, begun, watch

    def preload(self, modules: Sequence[str]) -> None:
        """Have the zygote that the next workers are forked from import modules; start it, unless it is there.

        Where the variables of workers have changed, another takes its place.
        """
        variables = _of_libraries(self._variables())
        if self._zygote is not None and (self._zygote.ended or not self._zygote.has(variables)):
            self.end_zygote()
        with contextlib.suppress(OSError):
            if self._zygote is None and self._zygotes < _MOST_ZYGOTES:
                self._zygotes += 1
                with open(os.path.join(self._logs, "zygote.log"), "ab") as output:
                    # A driver that is killed while it imports takes it along; what it has forked sees to itself.
                    began = self._starter.submit(Zygote, variables, self._scratch, output, dies_with=os.getpid())
                    self._zygote = began.result()
                self._watch(self._zygote, True)
            zygote = self._zygote
            if zygote is not None and zygote.busy_since is None and (lacks := zygote.lacks(modules)):
                zygote.preload(lacks)

    def _variables(self) -> dict[str, str]:
        return {**share([], self._has_gpus, self._places), HOSTS_OF: self._scratch}

    def serves(self, variables: Mapping[str, str]) -> bool:
        """Return whether library processes with these variables beside the machine's can have what a zygote imports."""
        own = self._variables()
        return environment_key(_of_libraries({**own, **variables})) == environment_key(_of_libraries(own))

    def imports_for(self, worker: LocalWorker, modules: Sequence[str] | None, environment: Mapping[str, str]) -> bool:
        """Have the zygote import what a build takes, in place of each worker's own; whether a worker is to wait for it.

        Only one that nothing was sent to yet: its host is forked again then (`renew`), with all that is imported.

        :param environment: the context's variables.
        """
        if not worker.fresh or not modules or self._places == 1 or worker.imported.issuperset(modules):
            return False
        if not self.serves({**worker.share, **environment}):
            return False
        self.preload(modules)
        zygote = self._zygote
        if zygote is None or zygote.unsafe or zygote.ended:
            return False
        return not zygote.asked.isdisjoint(modules)  # It may be at others'.

    @property
    def imports_since(self) -> float | None:
        """When the zygote began what it imports, by the monotonic clock; None if it imports nothing."""
        zygote = self._zygote
        return None if zygote is None or zygote.ended or zygote.stopped else zygote.busy_since

    def give_up_imports(self) -> None:
        """End a zygote that has imported for too long, and start no other: workers import for themselves."""
        logger.info("what workers import took longer than a build may: each imports for itself")
        self.end_zygote()
        self._zygotes = _MOST_ZYGOTES

    def renew(self, worker: LocalWorker) -> bool:
        """Fork a worker's host from the zygote, in place of the one that it has; whether that was done."""
        zygote = self._zygote
        return zygote is not None and zygote.ready and worker.renew(zygote)

    def end_zygote(self) -> None:
        """End the zygote; what it has forked lives on."""
        if self._zygote is not None:
            self._watch(self._zygote, False)
            self._zygote.end()
            self._zygote = None

    def end_guard(self) -> None:
        """End what waits for this process to be killed, and what started them: the workers are gone."""
        self._starter.shutdown()
        if self._guard is not None:
            self._guard.close()

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
        self._failed_starts = 0

    def left(self, worker: LocalWorker) -> None:
        """It has ended, or was ended: see to its successor."""
        del self.there[worker.name]
        if worker.devices and (remains := worker.remains()):
            logger.warning(
                "process %d of the worker %s was killed and does not end: its GPUs are used again when it is gone",
                remains[0],
                worker.name,
            )
            self._unkillable.append(worker)
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
            self._start_failed(worker.exit_text())

    def start_due(self) -> None:
        """Start those whose time has come."""
        if self._unkillable and self._look_at <= self._clock():
            self._look_at = self._clock() + _LOOK_SECONDS
            for worker in [worker for worker in self._unkillable if not worker.remains()]:
                self._unkillable.remove(worker)
                self._give_back(worker)
        while self._respawn_at and self._respawn_at[0] <= self._clock() and not self._zygote_seconds():
            del self._respawn_at[0]
            if self._ordinary() < self.wanted:
                self.spawn()
        self._schedule()

    def _schedule(self) -> None:
        respawn_at = [max(at, self._clock() + self._zygote_seconds()) for at in self._respawn_at[:1]]
        self.next_at = min(respawn_at + [self._look_at] * bool(self._unkillable), default=None)

    def _zygote_seconds(self) -> float:
        """Return how long to wait for the zygote, which imports what the next worker would import beside it."""
        if self._zygote is None or self._zygote.busy_since is None or self._zygote.ended:
            return 0.0
        return max(0.0, self._zygote.busy_since + _ZYGOTE_SECONDS - time.monotonic())

    def spawn(self) -> None:
        """Start one."""
        devices = self.shares.take()
        self._begin(devices, [devices])

    def _places_taken(self) -> int:
        """By workers that are there, that are about to be, and that do not end."""
        return self._ordinary() + len(self._respawn_at) + sum(worker.pin is None for worker in self._unkillable)

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
        variables = {**share(devices, self._has_gpus, self._places, len(shares)), HOSTS_OF: self._scratch}
        if number < len(self._slowdowns):
            variables[AROUND] = "ctxflow.testing.worker_calls:slowed"
            variables["CTXFLOW_SLOWDOWN"] = str(self._slowdowns[number])
        try:
            self._guard = self._guard or HostGuard(self._scratch)
            same = self._zygote is not None and self._zygote.has(_of_libraries(variables))
            zygote = self._zygote if same else None
            worker = LocalWorker(name, devices, self._scratch, self._log_of(name), variables, zygote)
        except OSError as error:
            self.shares.give_back(shares)
            if none_left(error) and not self._warned:
                self._warned = True
                logger.warning("workers cannot be started (%s)%s", error, advice(error))
            self._start_failed(f"{error}{advice(error)}")
            return
        worker.shares, worker.pin = shares, pin
        self.there[worker.name] = worker
        self._kept_logs.add(self._log_of(name), list(map(self._log_of, self.there)))
        self._tell(worker)

    def _log_of(self, name: str) -> str:
        return os.path.join(self._logs, name)

    def _start_failed(self, reason: str) -> None:
        """A worker did not come up: try again, ever more slowly, and at last give up."""
        self._failed_starts += 1
        nobody = not any(worker.joined for worker in self.there.values())
        if nobody and self._failed_starts >= _FAILED_STARTS + self._places:
            self.failure = EngineFailed(
                f"{counted(self._failed_starts, 'worker')} in a row did not start, so that nothing can run: {reason}; "
                "see that the machine has memory, processes and descriptors left, or run "
                f"`{sys.executable} -c 'import ctxflow.host.context_host'` "
                "to see whether that program can be imported"
            )
            return
        self._respawn(self.rejoin_seconds * 2 ** min(5, self._failed_starts))

    def _respawn(self, seconds: float) -> None:
        self._respawn_at.append(self._clock() + seconds)
        self._respawn_at.sort()
        self._schedule()


class LocalWorker:
    """A context host process as the engine sees it, with a directory of its own below `parent`.

    :raises OSError: if the machine has no room for it (disk, processes, descriptors); nothing is left then.
    """

    def __init__(
        self,
        name: str,
        devices: list[Device],
        parent: str,
        logs: str,
        share: dict[str, str],
        zygote: Zygote | None = None,
    ) -> None:
        self.name, self.share = name, share
        self.devices = devices
        self.scratch = os.path.join(parent, name)
        self.joined = False
        self.fresh = True  # Whether nothing was sent to it yet.
        self.evicted = False  # Known to be taken away, or about to be.
        self.released = False
        self.shares = [devices]  # What it holds of the machine's devices, as they are dealt out.
        self.pin: int | None = None  # The number by which it was asked for, with devices of its own.
        self.pause: float | None = None  # Seconds for which its place stays empty, if that was said.
        self.lines: dict[str, LibraryLine] = {}
        self._logs = logs
        os.makedirs(logs, exist_ok=True)
        self._log = os.path.join(logs, "host.log")
        self.process, self.channel = self._started(zygote)

    def _started(self, zygote: Zygote | None) -> tuple[ChildProcess, Channel]:
        with open(self._log, "wb") as output:  # It runs where no module of the user's hides one that the host needs.
            started = start_host(
                self.scratch,
                self._logs,
                output,
                environment={**os.environ, **self.share},
                directory=os.path.dirname(self.scratch),
                zygote=zygote,
            )
        self._zygote = zygote  # What its host may be forked from.
        forked = zygote is not None and isinstance(started[0], ForkedProcess)
        self.imported = frozenset(zygote.asked) if zygote is not None and forked else frozenset[str]()
        return started

    def renew(self, zygote: Zygote) -> bool:
        """Replace a host that nothing was sent to by one forked from a zygote; return whether there is one now."""
        process, own = self.process, self._zygote
        try:
            started = self._started(zygote)
        except OSError:
            return False
        kill_tree(process.pid)  # Before it finds that its connection is closed, and removes the worker's files.
        ended_within(process, _KILL_SECONDS)
        if own is not None and isinstance(process, ForkedProcess):
            own.bury(process.pid)
        self.process, self.channel = started
        return True

    def give_up(self, error: Exception) -> None:
        """Kill it, since something failed between it and the engine, and what it was told is not certain."""
        what = f"{type(error).__name__}: {error}"
        logger.warning("the worker %s cannot be spoken with (%s), and is given up", self.name, what)
        self.evicted = True  # Nobody in it is to blame.
        kill_tree(self.process.pid)

    def end(self) -> None:
        """Kill what is left of it, wait for that, and remove its files."""
        kill_tree(self.process.pid)  # Also what left the worker's session.
        kill_session(self.process.pid)  # Also what lost its parents.
        ended_within(self.process, _KILL_SECONDS)
        if self._zygote is not None and isinstance(self.process, ForkedProcess):
            self._zygote.bury(self.process.pid)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def remains(self) -> list[int]:
        """Return its processes that have not ended though they were killed: they may hold its GPUs."""
        self.process.poll()
        return session_members(self.process.pid)

    def exit_text(self) -> str:
        """Return how it ended: the last line of its output, or its exit status."""
        status = f"a worker ended with status {self.process.returncode}"
        return (tail(self._log).splitlines() or [status])[-1].strip()


class LibraryLine:
    """One line: to the library process of a context on a worker."""

    def __init__(self, worker: LocalWorker, context: str) -> None:
        self.worker = worker
        self.context = context
        self.key = secrets.token_hex(8)  # What its library process will name.
        self.channel: Channel | None = None
        self.ended_at = math.inf  # When it ended, by the monotonic clock.
        self.built = False  # Whether the host has said that what is behind it is built.
        self.ready: ev.Event | None = None  # Reported by the host; waits for the line to be there.
        self.functions: set[str] = set()  # Those that the process was given.
        self.calls: dict[int, float] = {}  # Those that it has, in the order in which it runs them -> their timeouts.
        self._first: tuple[int, float] = -1, 0.0  # The first of them, and when it was first seen to run.

    def overdue(self, now: float, grace: float) -> tuple[int, float] | None:
        """Return the call that has run so much longer than its timeout, and that; then not before as much later."""
        call, timeout = next(iter(self.calls.items()), (-1, math.inf))
        if call == self._first[0] and now < self._first[1] + timeout + grace:
            return None
        overdue = call == self._first[0]
        self._first = call, now
        return (call, timeout) if overdue else None


def share(devices: list[Device], dealt: bool, workers: int, shares: int = 1) -> dict[str, str]:
    """Return the environment that keeps a worker to its `shares` of the threads, and to its GPUs if any are dealt."""
    threads = str(max(1, (os.cpu_count() or 1) * shares // workers))
    variables = {}
    if _ALL_THREADS not in os.environ:  # The others follow that one where they are not set.
        variables = {name: threads for name in _THREAD_VARIABLES if name not in os.environ}
    if dealt:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(device.id for device in devices)
    return {**variables, **python_path()}


def _of_libraries(share: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the library processes of a worker with that share."""
    own = python_path()  # As a host has it, and not twice.
    return library_variables({name: value for name, value in share.items() if name not in own})


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
        """Return the topology with the GPUs that are dealt out, and who uses each, as data; None if there are none."""
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
