"""Errors that are the machine's: no file descriptors left, and those that a broken machine raises.

A call that met one of the latter is tried on another machine before anybody is blamed. A process that listens where no
descriptor is left for a connection leaves it waiting for a moment: else the socket would be readable for ever, and its
owner spin. What does not live here: what follows from them (scheduler/items.py, policies/health.py).
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import resource
import select
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

_ENOUGH = 1 << 16
_FEW = 64  # With fewer, not all libraries that a run needs can say what they lack.


def take_enough() -> None:
    """Have this process be allowed one for each of very many connections, as far as its hard limit lets it."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _ENOUGH if most == resource.RLIM_INFINITY else min(_ENOUGH, most)
    if limit != resource.RLIM_INFINITY and limit < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))


def readable(descriptor: int, seconds: float) -> bool:
    """Return whether there is something to read, waiting for it so long; select(2) knows no descriptor above 1023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def count_left() -> int:
    """Return how many more this process may have."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = len(os.listdir("/proc/self/fd")) - 1  # Listing takes one.
    except OSError as error:
        if none_left(error):
            return 0
        raise
    return max(0, (1 << 31 if limit == resource.RLIM_INFINITY else limit) - used)


def none_left(error: BaseException | None) -> bool:
    """Return whether an error says that there is no descriptor left, of this process or of the machine."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def advice(error: BaseException | None) -> str:
    """Return what to do about such an error, to be put after it; nothing where it is another.

    >>> advice(OSError(28, "No space left on device"))
    ''
    """
    if not none_left(error):
        return ""
    if isinstance(error, OSError) and error.errno == errno.ENFILE:
        return ": all descriptors of the machine are in use, so end programs that hold many"
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    further = f" (up to {most} here)" if limit < most else ""
    return f": all {limit} descriptors that a process may have are in use, so raise `ulimit -n`{further}"


def scarcity() -> str:
    """Return what to do if a process with this one's limit, which ended without a word, may have had too few."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most == resource.RLIM_INFINITY or most >= _FEW:
        return ""
    return f": a process may have {most} descriptors at most, so raise `ulimit -n`"


PAUSE_SECONDS = 0.5


class Acceptor:
    """Serves a listening socket by a selector; its owner asks `resume` in each round how long that may last.

    :param accepted: called with each connection, and where it comes from.
    :param tell: called once with what is wrong where connections have to wait.
    :ivar paused: whether they do.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        accepted: Callable[[socket.socket, Any], None],
        tell: Callable[[str], None],
    ) -> None:
        self._selector, self._listener = selector, listener
        self._accepted, self._tell = accepted, tell
        self._told = False
        self.paused = False
        self._resume_at = 0.0
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if none_left(error):
                self._pause(error)
            return
        with contextlib.suppress(OSError):  # It may have left again.
            self._accepted(connection, address)

    def _pause(self, error: OSError) -> None:
        self._selector.unregister(self._listener)
        self.paused, self._resume_at = True, time.monotonic() + PAUSE_SECONDS
        self.complain(error)

    def complain(self, error: OSError) -> None:
        """Tell that there is no descriptor, once."""
        if not self._told:
            self._told = True
            self._tell(f"connections of workers have to wait ({error}){advice(error)}")

    def resume(self) -> float:
        """Serve the socket again, if it is time; gives how many seconds there are until then."""
        if not self.paused:
            return math.inf
        left = self._resume_at - time.monotonic()
        if left > 0:
            return left
        self.paused = False
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        return math.inf

    def close(self) -> None:
        """Let nobody connect any more."""
        self._listener.close()


# Compiled by `re` when first needed: most processes never meet an error.
_DEVICE = (
    r"(?i)\bCUDA\b|\bECC\b|\bXid\b|\bNCCL\b|\bcuDNN\b|CUDNN_STATUS|CUBLAS_STATUS|\bHIP error\b|\bNVML\b|"
    r"driver (?:version|is|not|fail|shut)|device (?:is |was )?lost|GPU (?:is |has fallen )?(?:lost|off the bus)|"
    r"No space left|Input/output error|Stale file handle|Read-only file system"
)
_TOO_MUCH = r"(?i)out of memory|ALLOC_FAILED"  # A smaller batch may do, on the same machine.


def looks_like_the_machine(error: BaseException) -> bool:
    """Return whether an error, or one that it was raised from, is of the kinds that bad machines raise.

    >>> looks_like_the_machine(RuntimeError("CUDA error: uncorrectable ECC error encountered"))
    True
    >>> looks_like_the_machine(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    False
    >>> looks_like_the_machine(ModuleNotFoundError("no module named torch")), looks_like_the_machine(KeyError("x"))
    (True, False)
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if _looks(cause):
            return True
        seen.add(id(cause))
        cause = cause.__cause__
    return False


def _looks(error: BaseException) -> bool:
    if isinstance(error, (OSError, ImportError)):
        return True
    try:
        text = str(error)
    except Exception:  # The user's class may say nothing.
        return False
    return bool(re.search(_DEVICE, text)) and not re.search(_TOO_MUCH, text)
