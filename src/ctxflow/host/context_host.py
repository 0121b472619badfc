"""The context host: supervises the library processes of one worker, one for each context.

It runs none of the user's code, so that nothing of the user's can take the worker down: exceptions, exits,
crashes, floods of output and unpicklable results end in a library process, and leave here as data.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ctxflow.host import private_shm
from ctxflow.host.artifacts import ArtifactStore
from ctxflow.host.closing_libraries import ClosingLibraries
from ctxflow.host.forking import Zygote, Zygotes
from ctxflow.host.keeping_artifacts import KeptArtifacts
from ctxflow.host.library_limits import LibraryLimits
from ctxflow.host.library_messages import (
    FROM_LIBRARY,
    AskLoop,
    BuildContext,
    BuildFailed,
    CallBegan,
    CallEnded,
    CallFinished,
    CallRaised,
    ContextAsleep,
    ContextAwake,
    ContextBuilt,
    ContextGone,
    FirstCallEnded,
    ForgetParts,
    FromLibrary,
    GivePart,
    LoopBegan,
    ParkContext,
    ParkRaised,
    PartFinished,
    RunCall,
    WakeContext,
)
from ctxflow.host.library_process import HostPatience, KeptLogs, LibraryProcess, Undead, now
from ctxflow.host.linux import (
    advice,
    bury_orphans,
    kill_tree,
    looks_like_the_machine,
)
from ctxflow.host.local_files import clear, stage, staging_message
from ctxflow.host.messages import (
    ArtifactsFailed,
    ArtifactsMade,
    DrainCalls,
    EndLibrary,
    EndOverdue,
    FilesStaged,
    FromHost,
    InterruptCall,
    LibraryDied,
    LibraryEnded,
    Ping,
    Pong,
    PreloadModules,
    StageFiles,
    StagingFailed,
    ToHost,
    WorkerStuck,
)
from ctxflow.host.shm_leftovers import ShmLeftovers
from ctxflow.host.wire import Message, Trouble, pack

T = TypeVar("T")
Emit = Callable[[FromHost], None]
_NEXT_SECONDS = 0.2
_END_SECONDS = 2.0  # For all library processes together, at the host's end.
_MOST_LOGS = 20
_CLEAR_SECONDS = 60.0  # How long what a process made is kept for whoever copies it.


def _trouble(text: str, error: Exception) -> Trouble:
    return Trouble("exception", type(error).__name__, text, machine=looks_like_the_machine(error))


def _explained(library: LibraryProcess, trouble: Trouble) -> Trouble:
    """Return what went wrong in a library process with its last lines, and with what these suggest."""
    output = library.tail()
    said = f"{trouble.message}\n{trouble.traceback}\n{output}"
    return trouble._replace(output=output, message=trouble.message + private_shm.advice(library.process.pid, said))


class Host:
    """Carries out what it is told about contexts and calls, and reports.

    Takes the messages of `ctxflow.host.messages.ToHost` but `LeaveWorker`, and makes those of `FromHost` but
    `HostStarted` and `NoticeGiven`.

    :param emit: takes each report; called on the thread that runs the selector.
    :param selector: where the host registers what it waits for; each key's data is a function to call.
    :param scratch: the worker's directory.
    :param logs: where the library processes' output is kept.
    :param zygote: one that library processes can be forked from, if there is one already.
    :param artifacts: where what builds made is kept; None to keep none.
    :param patience: how long library processes are waited for.
    """

    def __init__(
        self,
        emit: Emit,
        selector: selectors.BaseSelector,
        scratch: str,
        logs: str,
        zygote: Zygote | None = None,
        artifacts: ArtifactStore | None = None,
        *,
        patience: HostPatience = HostPatience(),  # noqa: B008 - It is frozen.
    ) -> None:
        self._emit = emit
        self._patience = patience
        self._selector = selector
        self._scratch = scratch
        self._logs = logs
        self._kept_logs = KeptLogs(_MOST_LOGS)
        self._libraries: dict[str, LibraryProcess] = {}
        self._parts: dict[str, GivePart] = {}
        self._started = 0
        self._noticed = False
        self._done: collections.deque[Callable[[], None]] = collections.deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._closing = threading.Lock()
        self._closed = False
        selector.register(self._wake_read, selectors.EVENT_READ, self._background_done)
        self._limits = LibraryLimits(self._fail, self._ask_loop)
        self.undead = Undead(patience.stuck)
        self._zygotes = Zygotes(selector, scratch, zygote)
        self._closing_libraries = ClosingLibraries(selector, self._end_for_good)
        self._leftovers = ShmLeftovers()
        self._artifacts = KeptArtifacts(artifacts, self.in_background)
        # What waits until there is room, or a zygote.
        self._postponed: dict[str, BuildContext | WakeContext] = {}
        self._handlers: dict[type[Message], Callable[[Any], None]] = {
            StageFiles: self._stage,
            PreloadModules: self._preload,
            BuildContext: self._load,
            EndLibrary: self._unload,
            ParkContext: self._move,
            WakeContext: self._move,
            GivePart: self._give_part,
            ForgetParts: self._forget_parts,
            RunCall: self._call,
            InterruptCall: self._interrupt,
            DrainCalls: lambda message: self.give_notice(),
            EndOverdue: self._overdue,
            Ping: lambda message: self._emit(Pong()),
        }

    def handle(self, message: ToHost) -> None:
        """Carry out one instruction. What cannot be carried out is reported as a failure."""
        try:
            self._handlers[type(message)](message)
        except Exception as error:
            self._refuse(message, error)

    def _refuse(self, message: ToHost, error: Exception) -> None:
        def trouble(do: str) -> Trouble:
            text = advice(error)
            if isinstance(error, OSError) and not text:
                text = "; see that the worker's machine has disk space, memory, processes and descriptors left"
            return _trouble(f"the worker cannot {do} it: {error or type(error).__name__}{text}", error)

        if isinstance(message, RunCall):
            self._emit(CallRaised(message.call, message.context, 0.0, trouble("call"), message.key))
        elif isinstance(message, BuildContext):
            self._emit(BuildFailed(message.context, message.key, trouble("load")))
        elif isinstance(message, StageFiles):
            self._emit(StagingFailed(message.context, trouble("stage")))

    def keep_artifacts(
        self, store: ArtifactStore, tell: Callable[[ArtifactsMade | ArtifactsFailed], None] | None = None
    ) -> None:
        """Keep what builds make from now on; `tell` takes what the driver is to know, so that it goes to others."""
        self._artifacts.store, self._artifacts.tell = store, tell

    def timeout(self) -> float | None:
        """Return how long the selector may wait before `check` is due, in seconds."""
        due = min(self._limits.due(self._libraries.values()), self.undead.look_at, self._closing_libraries.look_at)
        due = min(due, self._leftovers.due(len(self._libraries)), self._zygotes.due())
        due = min(due, self._artifacts.due(self._libraries.values()))
        return None if due == float("inf") else max(0.0, due - now())

    def check(self) -> None:
        """End what has taken too long or too much memory."""
        time = now()
        self._limits.check(list(self._libraries.values()), time)
        self._closing_libraries.check(time)
        self._leftovers.check(self._pids(), time)
        self._zygotes.check(time)
        self._artifacts.check(self._libraries.values(), time)
        if self.undead.look_at <= time and (reason := self.undead.look(time)) is not None:
            self._emit(WorkerStuck(reason))
        if self._postponed and not self._is_full():
            postponed, self._postponed = self._postponed, {}
            for message in postponed.values():
                self.handle(message)

    def _is_full(self) -> bool:
        """Return whether something is about to go that may still have a GPU's memory."""
        parking = any(library.moving == "park" for library in self._libraries.values())
        return parking or bool(self.undead or self._closing_libraries)

    def give_notice(self) -> None:
        """Have calls that answer their items one by one end after the item in flight: the worker will be evicted."""
        self._noticed = True
        for library in self._libraries.values():
            library.give_notice()

    def stop(self) -> None:
        """End all library processes; those that have something to close get two seconds for it, all together."""
        for library in list(self._libraries.values()):
            if library.closes:
                self._remove(library.context, close=True)
            else:
                kill_tree(library.process.pid)
        self._closing_libraries.finish()
        self._zygotes.close()
        self._artifacts.finish(self._libraries.values())
        deadline = now() + _END_SECONDS
        for context in list(self._libraries):
            self._remove(context, max(0.0, deadline - now()))
        self.undead.wait(max(0.0, deadline - now()))

    def close(self) -> None:
        """Free the host's own descriptors; it cannot be used any more."""
        with self._closing:
            self._closed = True
            os.close(self._wake_read)
            os.close(self._wake_write)

    def bury_orphans(self) -> None:
        """Reap what calls left behind, where this process has adopted it."""
        bury_orphans([*self._pids(), *self.undead.pids()])

    def _pids(self) -> list[int]:
        living = [library.process.pid for library in self._libraries.values()]
        return [*living, *self._closing_libraries.pids()]

    def in_background(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Do what takes long, and does not raise, in a thread; pass its result on in the thread of the selector."""

        def run() -> None:
            self._done.append(functools.partial(then, work()))
            with self._closing, contextlib.suppress(OSError):
                if not self._closed:  # The number may be another file's by now.
                    os.write(self._wake_write, b".")

        threading.Thread(target=run, name="ctxflow-background", daemon=True).start()

    def _background_done(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while self._done:
            self._done.popleft()()

    # --- instructions

    def _stage(self, message: StageFiles) -> None:
        """Copy files to the cache, while the host goes on serving calls."""

        def work() -> FromHost:
            try:
                for source, digest in message.files.values():
                    stage(source, digest, message.cache, message.link)
            except Exception as error:
                return StagingFailed(message.context, _trouble(staging_message(error, message.cache), error))
            return FilesStaged(message.context)

        self.in_background(work, self._emit)

    def _preload(self, message: PreloadModules) -> None:
        self._zygotes.preload(message.environment, message.modules)

    def _load(self, message: BuildContext) -> None:
        context = message.context
        self._remove(context, close=True)
        if self._is_full():
            self._postponed[context] = message
            return
        zygote = self._zygotes.offer(message)
        if zygote is None:  # It is importing.
            self._postponed[context] = dataclasses.replace(message, began=message.began or now())
            return
        began = message.began or now()
        message = dataclasses.replace(message, began=began, waited=now() - began if message.began else 0.0)
        self._started += 1
        scratch = os.path.join(self._scratch, f"library-{self._started}")
        log = os.path.join(self._logs, f"{message.name or 'plain'}-{self._started}.log")
        forked_from, why = (None, zygote) if isinstance(zygote, str) else (zygote, "")
        message, variables, artifacts = self._artifacts.begin(message, scratch)
        environment = {**message.environment, **variables}
        library = LibraryProcess(context, scratch, environment, log, forked_from, message.path, patience=self._patience)
        library.artifacts = artifacts
        library.started += f": {why}" if why else ""
        library.key = message.key
        self._libraries[context] = library
        self._kept_logs.add(log, [each.log for each in self._libraries.values()])
        if self._noticed:
            library.give_notice()
        if message.timeout:
            library.load_deadline = now() + message.timeout
            library.timeout = message.timeout
        if message.memory is not None:
            self._limits.limit_memory(library, message.memory)
        register = self._selector.register
        register(library.channel, selectors.EVENT_READ, lambda: self._heard(library))
        register(library.output, selectors.EVENT_READ, library.read_output)
        register(library.death, selectors.EVENT_READ, lambda: self._died(library))
        library.channel.send_frame(pack(message))
        self._watch_writes(library)

    def _unload(self, message: EndLibrary) -> None:
        postponed = self._postponed.pop(message.context, None) is not None

        def then() -> None:
            if message.files:
                clear(message.files)
            self._emit(LibraryEnded(message.context))

        if not self._remove(message.context, close=True, then=then):
            if postponed:
                then()
            elif message.files:
                clear(message.files)

    def _move(self, message: ParkContext | WakeContext) -> None:
        """Have a library process park or wake what it has built."""
        library = self._libraries.get(message.context)
        if library is None:  # Its end was reported.
            return
        if isinstance(message, WakeContext) and self._is_full():
            self._postponed[message.context] = message
            return
        library.move("park" if isinstance(message, ParkContext) else "wake", now())
        library.channel.send_frame(pack(message))
        self._watch_writes(library)

    def _give_part(self, message: GivePart) -> None:
        self._parts[message.name] = message

    def _forget_parts(self, message: ForgetParts) -> None:
        for name in message.names:
            self._parts.pop(name, None)
        for library in self._libraries.values():
            library.forget_parts(message.names)
            self._watch_writes(library)

    def _call(self, message: RunCall) -> None:
        library = self._libraries.get(message.context)
        if library is None or message.key not in (None, library.key):  # It ended while the call was on its way.
            trouble = Trouble("crash", "LibraryGone", "the library process ended before the call")
            self._emit(LibraryDied(message.context, None, [message.call], trouble))
            return
        for name in filter(None, (message.function, message.constants)):
            library.give_part(self._parts[name])
        library.begin(message, now())
        self._watch_writes(library)

    def _interrupt(self, message: InterruptCall) -> None:
        library = self._libraries.get(message.context)
        if library is not None and library.ready:
            library.interrupt(message.call, now())

    def _overdue(self, message: EndOverdue) -> None:
        """End a process whose call has timed out: it may have stopped before it said that the call began."""
        library = self._libraries.get(message.context)
        if library is not None and library.key == message.key:
            if library.overlaps:
                self._limits.end_if_overdue(library, now(), message.call)
            else:
                self._limits.end_call(library, message.timeout, [message.call])

    # --- events

    def _heard(self, library: LibraryProcess) -> None:
        library.channel.flush()
        for head, body in library.channel.receive():
            try:
                message = FROM_LIBRARY.open(head, body)
            except ValueError:  # The user's code wrote there.
                library.channel.closed = True
                break
            if not self._take(library, message):
                return
        if library.channel.closed:
            # The process is about to end, or closed its socket: either way it is of no more use.
            self._died(library)
        else:
            self._watch_writes(library)

    def _take(self, library: LibraryProcess, message: FromLibrary) -> bool:
        """Take what a library process says; False if it is of no more use."""
        library.asked = False  # It turns, whatever it says; `LoopAnswered` says nothing else.
        if isinstance(message, (CallFinished, CallRaised, CallEnded)):
            library.ended(message.call)
        if isinstance(message, (CallRaised, BuildFailed, ParkRaised)):
            message = dataclasses.replace(message, trouble=_explained(library, message.trouble))
        if isinstance(message, CallBegan):
            library.watch(message.call, message.timeout, now())
        elif isinstance(message, FirstCallEnded):
            self._artifacts.called(library, message.failed)
        elif isinstance(message, LoopBegan):
            library.loop_began(message.closes, message.threads, now())
        elif isinstance(message, ContextGone):
            self._fail(library, message.trouble)
            return False
        elif isinstance(message, (ContextAsleep, ContextAwake)):
            library.moved(parked=isinstance(message, ContextAsleep))
            self._emit(message)
        elif isinstance(message, BuildFailed):
            self._remove(library.context)
            self._not_built(library, message)
            return False
        elif isinstance(message, ParkRaised):
            self._remove(library.context)
            self._emit(message)
            return False
        elif isinstance(message, ContextBuilt):
            if self._limits.end_if_too_big(library):
                return False
            library.load_deadline, library.ready = float("inf"), True
            came = self._artifacts.built(library, message.artifacts)
            self._emit(dataclasses.replace(message, started=library.started, artifacts=came))
        elif isinstance(message, (PartFinished, CallFinished, CallRaised)):
            self._emit(message)
        return True

    def _ask_loop(self, library: LibraryProcess) -> None:
        library.asked = True
        library.channel.send_frame(pack(AskLoop()))
        self._watch_writes(library)

    def _watch_writes(self, library: LibraryProcess) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if library.channel.pending else 0)
        key = self._selector.get_key(library.channel)
        if key.events != wanted:
            self._selector.modify(library.channel, wanted, key.data)

    def _died(self, library: LibraryProcess) -> None:
        if self._libraries.get(library.context) is not library:
            return
        # What it sent before its end still counts.
        if not library.channel.closed:
            self._heard(library)
            if self._libraries.get(library.context) is not library:
                return
        cause = library.cause_of_death()
        if library.process.returncode == -signal.SIGKILL:
            # Where the whole worker is being killed, this process is next: then nothing in it is to blame.
            time.sleep(_NEXT_SECONDS)
        self._fail(library, Trouble("crash", "LibraryDied", cause))

    def _fail(self, library: LibraryProcess, trouble: Trouble, blamed: Sequence[int] = ()) -> None:
        """End a library process, and report its load or its calls as failed, of which some may be to blame."""
        # Those on the line to the driver are known as far as they are to blame; the driver knows the others.
        calls = [*blamed, *(call for call in library.calls if call not in blamed)]
        was_ready, trouble = library.ready, _explained(library, trouble)
        self._remove(library.context)
        if library.moving and not calls:
            self._emit(ParkRaised(library.context, library.key, trouble))
        elif was_ready:
            self._artifacts.failed(library, trouble.message)
            self._emit(LibraryDied(library.context, library.key, calls, trouble, blamed))
        else:
            self._not_built(library, BuildFailed(library.context, library.key, trouble))

    def _not_built(self, library: LibraryProcess, report: BuildFailed) -> None:
        """Build a context once more without what an earlier build made, if it failed with that; else report it."""
        again = self._artifacts.failed(library, f"{report.trouble.error}: {report.trouble.message}")
        if again is None:
            self._emit(report)
        else:
            self.handle(again)

    def _remove(
        self,
        context: str,
        seconds: float | None = None,
        close: bool = False,
        then: Callable[[], None] = lambda: None,
    ) -> bool:
        """End a context's library process, if there is one.

        :param seconds: how long to wait for it.
        :param close: whether it may first close what it has built, for which nobody waits.
        :param then: what to do once it has ended.
        """
        library = self._libraries.pop(context, None)
        if library is None:
            return False
        if isinstance(self._postponed.get(context), WakeContext):
            del self._postponed[context]  # It was for this one.
        for registered in (library.channel, library.output, library.death):
            self._selector.unregister(registered)
        if close and library.closes:
            self._closing_libraries.add(library, then)
        else:
            self._end_for_good(library, seconds)
            then()
        return True

    def _end_for_good(self, library: LibraryProcess, seconds: float | None = None) -> None:
        self._leftovers.look([library.process.pid, *self._pids()])
        gone = library.end() if seconds is None else library.end(seconds)
        self._leftovers.ended(now())
        if not gone:
            self.undead.add(library.process, now())
        else:
            try:
                os.rmdir(library.scratch)
            except OSError:  # What calls left there may be much.
                its = library.artifacts

                def work() -> None:
                    if its is not None:
                        self._artifacts.wait(now() + _CLEAR_SECONDS)
                    clear(library.scratch)

                self.in_background(work, lambda cleared: None)
