"""What passes between the engine, the manager's process and its gate: messages, the bell, and news of connections."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import socket
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ctxflow.host.wire import Direction, Message

# --- to the manager


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StartManager(Message):
    """Configure the manager: the first message to its process. Answered by `ManagerStarted`.

    :ivar directory: of the run's files.
    :ivar port: to listen at, or the lowest and highest of those that it may choose from.
    :ivar program: the path of what workers run.
    :ivar fan_out: files that a worker sends at a time.
    :ivar keepalive_interval, keepalive_timeout: seconds.
    :ivar slots: instructions that a worker carries out at a time.
    :ivar doorbell: the socket at which its doorbell listens.
    """

    directory: str
    port: int | Sequence[int]
    password_file: str
    program: str
    ssl: bool
    fan_out: int
    keepalive_interval: int
    keepalive_timeout: int
    slots: int
    doorbell: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SubmitCall(Message):
    """Call a worker. Answered by `CallAnswered` or `CallUnanswered`, unless the worker is lost.

    :ivar number: the engine's for the call.
    :ivar most: bytes that the answer may have, None for no limit.
    :ivar inputs: name in the call's sandbox -> key of a declared file; `outputs`: likewise, what the call makes.
    :ivar body: the sealed instructions.
    """

    number: int
    worker: str
    most: int | None = None
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    outputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DeclareFile(Message):
    """Declare a file on this machine. Not answered.

    :ivar cache: whether workers keep it for later calls; `peers`: whether they then send it to one another.
    """

    key: str
    path: str
    cache: bool = False
    peers: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DeclareTemp(Message):
    """Declare a file that a call will make, and that stays on workers. Not answered."""

    key: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Undeclare(Message):
    """Forget a file. Not answered."""

    key: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CancelCall(Message):
    """Cancel a call, which is not answered then. Not answered."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StopManager(Message):
    """End all workers, and the process. Answered by its end."""


ToManager: TypeAlias = StartManager | SubmitCall | DeclareFile | DeclareTemp | Undeclare | CancelCall | StopManager


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ManagerStarted(Message):
    """Report the port at which the manager listens: its first message."""

    port: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ManagerBeat(Message):
    """Report, about once a second, that the process is in its loop."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CallAnswered(Message):
    """Return the answer to a call: `body`, sealed; or whatever came in its place."""

    number: int
    worker: str
    body: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CallUnanswered(Message):
    """Report that TaskVine could not make a call."""

    number: int
    worker: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WorkerConnected(Message):
    """Report that a worker has connected, from the address `ip`; `address` is its name for TaskVine."""

    worker: str
    address: str
    host: str
    ip: str = ""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WorkerGone(Message):
    """Report that a worker's connection has ended; its calls are not answered any more."""

    worker: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StrangerConnected(Message):
    """Report a connection that is no worker of this run, and gets no work."""

    host: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GateTrouble(Message):
    """Report, for people, what keeps workers from connecting."""

    text: str


FromManager: TypeAlias = (
    ManagerStarted
    | ManagerBeat
    | CallAnswered
    | CallUnanswered
    | WorkerConnected
    | WorkerGone
    | StrangerConnected
    | GateTrouble
)

TO_MANAGER: Direction[ToManager] = Direction(ToManager)
FROM_MANAGER: Direction[FromManager] = Direction(FromManager)


BYTES = 2
NEWS = 1
"""The index of the second shared byte: 1 if the gate has news for the manager, which looks for them only then."""


class Bell:
    """Wakes the manager through its doorbell's socket, if the first of the shared bytes is 1: it sleeps."""

    def __init__(self, asleep: mmap.mmap, path: str) -> None:
        self._asleep, self._path = asleep, path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def ring(self, news: bool = False) -> None:
        """Wake the manager, if it sleeps; to be called after what it is to find."""
        if news:
            self._asleep[NEWS] = 1
        if self._asleep[0]:
            with contextlib.suppress(OSError):  # It is not there yet; or full, and so has rung.
                self._socket.sendto(b".", self._path)

    def close(self) -> None:
        """Free its socket."""
        self._socket.close()


_NAMELESS_SECONDS = 15.0  # A worker tells its name a moment after it has connected; after that none is waited for.
_LOOK_SECONDS = 0.1  # How often it is looked for meanwhile: TaskVine lists all workers each time.


class Roster:
    """The connections, from TaskVine's list of them.

    TaskVine takes workers' names as they are told: none is believed here that another has.

    >>> roster = Roster()
    >>> roster.look([{"addrport": "10.0.0.1:4", "factory_name": "n1.ab", "hostname": "n1"}], 0.0)
    [WorkerConnected(worker='n1.ab', address='10.0.0.1:4', host='n1', ip='')]
    >>> roster.look([], 1.0)
    [WorkerGone(worker='n1.ab')]
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # Address -> worker.
        self._nameless: dict[str, float] = {}  # Address -> since when.
        self._strangers: set[str] = set()  # Addresses.
        self._seen: object = None
        self._next_look = 0.0

    def due(self, moved: object, now: float) -> bool:
        """Return whether to look; `moved`: TaskVine's counts of connections made and ended."""
        changed, self._seen = moved != self._seen, moved
        return changed or (bool(self._nameless) and now >= self._next_look)

    def look(self, rows: Sequence[Mapping[str, Any]], now: float) -> list[FromManager]:
        """Return what has changed since the last look in TaskVine's list of workers."""
        self._next_look = now + _LOOK_SECONDS
        there = {each["addrport"]: each for each in rows}
        news: list[FromManager] = []
        for address in [address for address in self._names if address not in there]:
            news.append(WorkerGone(self._names.pop(address)))
        self._strangers &= there.keys()
        self._nameless = {address: since for address, since in self._nameless.items() if address in there}
        for address, each in there.items():
            if address not in self._names and address not in self._strangers:
                found = self._appeared(address, each, now)
                news += [] if found is None else [found]
        return news

    def _appeared(self, address: str, each: Mapping[str, Any], now: float) -> FromManager | None:
        name, host = each.get("factory_name"), str(each.get("hostname", address))
        if name is None:
            if now < self._nameless.setdefault(address, now) + _NAMELESS_SECONDS:
                return None
            reason = "it tells no name"
        elif name in self._names.values():
            reason = "it has the name of another worker"
        else:
            self._nameless.pop(address, None)
            self._names[address] = str(name)
            return WorkerConnected(str(name), address, host)
        self._nameless.pop(address, None)
        self._strangers.add(address)
        return StrangerConnected(host, reason)
