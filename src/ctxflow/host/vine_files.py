"""What a TaskVine worker does with files: from TaskVine's sandboxes into the host's cache, and between caches.

TaskVine brings a file to a worker as a call's input, which is gone when the call is answered; so it is
hard-linked into the cache before. What does not live here: the cache's layout (staging.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

from ctxflow.host import staging
from ctxflow.host.machine_faults import looks_like_the_machine
from ctxflow.host.messages import Message, Trouble
from ctxflow.host.sessions import state_path
from ctxflow.host.vine_messages import (
    FetchFile,
    FileCached,
    FileDone,
    FileFailed,
    FileMessage,
    ForgetFile,
    LinkFile,
    OpenEnvironment,
    SeedFile,
    SendState,
    TakeState,
)


def carry_out(message: FileMessage, sandbox: str, cache: str) -> FileCached | FileDone | FileFailed:
    """Do what a message says, and return its report.

    :param sandbox: the folder of the call's files.
    """
    do, work = _WORK[type(message)]
    try:
        return work(message, sandbox, cache) or FileDone()
    except Exception as error:
        where = getattr(error, "filename", None)
        reason = f"{getattr(error, 'strerror', None) or error}" + (f": {where}" if where else "")
        text = f"the worker cannot {do} {getattr(message, 'source', 'it')}: {reason}"
        trouble = Trouble("exception", type(error).__name__, text, machine=looks_like_the_machine(error))
        return FileFailed(getattr(message, "digest", None), trouble)


def states_folder(cache: str) -> str:
    """Return where frozen states of sessions are in a cache."""
    return os.path.join(cache, "sessions")


def _seed(message: SeedFile, sandbox: str, cache: str) -> None:
    """Make a call's input its output too, which TaskVine keeps as a temp file and sends from peer to peer."""
    _link_or_copy(os.path.join(sandbox, message.input), os.path.join(sandbox, message.output))


def _fetch(message: FetchFile, sandbox: str, cache: str) -> FileCached:
    """Keep a call's input: a file, or a folder's content as a tar archive.

    It came through TaskVine, in clear from another worker perhaps; the call, which is sealed, tells its digest.

    :raises ValueError: if it is something else than was sent.
    """
    from ctxflow.contents import digest_now  # Here: not every worker is sent files.

    given = os.path.join(sandbox, message.input)
    if digest_now(given) != message.content:
        raise ValueError(
            "what came is not what the driver knows by its digest: it was altered on the way, or the file was changed "
            "while the run had it"
        )
    make = staging.unpack if message.kind == "tar" else staging.stage_as
    return _cached(message, make(given, message.digest, message.source, cache))


def _link(message: LinkFile, sandbox: str, cache: str) -> FileCached:
    """Take a file or folder from the cache of another worker on this machine, by hard links."""
    return _cached(message, staging.link(message.path, message.digest, message.source, cache))


def _send_state(message: SendState, sandbox: str, cache: str) -> None:
    """Make a session's frozen state a call's output, which TaskVine keeps as a temp file; it is no longer here then."""
    shutil.move(_state(cache, message), os.path.join(sandbox, message.output))


def _take_state(message: TakeState, sandbox: str, cache: str) -> None:
    """Put a session's frozen state in the cache: a call's input, or what another worker on the machine has in its."""
    target = _state(cache, message)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if message.cache:
        shutil.move(_state(message.cache, message), target)
    else:
        _link_or_copy(os.path.join(sandbox, message.input), target)


def _forget(message: ForgetFile, sandbox: str, cache: str) -> None:
    """Remove a file or folder from the cache."""
    staging.forget(message.digest, cache)


def _environment(message: OpenEnvironment, sandbox: str, cache: str) -> None:
    """Open a packed environment, whose archive is in the cache, and have library processes run its Python."""
    from ctxflow.environments.opening import open_environment  # Here: see staging.unpack.

    archive = staging.cached(message.digest, message.source, cache)
    place = os.path.join(cache, f"environment-{message.digest[:12]}")
    os.environ["CTXFLOW_PYTHON"] = str(open_environment(archive, place))


_WORK: dict[type[Message], tuple[str, Callable[[Any, str, str], FileCached | None]]] = {
    SeedFile: ("seed", _seed),
    FetchFile: ("fetch", _fetch),
    LinkFile: ("link", _link),
    ForgetFile: ("forget", _forget),
    OpenEnvironment: ("environment", _environment),
    SendState: ("send_state", _send_state),
    TakeState: ("take_state", _take_state),
}
"""What is done for each message, and its name in what is said of a failure."""


def _cached(message: FetchFile | LinkFile, place: str) -> FileCached:
    return FileCached(message.digest, os.path.abspath(place))


def _state(cache: str, message: SendState | TakeState) -> str:
    return state_path(states_folder(cache), message.session, message.made)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)
