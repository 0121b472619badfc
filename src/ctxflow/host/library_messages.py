"""The messages between library processes, their hosts, and the driver on the lines that it has to them.

They are apart from those of messages.py so that a library process imports no others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ctxflow.host.wire import Direction, Message, Trouble

# --- to library processes


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
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
    :ivar path: `sys.path` of the process, empty for its own; where CTXFLOW_PYTHON names it, its own comes after.
    :ivar states: the folder of the worker's cache with frozen states of sessions.
    :ivar preload: modules that it is known to import, which a zygote does beforehand; None to spawn the process.
    :ivar began: when the host was asked for the process, by `time.monotonic`, and `waited`, the seconds from then on in
        which a zygote imported for it; from the host alone.
    :ivar park: whether it may be parked, if it can be.
    :ivar artifacts: what the recipe names of them: name -> variable or folder (artifact_keys.py); None to keep none.
    :ivar fresh: whether to begin without what was kept of them.
    :ivar sent: those that came from other hosts, by their keys: digest, and path of the archive (on the driver, until
        the worker has put in its place that in its cache).
    :ivar kept: the folder and the key from which the library process takes artifacts, and the path of each; None to
        take none. `packed`: it is an archive and its digest. Both from the host alone.
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
    preload: Sequence[str] | None = ()
    began: float | None = None
    waited: float = 0.0
    park: bool = True
    artifacts: Mapping[str, str] | None = None
    fresh: bool = False
    sent: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    kept: tuple[str, str, Mapping[str, str]] | None = None
    packed: bool = False
    body: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class GivePart(Message):
    """Keep a function, or constants, that calls will name; the body is its pickle.

    From the engine before the first call that names it. Not answered.
    """

    name: str
    body: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class ForgetParts(Message):
    """Forget functions and constants that no call will name. From the engine. Not answered."""

    names: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class RunCall(Message):
    """Run a function on the library process of a context.

    From the engine, for a `Run` or `Step`. Answered by `CallFinished` or `CallRaised`, after any number of
    `PartFinished`; by `LibraryDied` if the process ends first.

    :ivar call: the attempt's number.
    :ivar key: of the load that is meant, None for the latest.
    :ivar function: the name of a part, "" if the function is in the body; `constants`: likewise of its named arguments.
    :ivar style: "batch", "item", "apply" or "step" (see `ctxflow.executors.contract.CallPayload`).
    :ivar insert: whether an "apply" function gets the built context as its first argument.
    :ivar timeout: seconds that it may take, None for no limit.
    :ivar every: seconds between two `PartFinished`, None for the library process's own choice.
    :ivar files: inputs (name in the call's folder, name in the sandbox or web address), outputs (name in the folder,
        name in the sandbox, whether the call has to make it), and the sandbox, which the host fills in; None without.
    :ivar threads: as of `ctxflow.executors.contract.CallPayload`.
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
    threads: int = 0
    body: bytes = b""

    @property
    def overlaps(self) -> bool:
        """Whether it runs beside others, and the library process sees to its timeout."""
        return self.style == "item" or self.threads > 1


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class CloseContext(Message):
    """Clean up what an `async` context has built, and end.

    From a host to a library process that said by `LoopBegan` that there is something to close. Its end answers it; it
    is killed if that takes too long.
    """


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class ParkContext(Message):
    """Have a built context that runs nothing give up its GPU memory.

    From the engine to a host, for a `Park`; the host passes it on, and builds and wakes nothing until it is done.
    Answered by `ContextAsleep` or `ParkRaised`; by `LibraryDied` if the process had ended.
    """

    context: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class WakeContext(Message):
    """Have a parked context take calls again; as `ParkContext`. Answered by `ContextAwake` or `ParkRaised`."""

    context: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class AskLoop(Message):
    """Ask a library process whose calls overlap whether its event loop still turns. Answered by `LoopAnswered`."""


CallFolder: TypeAlias = tuple[Sequence[tuple[str, str]], Sequence[tuple[str, str, bool]], str]
"""Inputs, outputs and the sandbox of a call with files."""
ToLibrary: TypeAlias = (
    BuildContext | CloseContext | ParkContext | WakeContext | AskLoop | GivePart | ForgetParts | RunCall
)
"""From a host to its library process; the last three also from the driver, on the line that it has to one."""


# --- from library processes


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class LineOpened(Message):
    """Say whose line a connection to the driver is: its first message. Not answered."""

    key: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class ContextBuilt(Message):
    """Answer `BuildContext`: calls may come.

    :ivar seconds: what the load took, from the start of its process on. :ivar memory: bytes as measured, of the process
        and its descendants (docs/glossary.md), None where unknown. :ivar gpu_memory: on each GPU; unknown too where a
        process beside the library process has one open.
    :ivar parts: what of these seconds went into which part (load_parts.py), all together the same.
    :ivar modules: those of installed packages that were imported for it, in their order, but those of the zygote.
    :ivar started: "forked", "spawned", or "spawned: " and why; its host adds it.
    :ivar parks: whether it may be parked.
    :ivar artifacts: "used" if it began with what an earlier build made; "spoiled: ", "failed: " or "not kept: " and
        why, where that did not go well; else "".
    """

    context: str
    key: str
    seconds: float
    memory: int | None = None
    gpu_memory: int | None = None
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    modules: Sequence[str] = ()
    started: str = ""
    parks: bool = False
    artifacts: str = ""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class ContextAsleep(Message):
    """Answer `ParkContext`: the context is parked; memory as of `ContextBuilt`, as it is now."""

    context: str
    key: str
    seconds: float
    memory: int | None = None
    gpu_memory: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class ContextAwake(Message):
    """Answer `WakeContext`: calls may come; memory as of `ContextBuilt`."""

    context: str
    key: str
    seconds: float
    memory: int | None = None
    gpu_memory: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class ParkRaised(Message):
    """Answer `ParkContext` or `WakeContext`: it cannot be done, and there is no library process now."""

    context: str
    key: str
    trouble: Trouble


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class BuildFailed(Message):
    """Answer `BuildContext`: there is no library process now. From the library process or its host.

    :ivar body: the exception, a pickle, where it can be opened again.
    """

    context: str
    key: str
    trouble: Trouble
    body: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class LoopBegan(Message):
    """Tell the host that calls overlap from now on: it finds them as running_calls.py says. Not answered.

    :ivar closes: whether there is something to clean up at the end (`CloseContext`).
    :ivar threads: whether calls run on threads.
    """

    closes: bool = False
    threads: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class LoopAnswered(Message):
    """Answer `AskLoop`."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class ContextGone(Message):
    """Say that what was built is of no more use (`ctxflow.errors.ContextLost`): the host ends the process.

    It answers no call: those in flight are in the `LibraryDied` that follows.
    """

    trouble: Trouble


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class FirstCallEnded(Message):
    """Tell the host that a call has ended, the first that went well or, before it, the first that failed. Not answered.

    From a library process with artifacts alone: a first call may compile.
    """

    failed: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class CallBegan(Message):
    """Have the host see to the timeout of a call that came on the line to the driver, past the host. Not answered."""

    call: int
    timeout: float


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class CallEnded(Message):
    """Tell the host that such a call is over. Not answered."""

    call: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class PartFinished(Message):
    """Bring results of a call that goes on: of `count` of its items, from its `first` on. Not answered."""

    call: int
    first: int
    count: int
    body: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
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


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
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
    LineOpened | ContextBuilt | BuildFailed | ContextAsleep | ContextAwake | ParkRaised | LoopBegan | LoopAnswered
    | ContextGone | FirstCallEnded | CallBegan | CallEnded | PartFinished | CallFinished | CallRaised
)  # fmt: skip

TO_LIBRARY: Direction[ToLibrary] = Direction(ToLibrary)
FROM_LIBRARY: Direction[FromLibrary] = Direction(FromLibrary)
ANSWERS: Direction[Answer] = Direction(Answer)
