"""Counts the calls of a process, in all threads that begin meanwhile."""

import contextlib
import sys
import threading


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
    """Count them in this thread and in those that begin within."""
    calls, before = Calls(), sys.getprofile()
    threading.setprofile(calls)
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
