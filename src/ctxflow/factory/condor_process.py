"""Query HTCondor through its Python bindings, in a process of their own: both ends, `condor_process` and `main`.

The bindings hold Python's lock while they wait for a schedd or a collector, and so would all threads of a driver. So
the driver sends its requests to a process, with a timeout, and replaces it when it does not answer or crashes.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ctxflow.factory.provider import ProviderError
from ctxflow.host.linux import ended_within, python_path, readable
from ctxflow.installing import how_to_install

# Longer than the bindings wait for most answers, which is 20 s: a schedd with much to do is left to do it.
_SECONDS = {"submit": 30.0, "survey": 30.0, "machines": 30.0, "refusal": 30.0, "events": 60.0}
_OTHERS_SECONDS = 25.0
_LOAD_SECONDS = 60.0  # For loading the bindings, from a file system that is slow.
_LEAVE_SECONDS, _KILL_SECONDS = 0.2, 1.0

Place = tuple[str | None, str | None]
"""Which schedd, by its name and its pool's central manager; None for this machine's."""

# Of the process itself.
_BY_US = 0  # The subcode of a removal's reason.
_LENGTH = struct.Struct("!Q")
_LOOK_SECONDS = 10.0
_GRACE_SECONDS = 5.0
_readers: dict[str, tuple[Any, int]] = {}  # A job log's path -> its reader, and how many events that has read.


class CondorError(Exception):
    """An error of HTCondor's, or of the connection to it."""


class ScheddNotFound(CondorError):
    """The schedd could not be located, so that it got no request."""


class CutOff(CondorError):
    """The answer was lost: it is unknown whether the request was carried out."""


class NoAnswer(CutOff):
    """The answer did not come in time."""


class NoSuchSchedd(Exception):
    """The pool has no schedd of that name."""


@contextlib.contextmanager
def explained(what: str, who: str = "schedd") -> Iterator[None]:
    """Turn an error of HTCondor's into a ProviderError of one sentence; `who` was queried."""
    try:
        yield
    except (CondorError, OSError) as error:
        complaint = " ".join(str(error).split()).rstrip(",.")
        if isinstance(error, NoAnswer):
            complaint = f"its {who} does not answer: see whether condor_q works on this machine ({complaint})"
        else:
            complaint = _why(complaint)
        raise ProviderError(f"{what}: {complaint}") from None


def _why(complaint: str) -> str:
    """Return HTCondor's complaint, and what to do about it.

    >>> _why("Unable to commit transaction")
    'its schedd cannot keep them: is the disk full that its SPOOL directory is on? (Unable to commit transaction)'
    >>> _why("Failed to create new cluster").partition(":")[0]
    'its schedd takes no jobs, or ended meanwhile'
    """
    if "commit transaction" in complaint:
        return f"its schedd cannot keep them: is the disk full that its SPOOL directory is on? ({complaint})"
    look = "see whether condor_q works on this machine"
    if "create new cluster" in complaint:
        return f"its schedd takes no jobs, or ended meanwhile: {look} ({complaint})"
    if any(each in complaint for each in ("connect to schedd", "SECMAN", "locate local daemon")):
        return f"its schedd does not answer: {look} ({complaint})"
    return f"{complaint}; {look}"


# --- the driver's end


class CondorProcess:
    """The driver's end of a process with HTCondor's bindings, which ends with this object, and with this process.

    :ivar limit: how many seconds any request may take, in place of what is usual for it.
    """

    def __init__(self) -> None:
        self.limit: float | None = None
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._end: Any = None
        self._loading = True

    def start(self) -> None:
        """Start the process, which then loads the bindings; the first request does so at the latest."""
        with self._lock:
            self._started()

    def ask(self, request: str, *arguments: Any) -> Any:
        """Return the answer to a request, which is the name of a function of this module.

        :raises CondorError: if HTCondor complains.
        :raises CutOff: if there is no answer in time.
        :raises ProviderError: if the bindings are missing, or there is no such schedd.
        """
        seconds = self.limit or _SECONDS.get(request, _OTHERS_SECONDS)
        with self._lock:
            line = self._started()
            try:
                if self._loading:
                    self._wait_until_loaded(line)
                line.settimeout(seconds)
                send(line, (request, arguments, seconds))
                kind, answer = receive(line, seconds)
            except TimeoutError:
                self._end()
                raise NoAnswer(f"no answer within {seconds:.0f} s") from None
            except (EOFError, OSError):
                raise CutOff(_how_it_ended(self._end())) from None
            except BaseException:  # The answer to come must not be taken for another's.
                self._end()
                raise
        if kind == "refusal":
            raise ProviderError(answer)
        if kind == "not found":
            raise ScheddNotFound(answer)
        if kind == "complaint":
            raise CondorError(answer)
        return answer

    def _wait_until_loaded(self, line: socket.socket) -> None:
        try:
            loaded = receive(line, _LOAD_SECONDS)
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
                [sys.executable, "-m", "ctxflow.factory.condor_process", str(far.fileno())],
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
    """End a process, and return its status."""
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
    """Return the process for one schedd, the same for all who hold it meanwhile."""
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


# --- what the process is asked; `_REQUESTS` names it all


def submit(place: Place, description: Mapping[str, str], count: int, directory: str) -> tuple[int, int]:
    """Submit jobs that are all alike, as from this directory, and return their cluster and the first one's number."""
    os.chdir(directory)
    done = _schedd(place).submit(_htcondor().Submit(dict(description)), count=count)
    return done.cluster(), done.first_proc()


def query(place: Place, constraint: str, projection: Sequence[str], limit: int) -> list[dict[str, Any]]:
    """Return a schedd's ads of jobs; at most `limit`, -1 for all of them."""
    return [_plain(ad) for ad in _schedd(place).query(constraint, projection=list(projection), limit=limit)]


def edit(place: Place, constraint: str, attribute: str, value: str) -> None:
    """Change an attribute of jobs."""
    _schedd(place).edit(constraint, attribute, value)


def remove(place: Place, jobs: Sequence[str] | str, reason: str) -> None:
    """Remove jobs, by their ids or by a constraint."""
    _schedd(place).act(_htcondor().JobAction.Remove, jobs, (reason, _BY_US))


def events(path: str, seen: int) -> list[dict[str, Any]]:
    """Return the events of a job log after the first so many, each with "time", in seconds since 1970."""
    log, read = _readers.pop(path, (None, -1))
    if read != seen:  # It is another process that has read them, or its answer was lost.
        if log is not None:
            log.close()
        log = _htcondor().JobEventLog(path)
        for _ in itertools.islice(log.events(0), seen):
            pass
    found: list[dict[str, Any]] = []
    try:
        for event in log.events(0):
            found.append({**_plain(event), "time": float(event.timestamp)})
    except (_htcondor().HTCondorException, OSError):
        if not found:  # What was read before counts, whatever follows.
            raise
    finally:
        _readers[path] = log, seen + len(found)
    return found


def forget(path: str) -> None:
    """Close a job log."""
    log, _ = _readers.pop(path, (None, 0))
    if log is not None:
        log.close()


def survey(place: Place, job: Any) -> Any:
    """Return what the pool has for such a worker."""
    return _surveys().ask(job, _htcondor(), *place)


def machines(place: Place, job: Any) -> Any:
    """Return the machines that a worker may be on."""
    return _surveys().ask_for_places(job, _htcondor(), place[1])


def refusal() -> Any:
    """Return why no driver can be submitted on this machine, None if it can."""
    return _surveys().driver_refusal(_htcondor())


_REQUESTS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (submit, query, edit, remove, events, forget, survey, machines, refusal)
}


def _htcondor() -> Any:
    return importlib.import_module("htcondor2")


def _surveys() -> Any:
    """Return the module that only some requests need."""
    return importlib.import_module("ctxflow.factory.condor_survey")


def _schedd(place: Place) -> Any:
    """Return the schedd, located anew each time, since its address changes when it restarts."""
    name, pool = place
    htcondor = _htcondor()
    if name is None and pool is None:
        return htcondor.Schedd()
    try:
        ad = htcondor.Collector(pool).locate(htcondor.DaemonType.Schedd, name)
    except (htcondor.HTCondorException, OSError) as error:
        raise ScheddNotFound(str(error)) from None
    if ad is None:
        raise NoSuchSchedd(f"there is no schedd {name!r} in the pool: condor_status -schedd lists their names")
    return htcondor.Schedd(ad)


def _plain(ad: Any) -> dict[str, Any]:
    return {key: value for key in ad if isinstance(value := ad[key], str | int | float)}


# --- how it is asked


def send(line: socket.socket, what: Any) -> None:
    """Send a message, within the socket's timeout."""
    body = pickle.dumps(what)
    line.sendall(_LENGTH.pack(len(body)) + body)


def receive(line: socket.socket, seconds: float | None = None) -> Any:
    """Return the next message.

    :raises TimeoutError: if it does not come within so many seconds; EOFError, if the other end is closed.
    """
    until = None if seconds is None else time.monotonic() + seconds
    return pickle.loads(_exactly(line, _LENGTH.unpack(_exactly(line, _LENGTH.size, until))[0], until))


def _exactly(line: socket.socket, length: int, until: float | None) -> bytes:
    found = bytearray()
    while len(found) < length:
        line.settimeout(None if until is None else max(1e-3, until - time.monotonic()))
        if not (part := line.recv(min(1 << 20, length - len(found)))):
            raise EOFError
        found += part
    return bytes(found)


def _answer(name: str, arguments: Sequence[Any]) -> tuple[str, Any]:
    try:
        return "answer", _REQUESTS[name](*arguments)
    except NoSuchSchedd as error:
        return "refusal", str(error)
    except ScheddNotFound as error:
        return "not found", str(error)
    except (_htcondor().HTCondorException, OSError) as error:
        return "complaint", str(error)
    except Exception as error:
        return "complaint", f"{type(error).__name__}: {error}"


def main(line: socket.socket) -> None:
    """Tell whether the bindings are there, then answer requests until the driver closes its end, or is gone."""
    parent = os.getppid()
    try:
        _htcondor()
    except ImportError:
        send(line, False)
        return
    send(line, True)
    while os.getppid() == parent:  # A child of the driver's may still hold its end.
        if not readable(line.fileno(), _LOOK_SECONDS):
            continue
        try:
            name, arguments, seconds = receive(line)
            # Whatever it hangs in, it ends some time after its request has timed out.
            signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE_SECONDS)
            send(line, _answer(name, arguments))
            signal.setitimer(signal.ITIMER_REAL, 0)
        except (EOFError, OSError):
            return


if __name__ == "__main__":
    os.dup2(2, 1)  # What the bindings print is no answer.
    main(socket.socket(fileno=int(sys.argv[1])))
