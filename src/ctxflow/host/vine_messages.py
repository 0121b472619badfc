"""What a TaskVine worker hears and says beside the messages of messages.py: who it is, files, and states of sessions.

Each is an instruction of a TaskVine call, or a report in its answer; both are sealed (seal.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ctxflow.host.messages import FromHost, ToHost
from ctxflow.host.wire import Direction, Message, Trouble

# --- to workers


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AskFacts(Message):
    """Ask a worker that has connected what it is: its first instruction. Answered by `WorkerFacts`."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Listen(Message):
    """Wait for the next report that answers nothing. Answered by what there is then; another `Listen` confirms it."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SeedFile(Message):
    """Make the call's file `input` its `output` too, which TaskVine sends from peer to peer. Answered by `FileDone`."""

    input: str
    output: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FetchFile(Message):
    """Put the call's file `input` in the cache. Answered by `FileCached` or `FileFailed`.

    :ivar digest: its name in the cache.
    :ivar content: the digest of what is sent.
    :ivar source: its path on the driver, whose name it keeps.
    :ivar kind: "file", or "tar" for the archive of a folder.
    """

    digest: str
    content: str
    source: str
    kind: str
    input: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LinkFile(Message):
    """Put in the cache what another worker of the machine has at `path`. Answered by `FileCached` or `FileFailed`."""

    digest: str
    source: str
    path: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ForgetFile(Message):
    """Remove a file from the cache. Answered by `FileDone` or `FileFailed`."""

    digest: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OpenEnvironment(Message):
    """Run library processes with the packed Python whose archive is in the cache.

    Answered by `FileDone` or `FileFailed`.
    """

    digest: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SendState(Message):
    """Make a session's frozen state, with so many chunks made, the call's file `output`.

    Answered by `FileDone` or `FileFailed`.
    """

    session: int
    made: int
    output: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TakeState(Message):
    """Put a session's frozen state in the cache. Answered by `FileDone` or `FileFailed`.

    :ivar input: the call's file with it, or
    :ivar cache: the cache of the worker on this machine that has it.
    """

    session: int
    made: int
    input: str = ""
    cache: str = ""


FileMessage: TypeAlias = SeedFile | FetchFile | LinkFile | ForgetFile | OpenEnvironment | SendState | TakeState
"""What is done with files, beside calls; what goes wrong is reported with `FileFailed`."""
ToWorker: TypeAlias = ToHost | AskFacts | Listen | FileMessage


# --- from workers


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FileCached(Message):
    """Answer `FetchFile` or `LinkFile`: the file is at this path of the worker."""

    digest: str
    path: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FileDone(Message):
    """Answer a `FileMessage` that has nothing to tell."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FileFailed(Message):
    """Answer a `FileMessage` that could not be carried out."""

    digest: str | None
    trouble: Trouble


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CallRefused(Message):
    """Answer a TaskVine call that cannot be read, is not the driver's, or asks for what there is not."""

    message: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ModulesLacking(Message):
    """Say that something imports what the worker's program lacks (own_modules.py)."""


FromWorker: TypeAlias = FromHost | WorkerFacts | FileCached | FileDone | FileFailed | CallRefused | ModulesLacking

TO_WORKER: Direction[ToWorker] = Direction(ToWorker)
FROM_WORKER: Direction[FromWorker] = Direction(FromWorker)
