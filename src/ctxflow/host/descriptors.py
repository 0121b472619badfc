"""Where a process has very many file descriptors, or none left."""

from __future__ import annotations

import errno
import os
import resource
import select

_ENOUGH = 1 << 16
_FEW = 64  # With fewer, not all libraries that a run needs can say what they lack.


def take_enough() -> None:
    """Have this process be allowed one for each of very many connections, as far as its hard limit lets it."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _ENOUGH if most == resource.RLIM_INFINITY else min(_ENOUGH, most)
    if limit != resource.RLIM_INFINITY and limit < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))


def readable(descriptor: int, seconds: float) -> bool:
    """Whether there is something to read, waiting for it so long; select(2) knows no descriptor above 1023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def count_left() -> int:
    """How many more this process may have."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = len(os.listdir("/proc/self/fd")) - 1  # Listing takes one.
    except OSError as error:
        if none_left(error):
            return 0
        raise
    return max(0, (1 << 31 if limit == resource.RLIM_INFINITY else limit) - used)


def none_left(error: BaseException | None) -> bool:
    """Whether an error says that there is no descriptor left, of this process or of the machine."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def advice(error: BaseException | None) -> str:
    """What to do about such an error, to be put after it; nothing where it is another.

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
    """What to do where a process that may have as many as this one, and ended without a word, may have had too few."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most == resource.RLIM_INFINITY or most >= _FEW:
        return ""
    return f": a process may have {most} descriptors at most, so raise `ulimit -n`"
