"""Which process this is, when Ctrl-C may interrupt it, and whether the one that wrote a file still runs.

After a fork the child has copies of what belongs to its parent alone: they are told so before the child's code runs.
A child owns nothing: it may not end what its parent runs, write the parent's files, or wait for threads that it does
not have.

Another process is known by its number, when the kernel started it (in ticks since the machine booted) and the boot's
own id: steps of the machine's clock, and the clock of whoever keeps the file, change none of them.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # `signal.signal` takes five times as long: it makes enumerations.
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from signal import SIGINT
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_INTERRUPT_SECONDS = 2.0  # How long after the first an interrupt is raised at once.


class Owned(Protocol):
    """Something that only the process that made it may use."""

    def forked(self) -> None:
        """Note that this is a copy, in a child of the process that made it."""


_owned: weakref.WeakSet[Owned] = weakref.WeakSet()


class Process:
    """Which process this is.

    :cvar generation: how many forks lie between it and the process that imported ctxflow.
    :cvar main_thread: the identity of its main thread, for whom `threading` takes too long to say so.
    """

    generation = 0
    main_thread = threading.main_thread().ident


def belongs_here(thing: Owned) -> None:
    """Have something told when it is a copy in a child."""
    _owned.add(thing)


def lead_nowhere(descriptor: int) -> None:
    """Have a descriptor lead to /dev/null: nothing done to it reaches the parent's file or gives up its lock."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.dup2(null, descriptor, inheritable=False)
    finally:
        os.close(null)


def foreign_text(what: str) -> str:
    """Return the sentence that says why a child may not use something."""
    return (
        f"this process was forked from the one that runs {what}, which alone can use it: make calls there, or start an "
        "executor of this process's own"
    )


def _in_child() -> None:
    Process.generation += 1
    Process.main_thread = threading.get_ident()
    for thing in list(_owned):
        thing.forked()


os.register_at_fork(after_in_child=_in_child)


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Have a short function finish before an interrupt is raised.

    Should it not be short, an interrupt that comes seconds after the first is raised at once.
    """

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        if threading.get_ident() != Process.main_thread:
            return function(*args, **kwargs)  # Interrupts come to the main thread.
        caught: list[float] = []

        def note(number: int, frame: Any) -> None:
            caught.append(time.monotonic())
            if caught[-1] - caught[0] > _INTERRUPT_SECONDS and callable(handler):
                handler(number, frame)

        handler = _signal.signal(SIGINT, note)
        if not callable(handler):
            _signal.signal(SIGINT, handler if handler is not None else _signal.SIG_DFL)
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        finally:
            _signal.signal(SIGINT, handler)
            if caught:
                handler(SIGINT, None)

    return guarded


def birth_of(pid: int) -> str | None:
    """Return what tells a process from all others that have or had its number; None if there is none, or it has ended.

    :returns: "" for a process that is there, of which this user may see no more.

    >>> birth_of(os.getpid()) == birth_of(os.getpid()), birth_of(2**22 + 1)
    (True, None)
    """
    if pid <= 0:
        return None
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # After the name, which may hold anything: state is the third field of all, the start the 22nd.
            fields = file.read().rpartition(b")")[2].split()
        state, start = fields[0].decode(), fields[19].decode()
    except (OSError, IndexError):
        return "" if _is_there(pid) else None
    return None if state in "ZX" else f"{start}@{_boot()}"


def lives(pid: int, birth: str | None) -> bool:
    """Return whether a process still runs.

    :param birth: what `birth_of` gave when it was known; none or "" where nothing was, so that its number alone counts.
    """
    now = birth_of(pid)
    return now is not None and (not birth or not now or birth == now)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:  # Not Linux's own; the start alone is known then.
        return ""
