"""The library process: builds one context, keeps it, and runs calls against it, one after the other.

It is spawned (never forked from a process that touched CUDA), and speaks to its host over the socket whose descriptor
it is given. Where the driver is on the same machine, calls and results go over a line of their own to the driver, past
the host, which still gets everything else. The user's code runs here and nowhere else.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # `signal.getsignal` makes enumerations, at each call.
import contextlib
import faulthandler
import gc
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import GeneratorType
from typing import Any

import cloudpickle

from ctxflow.errors import BatchContractError, name_of
from ctxflow.host.call_results import EVERY_SECONDS, Extent, States, StepEntry, Yielding, dump_results, one_each
from ctxflow.host.call_surroundings import (
    STAGED,
    CallInterrupted,
    FolderEach,
    FolderFiles,
    InPlace,
    Interrupts,
    Output,
    around_calls,
    leave_notice_to_host,
)
from ctxflow.host.library_messages import (
    TO_LIBRARY,
    BuildContext,
    BuildFailed,
    CallBegan,
    CallEnded,
    CallFinished,
    CallRaised,
    ContextBuilt,
    ForgetParts,
    FromLibrary,
    GivePart,
    LineOpened,
    PartFinished,
    RunCall,
    ToLibrary,
)
from ctxflow.host.linux import (
    INTERRUPT_SIGNAL,
    die_with_parent,
    looks_like_the_machine,
    resident_bytes,
    restore_python_path,
    tree_bytes,
)
from ctxflow.host.wire import BlockingChannel, Trouble, connect, pack
from ctxflow.on_worker import set_loaded
from ctxflow.recipe import Context

_HOST_LOOKS_WITHIN = 2.0  # Seconds within which a busy host has looked at the memory of its processes, too.
_LONGEST = 20_000  # Characters of a message or traceback that are kept.
_MOST_NAMES = 20  # Of files that a call left.
_OBJECTS_OF_BUILD = 100_000  # Made before garbage is looked for while a context is built.
_OWN_FILES = (os.path.dirname(__file__), str(sys.modules[Context.__module__].__file__))


def main(argv: Sequence[str]) -> None:
    """Serve until the other end closes the connection.

    :param argv: the connection's descriptor; the directory that calls run below; the host's process; an eventfd that
        the host makes readable when the worker has notice of its eviction; and the two of `Interrupts`.
    """
    scratch = argv[1]
    descriptor, parent, notice, asked, running = map(int, (argv[0], *argv[2:]))
    # A process group of its own, in the worker's session: what its calls start is ended with it.
    os.setpgid(0, 0)
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_notice_to_host()
    for own in (descriptor, notice, asked, running):
        os.set_inheritable(own, False)
    restore_python_path()
    # A crash, and the host before it ends a call that takes too long, have Python print where it is.
    if sys.version_info >= (3, 14):
        faulthandler.enable(c_stack=False)  # Which would be all that the host keeps of what was printed.
    else:
        faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=False)
    host = BlockingChannel(socket.socket(fileno=descriptor))
    library = _Library(host, scratch, notice, Interrupts(asked, running))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            head, body = library.line.receive()
            library.handle(TO_LIBRARY.open(head, body))
    # If it was the line to the driver that ended: the host ends this process, with all that calls started.
    with contextlib.suppress(EOFError, OSError):
        library.host.receive()
    # What the user's code left running (threads, exit handlers) must not keep the process.
    os._exit(0)


@contextlib.contextmanager
def seldom_collecting() -> Iterator[None]:
    """Collect garbage less often than Python does, which is a sixth of the time of importing PyTorch."""
    before = gc.get_threshold()
    ours = (_OBJECTS_OF_BUILD, *before[1:])
    if before[0]:
        gc.set_threshold(*ours)
    try:
        yield
    finally:
        if gc.get_threshold() == ours:
            gc.set_threshold(*before)


class _Library:
    """The built context, the functions seen so far, and where the next call runs."""

    def __init__(self, host: BlockingChannel, scratch: str, notice: int, interrupts: Interrupts) -> None:
        self.host = host
        self._interrupts = interrupts
        self.line = host  # Where calls come from.
        self._output = Output()
        self._handlers: dict[int, Any] = {}
        self._note_handlers()
        self._pid = os.getpid()
        self._place: InPlace | FolderEach = FolderEach(scratch)
        self._functions: dict[str, Any] = {}  # Also constants; as bytes until they are needed.
        self._value: Any = None
        self._memory: int | None = None
        self._around = around_calls(os.environ)
        self._notice = select.poll()
        self._notice.register(notice, select.POLLIN)
        self._states = States(self._leaving, self._end_fork)
        self._frozen_states = ""  # The folder of those in the worker's cache.
        self._app = ""  # What its user calls the function of the call in progress.
        self._failed = False  # Whether that call has given back an error.
        self._yielding: Yielding | None = None  # The call in progress, if it answers its items one by one.

    def handle(self, message: ToLibrary) -> None:
        if isinstance(message, RunCall):
            self._call(message)
        elif isinstance(message, GivePart):
            self._functions[message.name] = message.body
        elif isinstance(message, ForgetParts):
            for name in message.names:
                self._functions.pop(name, None)
        else:
            self._load(message)

    def _load(self, load: BuildContext) -> None:
        sys.path[:] = load.path or sys.path
        self._frozen_states = load.states
        if load.line:
            self.line = BlockingChannel(connect(load.line))
            self._send(self.line, LineOpened(load.key))
        started = time.monotonic()
        try:
            if load.directory:
                self._place = InPlace(load.directory)
                self._place.enter()
            if load.body:
                with seldom_collecting():
                    function, args, kwargs = pickle.loads(load.body)
                    recipe = Context(load.name, function, args, kwargs, files=dict(load.files))
                    self._value = recipe.build()
                set_loaded(self._value)
            self._memory = load.memory
        except BaseException as error:
            self._end_fork()
            full = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
            trouble, body = self._trouble("memory" if full else "exception", error)
            self._send(self.host, BuildFailed(load.context, load.key, trouble, body))
            return
        self._end_fork()
        self._output.mend()
        self._note_handlers()
        seconds = time.monotonic() - started
        built = ContextBuilt(load.context, load.key, seconds, *_measured())
        self._send(self.host, built)

    def _wait_if_too_big(self) -> None:
        """Leave a step unanswered that took too much memory, until the host ends the process for it."""
        pid, limit = os.getpid(), self._memory
        # Its own memory is quick to read; what counts for the host includes its children's.
        if limit is not None and resident_bytes(pid) > limit and tree_bytes(pid, limit) > limit:
            time.sleep(_HOST_LOOKS_WITHIN)

    @staticmethod
    def _send(channel: BlockingChannel, message: FromLibrary) -> None:
        channel.send_frame(pack(message))

    def _note_handlers(self) -> None:
        """Note what is done at the signals that the host sends, which a context may have changed."""
        numbers = (signal.SIGINT, signal.SIGTERM, INTERRUPT_SIGNAL)
        self._handlers = {number: signal.getsignal(number) for number in numbers}

    def _mend_handlers(self) -> None:
        """Restore the handlers that a call changed: else a process that the next call starts might ignore SIGTERM."""
        for number, handler in self._handlers.items():
            if handler is not None and _signal.getsignal(number) != handler:
                signal.signal(number, handler)

    def _end_fork(self) -> None:
        """End a process that the user's code forked and that returned here."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _call(self, call: RunCall) -> None:
        # The host enforces timeouts, also of calls that come past it.
        watched = self.line is not self.host and call.timeout
        if watched:
            self._send(self.host, CallBegan(call.call, watched))
        started = time.monotonic()
        self._yielding, self._failed = None, False
        files: FolderFiles | None = None
        try:
            self._place.enter()
            if call.files is not None:
                files = FolderFiles(*call.files, self._place.folder)
            extent, result = self._run_interruptibly(call, files)
            self._end_fork()
            made = None if files is None else files.take(self._failed)
            rest = self._place.rest({STAGED} if files is None else {STAGED, *files.known})
        except BaseException as error:
            self._end_fork()
            made = None
            if files is not None:
                with contextlib.suppress(OSError):  # The error that there is tells more.
                    made = files.take(failed=True)
            at = None if self._yielding is None else self._yielding.at
            contract = "contract" if isinstance(error, BatchContractError) else "exception"
            kind = "cancelled" if isinstance(error, CallInterrupted) else contract
            trouble, body = self._trouble(kind, error)
            seconds = time.monotonic() - started
            raised = CallRaised(call.call, call.context, seconds, trouble, at=at, made=made, body=body)
            self._send(self.host, raised)
        else:
            seconds = time.monotonic() - started
            self._output.mend()
            if watched:
                self._send(self.host, CallEnded(call.call))
            if not extent and made is None and not rest:  # As nearly always.
                answer = CallFinished(call.call, seconds, body=result)
            else:
                app, left = self._app if rest else "", rest[:_MOST_NAMES]
                answer = CallFinished(call.call, seconds, **extent, made=made, app=app, rest=left, body=result)
            self._send(self.line, answer)
        self._mend_handlers()
        self._place.leave()
        self._interrupts.end()

    def _run_interruptibly(self, call: RunCall, files: FolderFiles | None) -> tuple[dict[str, Any], bytes]:
        # An interrupt may come at any point of this, also before the first line and in the last one.
        try:
            self._interrupts.begin(call.call)
            if files is not None:
                files.bring()
            return self._run(call)
        finally:
            self._interrupts.end()

    def _run(self, call: RunCall) -> tuple[dict[str, Any], bytes]:
        """Run a call; return the fields of `CallFinished` that say what the results are for, and the results."""
        if call.style == "batch":
            columns = pickle.loads(call.body)
            lists: list[Any] = [list(column) for column in columns]  # The call may change its lists as it likes.
            inputs = lists if call.context == "" else [self._value, *lists]
            function = self._function(call)
            constants = self._opened(call.constants) if call.constants else {}
            results, expected = function(*inputs, **constants), len(columns[0])
            if type(results) is GeneratorType:
                return self._take_one_by_one(call, results, expected, function)
            return {}, dump_results(one_each(results, expected, function))
        if call.style == "step":
            entries = [StepEntry(*entry) for entry in pickle.loads(call.body)]
            value = [] if call.context == "" else [self._value]
            outcomes, made = self._states.step(self._function(call), value, entries, self._frozen_states)
            self._wait_if_too_big()
            return {"outcomes": outcomes}, made
        if call.function:
            args, kwargs = pickle.loads(call.body)
            function = self._function(call)
        else:
            function, args, kwargs = pickle.loads(call.body)
            self._app, function = name_of(function), self._as_called(function)
        if call.insert:
            args = (self._value, *args)
        result = function(*args, **kwargs)
        self._failed = type(result).__name__ == "RemoteExceptionWrapper"  # Parsl's apps return what they raise.
        return {}, dump_results(result)

    def _take_one_by_one(
        self, call: RunCall, results: GeneratorType[Any, Any, Any], expected: int, function: Callable[..., Any]
    ) -> tuple[dict[str, Any], bytes]:
        def send(extent: Extent, body: bytes) -> None:
            part = PartFinished(call.call, **extent, body=body)
            self._interrupts.shielded(lambda: self._send(self.line, part))

        every = EVERY_SECONDS if call.every is None else call.every
        self._yielding = Yielding(send, self._leaving, self._end_fork, every)
        return self._yielding.run(results, expected, function)

    def _leaving(self) -> bool:
        return any(event & select.POLLIN for _, event in self._notice.poll(0))

    def _function(self, call: RunCall) -> Callable[..., Any]:
        function: Callable[..., Any] = self._opened(call.function)
        self._app = name_of(function)
        return self._as_called(function)

    def _as_called(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if self._around is None else self._around(function)

    def _opened(self, name: str) -> Any:
        """Return a function, or constants that the calls of an app share; unpickled once."""
        part = self._functions[name]
        if isinstance(part, bytes):
            self._functions[name] = part = pickle.loads(part)
        return part

    def _trouble(self, kind: str, error: BaseException) -> tuple[Trouble, bytes]:
        """Return the report of an error, and the error pickled, if it can be."""
        self._output.mend()
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, (StopIteration, StopAsyncIteration)):
            error = error.__cause__  # Python raises RuntimeError for one that leaves a generator.
        try:
            body = cloudpickle.dumps(error)
            pickle.loads(body)  # Some exceptions pickle but do not unpickle.
        except BaseException:
            body = b""
        hint = self._place.hint(error)
        text = "; ".join(filter(None, (_message(error)[:_LONGEST], hint)))
        shown = _user_traceback(error)[-_LONGEST:] + hint
        machine = kind == "exception" and looks_like_the_machine(error)
        return Trouble(kind, type(error).__name__, text, shown, machine=machine), body


def _message(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; install it where the workers run, or name it in the site's environment"
    if isinstance(error, SystemExit):
        return f"exit({error.code!r}) was called: raise an exception instead"
    try:
        return str(error)
    except BaseException:
        return "its message cannot be had: its __str__ raises"


def _user_traceback(error: BaseException) -> str:
    """Return the traceback without ctxflow's own frames."""
    summary = traceback.TracebackException.from_exception(error)
    kept = [f for f in summary.stack if not f.filename.startswith(_OWN_FILES)]
    summary.stack = traceback.StackSummary.from_list(kept)
    return "".join(summary.format())


def _measured() -> tuple[int | None, int | None]:
    """Return the memory of a context that is built, on the host and on the GPUs, in bytes: None where unknown.

    It is that of this process and its descendants, with shared pages counted once, and what torch has reserved here.
    """
    memory = tree_bytes(os.getpid())
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return memory, None
    gpu: int = sum(torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count()))
    return memory, gpu


if __name__ == "__main__":
    # The module must be importable under its own name, not run twice: pickles may refer to it.
    from ctxflow.host import library  # noqa: PLW0406 - see above

    library.main(sys.argv[1:])
