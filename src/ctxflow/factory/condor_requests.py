"""What the process that holds HTCondor's Python bindings can be asked, and that process itself.

The bindings keep Python's lock while they wait for a schedd or a collector: all threads of a driver would wait with
them, for as long as one hangs. Here they keep nobody else from work.

What does not live here: starting the process, and ending one that does not answer (condor_process.py).
"""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ctxflow.host.descriptors import readable

Place = tuple[str | None, str | None]
"""Which schedd, by its name and its pool's central manager; None for this machine's."""
_BY_US = 0  # The subcode of a removal's reason.
_LENGTH = struct.Struct("!Q")
_LOOK_SECONDS = 10.0
_GRACE_SECONDS = 5.0
_readers: dict[str, tuple[Any, int]] = {}  # A job log's path -> its reader, and how many events that has read.


class NoSuchSchedd(Exception):
    """The pool has none of that name."""


class NotFound(Exception):
    """Nobody says where the schedd is, so that nothing was asked of it."""


# --- what can be asked


def submit(place: Place, description: Mapping[str, str], count: int, directory: str) -> tuple[int, int]:
    """Submit jobs that are all alike, as from this directory, and return their cluster and the first one's number."""
    os.chdir(directory)
    done = _schedd(place).submit(_htcondor().Submit(dict(description)), count=count)
    return done.cluster(), done.first_proc()


def query(place: Place, constraint: str, projection: Sequence[str], limit: int) -> list[dict[str, Any]]:
    """Return what a schedd has of jobs; -1 for all of them."""
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
    return _of("condor_survey").ask(job, _htcondor(), *place)


def machines(place: Place, job: Any) -> Any:
    """Return the machines that a worker may be on."""
    return _of("condor_survey").ask_for_places(job, _htcondor(), place[1])


def refusal() -> str | None:
    """Return why no driver can be submitted on this machine."""
    found: str | None = _of("condor_survey").driver_refusal(_htcondor())
    return found


_REQUESTS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (submit, query, edit, remove, events, forget, survey, machines, refusal)
}


def _htcondor() -> Any:
    return importlib.import_module("htcondor2")


def _of(module: str) -> Any:
    """A module that few need, with much behind it."""
    return importlib.import_module(f"ctxflow.factory.{module}")


def _schedd(place: Place) -> Any:
    """The schedd, asked for anew each time, since its address changes when it is started again."""
    name, pool = place
    htcondor = _htcondor()
    if name is None and pool is None:
        return htcondor.Schedd()
    try:
        ad = htcondor.Collector(pool).locate(htcondor.DaemonType.Schedd, name)
    except (htcondor.HTCondorException, OSError) as error:
        raise NotFound(str(error)) from None
    if ad is None:
        raise NoSuchSchedd(f"there is no schedd {name!r} in the pool: condor_status -schedd lists their names")
    return htcondor.Schedd(ad)


def _plain(ad: Any) -> dict[str, Any]:
    return {key: value for key, value in _items(ad) if isinstance(value, str | int | float)}


def _items(ad: Any) -> Iterable[tuple[str, Any]]:
    return ((key, ad[key]) for key in ad)


# --- how it is asked


def say(line: socket.socket, what: Any) -> None:
    """Send something whole, within the socket's time."""
    body = pickle.dumps(what)
    line.sendall(_LENGTH.pack(len(body)) + body)


def hear(line: socket.socket, seconds: float | None = None) -> Any:
    """Return what was sent, whole, within so many seconds.

    :raises TimeoutError: if it does not come in time.
    :raises EOFError: if the other end is closed.
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
    except NotFound as error:
        return "not found", str(error)
    except (_htcondor().HTCondorException, OSError) as error:
        return "complaint", str(error)
    except Exception as error:
        return "complaint", f"{type(error).__name__}: {error}"


def main(line: socket.socket) -> None:
    """Say whether the bindings are there, then answer requests until the driver closes its end, or is gone."""
    parent = os.getppid()
    try:
        _htcondor()
    except ImportError:
        say(line, False)
        return
    say(line, True)
    while os.getppid() == parent:  # A child of the driver's may still hold its end.
        if not readable(line.fileno(), _LOOK_SECONDS):
            continue
        try:
            name, arguments, seconds = hear(line)
            # Whatever it hangs in, nobody waits for it then: neither a driver, nor what that leaves behind.
            signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE_SECONDS)
            say(line, _answer(name, arguments))
            signal.setitimer(signal.ITIMER_REAL, 0)
        except (EOFError, OSError):
            return


if __name__ == "__main__":
    os.dup2(2, 1)  # What the bindings print is no answer.
    main(socket.socket(fileno=int(sys.argv[1])))
