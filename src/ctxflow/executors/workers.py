"""The embedded engine's workers: starting a context host process, and ending all that belongs to it.

What does not live here: which workers there are, and what they are told (host_messages.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from ctxflow.factory.provider import tail
from ctxflow.host.devices import Device
from ctxflow.host.process import python_path
from ctxflow.host.processes import ended_within, kill_session, kill_tree, session_members
from ctxflow.host.wire import Channel

if TYPE_CHECKING:
    from ctxflow.executors.lines import Line

_KILL_SECONDS = 2.0  # How long what was killed is waited for; what hangs in the kernel ends later, or never.
_ALL_THREADS = "OMP_NUM_THREADS"
_THREAD_VARIABLES = (_ALL_THREADS, "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCH_NUM_THREADS")


class Worker:
    """A context host process as the engine sees it.

    :param name: what the scheduler knows it by.
    :param parent: the directory in which it gets one of its own.
    :param logs: where its output and its library processes' is kept.
    :raises OSError: if the machine has no room for it (disk, processes, descriptors); nothing is left then.
    """

    def __init__(self, name: str, devices: list[Device], parent: str, logs: str, share: dict[str, str]) -> None:
        self.name = name
        self.devices = devices
        self.scratch = os.path.join(parent, name)
        self.joined = False
        self.evicted = False  # Known to be taken away, or about to be.
        self.released = False
        self.shares = [devices]  # What it holds of the machine's devices, as they are dealt out.
        self.pin: int | None = None  # The number by which it was asked for, with devices of its own.
        self.pause: float | None = None  # Seconds for which its place stays empty, if that was said.
        self.lines: dict[str, Line] = {}
        os.makedirs(logs, exist_ok=True)
        self._log = os.path.join(logs, "host.log")
        with contextlib.ExitStack() as ours, open(self._log, "wb") as output:
            near, far = socket.socketpair()
            ours.callback(near.close)
            with far:
                arguments = [str(far.fileno()), self.scratch, logs, str(os.getpid())]
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "ctxflow.host", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[far.fileno()],
                    env={**os.environ, **share},
                    cwd=parent,  # Where no module of the user's hides one that the host needs.
                    start_new_session=True,  # Ctrl-C is the driver's; and the worker can be ended as a whole.
                )
            ours.pop_all()
        self.channel = Channel(near)

    def end(self) -> None:
        """Kill what is left of it, wait for that, and remove its files."""
        kill_tree(self.process.pid)  # Also what left the worker's session.
        kill_session(self.process.pid)  # Also what lost its parents.
        ended_within(self.process, _KILL_SECONDS)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def remains(self) -> list[int]:
        """Its processes that have not ended though they were killed: they may hold its GPUs."""
        self.process.poll()
        return session_members(self.process.pid)

    def last_words(self) -> str:
        """How it ended: the last line of its output, or its exit status."""
        status = f"a worker ended with status {self.process.returncode}"
        return (tail(self._log).splitlines() or [status])[-1].strip()


def share(devices: list[Device], dealt: bool, workers: int, shares: int = 1) -> dict[str, str]:
    """The environment that keeps a worker to its share of the machine.

    :param devices: its GPUs.
    :param dealt: whether the machine has GPUs at all.
    :param workers: how many share the machine.
    :param shares: how many of those shares it has.
    """
    threads = str(max(1, (os.cpu_count() or 1) * shares // workers))
    variables = {}
    if _ALL_THREADS not in os.environ:  # The others follow that one where they are not set.
        variables = {name: threads for name in _THREAD_VARIABLES if name not in os.environ}
    if dealt:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(device.id for device in devices)
    return {**variables, **python_path()}
