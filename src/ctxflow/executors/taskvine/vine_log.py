"""TaskVine's own logs, kept to what is read: which file went where (`ctxflow report`).

TaskVine writes some 23 lines to its debug log for every call, one by one, with the call's content, and four lines to
other logs: a third of a call's time, gigabytes a night, and an abort when the disk is full. What does not live here:
reading them (observe/).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

NAME = "manager"
_UNREAD = ("performance", "taskgraph", "transactions")


def prepare(directory: str) -> str:
    """Make the folder of TaskVine's logs, in which those that nobody reads lead nowhere; gives its name."""
    folder = os.path.join(directory, NAME, "vine-logs")
    os.makedirs(folder, exist_ok=True)
    for name in _UNREAD:
        with contextlib.suppress(FileExistsError):
            os.symlink(os.devnull, os.path.join(folder, name))
    return NAME


class DebugLog:
    """The debug log, written while files are on their way and not otherwise, or always with CTXFLOW_VINE_LOG=all.

    Where this build of ndcctools does not let it be switched, it is always written.

    :param vine: the module ndcctools.taskvine.
    """

    def __init__(self, vine: Any) -> None:
        self._transfers: set[int] = set()
        self._library: ctypes.CDLL | None = None
        if os.environ.get("CTXFLOW_VINE_LOG") == "all":
            return
        try:
            library = ctypes.CDLL(vine.cvine._cvine.__file__)
            library.cctools_debug_flags_clear.restype = None
            library.cctools_debug_flags_set.argtypes = [ctypes.c_char_p]
            library.cctools_debug_flags_clear()
            self._library = library
        except (AttributeError, OSError):
            pass

    def begin(self, call: int) -> None:
        """A call brings files along."""
        if self._library is not None and not self._transfers:
            self._library.cctools_debug_flags_set(b"vine")
        self._transfers.add(call)

    def end(self, call: int) -> None:
        """A call has ended, which may have brought files."""
        if call in self._transfers:
            self._transfers.discard(call)
            if self._library is not None and not self._transfers:
                self._library.cctools_debug_flags_clear()
