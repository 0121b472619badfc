"""The program that holds the ndcctools manager, in a process of its own.

It does as the engine tells it over a socket (calls pinned to workers, files), reports answers, workers that joined and
workers that were lost, and decides nothing. ndcctools' `wait` sleeps whole seconds, holds the interpreter's lock and
cannot be woken; so it runs here, and sleeps with a *doorbell*: a local worker whose standing call ends when the engine
writes to its socket, which it does only while a shared byte says "asleep".
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import dataclasses
import mmap
import os
import secrets
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from ctxflow.executors.taskvine import manager_messages as msg
from ctxflow.executors.taskvine.gate import Entrance
from ctxflow.host.linux import advice, die_with_parent, ended_within, kill_tree, none_left, take_enough
from ctxflow.host.wire import Channel, pack
from ctxflow.host.worker import HOST

LIBRARY = "ctxflow"
BEAT_SECONDS = 1.0
DOORBELL = "doorbell"
_INLINE_BYTES = 1500  # A call's frames that ride in its command; in base64 that is 2 KB, and 4 KB would be too long.
_KILL_SECONDS = 2.0
_BELL_SECONDS = 5.0  # How soon the doorbell's worker may be started again.
_LINGER_SECONDS = 0.001  # How long to wait for what the engine makes of an answer, before going to sleep.
_SHORT_SECONDS = 5  # How long TaskVine waits for a word of a worker.
_SILENT_SECONDS = 600
_BACKLOG = 4096
_NAME = "manager"  # Of the folder of TaskVine's files.
_UNREAD = ("performance", "taskgraph", "transactions")


class Manager:
    """The ndcctools manager, as the engine drives it over a channel.

    :param asleep: descriptor of the shared bytes, the first 1 while only the doorbell can wake this process.
    """

    def __init__(self, channel: Channel, asleep: int, settings: msg.StartManager) -> None:
        import ndcctools.taskvine as vine

        self._vine: Any = vine
        self._channel = channel
        self._inbox = select.poll()
        self._inbox.register(channel.fileno(), select.POLLIN)
        self._asleep = mmap.mmap(asleep, msg.BYTES)
        self._stopping = False
        self._tasks: dict[int, tuple[Any, str, int, Any]] = {}  # TaskVine's id -> task, worker, call, its buffer.
        self._most: dict[int, int] = {}  # Call -> the bytes that its answer may have, where that is limited.
        self._of_worker: dict[str, set[int]] = {}  # Worker -> TaskVine's ids of its calls.
        self._roster = msg.Roster()
        self._files: dict[str, Any] = {}
        self._submitted = 0
        self._bell_name = f"{DOORBELL}-{secrets.token_hex(8)}"  # Nobody else can take its place.
        self._bell_worker = ""
        self._bell_stands = False
        self._manager = self._make(settings)
        self._log = DebugLog(vine)
        self._port: int = self._manager.port
        listener = tune_connections(self._port, settings.keepalive_timeout)
        self._entrance: Entrance | None = None
        if not settings.ssl:  # What OpenSSL keeps of a connection is TaskVine's from its first byte on.
            self._entrance = Entrance(listener, asleep, settings.doorbell, settings.password_file)
        self._install(settings)
        self._settings = settings
        self._bell = self._start_bell()
        self._bell_since = time.monotonic()
        if self._entrance is not None:
            self._entrance.require_room()
        self._beat_at = 0.0
        self._say(msg.ManagerStarted(self._port))

    def _say(self, message: msg.FromManager) -> None:
        self._channel.send_frame(pack(message))

    def _make(self, settings: msg.StartManager) -> Any:
        manager = self._vine.Manager(
            port=settings.port,
            run_info_path=settings.directory,
            run_info_template=prepare(settings.directory),
            ssl=settings.ssl or None,
            shutdown=True,
        )
        manager.set_password_file(settings.password_file)
        manager.set_keepalive_interval(settings.keepalive_interval)
        manager.set_keepalive_timeout(settings.keepalive_timeout)
        manager.tune("worker-source-max-transfers", settings.fan_out)
        manager.tune("attempt-schedule-depth", 10_000)
        manager.tune("max-new-workers", 100)
        manager.tune("transient-error-interval", 1)
        manager.tune("short-timeout", _SHORT_SECONDS)
        manager.tune("watch-library-logfiles", 1)
        return manager

    def _install(self, settings: msg.StartManager) -> None:
        for name, command, slots in (
            (LIBRARY, "vine_library", settings.slots),
            (DOORBELL, f"doorbell --socket {shlex.quote(settings.doorbell)}", 2),
        ):
            library = self._vine.LibraryTask(f"{HOST} {command}", name)
            library.set_cores(1)
            library.set_function_slots(slots)
            library.set_function_exec_mode_from_string("fork")
            self._manager.install_library(library)

    def _start_bell(self) -> subprocess.Popen[bytes]:
        settings = self._settings
        address = f"127.0.0.1:{self._port}"
        words = [sys.executable, settings.program, "worker", address, "--password", settings.password_file]
        words += ["--name-prefix", self._bell_name, "--cores", "1", "--memory", "100", "--disk", "100", "--gpus", "0"]
        # By itself it would notice only after seconds that this process was killed.
        words += ["--parent", str(os.getpid()), *(["--ssl"] if settings.ssl else [])]
        folder = os.path.dirname(settings.doorbell)  # It goes with the run, and this worker's own with it.
        return subprocess.Popen([*words, "--workdir", folder], stdin=subprocess.DEVNULL, cwd=folder)

    # --- the loop

    def serve(self) -> None:
        """Carry out messages and report what happens, until the engine says stop or is gone."""
        while not self._stopping:
            self._take_inbox(0.0)
            self._arm_bell()
            self._asleep[0] = 1
            # What came before the byte was set did not ring.
            ended = None if self._inbox.poll(0) else self._manager.wait(1)
            self._asleep[0] = 0
            if self._asleep[msg.NEWS]:
                self._let_in()
            answered = False
            while ended is not None:
                answered |= self._ended(ended)
                ended = self._manager.wait(0)
            self._watch_workers()
            self._flush()
            if answered:
                self._take_inbox(_LINGER_SECONDS)
            if (now := time.monotonic()) >= self._beat_at:
                self._beat(now)

    def _beat(self, now: float) -> None:
        """Tell the engine that this process is in its loop, and check those that it started."""
        self._beat_at = now + BEAT_SECONDS
        if not self._channel.pending:  # While it reads nothing, once is enough.
            self._say(msg.ManagerBeat())
        if self._bell.poll() is not None and now > self._bell_since + _BELL_SECONDS:
            # Starved on a loaded machine, most likely. Without it everything takes up to a second longer.
            self._bell, self._bell_since = self._start_bell(), now
        if self._entrance is not None:
            self._entrance.check()

    def close(self) -> None:
        """End everything that was started here."""
        if self._entrance is not None:
            self._entrance.close()
        kill_tree(self._bell.pid)
        ended_within(self._bell, _KILL_SECONDS)
        self._manager.workers_shutdown(0)

    def _take_inbox(self, seconds: float) -> None:
        while self._inbox.poll(1000 * seconds):
            seconds = 0.0
            for head, body in self._channel.receive():
                self.handle(msg.TO_MANAGER.open(head, body))
            if self._channel.closed:
                self._stopping = True
                return

    def _flush(self) -> None:
        """Send all that waits to be sent: the engine always reads, and nothing here is more urgent."""
        while self._channel.pending and not self._channel.closed:
            self._channel.wait(events=select.POLLOUT)
            self._channel.flush()

    # --- what the engine says

    def handle(self, message: msg.ToManager) -> None:
        """Carry out a message."""
        if isinstance(message, msg.SubmitCall):
            self._call(message)
        elif isinstance(message, msg.DeclareFile):
            options = {"cache": message.cache, "peer_transfer": message.peers}
            self._files[message.key] = self._manager.declare_file(message.path, **options)
        elif isinstance(message, msg.DeclareTemp):
            self._files[message.key] = self._manager.declare_temp()
        elif isinstance(message, msg.Undeclare):
            file = self._files.pop(message.key, None)
            if file is not None:
                self._manager.undeclare_file(file)
        elif isinstance(message, msg.CancelCall):
            for task_id in [number for number, (_, _, call, _) in self._tasks.items() if call == message.number]:
                self._manager.cancel_by_task_id(task_id)
        elif isinstance(message, msg.StopManager):
            self._stopping = True

    def _call(self, message: msg.SubmitCall) -> None:
        """Submit a call that is pinned to a worker, if it is there: else the call would wait for ever."""
        worker, body = message.worker, message.body
        if worker not in self._of_worker:
            return
        buffer = None
        if len(body) <= _INLINE_BYTES:
            task = self._vine.Task("=" + base64.b64encode(body).decode())
        else:
            task = self._vine.Task("@")
            buffer = self._manager.declare_buffer(body)
            task.add_input(buffer, "call")
        for name, key in message.inputs.items():
            task.add_input(self._files[key], name)
        for name, key in message.outputs.items():
            task.add_output(self._files[key], name)
        if message.most is not None:
            self._most[message.number] = message.most
        if message.inputs:
            self._log.begin(message.number)
        self._submit(task, LIBRARY, worker, message.number, buffer)

    def _submit(self, task: Any, library: str, worker: str, call: int, buffer: Any) -> None:
        task.set_library_required(library)
        task.add_feature(worker)
        self._submitted += 1
        task.set_priority(-self._submitted)  # Else later calls may overtake earlier ones.
        number = self._manager.submit(task)
        self._tasks[number] = task, worker, call, buffer
        self._of_worker[worker].add(number)

    def _arm_bell(self) -> None:
        if self._bell_worker and not self._bell_stands:
            self._bell_stands = True
            self._submit(self._vine.Task("=" + "A" * 4), DOORBELL, self._bell_worker, 0, None)

    # --- what TaskVine says

    def _ended(self, ended: Any) -> bool:
        """Report a call's end; return whether it was answered."""
        _, worker, call, buffer = self._tasks.pop(ended.id)
        if buffer is not None:
            self._manager.undeclare_file(buffer)
        self._log.end(call)
        most = self._most.pop(call, None)
        if worker in self._of_worker:
            self._of_worker[worker].discard(ended.id)
        if call == 0:
            self._bell_stands &= worker != self._bell_worker
            return False
        if not ended.successful():
            if ended.result != "cancelled":
                reason = f"exit status {ended.exit_code}" if ended.result == "success" else str(ended.result)
                self._say(msg.CallUnanswered(call, worker, reason))
            return False
        answer = b""  # Fails the check of its seal.
        with contextlib.suppress(ValueError, TypeError):
            text = ended.std_output or b""
            if most is None or len(text) <= most:
                answer = base64.b64decode(text)
        self._say(msg.CallAnswered(call, worker, answer))
        return True

    def _let_in(self) -> None:
        self._asleep[msg.NEWS] = 0  # Before it is looked for, so that none is missed.
        for host in [] if self._entrance is None else self._entrance.serve():
            self._say(msg.StrangerConnected(host, "it has not the run's password"))
        while self._entrance is not None and self._entrance.troubles:
            self._say(msg.GateTrouble(self._entrance.troubles.pop(0)))

    def _watch_workers(self) -> None:
        stats, now = self._manager.stats, time.monotonic()
        if not self._roster.due((stats.workers_joined, stats.workers_removed), now):
            return
        for news in self._roster.look(self._manager.status("workers"), now):
            if isinstance(news, msg.WorkerConnected):
                self._joined(news)
            elif isinstance(news, msg.WorkerGone):
                self._lost(news)
            else:
                self._say(news)

    def _joined(self, news: msg.WorkerConnected) -> None:
        self._of_worker[news.worker] = set()
        if news.worker.startswith(self._bell_name + "."):
            self._bell_worker = news.worker
        else:
            ip = news.address.rpartition(":")[0] if self._entrance is None else self._entrance.origin(news.address)
            self._say(dataclasses.replace(news, ip=ip))

    def _lost(self, news: msg.WorkerGone) -> None:
        """Cancel a worker's calls, which TaskVine would keep for a worker of that name: none ever comes."""
        for number in self._of_worker.pop(news.worker):
            self._manager.cancel_by_task_id(number)
        if news.worker == self._bell_worker:
            self._bell_worker, self._bell_stands = "", False
            kill_tree(self._bell.pid)  # It may only be stopped; another takes its place.
            return
        self._say(news)


def prepare(directory: str) -> str:
    """Make the folder of TaskVine's logs, in which those that nobody reads lead nowhere; return its name."""
    folder = os.path.join(directory, _NAME, "vine-logs")
    os.makedirs(folder, exist_ok=True)
    for name in _UNREAD:
        with contextlib.suppress(FileExistsError):
            os.symlink(os.devnull, os.path.join(folder, name))
    return _NAME


class DebugLog:
    """TaskVine's debug log, written while files are on their way, for `ctxflow report`.

    Some 23 lines for every call, written one by one, are a third of the call's time, gigabytes a night, and an abort
    when the disk is full. With CTXFLOW_VINE_LOG=all, or where ndcctools cannot switch it, it is always written.
    """

    def __init__(self, vine: Any) -> None:
        self._transfers: set[int] = set()
        self._library: ctypes.CDLL | None = None
        if os.environ.get("CTXFLOW_VINE_LOG") == "all":
            return
        with contextlib.suppress(AttributeError, OSError):
            library = ctypes.CDLL(vine.cvine._cvine.__file__)
            library.cctools_debug_flags_clear.restype = None
            library.cctools_debug_flags_set.argtypes = [ctypes.c_char_p]
            library.cctools_debug_flags_clear()
            self._library = library

    def begin(self, call: int) -> None:
        """Note that a call brings files along."""
        if self._library is not None and not self._transfers:
            self._library.cctools_debug_flags_set(b"vine")
        self._transfers.add(call)

    def end(self, call: int) -> None:
        """Note that a call has ended, which may have brought files."""
        if call in self._transfers:
            self._transfers.discard(call)
            if self._library is not None and not self._transfers:
                self._library.cctools_debug_flags_clear()


def tune_connections(port: int, timeout: int) -> int:
    """Have the kernel keep back connections on which nothing is said, and end those that take nothing.

    TaskVine would wait for each of the former in turn, 5 seconds, with TLS without end; workers speak first. And it
    listens with room for 5 connections only, too few where hundreds of workers start together. While it sends a file
    it does nothing else: where the worker is cut off or stopped meanwhile, it would wait for a minute or longer.

    :param timeout: seconds in which a worker must take some of what is sent to it.
    :returns: the descriptor at which TaskVine listens.
    """
    for descriptor, found in _sockets():
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[1] == port:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_SECONDS)
            # Accepted connections inherit these; the second is of use while TLS is agreed on, which has no limit else.
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * timeout)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _SHORT_SECONDS, 0))
            found.listen(_BACKLOG)
            return descriptor
    raise RuntimeError(f"TaskVine does not listen at its port {port}")


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the descriptors of this process's sockets, and each as a socket for the moment."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry))) as found:
                    yield int(entry), found


def main(descriptor: int, asleep: int, parent: int) -> None:
    """Serve the engine at the other end of a socket; `asleep`: descriptor of the shared bytes."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    take_enough()
    channel = Channel(socket.socket(fileno=descriptor))
    channel.wait()
    messages = [msg.TO_MANAGER.open(head, body) for head, body in channel.receive()]
    if not messages or not isinstance(messages[0], msg.StartManager):
        return
    try:
        with contextlib.closing(Manager(channel, asleep, messages[0])) as manager:
            for message in messages[1:]:
                manager.handle(message)
            manager.serve()
    except OSError as error:
        if none_left(error):
            sys.exit(f"{error}{advice(error)}")  # The last line is what the engine tells.
        raise


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
