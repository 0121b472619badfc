"""One library process as its host sees it: starting it, its output, its calls, its end. Inside: library.py."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from typing import IO

from ctxflow.host.artifacts import LibraryArtifacts
from ctxflow.host.forking import LIBRARY, CannotFork, Zygote
from ctxflow.host.library_messages import ForgetParts, GivePart, RunCall
from ctxflow.host.library_start import command, library_variables
from ctxflow.host.linux import (
    CALL_NUMBER_BYTES,
    INTERRUPT_SIGNAL,
    ChildProcess,
    activity,
    adopted,
    ended_within,
    is_exiting,
    is_stopped,
    kill_adopted,
    kill_tree,
    process_state,
    readable,
    running_seconds,
    tree_bytes,
)
from ctxflow.host.local_files import OF_LIBRARY
from ctxflow.host.running_calls import RunningCalls, read_calls
from ctxflow.host.wire import Channel, Trouble, pack

now = time.monotonic
"""The host's clock."""
_TAIL_BYTES = 4096
_LOG_BYTES = 10_000_000
_KILL_SECONDS = 2.0  # How long what was killed is waited for; what hangs in the kernel ends later, or never.
# The last line that faulthandler prints: the outermost frame, which is runpy's here, or that there are more.
_TRACE_END = re.compile(rb"^  (File .*, line \S+ in _run_module_as_main|\.\.\.)$", re.MULTILINE)
_LOOK_SECONDS = 0.5
_REMIND_SECONDS = 0.1  # Until it is told again: a signal just before a call of the system does not end that one's wait.
_ITEMS_LOOK_SECONDS = 1.0
_MOST_BETWEEN_LOOKS = 5.0


@dataclasses.dataclass(frozen=True)
class HostPatience:
    """How long a host waits for its library processes, in seconds.

    :ivar interrupt: for an interrupted call to end, before it costs the context, and for one of several that overlap
        after its timeout: an engine may take a step before it hears.
    :ivar move: for a context to be parked or woken.
    :ivar close: for what a context has built to be closed, before its process is killed.
    :ivar trace: for a process to print where it is, before it is killed.
    :ivar stuck: for anything to move in a process that was killed, before that is reported.
    :ivar stopped: for a process that was stopped (SIGSTOP) to go on.
    :ivar waiting: for a process that waits in the kernel for a file or a device (state D) to get anything done.
    :ivar loop: for an event loop to answer whether it turns: far more than a busy machine needs.
    """

    interrupt: float = 5.0
    move: float = 120.0
    close: float = 2.0
    trace: float = 1.0
    stuck: float = 20.0
    stopped: float = 30.0
    waiting: float = 600.0
    loop: float = 300.0


_STOPPED = "was stopped for {:.0f} s (SIGSTOP): let it go on sooner, or end it"
_WAITING = "waited in the kernel for {:.0f} s and did nothing: see which file server or device does not answer"
_STANDSTILLS = {
    "stopped": Trouble("lost", "Unresponsive", _STOPPED, machine=True),  # By somebody else: no item is to blame.
    "waiting": Trouble("crash", "Unresponsive", _WAITING, machine=True),
    "loop": Trouble(
        "crash",
        "Unresponsive",
        "did not answer for {:.0f} s, since its event loop stood still: await what takes long, or give it a thread by "
        "asyncio.to_thread; the last lines show where it is",
    ),
}
_AT_REST = {"T": "stopped", "D": "waiting"}  # By its state, as of ps.
_COMPUTES = 0.1  # As much of the time for which there is a core, and as one that waits for Python's lock does not.


class Standstill:
    """How long a process has done nothing, and in which way, as far as was looked.

    Between two looks no more time counts than twice that in which they should follow: the host that looks may have been
    stopped, or starved, together with what it looks at.

    >>> still = Standstill(HostPatience(stopped=2.0))
    >>> [still.look(now, {"stopped": True}) for now in (10.0, 10.5, 99.0)]
    [None, None, None]
    >>> still.look(99.5, {"stopped": True}).message
    'was stopped for 2 s (SIGSTOP): let it go on sooner, or end it'
    """

    def __init__(self, patience: HostPatience) -> None:
        self._limits = {name: float(getattr(patience, name)) for name in _STANDSTILLS}
        self.every = min(_MOST_BETWEEN_LOOKS, *(limit / 4 for limit in self._limits.values()))
        self._looked_at = float("inf")
        self._since: dict[str, tuple[object, float]] = {}  # What was seen, and for how long.

    def look(self, now: float, seen: Mapping[str, object]) -> Trouble | None:
        """Look at a process; return in which way it did nothing for longer than it may, None if it may go on.

        :param seen: in which ways it does nothing, each with what would be another if it had done something since.
        """
        passed, self._looked_at = max(0.0, min(now - self._looked_at, 2 * self.every)), now
        before, self._since = self._since, {}
        for name, sign in seen.items():
            known, seconds = before.get(name, (None, 0.0))
            self._since[name] = sign, seconds + passed if name in before and known == sign else 0.0
        over = ((_STANDSTILLS[name], s) for name, (_, s) in self._since.items() if s >= self._limits[name])
        return next((trouble._replace(message=trouble.message.format(s)) for trouble, s in over), None)


class LibraryProcess:
    """A library process, spawned, or forked from a zygote.

    Its host registers three things with its selector: the `channel`, the `output` pipe and the `death`
    descriptor, which becomes readable when the process has ended.

    :param context: the id of the context that it holds.
    :param scratch: a directory of its own; calls run below it.
    :param environment: the variables it gets beside the host's.
    :param log: the file that its output is kept in, up to 10 MB.
    :param zygote: what it is forked from, if that can be done; `path`: its `sys.path` then, empty for its own.
    :raises OSError: if the machine has no room for it (disk, processes, descriptors); nothing is left then.
    """

    def __init__(
        self,
        context: str,
        scratch: str,
        environment: Mapping[str, str],
        log: str,
        zygote: Zygote | None = None,
        path: Sequence[str] = (),
        *,
        patience: HostPatience = HostPatience(),
    ) -> None:
        self.context, self.log, self.patience = context, log, patience
        self.started = "spawned"  # Or "forked", or why it is not.
        self.scratch = scratch
        self.artifacts: LibraryArtifacts | None = None
        self.key = ""  # Tells this load of the context from earlier ones.
        self.calls: dict[int, float] = {}  # Running calls -> when they time out (inf: never).
        self.parts: set[str] = set()  # The functions and constants that it was given.
        self.interrupted: dict[int, float] = {}  # Calls that nobody waits for -> when they must have ended.
        self.remind_at = float("inf")  # When to tell again of those.
        self.overlaps = False  # Whether its calls overlap, on an event loop.
        self.threads = False  # Whether some run on threads.
        self.closes = False  # Whether it has something to close before it ends.
        self.items: dict[int, float] = {}  # Of the running calls those of items -> when they must have ended.
        self.look_at = float("inf")  # When to look for those that should have.
        self._turn = -1  # Which the loop was in at the last look.
        self._was_late: set[int] = set()  # Those that should have ended then.
        self._was_blocked = False  # Whether a call kept interrupted ones from hearing of it, at the last look.
        self.ready = False
        self.load_deadline = float("inf")
        self.timeout: float | None = None  # What the deadline was made of.
        self.memory_limit: int | None = None
        self.moving = ""  # "park" or "wake" while it does so.
        self.parked = False  # Whether it holds what was on the GPU in the host's memory.
        self.asked = False  # Whether its event loop was asked whether it turns, and has not answered.
        self._standstill = Standstill(patience)
        self._ran = 0.0, 0.0, 0.0  # When it was looked at last, and for how long it had run and waited for a core.
        self.standstill_at = now() + self._standstill.every  # When to look whether it does nothing any more.
        self._log: IO[bytes] | None = None
        with contextlib.suppress(OSError):  # Without a log there is still the tail in memory.
            self._log = open(log, "ab")  # noqa: SIM115 - closed in `end`
        self._logged = 0
        self._tail: collections.deque[bytes] = collections.deque()
        self._tail_bytes = 0
        try:
            try:
                self._begin(scratch, environment, zygote, path)
            except CannotFork as error:
                self.started = f"spawned: {error}"
                self._begin(scratch, environment, None, path)
        except BaseException:
            self._close_log()
            raise

    def _begin(self, scratch: str, environment: Mapping[str, str], zygote: Zygote | None, path: Sequence[str]) -> None:
        os.makedirs(scratch, exist_ok=True)
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            near, far = socket.socketpair()
            ours.callback(near.close)
            theirs.callback(far.close)
            self.output, write_end = os.pipe2(os.O_CLOEXEC)
            ours.callback(os.close, self.output)
            self.notice = os.eventfd(0)
            ours.callback(os.close, self.notice)
            theirs.callback(os.close, write_end)
            os.set_blocking(self.output, False)
            asked, self._asked = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            theirs.callback(os.close, asked)
            ours.callback(os.close, self._asked)
            self._running = os.memfd_create("ctxflow-call", os.MFD_CLOEXEC)
            ours.callback(os.close, self._running)
            os.truncate(self._running, CALL_NUMBER_BYTES)
            given = [far.fileno(), self.notice, asked, self._running, write_end]
            self.process = self._started({OF_LIBRARY: scratch, **library_variables(environment)}, given, zygote, path)
            ours.callback(lambda: ended_within(self.process, _KILL_SECONDS))
            ours.callback(self.process.kill)
            self.death = os.pidfd_open(self.process.pid)
            self.channel = Channel(near)
            ours.pop_all()

    def _started(
        self, variables: Mapping[str, str], given: Sequence[int], zygote: Zygote | None, path: Sequence[str]
    ) -> ChildProcess:
        """Start the process with these descriptors, of which the last is for its output."""
        words: list[str | int] = [0, self.scratch, str(os.getpid()), 1, 2, 3]  # As of `library.main`.
        if zygote is not None:
            forked = zygote.fork(LIBRARY, words, variables, self.scratch, path, given)
            self.started = f"spawned: {zygote.unsafe}" if zygote.unsafe else "forked"
            return forked
        return subprocess.Popen(
            [*command("library"), *(str(given[word]) if isinstance(word, int) else word for word in words)],
            stdin=subprocess.DEVNULL,
            stdout=given[-1],
            stderr=given[-1],
            pass_fds=given[:-1],
            env=variables,
            cwd=self.scratch,
        )

    def give_notice(self) -> None:
        """Have calls that answer their items one by one end after the item in flight, now and from now on."""
        os.eventfd_write(self.notice, 1)

    def give_part(self, part: GivePart) -> None:
        """Send a function, or constants, once."""
        if part.name not in self.parts:
            self.parts.add(part.name)
            self.channel.send_frame(pack(part))

    def forget_parts(self, names: Collection[str]) -> None:
        """Have it forget functions and constants that no call will need."""
        known = [name for name in names if name in self.parts]
        if known:
            self.parts.difference_update(known)
            self.channel.send_frame(pack(ForgetParts(known)))

    def begin(self, call: RunCall, now: float) -> None:
        """Send a call."""
        if call.overlaps:  # Whose timeout the library process sees to.
            self.calls[call.call] = float("inf")
            self.items[call.call] = now + (call.timeout or float("inf")) + self.patience.interrupt
        else:
            self.watch(call.call, call.timeout, now)
        self.channel.send_frame(pack(call))

    def watch(self, call: int, timeout: float | None, now: float) -> None:
        """Note that a call runs, and how long it may."""
        self.calls[call] = now + timeout if timeout else float("inf")
        self.timeout = timeout

    def ended(self, call: int) -> None:
        """Note that a call was answered."""
        self.calls.pop(call, None)
        self.items.pop(call, None)
        self.interrupted.pop(call, None)

    def move(self, how: str, now: float) -> None:
        """Note that it is about to "park" or to "wake"."""
        self.moving, self.parked, self.load_deadline = how, True, now + self.patience.move

    def moved(self, parked: bool) -> None:
        """Note that it is parked, or awake."""
        self.moving, self.parked, self.load_deadline = "", parked, float("inf")

    def interrupt(self, call: int, now: float) -> None:
        """Have a call that nobody waits for end with an exception, unless it has ended."""
        with contextlib.suppress(OSError):  # Of a pipe that is full, or a process that is gone.
            os.write(self._asked, call.to_bytes(CALL_NUMBER_BYTES, "little"))
            if not self.overlaps or call not in self.running().in_flight:
                self.process.send_signal(INTERRUPT_SIGNAL)
        self.interrupted[call] = now + self.patience.interrupt
        self.remind_at = min(self.remind_at, now + _REMIND_SECONDS)

    def remind(self, now: float) -> None:
        """Tell it again of an interrupted call that goes on, when it is time to."""
        if now < self.remind_at:
            return
        found = self.running()
        if found.running in self.interrupted and found.running not in found.in_flight:
            with contextlib.suppress(OSError):
                self.process.send_signal(INTERRUPT_SIGNAL)
        self.remind_at = now + _REMIND_SECONDS if self.interrupted else float("inf")

    def running(self) -> RunningCalls:
        """Return what it runs just now."""
        return read_calls(self._running)

    def ignores_interrupt(self, now: float) -> list[int]:
        """Return which calls it still runs that were interrupted some time ago."""
        overdue = [call for call, due in self.interrupted.items() if due <= now]
        for call in overdue:
            del self.interrupted[call]
        if not overdue:
            return []
        found = self.running()
        ignoring = [call for call in overdue if call == found.running or call in found.in_flight]
        if self.threads and found.in_flight.keys() - ignoring - self.interrupted.keys():
            again = self.patience.interrupt  # A thread cannot be stopped, and those beside it are not to blame.
        elif self.overlaps and not self.threads and found.running and found.running not in ignoring:
            again = _ITEMS_LOOK_SECONDS  # Another call blocks the event loop, such as by an import.
            self._was_blocked = True
        elif self._was_blocked:  # The loop turns again, and the call may not have heard yet.
            again = self.patience.interrupt
            self._was_blocked = False
        else:
            return ignoring
        self.interrupted.update(dict.fromkeys(ignoring, now + again))
        return []

    def resume(self, now: float) -> None:
        """Let it do what it could not while its host was suspended too, before it is judged by when that was due."""
        until = now + self.patience.interrupt
        self.interrupted = {call: max(due, until) for call, due in self.interrupted.items()}
        self.look_at = max(self.look_at, until)

    def loop_began(self, closes: bool, threads: bool, now: float) -> None:
        """Note that its calls overlap from now on."""
        self.overlaps, self.closes, self.threads, self.look_at = True, closes, threads, now
        until = now + self.patience.interrupt  # It may import what they call.
        self.interrupted = dict.fromkeys(self.interrupted, until)

    def overdue_items(self, now: float, call: int = 0) -> tuple[str, list[int]] | None:
        """Look for calls of items that did not end with their timeouts; return what to say, and which are to blame.

        :param call: one of which somebody else says that it did not.
        """
        found = self.running()
        before, self._turn = self._turn, found.turn
        was_late, self._was_late = self._was_late, set()
        self.look_at = now + _ITEMS_LOOK_SECONDS
        if found.running and found.running not in found.in_flight:  # A call that others wait for.
            return None
        late = {number for number, due in found.in_flight.items() if due + self.patience.interrupt <= now}
        unbegun = [number for number in (*self._late(now), call) if number and number not in found.in_flight]
        if not late and not unbegun:
            return None
        if 0 < found.turn == before or is_stopped(self.process.pid):
            return _BLOCKED, [found.running] if found.running else []
        self._was_late = late  # Once the loop has turned again it may not have heard of the timeout yet.
        again = sorted(late & was_late)
        return (_IGNORES.format(self.patience.interrupt), again) if again else None

    def at_standstill(self, now: float) -> Trouble | None:
        """Look whether it does anything; return why it is to be ended, None if it is not."""
        self.standstill_at = now + self._standstill.every
        seen: dict[str, object] = {}
        pid, state = self.process.pid, process_state(self.process.pid)
        if state in _AT_REST:
            seen[_AT_REST[state]] = activity(pid)
        computes = self._computes(now)
        if self.asked and not computes and state != "t" and self.may_be_asked:  # "t": for as long as a debugger likes.
            seen["loop"] = self.asked
        found = self._standstill.look(now, seen)
        return found and found._replace(message=f"the library process, {pid}, {found.message}")

    def _computes(self, now: float) -> bool:
        """Return whether its main thread has computed since the last look, as far as it got a core."""
        before, self._ran = self._ran, (now, *running_seconds(self.process.pid))
        passed, ran, waited = (new - old for new, old in zip(self._ran, before, strict=True))
        return ran > _COMPUTES * (passed - waited)

    @property
    def may_be_asked(self) -> bool:
        """Whether it should answer now that its event loop turns: what runs there and may take long ends that.

        Plain calls may take hours, on the loop's thread or on others, where they may keep Python's lock; so may an item
        beside which there is none. Calls with timeouts are judged by these, as is whether it parks or wakes.
        """
        if not self.overlaps or self.threads or not self.ready or self.moving:
            return False
        found = self.running()
        beside = found.in_flight.keys() - {found.running}
        return not found.running or bool(beside and found.in_flight.get(found.running) == float("inf"))

    def _late(self, now: float) -> list[int]:
        return [number for number, due in self.items.items() if due <= now]

    @property
    def deadline(self) -> float:
        """When the first of its calls, or its load, has taken too long, or it is time to look."""
        # Those of items, which may be a thousand, are not looked at each time but at `look_at`.
        calls = list(self.calls.values()) if len(self.calls) > len(self.items) else []
        dues = [self.load_deadline, self.look_at, self.remind_at, self.standstill_at]
        return min([*dues, *calls, *self.interrupted.values()])

    def read_output(self) -> None:
        """Keep what it printed: the end in memory, the first 10 MB in the log."""
        with contextlib.suppress(OSError):  # There is no more.
            for _ in range(64):
                if not (block := os.read(self.output, 1 << 16)):
                    return
                self._keep(block)

    def _keep(self, block: bytes) -> None:
        self._tail.append(block[-_TAIL_BYTES:])
        self._tail_bytes += len(self._tail[-1])
        while self._tail_bytes - len(self._tail[0]) >= _TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())
        if self._log is None:
            return
        try:
            self._log.write(block[: _LOG_BYTES - self._logged])
            self._logged += len(block)
            if self._logged >= _LOG_BYTES:
                self._log.write(b"\n[ctxflow: what was printed after the first 10 MB is not kept]\n")
                self._close_log()
            else:
                self._log.flush()
        except OSError:  # A full disk must not end the worker: the tail in memory goes on.
            self._close_log()

    def bytes_used(self, limit: int) -> int:
        """Return the memory in bytes of it and of all that it started, also what has left it; see `tree_bytes`."""
        return tree_bytes([self.process.pid, *adopted(OF_LIBRARY, self.scratch)], limit)

    def _close_log(self) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = None

    def tail(self, lines: int = 20) -> str:
        """Return the last lines that it printed; they are then forgotten."""
        self.read_output()
        text = b"".join(self._tail)[-_TAIL_BYTES:].decode(errors="replace")
        self._tail.clear()
        self._tail_bytes = 0
        return "\n".join(text.splitlines()[-lines:])

    def show_where(self) -> None:
        """Have it print where it is, before it is ended for taking too long (see `library.main`)."""
        self.read_output()  # An earlier trace may be in it.
        if is_stopped(self.process.pid) or is_exiting(self.process.pid):
            return  # It prints nothing.
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR2)
        until, said = now() + self.patience.trace, b""
        with contextlib.suppress(OSError):
            while not _TRACE_END.search(said) and (left := until - now()) > 0 and readable(self.output, left):
                if not (block := os.read(self.output, 1 << 16)):
                    return
                self._keep(block)
                said += block

    def end(self, seconds: float = _KILL_SECONDS) -> bool:
        """Kill it and all that it started, and wait until it is gone: False if it is not after so many seconds."""
        kill_tree(self.process.pid)
        gone = ended_within(self.process, seconds)
        kill_adopted(OF_LIBRARY, self.scratch)
        self._close_log()
        self.channel.close()
        for descriptor in (self.output, self.notice, self._asked, self._running, self.death):
            os.close(descriptor)
        return gone

    def cause_of_death(self) -> str:
        """Return how the process ended, in words; it must have ended, or at least closed its connection."""
        if not readable(self.death, 1.0):
            self.process.kill()
            return "the code closed the library process's connection to its host: it must leave descriptors alone"
        if not ended_within(self.process, _KILL_SECONDS):
            return "the library process has ended, but the system does not let go of it: see what traces it"
        status = self.process.returncode
        if status is None or status >= 0:
            text = f"the code ended its library process with exit status {status}"
            return f"{text}: raise an exception instead of calling os._exit"
        known = -status in set(signal.Signals)  # Most real-time signals have no name.
        name = signal.Signals(-status).name if known else f"signal {-status}"
        return f"the library process was killed by {name}: {_ADVICE.get(-status, _FROM_OUTSIDE)}"


_BLOCKED = (
    "the event loop stood still, so that calls ran past their timeouts: await what takes long, or give it a thread by "
    "asyncio.to_thread; the last lines show where it is"
)
_IGNORES = (
    "a call went on for {:g} s after its timeout, at which it was told to end: let CancelledError (on a "
    "thread KeyboardInterrupt, of which compiled code hears when it returns) end it, clean up sooner, or raise the "
    "timeout"
)
_CRASHED = "compiled code that it uses has crashed; the last lines that it printed show where"
_FROM_OUTSIDE = "something outside ctxflow, or the code itself, sent that signal"
_ADVICE: dict[int, str] = {
    signal.SIGKILL: "the machine's memory may be exhausted, so make batches smaller or run fewer workers",
    **dict.fromkeys((signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL), _CRASHED),
}


class KeptLogs:
    """Files, or folders of them, of which the last so many are kept, and those of what lives.

    >>> kept = KeptLogs(2)
    >>> kept.add("/run/1", ()), kept.add("/run/2", ()), kept.add("/run/3", ["/run/1"]), kept.paths
    (None, None, None, ['/run/1', '/run/3'])
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.paths: list[str] = []

    def add(self, path: str, living: Collection[str]) -> None:
        """Keep another, and remove the oldest that are not of `living`, if there are too many."""
        self.paths.append(path)
        ended = [each for each in self.paths[:-1] if each not in living]
        for each in ended[: max(0, len(self.paths) - self._most)]:
            self.paths.remove(each)
            with contextlib.suppress(OSError):
                shutil.rmtree(each) if os.path.isdir(each) else os.unlink(each)


class Undead:
    """A host's processes that were killed and are not gone yet: their memory is large, or the kernel waits for them.

    :param stuck_seconds: how long nothing may move in one.
    :ivar look_at: when to call `look`.
    """

    def __init__(self, stuck_seconds: float) -> None:
        self._stuck_seconds = stuck_seconds
        self.look_at = float("inf")
        self._killed: dict[ChildProcess, tuple[float, tuple[str, ...]]] = {}  # When it moved, and what.
        self._told = False

    def __bool__(self) -> bool:
        return bool(self._killed)

    def add(self, process: ChildProcess, now: float) -> None:
        """Look after one more."""
        self._killed[process] = now, activity(process.pid)
        self.look_at = now + _LOOK_SECONDS

    def pids(self) -> list[int]:
        """Return their numbers."""
        return [process.pid for process in self._killed]

    def look(self, now: float) -> str | None:
        """Forget those that are gone; return what to report of one that stays, once."""
        self._killed = {process: seen for process, seen in self._killed.items() if process.poll() is None}
        self.look_at = now + _LOOK_SECONDS if self._killed else float("inf")
        for process, (moved_at, before) in self._killed.items():
            if (seen := activity(process.pid)) != before:
                self._killed[process] = now, seen
            elif now >= moved_at + self._stuck_seconds and not self._told:
                self._told = True
                return (
                    f"its process {process.pid} was killed and does not end, so that its GPU and memory stay "
                    "taken: see what it waits for in the kernel (a GPU that failed, a file server that hangs)"
                )
        return None

    def wait(self, seconds: float) -> None:
        """Give each so long to end."""
        for process in self._killed:
            ended_within(process, seconds)
