"""How the function of a session app says that a session has nothing more to do for now, or for good."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A chunk with which a turn ends.

    :ivar over: whether the session ends with it.
    """

    chunk: Any
    over: bool = False


def idle(chunk: Any) -> Turn:
    """The chunk after which a session makes none before it gets a prompt.

    >>> idle("that is all").over
    False
    """
    return Turn(chunk)


def last(chunk: Any) -> Turn:
    """The chunk with which a session ends.

    >>> last("good bye").over
    True
    """
    return Turn(chunk, over=True)
