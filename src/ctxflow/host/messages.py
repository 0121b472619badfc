"""The messages between the driver and a worker's context host: one dataclass for each kind.

A direction is a union (`ToHost`, `FromHost`; for TaskVine workers, which also know files and states of sessions,
`ToWorker`, `FromWorker`) and a `Direction` that reads it (see wire.py). Messages that a host passes on to library
processes and back are in library_messages.py. A field `body` is a pickle that neither hosts nor engines open.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ctxflow.host.library_messages import (
    BuildContext,
    BuildFailed,
    CallFinished,
    CallRaised,
    ContextAsleep,
    ContextAwake,
    ContextBuilt,
    ForgetParts,
    GivePart,
    ParkContext,
    ParkRaised,
    PartFinished,
    RunCall,
    WakeContext,
)
from ctxflow.host.wire import Direction, Message, Trouble

# --- to context hosts


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
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


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class PreloadModules(Message):
    """Have a zygote import what a context that is being staged will import. From the engine. Not answered.

    :ivar environment: the context's variables. :ivar modules: their names.
    """

    environment: Mapping[str, str]
    modules: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class EndLibrary(Message):
    """End the library process of a context, if there is one.

    From the engine, for an `Unload` or `Abandon`. Answered by `LibraryEnded` if there was one.

    :ivar files: a folder to remove as well, "" for none.
    """

    context: str
    files: str = ""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class InterruptCall(Message):
    """Interrupt a call that nobody waits for. From the engine, for an `Interrupt`. The call's answer answers it."""

    context: str
    call: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class DrainCalls(Message):
    """Have calls that answer their items one by one end after the item in flight, from now on.

    From the engine, for a `Drain`. Not answered.
    """


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class EndOverdue(Message):
    """End a library process whose call has timed out, while its host said nothing.

    From the embedded engine. Answered by `LibraryDied`, unless the key is of an earlier load.
    """

    context: str
    key: str
    call: int
    timeout: float


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Ping(Message):
    """Ask a host of which nothing was heard whether it is there. From the engine. Answered by `Pong`."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class LeaveWorker(Message):
    """Have the worker end by itself. From the engine, for a `Release`. Its end answers it."""


ToHost: TypeAlias = (
    BuildContext | GivePart | ForgetParts | RunCall | StageFiles | PreloadModules | EndLibrary | ParkContext
    | WakeContext | InterruptCall | DrainCalls | EndOverdue | Ping | LeaveWorker
)  # fmt: skip


# --- from context hosts


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class HostStarted(Message):
    """Say that an embedded worker is up: its first message."""

    pid: int
    python: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class FilesStaged(Message):
    """Answer `StageFiles`: the files are in the cache."""

    context: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class StagingFailed(Message):
    """Answer `StageFiles`: one of the files cannot be had."""

    context: str
    trouble: Trouble


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class LibraryEnded(Message):
    """Answer `EndLibrary`."""

    context: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class LibraryDied(Message):
    """Say that a library process ended by itself, or was ended for cause. Answers the calls that it cost.

    :ivar key: of its load; None where a call came for a process that had ended.
    :ivar calls: those that the host knew it ran, the blamed ones first.
    :ivar blamed: those that it was ended for: the others only lost their context. Empty if nobody can tell.
    """

    context: str
    key: str | None
    calls: Sequence[int]
    trouble: Trouble
    blamed: Sequence[int] = ()


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class WorkerStuck(Message):
    """Say that the worker is of no more use: what was killed does not end, or its wrapper is stopped."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Pong(Message):
    """Answer `Ping`."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class NoticeGiven(Message):
    """Say that the worker will be taken back soon. From a host whose worker got SIGTERM."""


FromHost: TypeAlias = (
    HostStarted | FilesStaged | StagingFailed | ContextBuilt | BuildFailed | ContextAsleep | ContextAwake | ParkRaised
    | LibraryEnded | LibraryDied | PartFinished | CallFinished | CallRaised | WorkerStuck | Pong | NoticeGiven
)  # fmt: skip


TO_HOST: Direction[ToHost] = Direction(ToHost)
FROM_HOST: Direction[FromHost] = Direction(FromHost)


# --- to TaskVine workers: instructions of a TaskVine call


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class AskFacts(Message):
    """Ask a worker that has connected what it is: its first instruction. Answered by `WorkerFacts`."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Listen(Message):
    """Wait for the next report that answers nothing. Answered by what there is then; another `Listen` confirms it."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class SeedFile(Message):
    """Make the call's file `input` its `output` too, which TaskVine sends from peer to peer. Answered by `FileDone`."""

    input: str
    output: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class FetchFile(Message):
    """Put the call's file `input` in the cache. Answered by `FileCached` or `FileFailed`.

    :ivar digest: its name in the cache.
    :ivar content: the digest of what is sent.
    :ivar source: its path on the driver, whose name it keeps.
    :ivar kind: "file", or "tar" for the archive of a folder.
    :ivar keep: whether it is for the host's cache too, where there is one.
    """

    digest: str
    content: str
    source: str
    kind: str
    input: str
    keep: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class TakeKept(Message):
    """Put in the cache what the host's cache has.

    Answered by `FileCached`, by `FileDone` if that has none, or by `FileFailed` if it is not what it should be.
    """

    digest: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class LinkFile(Message):
    """Put in the cache what another worker of the machine has at `path`. Answered by `FileCached` or `FileFailed`."""

    digest: str
    source: str
    path: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class ForgetFile(Message):
    """Remove a file from the cache. Answered by `FileDone` or `FileFailed`."""

    digest: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class OpenEnvironment(Message):
    """Run library processes with the packed Python whose archive is in the cache.

    Answered by `FileDone` or `FileFailed`.
    """

    digest: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class SendState(Message):
    """Make a session's frozen state, with so many chunks made, the call's file `output`.

    Answered by `FileDone` or `FileFailed`.
    """

    session: int
    made: int
    output: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class TakeState(Message):
    """Put a session's frozen state in the cache. Answered by `FileDone` or `FileFailed`.

    :ivar input: the call's file with it, or
    :ivar cache: the cache of the worker on this machine that has it.
    """

    session: int
    made: int
    input: str = ""
    cache: str = ""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class SendArtifacts(Message):
    """Make what builds made and the worker keeps under a key the call's file `output`.

    Answered by `FileSent` or `FileFailed`.
    """

    kept: str
    output: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class ReachPeer(Message):
    """Connect to where another worker serves files. Answered by `FileDone`, or in some seconds by `FileFailed`.

    :ivar source: its host and port, for people.
    """

    source: str
    address: str
    port: int


FileMessage: TypeAlias = (
    SeedFile
    | FetchFile
    | TakeKept
    | LinkFile
    | ForgetFile
    | OpenEnvironment
    | SendState
    | TakeState
    | SendArtifacts
    | ReachPeer
)
"""What is done with files, beside calls; what goes wrong is reported with `FileFailed`."""
ToWorker: TypeAlias = ToHost | AskFacts | Listen | FileMessage


# --- from TaskVine workers: reports in a call's answer


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class WorkerFacts(Message):
    """Answer `AskFacts`. What cannot be found is None.

    :ivar host: the machine's name; `machine`: what the batch system calls it.
    :ivar worker: the name under which it connected; `pid`: of its host.
    :ivar python: the version that library processes run.
    :ivar memory: bytes; `gpu_memory`: bytes of one GPU.
    :ivar cache: the folder of its files, on the disk `device`; `port`: where it serves files to its peers.
    :ivar scratch: its directory.
    :ivar job: the batch system's job that it is. `tier`, `region`: what the job was told that it is of.
    :ivar devices: the ids of its GPUs; `topology`: their machine's, as `ctxflow.topology.to_graph` writes it.
    :ivar pin: the number of the `AcquireAt` that it was submitted for.
    :ivar problem: why it cannot be used, if so.
    :ivar kept: the folder of its host's cache, "" for none; `kept_problem`: why the site's cannot be used.
    :ivar alike: the same for machines on which compilers make the same (artifact_keys.py).
    """

    host: str
    ctxflow: str
    problem: str | None = None
    pid: int = 0
    worker: str | None = None
    python: str | None = None
    cores: int = 0
    memory: int = 0
    gpus: int = 0
    gpu_model: str | None = None
    gpu_memory: int | None = None
    scratch: str = ""
    cache: str = ""
    device: int | None = None
    port: int | None = None
    tier: str | None = None
    region: str | None = None
    job: str | None = None
    machine: str | None = None
    devices: Sequence[str] = ()
    topology: Mapping[str, Any] | None = None
    pin: float | None = None
    kept: str = ""
    kept_problem: str = ""
    alike: str = ""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class FileCached(Message):
    """Answer `FetchFile`, `TakeKept` or `LinkFile`: the file is at this path of the worker.

    :ivar unkept: what is wrong with the host's cache, None if nothing.
    """

    digest: str
    path: str
    unkept: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class FileDone(Message):
    """Answer a `FileMessage` that has nothing to tell."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class FileSent(Message):
    """Answer `SendArtifacts`: digest and bytes of the file."""

    digest: str
    size: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class FileFailed(Message):
    """Answer a `FileMessage` that could not be carried out."""

    digest: str | None
    trouble: Trouble


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class CallRefused(Message):
    """Answer a TaskVine call that cannot be read, is not the driver's, or asks for what there is not."""

    message: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class ModulesLacking(Message):
    """Say that something imports what the worker's program lacks (worker_program.py)."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class ArtifactsMade(Message):
    """Say that a worker keeps what building a context made (artifacts.py), under a key, of so many bytes."""

    context: str
    key: str
    size: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class ArtifactsFailed(Message):
    """Say that a build or a first call failed, or died, with artifacts of that digest, which another host made."""

    context: str
    key: str
    digest: str


FromWorker: TypeAlias = (
    FromHost | WorkerFacts | FileCached | FileDone | FileSent | FileFailed | CallRefused | ModulesLacking
    | ArtifactsMade | ArtifactsFailed
)  # fmt: skip

TO_WORKER: Direction[ToWorker] = Direction(ToWorker)
FROM_WORKER: Direction[FromWorker] = Direction(FromWorker)
