"""The messages between the driver, a worker's context host and its library processes: one dataclass for each kind.

A direction is a union (`ToHost`, `FromHost`, `ToLibrary`, `FromLibrary`) and a `Direction` that reads it; `pack` writes
any message. On the wire a message is a frame of wire.py: its head the class's name and its fields as a list, its body
the field `body`, which neither a host nor the engine opens. What only a TaskVine worker hears and says is in
vine_messages.py, so that a library process need not import it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, get_args

from ctxflow.host.wire import Head, frame


class Message:
    """A message; its class is its kind."""

    __slots__ = ()

    @property
    def body(self) -> bytes:
        """What travels beside the fields, most often a pickle that only the two ends open."""
        return b""

    def __eq__(self, other: object) -> bool:  # One for all: to make one for each class takes time at each start.
        return type(self) is type(other) and pack(self) == pack(other)

    def __hash__(self) -> int:
        return hash(pack(self))


class Trouble(NamedTuple):
    """Why something failed on a worker, as data.

    :ivar kind: as of `ctxflow.scheduler.events.Failure`.
    :ivar output: the last lines that the library process printed; its host adds them.
    :ivar machine: whether it looks like the machine's fault.
    """

    kind: str
    error: str
    message: str
    traceback: str = ""
    output: str = ""
    machine: bool = False


# --- to library processes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BuildContext(Message):
    """Start a library process and build a context in it.

    From the engine to a host, for a `Load`; the host starts the process and passes it on. Answered by `ContextBuilt` or
    `BuildFailed`.

    :ivar key: tells this load from earlier ones; comes back with reports about what was loaded.
    :ivar files: parameter -> path on the worker.
    :ivar cached_files: parameter -> digest and path on the driver of a file in the worker's cache, in place of `files`.
    :ivar timeout: seconds that building may take; `memory`: bytes that the process may use. None for no limit.
    :ivar line: the socket of the driver to which calls' answers go, "" if they go through the host.
    :ivar directory: where builds and calls run, "" for a folder of its own for each call.
    :ivar path: `sys.path` of the process, empty for its own.
    :ivar states: the folder of the worker's cache with frozen states of sessions.
    :ivar body: the recipe, a pickle; empty for a library process without a context.
    """

    context: str
    key: str = ""
    name: str = ""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cached_files: Mapping[str, tuple[str, str]] | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    timeout: float | None = None
    memory: int | None = None
    line: str = ""
    directory: str = ""
    path: Sequence[str] = ()
    states: str = ""
    body: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GivePart(Message):
    """Keep a function, or constants, that calls will name.

    From the engine before the first call that names it. Not answered.

    :ivar body: its pickle.
    """

    name: str
    body: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ForgetParts(Message):
    """Forget functions and constants that no call will name. From the engine. Not answered."""

    names: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RunCall(Message):
    """Run a function on the library process of a context.

    From the engine, for a `Run` or `Step`. Answered by `CallFinished` or `CallRaised`, after any number of
    `PartFinished`; by `LibraryDied` if the process ends first.

    :ivar call: the attempt's number.
    :ivar key: of the load that is meant, None for the latest.
    :ivar function: the name of a part, "" if the function is in the body; `constants`: likewise of its named arguments.
    :ivar style: "batch", "apply" or "step" (see `ctxflow.executors.contract.CallPayload`).
    :ivar insert: whether an "apply" function gets the built context as its first argument.
    :ivar timeout: seconds that it may take, None for no limit.
    :ivar every: seconds between two `PartFinished`, None for the library process's own choice.
    :ivar files: inputs (name in the call's folder, name in the sandbox or web address), outputs (name in the folder,
        name in the sandbox, whether the call has to make it), and the sandbox, which the host fills in; None without.
    :ivar body: the arguments, a pickle.
    """

    call: int
    context: str
    function: str = ""
    style: str = "batch"
    insert: bool = False
    constants: str = ""
    timeout: float | None = None
    key: str | None = None
    every: float | None = None
    files: CallFolder | None = None
    body: bytes = b""


CallFolder: TypeAlias = tuple[Sequence[tuple[str, str]], Sequence[tuple[str, str, bool]], str]
"""Inputs, outputs and the sandbox of a call with files."""
ToLibrary: TypeAlias = BuildContext | GivePart | ForgetParts | RunCall
"""From a host to its library process; the last three also from the driver, on the line that it has to one."""


# --- from library processes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LineOpened(Message):
    """Say whose line a connection to the driver is: its first message. Not answered."""

    key: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ContextBuilt(Message):
    """Answer `BuildContext`: calls may come.

    :ivar seconds: what building took. Memory in bytes, None where unknown.
    """

    context: str
    key: str
    seconds: float
    memory: int | None = None
    gpu_memory: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BuildFailed(Message):
    """Answer `BuildContext`: there is no library process now. From the library process or its host.

    :ivar body: the exception, a pickle, where it can be opened again.
    """

    context: str
    key: str
    trouble: Trouble
    body: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CallBegan(Message):
    """Have the host see to the timeout of a call that came on the line to the driver, past the host. Not answered."""

    call: int
    timeout: float


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CallEnded(Message):
    """Tell the host that such a call is over. Not answered."""

    call: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PartFinished(Message):
    """Bring results of a call that goes on: of `count` of its items, from its `first` on. Not answered."""

    call: int
    first: int
    count: int
    body: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CallFinished(Message):
    """Answer `RunCall` with its results.

    :ivar first: the item that the results begin with, where some came before or the call ended early; None if the body
        has them all. `count`: how many they are then.
    :ivar outcomes: of a step, what came of each session (see `ctxflow.scheduler.events.StepFinished`); else None.
    :ivar made: size in bytes of each output, by its name in the sandbox; None for a call without files.
    :ivar app: the app's name, if the call left files that will be removed; `rest`: some of their names.
    :ivar body: the results, a pickle.
    """

    call: int
    seconds: float
    first: int | None = None
    count: int = 0
    outcomes: Sequence[Mapping[str, Any]] | None = None
    made: Mapping[str, int] | None = None
    app: str = ""
    rest: Sequence[str] = ()
    body: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CallRaised(Message):
    """Answer `RunCall` with an error: the app's, or the host's where the call could not be begun.

    :ivar key: of the load that was meant, if the host answers.
    :ivar at: where the function answers its items one by one, the first that it did not answer.
    :ivar made: as of `CallFinished`, of what the call printed.
    :ivar body: the exception, a pickle, where it can be opened again.
    """

    call: int
    context: str
    seconds: float
    trouble: Trouble
    key: str | None = None
    at: int | None = None
    made: Mapping[str, int] | None = None
    body: bytes = b""


Answer: TypeAlias = PartFinished | CallFinished
"""What comes on the line to the driver after `LineOpened`; all else goes to the host."""
FromLibrary: TypeAlias = (
    LineOpened | ContextBuilt | BuildFailed | CallBegan | CallEnded | PartFinished | CallFinished | CallRaised
)


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


# --- on the wire

M = TypeVar("M", bound=Message)
_writers: dict[type[Message], Callable[[Any], tuple[Any, ...]]] = {}


def pack(message: Message) -> bytes:
    """Return a message as a frame of wire.py.

    >>> pack(InterruptCall("c", 7))[12:]
    b'["InterruptCall","c",7]'
    """
    kind = type(message)
    write = _writers.get(kind) or _writer(kind)
    return frame([kind.__name__, *write(message)], message.body)


def _writer(kind: type[Message]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what gives the fields of a kind of message, but its body."""
    names = _fields(kind)
    get: Callable[[Any], Any] = attrgetter(*names) if names else lambda message: ()
    _writers[kind] = write = (lambda message: (get(message),)) if len(names) == 1 else get
    return write


def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.name != "body"]


class Direction(Generic[M]):
    """Reads the messages of one direction, a union of their classes.

    >>> messages: Direction[ToHost] = Direction(ToHost)
    >>> messages.open(["InterruptCall", "c", 7], b"")
    InterruptCall(context='c', call=7)
    """

    def __init__(self, union: Any) -> None:
        self._kinds: dict[str, tuple[Callable[..., M], bool]] = {}
        for kind in get_args(union):
            names = [field.name for field in dataclasses.fields(kind)]
            has_body = names[-1:] == ["body"]
            made = _with_trouble(kind, names.index("trouble")) if "trouble" in names else kind
            self._kinds[kind.__name__] = made, has_body

    def open(self, head: Head, body: bytes) -> M:
        """Return a message that came.

        :raises ValueError: if it is none of this direction.
        """
        try:
            kind, has_body = self._kinds[head[0]]
            return kind(*head[1:], body) if has_body else kind(*head[1:])
        except (LookupError, TypeError) as error:
            raise ValueError(f"this is no message that may come here ({error!r}); is it of another ctxflow?") from None


def _with_trouble(kind: Callable[..., M], place: int) -> Callable[..., M]:
    def made(*values: Any) -> M:
        return kind(*values[:place], Trouble(*values[place]), *values[place + 1 :])

    return made


TO_HOST: Direction[ToHost] = Direction(ToHost)
FROM_HOST: Direction[FromHost] = Direction(FromHost)
TO_LIBRARY: Direction[ToLibrary] = Direction(ToLibrary)
FROM_LIBRARY: Direction[FromLibrary] = Direction(FromLibrary)
ANSWERS: Direction[Answer] = Direction(Answer)
