"""The messages between the driver and a worker's context host: one dataclass for each kind.

A direction is a union (`ToHost`, `FromHost`) and a `Direction` that reads it (see wire.py). The messages that a host
passes on to library processes and back are in library_messages.py, those that only a TaskVine worker hears and says in
vine_messages.py. A field `body` is a pickle that neither hosts nor engines open.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ctxflow.host.library_messages import (
    BuildContext,
    BuildFailed,
    CallFinished,
    CallRaised,
    ContextBuilt,
    ForgetParts,
    GivePart,
    PartFinished,
    RunCall,
)
from ctxflow.host.wire import Direction, Message, Trouble

# --- to context hosts


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StageFiles(Message):
    """Copy a context's files from this machine's disk to the worker's cache.

    From the embedded engine, for a `Stage`. Answered by `FilesStaged` or `StagingFailed`.

    :ivar files: parameter -> path and digest.
    :ivar cache: the folder, "" for the host's own.
    :ivar link: whether a hard link will do for what is large.
    """

    context: str
    files: Mapping[str, tuple[str, str]]
    cache: str = ""
    link: bool = True


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EndLibrary(Message):
    """End the library process of a context, if there is one.

    From the engine, for an `Unload` or `Abandon`. Answered by `LibraryEnded` if there was one.

    :ivar files: a folder to remove as well, "" for none.
    """

    context: str
    files: str = ""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class InterruptCall(Message):
    """Interrupt a call that nobody waits for. From the engine, for an `Interrupt`. The call's answer answers it."""

    context: str
    call: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DrainCalls(Message):
    """Have calls that answer their items one by one end after the item in flight, from now on.

    From the engine, for a `Drain`. Not answered.
    """


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EndOverdue(Message):
    """End a library process whose call has timed out, while its host said nothing.

    From the embedded engine. Answered by `LibraryDied`, unless the key is of an earlier load.
    """

    context: str
    key: str
    call: int
    timeout: float


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Ping(Message):
    """Ask a host of which nothing was heard whether it is there. From the engine. Answered by `Pong`."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LeaveWorker(Message):
    """Have the worker end by itself. From the engine, for a `Release`. Its end answers it."""


ToHost: TypeAlias = (
    BuildContext
    | GivePart
    | ForgetParts
    | RunCall
    | StageFiles
    | EndLibrary
    | InterruptCall
    | DrainCalls
    | EndOverdue
    | Ping
    | LeaveWorker
)


# --- from context hosts


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HostStarted(Message):
    """Say that an embedded worker is up: its first message."""

    pid: int
    python: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FilesStaged(Message):
    """Answer `StageFiles`: the files are in the cache."""

    context: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StagingFailed(Message):
    """Answer `StageFiles`: one of the files cannot be had."""

    context: str
    trouble: Trouble


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LibraryEnded(Message):
    """Answer `EndLibrary`."""

    context: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LibraryDied(Message):
    """Say that a library process ended by itself, or was ended for cause. Answers the calls that it cost.

    :ivar key: of its load; None where a call came for a process that had ended.
    :ivar calls: those that the host knew it ran.
    """

    context: str
    key: str | None
    calls: Sequence[int]
    trouble: Trouble


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WorkerStuck(Message):
    """Say that the worker is of no more use: what was killed does not end, or its wrapper is stopped."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pong(Message):
    """Answer `Ping`."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NoticeGiven(Message):
    """Say that the worker will be taken back soon. From a host whose worker got SIGTERM."""


FromHost: TypeAlias = (
    HostStarted
    | FilesStaged
    | StagingFailed
    | ContextBuilt
    | BuildFailed
    | LibraryEnded
    | LibraryDied
    | PartFinished
    | CallFinished
    | CallRaised
    | WorkerStuck
    | Pong
    | NoticeGiven
)


TO_HOST: Direction[ToHost] = Direction(ToHost)
FROM_HOST: Direction[FromHost] = Direction(FromHost)
