"""What a TaskVine worker does with files: from TaskVine's sandboxes into the host's cache, and between caches.

TaskVine brings a file to a worker as a call's input, which is gone when the call is answered; so it is
hard-linked into the cache before. What does not live here: the cache's layout (staging.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from ctxflow.host import staging
from ctxflow.host.machine_faults import looks_like_the_machine
from ctxflow.host.sessions import state_path
from ctxflow.host.wire import Head


def seed(sandbox: str, head: Head) -> Head:
    """Make a call's input its output too, which TaskVine keeps as a temp file and sends from peer to peer."""
    given, target = os.path.join(sandbox, head["input"]), os.path.join(sandbox, head["output"])
    try:
        os.link(os.path.realpath(given), target)
    except OSError:
        shutil.copyfile(given, target)
    return {"is": "seeded"}


def fetch(sandbox: str, head: Head, cache: str) -> Head:
    """Keep a call's input: a file, or a folder's content as a tar archive.

    It came through TaskVine, in clear from another worker perhaps; the call, which is sealed, tells its digest.

    :raises ValueError: if it is something else than was sent.
    """
    from ctxflow.contents import digest_now  # Here: not every worker is sent files.

    given = os.path.join(sandbox, head["input"])
    if digest_now(given) != head["content"]:
        raise ValueError(
            "what came is not what the driver knows by its digest: it was altered on the way, or the file was changed "
            "while the run had it"
        )
    make = staging.unpack if head["kind"] == "tar" else staging.stage_as
    return _fetched(head, make(given, head["digest"], head["source"], cache))


def link(path: str, head: Head, cache: str) -> Head:
    """Take a file or folder from the cache of another worker on this machine, by hard links."""
    return _fetched(head, staging.link(path, head["digest"], head["source"], cache))


def send_state(sandbox: str, head: Head, folder: str) -> Head:
    """Make a session's frozen state a call's output, which TaskVine keeps as a temp file; it is no longer here then."""
    shutil.move(state_path(folder, head["session"], head["made"]), os.path.join(sandbox, head["output"]))
    return {"is": "sent"}


def take_state(sandbox: str, head: Head, folder: str) -> Head:
    """Put a session's frozen state in the cache: a call's input, or what another worker on the machine has in its."""
    target = state_path(folder, head["session"], head["made"])
    os.makedirs(folder, exist_ok=True)
    if "cache" in head:
        shutil.move(state_path(states_folder(head["cache"]), head["session"], head["made"]), target)
    else:
        given = os.path.join(sandbox, head["input"])
        try:
            os.link(os.path.realpath(given), target)
        except OSError:
            shutil.copyfile(given, target)
    return {"is": "taken"}


def states_folder(cache: str) -> str:
    """Where frozen states of sessions are in a cache."""
    return os.path.join(cache, "sessions")


def forget(digest: str, cache: str) -> Head:
    """Remove a file or folder from the cache."""
    staging.forget(digest, cache)
    return {"is": "forgotten", "digest": digest}


def environment(head: Head, cache: str) -> Head:
    """Open a packed environment, whose archive is in the cache, and have library processes run its Python."""
    from ctxflow.environments.opening import open_environment  # Here: see staging.unpack.

    archive = staging.cached(head["digest"], head["source"], cache)
    place = os.path.join(cache, f"environment-{head['digest'][:12]}")
    os.environ["CTXFLOW_PYTHON"] = str(open_environment(archive, place))
    return {"is": "opened"}


def reported(work: Callable[[], Head], head: Head) -> Head:
    """What some work reports, or why it failed."""
    try:
        return work()
    except Exception as error:
        where = getattr(error, "filename", None)
        reason = f"{getattr(error, 'strerror', None) or error}" + (f": {where}" if where else "")
        message = f"the worker cannot {head['do']} {head.get('source', 'it')}: {reason}"
        machine = looks_like_the_machine(error)
        failure = {"kind": "exception", "error": type(error).__name__, "message": message, "machine": machine}
        return {"is": "failed", "digest": head.get("digest"), "failure": failure}


def _fetched(head: Head, place: str) -> Head:
    return {"is": "fetched", "digest": head["digest"], "path": os.path.abspath(place)}
