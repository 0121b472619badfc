"""When Parsl waits for all of its tasks, of which it tells nobody.

What does not live here: what is done meanwhile (executor.py), and what a person is told (ending.py).
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

from parsl.dataflow.dflow import DataFlowKernel

from ctxflow.executors.ending import Teller


class ParslWait:
    """A wait for all of Parsl's tasks, of which Parsl tells nobody: it is seen from the threads' stacks.

    :ivar thread: who waits, None if nobody does.
    :ivar leaving: whether that is the end of `with parsl.load()`.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self.leaving = False
        self.teller = Teller()
        self._kernel: DataFlowKernel | None = None
        self._left = 0

    def look(self) -> None:
        """See who waits now; called once a second."""
        before, self.thread = self.thread, None
        own = threading.get_ident()
        for ident, frame in sys._current_frames().items():
            at: FrameType | None = None if ident == own else frame
            for _ in range(8):
                if at is not None and at.f_code is _WAITS:
                    self.thread, self._left = ident, 0
                    self.leaving = at.f_back is not None and at.f_back.f_code is _LEAVES
                    self._kernel = at.f_locals["self"]
                at = at.f_back if at is not None else None
        if self.thread is not None and before is None:
            self.teller = Teller()

    def was_interrupted(self) -> DataFlowKernel | None:
        """Return the kernel whose end was waited for, if Ctrl-C ended that: Parsl leaves it running then.

        It takes two looks to be sure, since a wait that was over is followed by the end of the kernel.
        """
        kernel = self._kernel
        if self.thread is not None or not self.leaving or kernel is None or kernel.cleanup_called:
            return None
        self._left += 1
        if self._left < 3:
            return None
        self._kernel = None
        return kernel


_WAITS = DataFlowKernel.wait_for_current_tasks.__code__
_LEAVES = DataFlowKernel.__exit__.__code__
