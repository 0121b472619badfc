"""The engine's end of the manager's process: starting it, talking to it, waking it.

What does not live here: what is said (engine.py), and the process itself (manager.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import socket
import subprocess
import sys
import time

from ctxflow.errors import CtxflowError
from ctxflow.executors.contract import EngineFailed
from ctxflow.executors.taskvine.gate import BYTES, Bell
from ctxflow.executors.taskvine.manager_messages import (
    FROM_MANAGER,
    DeclareFile,
    DeclareTemp,
    FromManager,
    ManagerStarted,
    StartManager,
    StopManager,
    ToManager,
    Undeclare,
)
from ctxflow.factory.provider import tail
from ctxflow.host.machine_errors import scarcity
from ctxflow.host.own_modules import python_path
from ctxflow.host.processes import activity, ended_within, kill_tree
from ctxflow.host.wire import Channel, pack

_MISSED_SECONDS = 4.0  # After which it is doing something else than it does in each round: it beats once a second.
_BUSY_SECONDS = 900.0  # For how long it may be doing that.
_KILL_SECONDS = 2.0


class ManagerLink:
    """The process that holds the ndcctools manager. Its owner locks.

    :param settings: what it is to be (see manager.py).
    :param log: the file of its output.
    """

    def __init__(self, settings: StartManager, log: str) -> None:
        self._settings = settings
        self._log = log
        self._files: dict[str, DeclareFile | DeclareTemp] = {}  # Those that it knows.
        self._spawn()

    def _spawn(self) -> None:
        near, far = socket.socketpair()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        shared = os.memfd_create("ctxflow-asleep")
        os.ftruncate(shared, BYTES)
        self._bell = Bell(mmap.mmap(shared, BYTES), self._settings.doorbell)
        with far, open(self._log, "ab") as output:
            words = [str(far.fileno()), str(shared), str(os.getpid())]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ctxflow.executors.taskvine.manager", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[far.fileno(), shared],
                env={**os.environ, **python_path()},
                cwd=os.path.dirname(self._log),
                start_new_session=True,  # Ctrl-C is the driver's.
            )
        os.close(shared)
        self.channel = Channel(near)
        self._heard_at = self._looked_at = time.monotonic()
        self._activity: tuple[str, ...] = ()
        self._idle = 0.0
        self.send(self._settings)

    def started(self, seconds: float) -> int:
        """Return the port that it listens at, which it says first.

        :raises EngineFailed: if it does not in time.
        """
        deadline = time.monotonic() + seconds
        while not self.channel.closed and time.monotonic() < deadline:
            self.channel.wait(0.5)
            for said in self.received():
                if isinstance(said, ManagerStarted):
                    return said.port
        words = self.last_words()
        raise EngineFailed(f"TaskVine's manager does not start: {words}{'' if 'ulimit' in words else scarcity()}")

    def again(self, port: int) -> bool:
        """Have another take the place of one that hangs or has ended: it knows the same files, and nobody.

        :param port: that it listens at. :returns: whether the one before is gone.
        """
        kill_tree(self.process.pid)
        if not ended_within(self.process, _KILL_SECONDS):
            return False
        self.channel.close()
        self._bell.close()
        self._settings = dataclasses.replace(self._settings, port=port)
        self._spawn()
        for file in self._files.values():
            self.send(file)
        return True

    def send(self, message: ToManager) -> None:
        """Say something, now or as soon as it fits."""
        if isinstance(message, (DeclareFile, DeclareTemp)):
            self._files[message.key] = message
        elif isinstance(message, Undeclare):
            self._files.pop(message.key, None)
        self.channel.send_frame(pack(message))

    def received(self) -> list[FromManager]:
        """Return what it has said."""
        said = [FROM_MANAGER.open(head, body) for head, body in self.channel.receive()]
        if said:
            self._heard_at = time.monotonic()
            self._idle = 0.0
        return said

    @property
    def hearing(self) -> bool:
        """Whether it is at its work, so that answers can come: while it sends a file it does nothing else."""
        return time.monotonic() < self._heard_at + _MISSED_SECONDS

    def idle(self) -> float:
        """Return for how long it has said and done nothing, as far as this process looked: once a second, or so."""
        now = time.monotonic()
        seconds, self._looked_at = min(now - self._looked_at, _MISSED_SECONDS), now
        if self.hearing:
            return 0.0
        seen = activity(self.process.pid)
        busy = seen != self._activity and now < self._heard_at + _BUSY_SECONDS
        self._activity = seen
        self._idle = 0.0 if busy else self._idle + seconds
        return self._idle

    def ring(self) -> None:
        """Wake the manager, if it sleeps; to be called after `send`."""
        self._bell.ring()

    def last_words(self) -> str:
        """Return the last line of its output."""
        return (tail(self._log).splitlines() or ["it wrote nothing"])[-1].strip()

    def end(self, seconds: float) -> None:
        """Have it end, and see to that."""
        self.send(StopManager())
        self.ring()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.process.kill()
        ended_within(self.process, _KILL_SECONDS)
        self.channel.close()
        self._bell.close()


def require_ndcctools() -> None:
    """See to it that there is a TaskVine.

    :raises CtxflowError: if there is none, saying how to get it.
    """
    try:
        import ndcctools.taskvine  # noqa: F401
    except ImportError:
        raise CtxflowError(
            "the TaskVine engine needs ndcctools 7.15 or newer in this Python: `conda install -c conda-forge "
            "ndcctools`, or Debian's packages python3-workqueue and coop-computing-tools"
        ) from None
