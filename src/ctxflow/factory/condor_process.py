"""The driver's end of the process that holds HTCondor's Python bindings: starting it, asking it, replacing it.

What does not live here: what it can be asked (condor_requests.py), and what that is for (condor.py).
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from typing import Any

from ctxflow.factory.condor_requests import Place, hear, say
from ctxflow.factory.provider import ProviderError
from ctxflow.host.process import python_path
from ctxflow.host.processes import ended_within
from ctxflow.installing import how_to_install

# Longer than the bindings wait for most answers, which is 20 s: a schedd with much to do is left to do it.
_SECONDS = {"submit": 30.0, "survey": 30.0, "machines": 30.0, "refusal": 30.0, "events": 60.0}
_OTHERS_SECONDS = 25.0
_LOAD_SECONDS = 60.0  # For loading the bindings, from a file system that is slow.
_LEAVE_SECONDS, _KILL_SECONDS = 0.2, 1.0


class CondorError(Exception):
    """HTCondor's own complaint, or what stands for one."""


class NotFound(CondorError):
    """Nobody says where the schedd is, so that nothing was asked of it."""


class CutOff(CondorError):
    """Nobody knows whether what was asked for was done."""


class NoAnswer(CutOff):
    """The bindings were left waiting for it."""


class CondorProcess:
    """A process with HTCondor's bindings; another takes its place when it does not answer in time, or crashes.

    It ends with this object, and with this process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._end: Any = None
        self._loading = True

    def start(self) -> None:
        """Start the process, which then loads the bindings; it is started when it is first asked at the latest."""
        with self._lock:
            self._started()

    def ask(self, request: str, *arguments: Any) -> Any:
        """Return the answer to a request of condor_requests.py.

        :raises CondorError: if HTCondor complains.
        :raises CutOff: if there is no answer in time.
        :raises ProviderError: if the bindings are missing, or there is no such schedd.
        """
        seconds = _SECONDS.get(request, _OTHERS_SECONDS)
        with self._lock:
            line = self._started()
            try:
                if self._loading:
                    self._loaded(line)
                line.settimeout(seconds)
                say(line, (request, arguments, seconds))
                kind, answer = hear(line, seconds)
            except TimeoutError:
                self._end()
                raise NoAnswer(f"no answer within {seconds:.0f} s") from None
            except (EOFError, OSError):
                raise CutOff(_how_it_ended(self._end())) from None
            except BaseException:  # The answer to come is nobody's.
                self._end()
                raise
        if kind == "refusal":
            raise ProviderError(answer)
        if kind == "not found":
            raise NotFound(answer)
        if kind == "complaint":
            raise CondorError(answer)
        return answer

    def _loaded(self, line: socket.socket) -> None:
        """Wait until the bindings are loaded."""
        try:
            loaded = hear(line, _LOAD_SECONDS)
        except TimeoutError:
            raise CondorError(f"its Python bindings were not loaded within {_LOAD_SECONDS:.0f} s") from None
        if not loaded:
            raise ProviderError(_missing())
        self._loading = False

    def _started(self) -> socket.socket:
        if self._line is not None and self._end.alive:
            return self._line
        near, far = socket.socketpair()
        with far:
            process = subprocess.Popen(
                [sys.executable, "-m", "ctxflow.factory.condor_requests", str(far.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[far.fileno()],
                env={**os.environ, **python_path()},
                cwd="/",
                start_new_session=True,  # Ctrl-C is the driver's.
            )
        self._line, self._loading = near, True
        self._end = weakref.finalize(self, _ended, near, process, os.getpid())
        return near


def _ended(line: socket.socket, process: subprocess.Popen[bytes], owner: int) -> int | None:
    """End a process, and return how it did."""
    line.close()
    if os.getpid() != owner:
        return None
    if not ended_within(process, _LEAVE_SECONDS):
        process.kill()
        ended_within(process, _KILL_SECONDS)
    return process.returncode


def _how_it_ended(status: int | None) -> str:
    how = "ended" if status is None or status >= 0 else f"crashed by {signal.Signals(-status).name}"
    return f"HTCondor's Python bindings {how}; those below 25.12 crash on Python 3.13: pip install --upgrade htcondor"


_processes: weakref.WeakValueDictionary[Place, CondorProcess] = weakref.WeakValueDictionary()
_guard = threading.Lock()


def condor_process(place: Place = (None, None)) -> CondorProcess:
    """Return the process for one schedd, the same for all who hold it meanwhile.

    :raises ProviderError: if the bindings are not installed.
    """
    if importlib.util.find_spec("htcondor2") is None:
        raise ProviderError(_missing())
    with _guard:
        found = _processes.get(place)
        if found is None:
            found = _processes[place] = CondorProcess()
        return found


def _missing() -> str:
    return (
        f"HTCondor's Python bindings (htcondor2) are missing: {how_to_install('htcondor', extra='htcondor')}; "
        "or on Debian install the package condor and make the virtual environment with --system-site-packages"
    )
