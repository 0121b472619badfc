"""What a user's function calls on a worker: variables of its context, its loss, parts of its load, ends of turns."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar, cast

from ctxflow.errors import ContextLost

_Chunk = TypeVar("_Chunk")

_loaded: Any = None
_tell_lost: Callable[[str], None] | None = None
_LONGEST_PART = 40  # Characters of a name.


class Parts(Protocol):
    """What notes the parts of a load; host/load_parts.py has it."""

    def enter(self, name: str) -> int:
        """Enter a part; return its number, with which it is left."""

    def leave(self, number: int) -> None:
        """Leave a part."""

    def add(self, name: str, began: float, ended: float) -> None:
        """Add a part that is over."""


_parts: Parts | None = None


def set_loaded(value: Any) -> None:
    """Remember what this library process built; host/library_calls.py calls it."""
    global _loaded  # noqa: PLW0603 - one library process holds one built context: it is the process's state
    _loaded = value


def when_lost(tell: Callable[[str], None]) -> None:
    """Remember how this library process tells that its context is lost; host/library_calls.py calls it."""
    global _tell_lost  # noqa: PLW0603 - as above
    _tell_lost = tell


def time_parts(parts: Parts | None) -> None:
    """Remember what notes the parts of this library process's load while it lasts; host/library_calls.py calls it."""
    global _parts  # noqa: PLW0603 - as above
    _parts = parts


@contextlib.contextmanager
def load_part(name: str) -> Iterator[None]:
    """Have what a context's function does inside count as a part of its load, under a name.

    `ctxflow report` shows how much of each load went into which part. Imports, and parts inside of others, count as
    what they are alone. Of several that are open, on threads or in tasks, the one that was entered last counts. Outside
    a load it does nothing.

    :param name: "weights" (reading and placing them), "compile", "warm-up" and "files" (fetching them), or any other of
        at most 40 characters, such as "index".
    :raises ValueError: for a name that is empty or longer.

    >>> with load_part("weights"):
    ...     weights = list(range(3))
    """
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_PART:
        raise ValueError(f"a part of a load has a name of 1 to {_LONGEST_PART} characters, and not {name!r}")
    parts = _parts
    if parts is None:
        yield
        return
    number = parts.enter(name)
    try:
        yield
    finally:
        parts.leave(number)


def add_load_part(name: str, began: float, ended: float) -> None:
    """Add a part of this process's load that another process has measured, by `time.monotonic`; see `load_part`."""
    if _parts is not None:
        _parts.add(name, began, ended)


def context_lost(message: str) -> None:
    """Say that what this library process has built is of no more use, where no call can raise `ContextLost`.

    For what a context runs itself: a task, a thread, or the callback of an engine that finds it dead. Returns at once,
    from any thread; the process is then ended with all that it started, and what was in flight runs again on a context
    built anew. Outside a library process it raises `ContextLost`.

    :param message: why, in one sentence.

    >>> context_lost("the engine ended with status 1")
    Traceback (most recent call last):
    ...
    ctxflow.errors.ContextLost: the engine ended with status 1
    """
    if _tell_lost is None:
        raise ContextLost(message)
    _tell_lost(message)


def load_variable_from_context(name: str) -> Any:
    """Return a variable of the dict that the context function returned, inside a call (the paper's Figure 3).

    :raises LookupError: outside a call with a context, or if the context has no such variable.
    """
    if not isinstance(_loaded, Mapping):
        raise LookupError(
            f"there is no variable {name!r} here: call this inside an app whose context function returns a dict"
        )
    if name not in _loaded:
        raise LookupError(f"the context has no variable {name!r}: it holds {', '.join(map(repr, _loaded)) or 'none'}")
    return _loaded[name]


load_variable_in_serverless = load_variable_from_context
"""The same, under the name that Parsl's proposal #3724 gives it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A chunk with which a turn ends, or the session, if it is `over`."""

    chunk: Any
    over: bool = False


def idle(chunk: _Chunk) -> _Chunk:
    """Mark a chunk as the last before the session gets another prompt; type checkers see the chunk itself.

    >>> idle("that is all").over
    False
    """
    return cast(_Chunk, Turn(chunk))


def last(chunk: _Chunk) -> _Chunk:
    """Mark a chunk as the one with which its session ends; type checkers see the chunk itself.

    >>> last("good bye").over
    True
    """
    return cast(_Chunk, Turn(chunk, over=True))
