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
from collections.abc import Callable
from typing import Any, TypeVar

from ctxflow.host.library_messages import (
    FROM_LIBRARY,
    BuildContext,
    BuildFailed,
    CallBegan,
    CallEnded,
    CallFinished,
    CallRaised,
    ContextBuilt,
    ForgetParts,
    GivePart,
    PartFinished,
    RunCall,
)
from ctxflow.host.library_process import KeptLogs, LibraryProcess, Undead, now
from ctxflow.host.linux import (
    advice,
    bury_orphans,
    kill_tree,
    looks_like_the_machine,
    tree_bytes,
)
from ctxflow.host.local_files import clear, stage, staging_message
from ctxflow.host.messages import (
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
    StageFiles,
    StagingFailed,
    ToHost,
    WorkerStuck,
)
from ctxflow.host.wire import Message, Trouble, pack

T = TypeVar("T")
Emit = Callable[[FromHost], None]
_MEMORY_CHECK_SECONDS = 0.5
_NEXT_SECONDS = 0.2
_END_SECONDS = 2.0  # For all library processes together, at the host's end.
_MOST_LOGS = 20


def _trouble(text: str, error: Exception) -> Trouble:
    return Trouble("exception", type(error).__name__, text, machine=looks_like_the_machine(error))


class Host:
    """Carries out what it is told about contexts and calls, and reports.

    Takes the messages of `ctxflow.host.messages.ToHost` but `LeaveWorker`, and makes those of `FromHost` but
    `HostStarted` and `NoticeGiven`.

    :param emit: takes each report; called on the thread that runs the selector.
    :param selector: where the host registers what it waits for; each key's data is a function to call.
    :param scratch: the worker's directory.
    :param logs: where the library processes' output is kept.
    """

    def __init__(self, emit: Emit, selector: selectors.BaseSelector, scratch: str, logs: str) -> None:
        self._emit = emit
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
        self._next_memory_check = float("inf")
        self.undead = Undead()
        self._postponed: dict[str, BuildContext] = {}  # Loads that wait until there is room.
        self._handlers: dict[type[Message], Callable[[Any], None]] = {
            StageFiles: self._stage,
            BuildContext: self._load,
            EndLibrary: self._unload,
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

    def timeout(self) -> float | None:
        """Return how long the selector may wait before `check` is due, in seconds."""
        due = min((library.deadline for library in self._libraries.values()), default=float("inf"))
        due = min(due, self._next_memory_check, self.undead.look_at)
        return None if due == float("inf") else max(0.0, due - now())

    def check(self) -> None:
        """End what has taken too long or too much memory."""
        time = now()
        for library in list(self._libraries.values()):
            if library.deadline <= time:
                self._end_overdue(library, time)
        if self._next_memory_check <= time:
            self._check_memory(time)
        if self.undead.look_at <= time:
            self._check_undead(time)

    def give_notice(self) -> None:
        """Have calls that answer their items one by one end after the item in flight: the worker will be evicted."""
        self._noticed = True
        for library in self._libraries.values():
            library.give_notice()

    def stop(self) -> None:
        """End all library processes."""
        for library in self._libraries.values():
            kill_tree(library.process.pid)
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
        bury_orphans([*(library.process.pid for library in self._libraries.values()), *self.undead.pids()])

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

    def _load(self, message: BuildContext) -> None:
        context = message.context
        self._remove(context)
        if self.undead:  # Which may still have the GPU's memory.
            self._postponed[context] = message
            return
        self._started += 1
        scratch = os.path.join(self._scratch, f"library-{self._started}")
        log = os.path.join(self._logs, f"{message.name or 'plain'}-{self._started}.log")
        library = LibraryProcess(context, scratch, message.environment, log)
        library.key = message.key
        self._libraries[context] = library
        self._kept_logs.add(log, [each.log for each in self._libraries.values()])
        if self._noticed:
            library.give_notice()
        if message.timeout:
            library.load_deadline = now() + message.timeout
            library.timeout = message.timeout
        if message.memory is not None:
            library.memory_limit = message.memory
            self._next_memory_check = min(self._next_memory_check, now() + _MEMORY_CHECK_SECONDS)
        register = self._selector.register
        register(library.channel, selectors.EVENT_READ, lambda: self._heard(library))
        register(library.output, selectors.EVENT_READ, library.read_output)
        register(library.death, selectors.EVENT_READ, lambda: self._died(library))
        library.channel.send_frame(pack(message))
        self._watch_writes(library)

    def _unload(self, message: EndLibrary) -> None:
        postponed = self._postponed.pop(message.context, None) is not None
        ended = self._remove(message.context) or postponed
        if message.files:
            clear(message.files)
        if ended:
            self._emit(LibraryEnded(message.context))

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
            self._fail_call(library, message.timeout)

    # --- events

    def _heard(self, library: LibraryProcess) -> None:
        library.channel.flush()
        for head, body in library.channel.receive():
            try:
                message = FROM_LIBRARY.open(head, body)
            except ValueError:  # The user's code wrote there.
                library.channel.closed = True
                break
            if isinstance(message, (CallFinished, CallRaised, CallEnded)):
                library.calls.pop(message.call, None)
            if isinstance(message, (CallRaised, BuildFailed)):
                message = dataclasses.replace(message, trouble=message.trouble._replace(output=library.tail()))
            if isinstance(message, CallBegan):
                library.watch(message.call, message.timeout, now())
            elif isinstance(message, BuildFailed):
                self._remove(library.context)
                self._emit(message)
                return
            elif isinstance(message, ContextBuilt):
                if self._end_if_too_big(library):
                    return
                library.load_deadline, library.ready = float("inf"), True
                self._emit(message)
            elif isinstance(message, (PartFinished, CallFinished, CallRaised)):
                self._emit(message)
        if library.channel.closed:
            # The process is about to end, or closed its socket: either way it is of no more use.
            self._died(library)
        else:
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
        self._fail(library, "crash", "LibraryDied", cause)

    def _fail(self, library: LibraryProcess, kind: str, error: str, message: str) -> None:
        """End a library process, and report its load or its calls as failed."""
        calls, was_ready, output = list(library.calls), library.ready, library.tail()
        self._remove(library.context)
        trouble = Trouble(kind, error, message, output=output)
        if was_ready:
            self._emit(LibraryDied(library.context, library.key, calls, trouble))
        else:
            self._emit(BuildFailed(library.context, library.key, trouble))

    def _end_overdue(self, library: LibraryProcess, time: float) -> None:
        if library.ignores_interrupt(time):
            library.show_where()
            message = "nobody waited for the call any more, and it went on for a second after it was interrupted"
            self._fail(library, "cancelled", "CallInterrupted", message)
        elif library.load_deadline <= time:
            library.show_where()
            message = f"building it took longer than its load_timeout of {library.timeout:g} s: raise that"
            self._fail(library, "timeout", "Timeout", f"{message}, or see in the last lines where it hangs")
        elif library.deadline <= time:
            self._fail_call(library, library.timeout or 0.0)

    def _fail_call(self, library: LibraryProcess, timeout: float) -> None:
        library.show_where()
        message = f"the call took longer than its timeout of {timeout:g} s: raise that, make batches smaller"
        self._fail(library, "timeout", "Timeout", f"{message}, or see in the last lines where it hangs")

    def _check_memory(self, time: float) -> None:
        limited = [library for library in self._libraries.values() if library.memory_limit is not None]
        self._next_memory_check = time + _MEMORY_CHECK_SECONDS if limited else float("inf")
        for library in limited:
            self._end_if_too_big(library)

    def _end_if_too_big(self, library: LibraryProcess) -> bool:
        limit = library.memory_limit
        used = tree_bytes(library.process.pid, limit) if limit is not None else 0
        if limit is None or used <= limit:
            return False
        message = (
            f"it used {used / 1e9:.2f} GB of memory, more than the {limit / 1e9:.2f} GB that its context "
            "asks for: raise its memory=, or make batches smaller"
        )
        self._fail(library, "crash", "MemoryExceeded", message)
        return True

    def _remove(self, context: str, seconds: float | None = None) -> bool:
        """End a context's library process, if there is one."""
        library = self._libraries.pop(context, None)
        if library is None:
            return False
        for registered in (library.channel, library.output, library.death):
            self._selector.unregister(registered)
        gone = library.end() if seconds is None else library.end(seconds)
        if not gone:
            self.undead.add(library.process, now())
            return True
        try:
            os.rmdir(library.scratch)
        except OSError:  # What calls left there may be much.
            self.in_background(functools.partial(clear, library.scratch), lambda cleared: None)
        return True

    def _check_undead(self, time: float) -> None:
        """Start the loads that wait for processes that were killed; report the worker as stuck if one stays."""
        if (reason := self.undead.look(time)) is not None:
            self._emit(WorkerStuck(reason))
        if not self.undead:
            postponed, self._postponed = self._postponed, {}
            for load in postponed.values():
                self.handle(load)
