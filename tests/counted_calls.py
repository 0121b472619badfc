"""Counts the calls of a process, in all threads that begin meanwhile."""

import contextlib
import sys
import threading

import pytest

from ctxflow.executors import live_run, run_loop

_NEVER = 86_400.0  # Seconds.


class Calls:
    """Calls, of Python and of C."""

    def __init__(self):
        self.count = 0

    def __call__(self, frame, event, value):
        if event in ("call", "c_call"):
            self.count += 1

    def least(self, rounds, each, action):
        """Return the fewest of a round, for each of so many: threads that wait look around now and then."""
        found = []
        for _ in range(rounds):
            before = self.count
            action()
            found.append((self.count - before) / each)
        return min(found)


@contextlib.contextmanager
def counted_calls():
    """Count them in this thread and in those that begin within.

    Runs that begin within do nothing each second: how often that is within so many calls depends on the machine.
    """
    calls, before = Calls(), sys.getprofile()
    with pytest.MonkeyPatch.context() as patch:
        for module in (run_loop, live_run):
            patch.setattr(module, "TICK_SECONDS", _NEVER)
        threading.setprofile(calls)
        sys.setprofile(calls)
        try:
            yield calls
        finally:
            sys.setprofile(before)
            threading.setprofile(None)
