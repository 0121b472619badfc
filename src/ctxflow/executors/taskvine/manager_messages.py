"""The messages between the engine and the process that holds TaskVine's manager: one dataclass for each kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ctxflow.host.wire import Direction, Message

# --- to the manager


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StartManager(Message):
    """Say what the manager is to be: the first message to its process. Answered by `ManagerStarted`.

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
    """Have a worker called. Answered by `CallAnswered` or `CallUnanswered`, unless the worker is lost.

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
    """Make a file on this machine known; `cache`: whether workers keep it for later calls. Not answered."""

    key: str
    path: str
    cache: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DeclareTemp(Message):
    """Make a file known that a call will make, and that stays on workers. Not answered."""

    key: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Undeclare(Message):
    """Forget a file. Not answered."""

    key: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CancelCall(Message):
    """Take a call back, which is not answered then. Not answered."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StopManager(Message):
    """End all workers, and the process. Its end answers it."""


ToManager: TypeAlias = StartManager | SubmitCall | DeclareFile | DeclareTemp | Undeclare | CancelCall | StopManager


# --- from the manager


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ManagerStarted(Message):
    """Say that the manager listens, and at which port: its first message."""

    port: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ManagerBeat(Message):
    """Say, about once a second, that the process gets on."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CallAnswered(Message):
    """Bring the answer to a call: `body`, sealed, or what is no answer."""

    number: int
    worker: str
    body: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CallUnanswered(Message):
    """Say that TaskVine could not make a call."""

    number: int
    worker: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WorkerConnected(Message):
    """Say that a worker has connected, from the address `ip`; `address` is the name by which TaskVine knows it."""

    worker: str
    address: str
    host: str
    ip: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WorkerGone(Message):
    """Say that a worker's connection has ended; its calls are not answered any more."""

    worker: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StrangerConnected(Message):
    """Say that somebody has connected who is no worker of this run, and gets nothing."""

    host: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GateTrouble(Message):
    """Tell a person what keeps workers from connecting."""

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
