"""The engine's end of the manager's process: starting it, talking to it, waking it.

What does not live here: what is said (engine.py), and the process itself (manager.py).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys

from ctxflow.errors import CtxflowError
from ctxflow.factory.provider import tail
from ctxflow.host.process import python_path
from ctxflow.host.wire import Channel, Head


class ManagerLink:
    """The process that holds the ndcctools manager. Its owner locks.

    :param settings: what it is to be (see manager.py).
    :param doorbell: the socket that its doorbell listens at.
    :param log: the file of its output.
    """

    def __init__(self, settings: Head, doorbell: str, log: str) -> None:
        near, far = socket.socketpair()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        shared = os.memfd_create("ctxflow-asleep")
        os.ftruncate(shared, 1)
        self._asleep = mmap.mmap(shared, 1)
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._doorbell = doorbell
        self._log = log
        with far, open(log, "wb") as output:
            words = [str(far.fileno()), str(shared), str(os.getpid())]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ctxflow.executors.taskvine.manager", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[far.fileno(), shared],
                env={**os.environ, **python_path()},
                cwd=os.path.dirname(log),
                start_new_session=True,  # Ctrl-C is the driver's.
            )
        os.close(shared)
        self.channel = Channel(near)
        self.send(settings)

    def send(self, head: Head, body: bytes = b"") -> None:
        """Say something, now or as soon as it fits."""
        self.channel.send(head, body)

    def ring(self) -> None:
        """Wake the manager, if it sleeps; to be called after `send`."""
        if self._asleep[0]:
            with contextlib.suppress(OSError):  # It is not there yet; or full, and so has rung.
                self._bell.sendto(b".", self._doorbell)

    def last_words(self) -> str:
        """The last line of its output."""
        return (tail(self._log).splitlines() or ["it wrote nothing"])[-1].strip()

    def end(self, seconds: float) -> None:
        """Have it end, and see to that."""
        self.send({"do": "stop"})
        self.ring()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.process.kill()
        self.process.wait()
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
