"""The library process's standard output and error: kept usable whatever a call does to them.

What does not live here: who reads them (process.py).
"""

from __future__ import annotations

import os
import sys
from typing import TextIO


class Output:
    """Remembers where output goes, so that a call that closes or replaces a descriptor harms no other."""

    def __init__(self) -> None:
        self._spare = os.dup(1)
        self._inode = os.fstat(1).st_ino

    def mend(self) -> None:
        """Flush what was printed, and put back what a call has closed."""
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            if os.fstat(1).st_ino == os.fstat(2).st_ino == self._inode:
                return
        except (OSError, ValueError, AttributeError):
            pass
        for descriptor in (1, 2):
            os.dup2(self._spare, descriptor)
        sys.stdout, sys.stderr = _usable(sys.stdout, 1), _usable(sys.stderr, 2)


def _usable(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is not None and not getattr(stream, "closed", False):
        return stream
    return open(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)
