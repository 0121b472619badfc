"""What a library process does: builds a context, keeps it, and runs calls against it, one after the other.

Where calls overlap, library_loop.py runs them, with what is here.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # `signal.getsignal` makes enumerations, at each call.
import _thread
import contextlib
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import CoroutineType, GeneratorType
from typing import Any, Protocol

from ctxflow.errors import BatchContractError, ContextLost, ItemRefused, name_of
from ctxflow.host.call_results import EVERY_SECONDS, Extent, States, StepEntry, Yielding, dump_results, one_each
from ctxflow.host.call_surroundings import (
    STAGED,
    CallNotes,
    FolderEach,
    FolderFiles,
    InPlace,
    Later,
    Output,
    around_calls,
)
from ctxflow.host.call_troubles import trouble_of
from ctxflow.host.context_building import hide_shared_memory, measured_bytes, opened_recipe, seldom_collecting
from ctxflow.host.device_errors import device_lost, machines_fault
from ctxflow.host.installed_modules import imported_modules
from ctxflow.host.library_messages import (
    TO_LIBRARY,
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
    LineOpened,
    ParkContext,
    ParkRaised,
    PartFinished,
    RunCall,
    ToLibrary,
    WakeContext,
)
from ctxflow.host.linux import INTERRUPT_SIGNAL, resident_bytes, tree_bytes
from ctxflow.host.load_parts import LoadParts
from ctxflow.host.parking import Parking
from ctxflow.host.running_calls import CallInterrupted, Interrupts
from ctxflow.host.wire import BlockingChannel, Trouble, connect, pack
from ctxflow.on_worker import set_loaded, time_parts, when_lost
from ctxflow.recipe import needs_loop

_HOST_LOOKS_WITHIN = 2.0  # Seconds within which a busy host has looked at the memory of its processes, too.
_MOST_NAMES = 20  # Of files that a call left.


_ALL: Mapping[str, Any] = {}


class Sends(Protocol):
    """Where messages go: one end of a connection."""

    def send_frame(self, data: bytes) -> object:
        """Send a message that is framed already."""


class LibraryCalls:
    """The built context, the functions seen so far, and where the next call runs.

    :param notice: an eventfd, readable when the worker has notice of its eviction.
    :ivar line: where calls come from, and their results go.
    :ivar value: what was built. :ivar awaits: whether functions may be async.
    """

    def __init__(self, host: BlockingChannel, scratch: str, notice: int, interrupts: Interrupts) -> None:
        self.host = self.line = host
        self.to_host: Sends = host
        self.to_line: Sends = host
        self._sending = _thread.allocate_lock()  # A context's own thread may say that it is lost.
        self.interrupts = interrupts
        self.output = Output()
        self._handlers: dict[int, Any] = {}
        self._note_handlers()
        self._pid = os.getpid()
        self._scratch = scratch
        self.place: InPlace | FolderEach = FolderEach(scratch)
        self._functions: dict[str, Any] = {}  # Also constants; as bytes until they are needed.
        self.value: Any = None
        self.awaits = False
        self._memory: int | None = None
        self._around = around_calls(os.environ)
        self._notice = notice
        self._opening = _thread.allocate_lock()
        self._states = States(_readable(notice), self.end_fork)
        self._frozen_states = ""  # The folder of those in the worker's cache.
        self._parts = LoadParts()  # Of the load.
        self._modules = frozenset(sys.modules)  # Those that are there already.
        self._key = ""
        self._artifacts = ""  # What came of taking them.
        self._calls_told: set[bool] | None = None  # Whether the host was told of a first call, by whether it failed.
        self._parking = Parking(None)
        self._from_host: Callable[[], bool] = lambda: (
            True
        )  # Whether to read what the host says, not what comes on the line.
        when_lost(self._told_lost)

    def receive(self) -> ToLibrary:
        """Wait for the next message, of the host or on the line to the driver.

        :raises EOFError: when the other end of one of them is gone.
        """
        return TO_LIBRARY.open(*(self.host if self._from_host() else self.line).receive())

    @staticmethod
    def overlaps(message: ToLibrary) -> bool:
        """Return whether from this message on calls may overlap, on an event loop."""
        if isinstance(message, RunCall):
            return message.overlaps
        return isinstance(message, BuildContext) and needs_loop(message.body)

    def handle(self, message: ToLibrary) -> None:
        """Do what a message asks for, but on an event loop."""
        if isinstance(message, RunCall):
            self.call(message)
        elif isinstance(message, GivePart):
            self._functions[message.name] = message.body
        elif isinstance(message, ForgetParts):
            for name in message.names:
                self._functions.pop(name, None)
        elif isinstance(message, (ParkContext, WakeContext)):
            began = time.monotonic()
            try:
                if isinstance(self.begin_move(message), Awaitable):
                    raise TypeError("its park() or wake() is async, but it was not built on an event loop")
            except BaseException as error:
                self.not_moved(message.context, error)
            else:
                self.moved(message, began)
        elif isinstance(message, BuildContext):
            self.begin_load(message)
            try:
                self.enter_load(message)
                if message.body:
                    with seldom_collecting():
                        self.value = opened_recipe(message).build()
            except BaseException as error:
                self.load_failed(message, error)
            else:
                self.loaded(message)

    def begin_load(self, load: BuildContext) -> None:
        """Have imports, and the line to the driver, as a load says."""
        self._parts = LoadParts(load.began, load.waited)
        own = sys.path if not load.path or os.environ.get("CTXFLOW_PYTHON") else []
        sys.path[:] = [*load.path, *(entry for entry in own if entry not in load.path)]
        self._frozen_states, self._key = load.states, load.key
        if load.kept is not None:  # Before this process may have rights of its own.
            number = self._parts.enter("artifacts")
            self._artifacts = _taken(*load.kept, load.packed)
            self._parts.leave(number)
        hide_shared_memory(load, self._scratch)
        if load.line:
            self.to_line = self.line = BlockingChannel(connect(load.line))
            self._from_host = _readable_first(self.host, self.line)
            self.send(self.line, LineOpened(load.key))
        self._parts.begin()
        time_parts(self._parts)
        self._calls_told = None if load.artifacts is None else set()

    def enter_load(self, load: BuildContext) -> None:
        """Go where the context is built."""
        if load.directory:
            self.place = InPlace(load.directory)
            self.place.enter()

    def load_failed(self, load: BuildContext, error: BaseException) -> None:
        """Report why the context was not built."""
        self.end_fork()
        self._end_parts()
        full = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        trouble, body = self.trouble("memory" if full else "exception", error)
        self.send(self.to_host, BuildFailed(load.context, load.key, trouble, body))

    def loaded(self, load: BuildContext) -> None:
        """Report that the context is built."""
        if load.body:
            set_loaded(self.value)
        self._memory = load.memory
        self.end_fork()
        self.output.mend()
        self._note_handlers()
        seconds, parts = self._end_parts()
        modules = imported_modules(self._modules) if load.preload is not None else ()
        memory, gpu_memory = measured_bytes()
        self._parking = Parking(self.value)
        parks = load.park and self._parking.possible
        built = ContextBuilt(
            load.context,
            load.key,
            seconds,
            memory,
            gpu_memory,
            parts=parts,
            modules=modules,
            parks=parks,
            artifacts=self._artifacts,
        )
        self.send(self.to_host, built)

    def _end_parts(self) -> tuple[float, dict[str, float]]:
        time_parts(None)
        return self._parts.end()

    def begin_move(self, message: ParkContext | WakeContext) -> Any:
        """Park or wake what was built; what is returned is awaited, if it can be."""
        return self._parking.park() if isinstance(message, ParkContext) else self._parking.wake()

    def moved(self, message: ParkContext | WakeContext, began: float) -> None:
        """Report that what was built is parked, or awake."""
        self.end_fork()
        self.output.mend()
        answer = ContextAsleep if isinstance(message, ParkContext) else ContextAwake
        seconds = time.monotonic() - began
        self.send(self.to_host, answer(message.context, self._key, seconds, *measured_bytes()))

    def not_moved(self, context: str, error: BaseException) -> None:
        """Report why what was built could not be parked, or woken; the host ends this process."""
        self.end_fork()
        trouble, _ = self.trouble("exception", error)
        self.send(self.to_host, ParkRaised(context, self._key, trouble))

    def lost(self, error: ContextLost) -> None:
        """Report that the context is of no more use: the host ends this process."""
        trouble, _ = self.trouble("crash", error)
        self.send(self.to_host, ContextGone(trouble._replace(error="ContextLost", machine=machines_fault(error))))

    def _told_lost(self, message: str) -> None:
        self.send(self.to_host, ContextGone(Trouble("crash", "ContextLost", message)))

    def _wait_if_too_big(self) -> None:
        """Leave a step unanswered that took too much memory, until the host ends the process for it."""
        pid, limit = os.getpid(), self._memory
        # Its own memory is quick to read; what counts for the host includes its children's.
        if limit is not None and resident_bytes(pid) > limit and tree_bytes([pid], limit) > limit:
            time.sleep(_HOST_LOOKS_WITHIN)

    def send(self, channel: Sends, message: FromLibrary) -> None:
        """Send a message, from any thread."""
        data = pack(message)
        with self._sending:
            channel.send_frame(data)

    def _note_handlers(self) -> None:
        """Note what is done at the signals that the host sends, which a context may have changed."""
        numbers = (signal.SIGINT, signal.SIGTERM, INTERRUPT_SIGNAL)
        self._handlers = {number: signal.getsignal(number) for number in numbers}

    def mend_handlers(self) -> None:
        """Restore the handlers that a call changed: else a process that the next call starts might ignore SIGTERM."""
        for number, handler in self._handlers.items():
            if handler is not None and _signal.getsignal(number) != handler:
                signal.signal(number, handler)

    def end_fork(self) -> None:
        """End a process that the user's code forked and that returned here."""
        if os.getpid() != self._pid:
            os._exit(0)

    def call(self, call: RunCall) -> Later | None:
        """Run a call to its end, and answer it; return what is left of it where its function is async and `awaits`."""
        # The host enforces timeouts, also of calls that come past it.
        watched = self.line is not self.host and call.timeout
        if watched:
            self.send(self.to_host, CallBegan(call.call, watched))
        started = time.monotonic()
        notes = CallNotes(self._tell)
        files: FolderFiles | None = None
        later: Later | None = None
        try:
            self.place.enter()
            if call.files is not None:
                files = FolderFiles(*call.files, self.place.folder)
            extent, result = self._run_interruptibly(call, notes, files)
            self.end_fork()
            made = None if files is None else files.take(notes.failed)
            rest = self.place.rest({STAGED} if files is None else {STAGED, *files.known})
        except Later as found:
            later, found.files = found, files
            if watched:
                self.send(self.to_host, CallEnded(call.call))
        except BaseException as error:
            self.raised(call, started, error, files, notes)
        else:
            self.output.mend()
            if watched:
                self.send(self.to_host, CallEnded(call.call))
            self.finished(call, started, result, extent, made, rest, notes.app)
        self.mend_handlers()
        if later is None:
            self.place.leave()
        self.interrupts.end()
        return later

    def finished(
        self,
        call: RunCall,
        started: float,
        result: bytes,
        extent: Mapping[str, Any] = _ALL,
        made: Mapping[str, int] | None = None,
        rest: Sequence[str] = (),
        app: str = "",
    ) -> None:
        """Answer a call with its results."""
        seconds = time.monotonic() - started
        if self._calls_told is not None:
            self._tell_first(failed=False)
        if not extent and made is None and not rest:  # As nearly always.
            answer = CallFinished(call.call, seconds, body=result)
        else:
            app, left = app if rest else "", rest[:_MOST_NAMES]
            answer = CallFinished(call.call, seconds, **extent, made=made, app=app, rest=left, body=result)
        self.send(self.to_line, answer)

    def _tell_first(self, failed: bool) -> None:
        """Tell the host of a first call, before whoever asked gets its answer, and may end all."""
        told = self._calls_told
        if told is not None and failed not in told and False not in told:
            told.add(failed)
            self.send(self.to_host, FirstCallEnded(failed))

    def raised(
        self,
        call: RunCall,
        started: float,
        error: BaseException,
        files: FolderFiles | None = None,
        notes: CallNotes | None = None,
    ) -> None:
        """Answer a call with the error that it has raised; not where it says, or shows, that the context is lost."""
        self.end_fork()
        if (lost := context_loss(error)) is not None:
            self.lost(lost)
            _wait_for_end()
        self.answer_error(call, started, error, files, notes)

    def answer_error(
        self,
        call: RunCall,
        started: float,
        error: BaseException,
        files: FolderFiles | None = None,
        notes: CallNotes | None = None,
    ) -> None:
        """Answer a call with an error with which the context is not lost."""
        made = None
        if files is not None:
            with contextlib.suppress(OSError):  # The error that there is tells more.
                made = files.take(failed=True)
        at = None if notes is None or notes.at is None else notes.at()
        trouble, body = self.trouble(_kind(error), error)
        self.answer_trouble(call, started, trouble, at, made, body)

    def answer_trouble(
        self,
        call: RunCall,
        started: float,
        trouble: Trouble,
        at: int | None = None,
        made: Mapping[str, int] | None = None,
        body: bytes = b"",
    ) -> None:
        """Answer a call with what is wrong."""
        seconds = time.monotonic() - started
        if trouble.kind == "exception":
            self._tell_first(failed=True)
        self.send(self.to_host, CallRaised(call.call, call.context, seconds, trouble, at=at, made=made, body=body))

    def _run_interruptibly(
        self, call: RunCall, notes: CallNotes, files: FolderFiles | None
    ) -> tuple[dict[str, Any], bytes]:
        # An interrupt may come at any point of this, also before the first line and in the last one.
        try:
            self.interrupts.begin(call.call)
            if files is not None:
                files.bring()
            return self.run(call, notes)
        finally:
            self.interrupts.end()

    def run(self, call: RunCall, notes: CallNotes) -> tuple[dict[str, Any], bytes]:
        """Run a call; return the fields of `CallFinished` that say what the results are for, and the results."""
        if call.style == "batch":
            columns = pickle.loads(call.body)
            lists: list[Any] = [list(column) for column in columns]  # The call may change its lists as it likes.
            inputs = lists if call.context == "" else [self.value, *lists]
            function = self.function(call, notes)
            constants = self.opened(call.constants) if call.constants else {}
            results, expected = function(*inputs, **constants), len(columns[0])
            if type(results) is CoroutineType and self.awaits:
                raise Later(results, lambda results: dump_results(one_each(results, expected, function)))
            if type(results) is GeneratorType:
                return self._take_one_by_one(call, notes, results, expected, function)
            return {}, dump_results(one_each(results, expected, function))
        if call.style == "step":
            entries = [StepEntry(*entry) for entry in pickle.loads(call.body)]
            value = [] if call.context == "" else [self.value]
            outcomes, made = self._states.step(self.function(call, notes), value, entries, self._frozen_states)
            self._wait_if_too_big()
            return {"outcomes": outcomes}, made
        if call.function:
            args, kwargs = pickle.loads(call.body)
            function = self.function(call, notes)
        else:
            function, args, kwargs = pickle.loads(call.body)
            notes.app, function = name_of(function), self.as_called(function)
        if call.insert:
            args = (self.value, *args)
        result = function(*args, **kwargs)
        if type(result) is CoroutineType and self.awaits:
            raise Later(result, dump_results)
        notes.failed = type(result).__name__ == "RemoteExceptionWrapper"  # Parsl's apps return what they raise.
        if notes.failed and (lost := context_loss(result.e_value)) is not None:
            raise lost
        return {}, dump_results(result)

    def _take_one_by_one(
        self,
        call: RunCall,
        notes: CallNotes,
        results: GeneratorType[Any, Any, Any],
        expected: int,
        function: Callable[..., Any],
    ) -> tuple[dict[str, Any], bytes]:
        def send(extent: Extent, body: bytes) -> None:
            notes.tell(PartFinished(call.call, **extent, body=body))

        every = EVERY_SECONDS if call.every is None else call.every
        yielding = Yielding(send, _readable(self._notice), self.end_fork, every)
        notes.at = lambda: yielding.at
        return yielding.run(results, expected, function)

    def _tell(self, part: PartFinished) -> None:
        self.interrupts.shielded(lambda: self.send(self.to_line, part))

    def function(self, call: RunCall, notes: CallNotes | None = None) -> Callable[..., Any]:
        """Return the function that a call names."""
        function: Callable[..., Any] = self.opened(call.function)
        if notes is not None:
            notes.app = name_of(function)
        return self.as_called(function)

    def as_called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called in a function's place."""
        return function if self._around is None else self._around(function)

    def opened(self, name: str) -> Any:
        """Return a function, or constants that the calls of an app share; unpickled once, also by threads."""
        part = self._functions[name]
        if isinstance(part, bytes):
            with self._opening:
                part = self._functions[name]
                if isinstance(part, bytes):
                    self._functions[name] = part = pickle.loads(part)
        return part

    def trouble(self, kind: str, error: BaseException) -> tuple[Trouble, bytes]:
        """Return the report of an error, and the error pickled, if it can be."""
        self.output.mend()
        return trouble_of(kind, error, self.place.hint(error))


def _taken(folder: str, key: str, places: Mapping[str, str], packed: bool) -> str:
    """Take artifacts, and return what came of that, as `ContextBuilt` says it."""
    from ctxflow.host.artifacts import ArtifactStore, NotKept, take_sent

    try:
        if packed:
            return "used" if take_sent(folder, key, places) else ""
        with contextlib.closing(ArtifactStore(folder)) as store:
            return "used" if store.take(key, places) else ""
    except NotKept as error:
        return f"spoiled: {error}"


def _readable(descriptor: int) -> Callable[[], bool]:
    """Return what says, on one thread, whether a descriptor is readable."""
    poll = select.poll()  # Which two threads cannot wait for.
    poll.register(descriptor, select.POLLIN)
    return lambda: bool(poll.poll(0))


def _readable_first(host: BlockingChannel, line: BlockingChannel) -> Callable[[], bool]:
    """Return what waits for a message of either, and says whether it is the host's."""
    poll = select.poll()
    for channel in (host, line):
        poll.register(channel.socket, select.POLLIN)
    number = host.socket.fileno()

    def wait() -> bool:
        if line.has_more:
            return False
        return host.has_more or poll.poll()[0][0] == number  # In the order in which they were registered.

    return wait


def context_loss(error: BaseException) -> ContextLost | None:
    """Return what says that the context is lost with an error, None if it is not."""
    return error if isinstance(error, ContextLost) else device_lost(error)


def _kind(error: BaseException) -> str:
    if isinstance(error, CallInterrupted):
        return "cancelled"
    if isinstance(error, ItemRefused):
        return "input"
    return "contract" if isinstance(error, BatchContractError) else "exception"


def _wait_for_end() -> None:
    """Do nothing more, until the host ends this process."""
    while True:
        time.sleep(60)
