"""Library processes that were killed and are not gone yet: their memory is large, or the kernel waits in their name.

One in which nothing moves any more is told of, once. What does not live here: killing them (process.py), and what waits
for their room (host.py).
"""

from __future__ import annotations

import subprocess

from ctxflow.host.processes import activity, ended_within

_LOOK_SECONDS = 0.5
_STUCK_SECONDS = 20.0  # After which a process in which nothing moves is said to stay.


class _Killed:
    def __init__(self, process: subprocess.Popen[bytes], now: float) -> None:
        self.process = process
        self.moved_at = now
        self._activity = activity(process.pid)

    def look(self, now: float) -> None:
        seen = activity(self.process.pid)
        if seen != self._activity:
            self._activity, self.moved_at = seen, now


class Undead:
    """All of a host's.

    :ivar stuck_seconds: how long nothing may move in one.
    :ivar look_at: when to call `look`.
    """

    def __init__(self) -> None:
        self.stuck_seconds = _STUCK_SECONDS
        self.look_at = float("inf")
        self._killed: list[_Killed] = []
        self._told = False

    def __bool__(self) -> bool:
        return bool(self._killed)

    def add(self, process: subprocess.Popen[bytes], now: float) -> None:
        """One more."""
        self._killed.append(_Killed(process, now))
        self.look_at = now + _LOOK_SECONDS

    def pids(self) -> list[int]:
        """Their numbers."""
        return [each.process.pid for each in self._killed]

    def look(self, now: float) -> str | None:
        """Forget those that are gone; what is to be told of one that stays, if that was not told before."""
        self._killed = [each for each in self._killed if each.process.poll() is None]
        self.look_at = now + _LOOK_SECONDS if self._killed else float("inf")
        for each in self._killed:
            each.look(now)
            if now >= each.moved_at + self.stuck_seconds and not self._told:
                self._told = True
                return (
                    f"its process {each.process.pid} was killed and does not end, so that its GPU and memory stay "
                    "taken: see what it waits for in the kernel (a GPU that failed, a file server that hangs)"
                )
        return None

    def wait(self, seconds: float) -> None:
        """Give each so long to end."""
        for each in self._killed:
            ended_within(each.process, seconds)
