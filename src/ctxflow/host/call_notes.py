"""What is noted of a call while it runs in a library process, and what is left of one whose function is async."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from ctxflow.host.call_results import Yielding
from ctxflow.host.call_surroundings import FolderFiles
from ctxflow.host.library_messages import PartFinished


class Later(BaseException):
    """A call whose function is async has begun: it ends when that has been awaited.

    :param finish: makes the results, pickled, of what the function returns.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], finish: Callable[[Any], bytes]) -> None:
        super().__init__(coroutine, finish)
        self.coroutine, self.finish = coroutine, finish
        self.files: FolderFiles | None = None


class CallNotes:
    """What is noted of a call while it runs.

    :ivar tell: sends results that come before its end.
    :ivar app: what its user calls its function. :ivar failed: whether it has given back an error.
    :ivar yielding: set where it answers its items one by one.
    """

    __slots__ = ("app", "failed", "tell", "yielding")

    def __init__(self, tell: Callable[[PartFinished], None]) -> None:
        self.tell = tell
        self.app, self.failed = "", False
        self.yielding: Yielding | None = None
