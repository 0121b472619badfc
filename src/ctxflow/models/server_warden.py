"""Hold a server and all that it starts, so that they end together, whoever dies first: a program of its own.

    python -I -S server_warden.py CONTROL PARENT GRACE FOLDER COMMAND...

`CONTROL` is a socket to the process `PARENT`, which is told "started PID", "failed WHY" and "ended STATUS", in lines.
When that process closes it, asks for the end, or dies, the server gets SIGTERM, and after `GRACE` seconds whatever is
left of it is killed, whatever groups and sessions it made; then `FOLDER` is removed. Should this program be killed, the
kernel kills the server. It uses the standard library alone, and takes 10 MB.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_DEAF = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # It ends when its parent says so.
_DEFAULT = (*_DEAF, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)
_KILL_SECONDS = 10.0  # What hangs in the kernel longer cannot be waited for.


class _Warden:
    def __init__(self, control: socket.socket, parent: int, folder: str) -> None:
        self.control, self.folder = control, folder
        self.woken, wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in _DEAF:
            signal.signal(number, signal.SIG_IGN)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.death = os.pidfd_open(parent)
        self.orphan = os.getppid() != parent
        self.server = 0
        self.status: int | None = None

    def start(self, command: list[str]) -> None:
        read, write = os.pipe2(os.O_CLOEXEC)
        warden = os.getpid()
        self.server = os.fork()
        if self.server == 0:
            try:
                signal.set_wakeup_fd(-1)
                for number in _DEFAULT:
                    signal.signal(number, signal.SIG_DFL)
                _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == warden:
                    os.execvp(command[0], command)
            except OSError as error:
                os.write(write, (error.strerror or str(error)).encode())
            finally:
                os._exit(127)
        os.close(write)
        nothing = os.open(os.devnull, os.O_RDWR)  # The log ends with those who write it.
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        why = os.read(read, 4096)
        os.close(read)
        self.tell(f"failed {why.decode()}" if why else f"started {self.server}")

    def hold(self) -> None:
        """Return when the server has ended, or shall."""
        poll = select.poll()
        for descriptor in (self.control.fileno(), self.woken, self.death):
            poll.register(descriptor, select.POLLIN)
        while not self.orphan:
            ready = {descriptor for descriptor, _ in poll.poll()}
            with contextlib.suppress(BlockingIOError):
                os.read(self.woken, 4096)
            self.reap()
            if self.status is not None or ready - {self.woken}:
                return

    def end(self, grace: float) -> None:
        if self.status is None:
            until = time.monotonic() + grace
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.server, signal.SIGTERM)
                os.kill(self.server, signal.SIGCONT)
            while descendants() and time.monotonic() < until:
                select.select([self.woken], [], [], 0.05)
                with contextlib.suppress(BlockingIOError):
                    os.read(self.woken, 4096)
                self.reap()
        until = time.monotonic() + _KILL_SECONDS
        while (left := descendants()) and time.monotonic() < until:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            time.sleep(0.005)
        _remove(self.folder)

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.server:
                    self.status = os.waitstatus_to_exitcode(status)
                    self.tell(f"ended {self.status}")

    def tell(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self.control.sendall(f"{line}\n".encode())


def descendants() -> list[int]:
    """Return all children of this process and theirs, the farthest first."""
    found = [os.getpid()]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children") as file:
                    found.extend(map(int, file.read().split()))
    return found[:0:-1]


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _remove(folder: str) -> None:
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                _remove(entry.path)
            else:
                os.unlink(entry.path)
        os.rmdir(folder)


def main(argv: list[str]) -> None:
    """Hold the server until it ends, or its parent does."""
    number, parent, grace, folder, *command = argv
    os.setpgid(0, 0)  # Whoever kills its parent's group leaves it the time to clean up.
    control = socket.socket(fileno=int(number))
    control.set_inheritable(False)
    warden = _Warden(control, int(parent), folder)
    warden.start(command)
    warden.hold()
    warden.end(float(grace))


if __name__ == "__main__":
    main(sys.argv[1:])
