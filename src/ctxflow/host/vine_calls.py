"""Which TaskVine call each of the host's reports answers, and what calls do with files.

A TaskVine call brings instructions, which are carried out one after another: each that ends in a report of its own is
waited for, and the call is answered after the last, or after the first that fails. TaskVine brings a file to a worker
as a call's input, which is gone when the call is answered; so it is hard-linked into the cache before.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import shutil
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ctxflow.host import local_files
from ctxflow.host.artifact_keys import PACKED
from ctxflow.host.call_surroundings import state_path
from ctxflow.host.library_messages import BuildFailed, CallFinished, CallRaised, ContextBuilt, PartFinished
from ctxflow.host.linux import looks_like_the_machine
from ctxflow.host.local_files import link_or_copy
from ctxflow.host.messages import (
    CallRefused,
    FetchFile,
    FileCached,
    FileDone,
    FileFailed,
    FileMessage,
    FileSent,
    FilesStaged,
    ForgetFile,
    FromWorker,
    LibraryDied,
    LibraryEnded,
    LinkFile,
    OpenEnvironment,
    ReachPeer,
    SeedFile,
    SendArtifacts,
    SendState,
    StagingFailed,
    TakeKept,
    TakeState,
    ToWorker,
)
from ctxflow.host.vine_protocol import Request
from ctxflow.host.wire import Message, Trouble, pack

if TYPE_CHECKING:
    from ctxflow.host.artifacts import ArtifactStore
    from ctxflow.host.host_cache import HostCache

_REACH_SECONDS = 3.0
_FAILURES = (BuildFailed, StagingFailed, FileFailed, CallRaised, LibraryDied)


class OpenCall:
    """A TaskVine call that is not answered yet."""

    __slots__ = ("context", "outputs", "parts", "reports", "request", "rest", "seal", "told")

    def __init__(self, request: Request, instructions: list[ToWorker], seal: bytes) -> None:
        self.request = request
        self.seal = seal  # To which its answer's is bound.
        self.rest = collections.deque(instructions)  # Those that are still to be carried out.
        self.reports: list[bytes] = []  # What its answer will hold, framed.
        self.context: str | None = None  # Of the instruction that it waits for, if that is about one.
        self.outputs: list[str] = []  # Names in its sandbox of the files that it must leave there.
        # Results of that instruction that came before its end, framed, until they are confirmed; the first `told` of
        # them are in the answer to the last `listen`.
        self.parts: list[bytes] = []
        self.told = 0

    def refuse(self, message: str) -> None:
        """Carry out nothing more of it."""
        self.rest.clear()
        self.reports.append(pack(CallRefused(message)))


class OpenCalls:
    """The open TaskVine calls.

    :param carry_out: starts one instruction of a call; returns whether it is done, else `finish` or `report` is called
        later with its report.
    :param answer: sends a call's answer.
    """

    def __init__(self, carry_out: Callable[[OpenCall, ToWorker], bool], answer: Callable[[OpenCall], None]) -> None:
        self._carry_out = carry_out
        self._answer = answer
        self._running: dict[int, OpenCall] = {}  # By the number that the driver gave the context's call.
        self._loading: dict[str, tuple[str, OpenCall]] = {}  # By context: the load's key, and the call.
        self._staging: dict[str, list[OpenCall]] = {}  # By context.
        self._current: OpenCall | None = None  # Whose instruction is being carried out.
        self._listening: OpenCall | None = None
        self._kept: list[bytes] = []  # Reports that nobody asked for, until somebody listens.

    def begin(self, call: OpenCall) -> None:
        """Take a call, and carry out what can be."""
        while call.rest:
            instruction = call.rest.popleft()
            self._current = call
            try:
                done = self._carry_out(call, instruction)
            finally:
                self._current = None
            if not done:
                return
        self._answer(call)

    def finish(self, call: OpenCall, report: FromWorker) -> None:
        """Note the report with which the instruction has ended that a call waits for."""
        # What a `Listen` was told may arrive later than this answer, so that it comes twice; the driver counts it once.
        call.reports += [*call.parts, pack(report)]
        call.parts.clear()
        call.told = 0
        call.context = None
        if isinstance(report, _FAILURES):
            call.rest.clear()
        if call.rest:
            self.begin(call)
        else:
            self._answer(call)

    # --- what is waited for

    def wait_for_call(self, call: OpenCall, number: int, context: str) -> None:
        """Have a call wait for the end of a context's call."""
        call.context = context
        self._running[number] = call

    def wait_for_load(self, call: OpenCall, context: str, key: str) -> None:
        """Have a call wait until a context is built; end the waits for its earlier process."""
        self._end_waits(context)
        call.context = context
        self._loading[context] = (key, call)

    def wait_for_staging(self, call: OpenCall, context: str) -> None:
        """Have a call wait until a context's files are there."""
        self._staging.setdefault(context, []).append(call)

    def listen(self, call: OpenCall) -> None:
        """Have a call wait for the next report that answers no other; it confirms what the one before brought."""
        if self._listening is not None:
            self._answer(self._listening)
        else:
            for running in self._running.values():
                del running.parts[: running.told]
                running.told = 0
        self._listening = call
        self._tell()

    # --- reports

    def report(self, report: FromWorker) -> None:
        """Hand a report of the host to the call that waits for it."""
        if isinstance(report, PartFinished):
            if (call := self._running.get(report.call)) is not None:
                call.parts.append(pack(report))
            else:  # Of a call that overlaps others.
                self._kept.append(pack(report))
            self._tell()
        elif isinstance(report, (CallFinished, CallRaised)):
            self._settle(self._running.pop(report.call, None), report)
        elif isinstance(report, LibraryDied):
            self._died(report)
        elif isinstance(report, (ContextBuilt, BuildFailed)):
            self._built(report)
        elif isinstance(report, (FilesStaged, StagingFailed)):
            self._settle(self._staged(report.context), report)
        else:
            if isinstance(report, LibraryEnded):
                self._end_waits(report.context)
            self._settle(None, report)

    def _settle(self, call: OpenCall | None, report: FromWorker) -> None:
        if call is not None:
            self.finish(call, report)
        elif self._current is not None and not isinstance(report, LibraryDied):
            self._current.reports.append(pack(report))
        else:
            self._kept.append(pack(report))
            self._tell()

    def _tell(self) -> None:
        if self._listening is None:
            return
        untold = [running for running in self._running.values() if len(running.parts) > running.told]
        if self._kept or untold:
            call, self._listening = self._listening, None
            for running in untold:
                call.reports += running.parts[running.told :]
                running.told = len(running.parts)
            call.reports += self._kept
            self._kept.clear()
            self._answer(call)

    def _died(self, report: LibraryDied) -> None:
        """Answer each call that it cost with a copy; report it unasked if it was idle."""
        unknown = []
        for number in report.calls:
            call = self._running.pop(number, None)
            if call is None:
                unknown.append(number)
            else:
                call.reports += self._kept  # What it answered before its end comes before that.
                self._kept.clear()
                self.finish(call, dataclasses.replace(report, calls=[number]))
        if unknown or not report.calls:
            self._settle(None, dataclasses.replace(report, calls=unknown))

    def _built(self, report: ContextBuilt | BuildFailed) -> None:
        context = report.context
        key, call = self._loading.get(context, (None, None))
        if call is not None and key == report.key:
            del self._loading[context]
            if isinstance(report, BuildFailed):
                self._end_waits(context)
            self.finish(call, report)
        else:
            self._settle(None, report)

    def _staged(self, context: str) -> OpenCall | None:
        """Return the first call that waits for a context's files: stagings of one context are alike."""
        calls = self._staging.get(context)
        if not calls:
            return None
        call = calls.pop(0)
        if not calls:
            del self._staging[context]
        return call

    def _end_waits(self, context: str) -> None:
        """Answer the calls that wait for a context's library process with what there is."""
        ended = [number for number, call in self._running.items() if call.context == context]
        calls = [self._running.pop(number) for number in ended]
        if context in self._loading:
            calls.append(self._loading.pop(context)[1])
        for call in calls:
            call.rest.clear()
            self._answer(call)


@dataclasses.dataclass(frozen=True)
class FilePlaces:
    """Where a message finds files, and puts them: the call's own, the worker's cache, that of its host, artifacts."""

    sandbox: str
    cache: str
    kept: HostCache | None = None
    artifacts: ArtifactStore | None = None


def carry_out(message: FileMessage, places: FilePlaces) -> FileCached | FileDone | FileSent | FileFailed:
    """Do what a message says, and return its report."""
    do, work = _WORK[type(message)]
    try:
        return work(message, places) or FileDone()
    except Exception as error:
        where = getattr(error, "filename", None)
        reason = f"{getattr(error, 'strerror', None) or error}" + (f": {where}" if where else "")
        text = f"the worker cannot {do} {getattr(message, 'source', 'it')}: {reason}"
        trouble = Trouble("exception", type(error).__name__, text, machine=looks_like_the_machine(error))
        return FileFailed(getattr(message, "digest", None), trouble)


def states_folder(cache: str) -> str:
    """Return where frozen states of sessions are in a cache."""
    return os.path.join(cache, "sessions")


def _seed(message: SeedFile, at: FilePlaces) -> None:
    """Make a call's input its output too, which TaskVine keeps as a temp file and sends from peer to peer."""
    link_or_copy(os.path.join(at.sandbox, message.input), os.path.join(at.sandbox, message.output))


def _fetch(message: FetchFile, at: FilePlaces) -> FileCached:
    """Keep a call's input: a file, or a folder's content as a tar archive.

    It came through TaskVine, in clear from another worker perhaps; the call, which is sealed, tells its digest.
    """
    from ctxflow.files import digest_now  # Here: not every worker is sent files.

    given = os.path.join(at.sandbox, message.input)
    if digest_now(given) != message.content:
        text = (
            "what came is not what the driver knows by its digest: it was altered on the way, or the file was changed"
        )
        raise ValueError(f"{text} while the run had it")
    is_folder, trouble = message.kind == "tar", None
    if message.keep and at.kept is not None:
        make, name = local_files.extract if is_folder else link_or_copy, os.path.basename(message.source)
        try:
            kept = at.kept.put(message.digest, lambda copy: make(given, copy), name, os.path.getsize(given))
            return _presented(message, kept, at.kept, at.cache)
        except OSError as error:  # The worker's own cache has room, perhaps.
            trouble = f"{name} is not kept in the host's cache: {error.strerror or error}"
    place = local_files.unpack if is_folder else local_files.stage_as
    return _cached(message, place(given, message.digest, message.source, at.cache), trouble)


def _take_kept(message: TakeKept | LinkFile, at: FilePlaces) -> FileCached | None:
    """Take a file or folder from the host's cache, if that has it."""
    kept = None if at.kept is None else at.kept.get(message.digest)
    return None if kept is None or at.kept is None else _presented(message, kept, at.kept, at.cache)


def _link(message: LinkFile, at: FilePlaces) -> FileCached:
    """Take a file or folder from the cache of another worker on this machine, by hard links, or from the host's."""
    trouble = None
    try:
        if (found := _take_kept(message, at)) is not None:
            return found
    except (OSError, ValueError) as error:
        trouble = str(error)
    return _cached(message, local_files.link(message.path, message.digest, message.source, at.cache), trouble)


def _send_state(message: SendState, at: FilePlaces) -> None:
    """Make a session's frozen state a call's output, which TaskVine keeps as a temp file; it is no longer here then."""
    shutil.move(_state(at.cache, message), os.path.join(at.sandbox, message.output))


def _take_state(message: TakeState, at: FilePlaces) -> None:
    """Put a session's frozen state in the cache: a call's input, or what another worker on the machine has in its."""
    target = _state(at.cache, message)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if message.cache:
        shutil.move(_state(message.cache, message), target)
    else:
        link_or_copy(os.path.join(at.sandbox, message.input), target)


def _forget(message: ForgetFile, at: FilePlaces) -> None:
    """Remove a file or folder from the cache."""
    local_files.forget(message.digest, at.cache)


def _environment(message: OpenEnvironment, at: FilePlaces) -> None:
    """Open a packed environment, whose archive is in the cache, and have library processes run its Python."""
    from ctxflow.environments.opening import open_environment  # Here: few workers need it.

    archive = local_files.cached(message.digest, message.source, at.cache)
    place = os.path.join(at.cache, f"environment-{message.digest[:12]}")
    os.environ["CTXFLOW_PYTHON"], os.environ[PACKED] = str(open_environment(archive, place)), message.digest


def _send_artifacts(message: SendArtifacts, at: FilePlaces) -> FileSent:
    """Make what is kept of a build a call's output."""
    if at.artifacts is None:
        raise FileNotFoundError("it keeps none")
    return FileSent(*at.artifacts.pack(message.kept, os.path.join(at.sandbox, message.output)))


def _reach(message: ReachPeer, at: FilePlaces) -> None:
    """Connect to another worker's transfer server, which TaskVine would try for minutes."""
    socket.create_connection((message.address, message.port), _REACH_SECONDS).close()


_WORK: dict[type[Message], tuple[str, Callable[[Any, FilePlaces], FileCached | FileSent | None]]] = {
    SeedFile: ("seed", _seed),
    FetchFile: ("fetch", _fetch),
    TakeKept: ("take from the host's cache", _take_kept),
    LinkFile: ("link", _link),
    ForgetFile: ("forget", _forget),
    OpenEnvironment: ("environment", _environment),
    SendState: ("send_state", _send_state),
    TakeState: ("take_state", _take_state),
    SendArtifacts: ("send what a build made", _send_artifacts),
    ReachPeer: ("reach", _reach),
}
"""What is done for each message, and its name in what is said of a failure."""


def _presented(message: FetchFile | TakeKept | LinkFile, kept: str, host: HostCache, cache: str) -> FileCached:
    return _cached(message, local_files.present(kept, message.digest, message.source, cache, host.in_place))


def _cached(message: FetchFile | TakeKept | LinkFile, place: str, trouble: str | None = None) -> FileCached:
    return FileCached(message.digest, os.path.abspath(place), trouble)


def _state(cache: str, message: SendState | TakeState) -> str:
    return state_path(states_folder(cache), message.session, message.made)
