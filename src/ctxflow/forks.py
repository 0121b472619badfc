"""What belongs to one process alone: a forked child has copies, which are told so before the child's code runs.

A child owns nothing: it may not end what its parent runs, write the parent's files, or wait for threads that it does
not have. What does not live here: what each thing does about it.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Owned(Protocol):
    """Something that only the process that made it may use."""

    def forked(self) -> None:
        """This is a copy in a child of the process that made it."""


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
