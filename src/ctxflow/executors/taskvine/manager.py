"""The program that holds the ndcctools manager, in a process of its own.

It does as the engine tells it over a socket (calls pinned to workers, files) and tells what came of it: answers,
workers that joined, workers that were lost. It decides nothing. ndcctools' `wait` sleeps whole seconds, holds the
interpreter's lock and cannot be woken; so it runs here, and sleeps with a *doorbell*: a local worker whose
standing call ends when the engine writes to its socket, which it does only while a shared byte says "asleep".
What does not live here: what calls mean (engine.py), and how workers are started (factory/).
"""

from __future__ import annotations

import base64
import contextlib
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any

from ctxflow.executors.taskvine.vine_log import DebugLog, prepare
from ctxflow.host.processes import die_with_parent, kill_tree
from ctxflow.host.wire import Channel, Head

LIBRARY = "ctxflow"
DOORBELL = "doorbell"
_INLINE_BYTES = 1500  # A call's frames that ride in its command; in base64 that is 2 KB, and 4 KB would be too long.
_SILENT_SECONDS = 600
_SHORT_SECONDS = 5
_BACKLOG = 4096
_BELL_SECONDS = 5.0  # How soon the doorbell's worker may be started again.
_LINGER_SECONDS = 0.001  # How long to wait for what the engine makes of an answer, before going to sleep.


class Manager:
    """The ndcctools manager, as the engine drives it.

    :param channel: to the engine.
    :param asleep: one shared byte, 1 while only the doorbell can wake this process.
    :param settings: of the engine's first message.
    """

    def __init__(self, channel: Channel, asleep: mmap.mmap, settings: Head) -> None:
        import ndcctools.taskvine as vine

        self._vine: Any = vine
        self._channel = channel
        self._asleep = asleep
        self._stopping = False
        self._tasks: dict[int, tuple[Any, str, int, Any]] = {}  # TaskVine's id -> task, worker, call, its buffer.
        self._of_worker: dict[str, set[int]] = {}  # Worker -> TaskVine's ids of its calls.
        self._names: dict[str, str] = {}  # Address -> worker.
        self._moved = (0, 0)
        self._files: dict[str, Any] = {}
        self._submitted = 0
        self._bell_worker = ""
        self._bell_stands = False
        self._manager = self._make(settings)
        self._log = DebugLog(vine)
        _tune_connections(self._manager.port, settings["keepalive_timeout"])
        self._install(settings)
        self._settings = settings
        self._bell = self._start_bell()
        self._bell_since = time.monotonic()
        channel.send({"is": "started", "port": self._manager.port})

    def _make(self, settings: Head) -> Any:
        manager = self._vine.Manager(
            port=settings["port"],
            run_info_path=settings["directory"],
            run_info_template=prepare(settings["directory"]),
            ssl=settings["ssl"] or None,
            shutdown=True,
        )
        manager.set_password_file(settings["password_file"])
        manager.set_keepalive_interval(settings["keepalive_interval"])
        manager.set_keepalive_timeout(settings["keepalive_timeout"])
        manager.tune("worker-source-max-transfers", settings["fan_out"])
        manager.tune("attempt-schedule-depth", 10_000)
        manager.tune("max-new-workers", 100)
        manager.tune("transient-error-interval", 1)
        manager.tune("short-timeout", _SHORT_SECONDS)
        manager.tune("watch-library-logfiles", 1)
        return manager

    def _install(self, settings: Head) -> None:
        for name, command, slots in (
            (LIBRARY, "vine_library", settings["slots"]),
            (DOORBELL, f"doorbell --socket {settings['doorbell']}", 2),
        ):
            library = self._vine.LibraryTask(f"exec $CTXFLOW_HOST {command}", name)
            library.set_cores(1)
            library.set_function_slots(slots)
            library.set_function_exec_mode_from_string("fork")
            self._manager.install_library(library)

    def _start_bell(self) -> subprocess.Popen[bytes]:
        settings = self._settings
        address = f"127.0.0.1:{self._manager.port}"
        words = [sys.executable, settings["program"], "worker", address, "--password", settings["password_file"]]
        words += ["--name-prefix", DOORBELL, "--cores", "1", "--memory", "100", "--disk", "100", "--gpus", "0"]
        words += ["--ssl"] if settings["ssl"] else []
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, cwd=os.path.dirname(settings["doorbell"]))

    # --- the loop

    def serve(self) -> None:
        """Carry out what comes, and tell what happens, until the engine says stop or is gone."""
        while not self._stopping:
            self._take_inbox(0.0)
            self._arm_bell()
            self._asleep[0] = 1
            # What came before the byte was set did not ring.
            ended = None if self._inbox_waits(0.0) else self._manager.wait(1)
            self._asleep[0] = 0
            answered = False
            while ended is not None:
                answered |= self._ended(ended)
                ended = self._manager.wait(0)
            self._watch_workers()
            self._flush()
            if answered:
                self._take_inbox(_LINGER_SECONDS)
            if self._bell.poll() is not None and time.monotonic() > self._bell_since + _BELL_SECONDS:
                # Starved on a loaded machine, most likely. Without it everything takes up to a second longer.
                self._bell, self._bell_since = self._start_bell(), time.monotonic()

    def close(self) -> None:
        """End everything that was started here."""
        kill_tree(self._bell.pid)
        self._bell.wait()
        self._manager.workers_shutdown(0)

    def _inbox_waits(self, seconds: float) -> bool:
        return bool(select.select([self._channel], [], [], seconds)[0])

    def _take_inbox(self, seconds: float) -> None:
        while self._inbox_waits(seconds):
            seconds = 0.0
            for head, body in self._channel.receive():
                self._handle(head, body)
            if self._channel.closed:
                self._stopping = True
                return

    def _flush(self) -> None:
        """Send all that waits to be sent: the engine always reads, and nothing here is more urgent."""
        while self._channel.pending and not self._channel.closed:
            select.select([], [self._channel], [])
            self._channel.flush()

    # --- what the engine says

    def _handle(self, head: Head, body: bytes) -> None:
        do = head["do"]
        if do == "call":
            self._call(head, body)
        elif do == "file":
            self._files[head["key"]] = self._manager.declare_file(head["path"], cache=head["cache"])
        elif do == "temp":
            self._files[head["key"]] = self._manager.declare_temp()
        elif do == "undeclare":
            file = self._files.pop(head["key"], None)
            if file is not None:
                self._manager.undeclare_file(file)
        elif do == "cancel":
            for task_id in [number for number, (_, _, call, _) in self._tasks.items() if call in head["calls"]]:
                self._manager.cancel_by_task_id(task_id)
        elif do == "stop":
            self._stopping = True

    def _call(self, head: Head, body: bytes) -> None:
        """Submit a call that is pinned to a worker; one to a worker that is gone would wait for ever."""
        worker = head["worker"]
        if worker not in self._of_worker:
            return
        buffer = None
        if len(body) <= _INLINE_BYTES:
            task = self._vine.Task("=" + base64.b64encode(body).decode())
        else:
            task = self._vine.Task("@")
            buffer = self._manager.declare_buffer(body)
            task.add_input(buffer, "call")
        for name, key in head.get("inputs", {}).items():
            task.add_input(self._files[key], name)
        for name, key in head.get("outputs", {}).items():
            task.add_output(self._files[key], name)
        if "inputs" in head:
            self._log.begin(head["id"])
        self._submit(task, LIBRARY, worker, head["id"], buffer)

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
        """Pass a call's answer on; whether there was one."""
        _, worker, call, buffer = self._tasks.pop(ended.id)
        if buffer is not None:
            self._manager.undeclare_file(buffer)
        self._log.end(call)
        if worker in self._of_worker:
            self._of_worker[worker].discard(ended.id)
        if call == 0:
            self._bell_stands &= worker != self._bell_worker
            return False
        if not ended.successful():
            if ended.result != "cancelled":
                reason = f"exit status {ended.exit_code}" if ended.result == "success" else str(ended.result)
                self._channel.send({"is": "unanswered", "id": call, "worker": worker, "reason": reason})
            return False
        answer = b""  # What is no answer has no seal either.
        with contextlib.suppress(ValueError, TypeError):
            answer = base64.b64decode(ended.std_output or b"")
        self._channel.send({"is": "answer", "id": call, "worker": worker}, answer)
        return True

    def _watch_workers(self) -> None:
        stats = self._manager.stats
        moved = (stats.workers_joined, stats.workers_removed)
        if moved == self._moved:
            return
        there = {each["addrport"]: each for each in self._manager.status("workers")}
        # A worker that has connected tells its name a moment later.
        if all("factory_name" in each for each in there.values()):
            self._moved = moved
        for address in [address for address in self._names if address not in there]:
            self._lost(self._names.pop(address))
        for address, each in there.items():
            if address not in self._names and "factory_name" in each:
                self._joined(address, each["factory_name"], each["hostname"])

    def _joined(self, address: str, worker: str, host: str) -> None:
        self._names[address] = worker
        self._of_worker[worker] = set()
        if worker.startswith(DOORBELL + "."):
            self._bell_worker = worker
        else:
            self._channel.send({"is": "joined", "worker": worker, "address": address, "host": host})

    def _lost(self, worker: str) -> None:
        """TaskVine would keep its calls until a worker of that name came: none ever does."""
        for number in self._of_worker.pop(worker):
            self._manager.cancel_by_task_id(number)
        if worker == self._bell_worker:
            self._bell_worker, self._bell_stands = "", False
            return
        self._channel.send({"is": "lost", "worker": worker})


def _tune_connections(port: int, timeout: int) -> None:
    """Have the kernel keep back connections on which nothing is said, and end those that take nothing.

    TaskVine would wait for each of the former in turn, 5 seconds, with TLS without end; workers speak first. And it
    listens with room for 5 connections only, too few where hundreds of workers start together. While it sends a file
    it does nothing else: where the worker is cut off or stopped meanwhile, it would wait for a minute or longer.

    :param timeout: seconds in which a worker must take some of what is sent to it.
    """
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry))) as found:
                    if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and found.getsockname()[1] == port:
                        _tune_listener(found, timeout)


def _tune_listener(listener: socket.socket, timeout: int) -> None:
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_SECONDS)
    # Accepted connections inherit these; the second is of use while TLS is agreed on, which has no limit else.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * timeout)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _SHORT_SECONDS, 0))
    listener.listen(_BACKLOG)


def main(descriptor: int, asleep: int, parent: int) -> None:
    """Serve the engine at the other end of a socket.

    :param asleep: descriptor of the shared byte's memory.
    """
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    select.select([channel], [], [])
    messages = channel.receive()
    if not messages:
        return
    manager = Manager(channel, mmap.mmap(asleep, 1), messages[0][0])
    try:
        manager.serve()
    finally:
        manager.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
