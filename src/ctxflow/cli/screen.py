"""Standard output kept for a command's own words.

What lives here: turning aside what native libraries print. What does not live here: what a command prints.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def native_output_aside() -> Iterator[None]:
    """What native code prints on standard output goes to standard error meanwhile, so that --json prints JSON alone.

    HiGHS prints a line of its own now and then, whatever it is told. For a command's main thread: descriptors belong
    to the whole process.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # C's own buffer, which is full only when standard output is no terminal.
        os.dup2(kept, 1)
        os.close(kept)
