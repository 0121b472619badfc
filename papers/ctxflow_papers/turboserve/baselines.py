"""The baselines of the paper's evaluation, as session policies of a run: where a session goes that becomes active.

A session that becomes idle leaves its GPU, so that it is placed anew when it returns, as in the paper; nothing moves
while it is active. None of them is shipped, but for the choice of the load-aware one, which is `least-loaded`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from ctxflow.policies.helpers import loads
from ctxflow.policies.protocols import View


class Baseline:
    """Places each session when it becomes active, and has it leave when it is idle."""

    def place(self, view: View) -> Mapping[int, str | None]:
        """Return a GPU for each session that has become active, and None for each that is idle."""
        placed: dict[int, str | None] = {}
        seeking = []
        for session in view.sessions.values():
            if session.idle:
                if session.state == "placed":
                    placed[session.id] = None
            elif session.state in ("waiting", "suspended") and not session.by_user:
                seeking.append(session.id)
        if seeking:
            there = self._there(view)
            for number in seeking if there else ():
                placed[number] = gpu = self._chosen(there)
                self._put(view, there, gpu, number)
        return placed

    def _there(self, view: View) -> dict[str, float]:
        """Return each GPU with what it is chosen by."""
        return {name: float(count) for name, count in loads(view).items()}

    def _put(self, view: View, there: dict[str, float], gpu: str, session: int) -> None:
        """Count a session for the GPU that it goes to."""
        there[gpu] += 1.0

    def _chosen(self, there: Mapping[str, float]) -> str:
        """Return the GPU of the next session."""
        return min(there, key=there.__getitem__)


class RoundRobin(Baseline):
    """GPUs take turns: the base configuration of section 7.1."""

    def __init__(self) -> None:
        self._turn = 0

    def _chosen(self, there: Mapping[str, float]) -> str:
        self._turn += 1
        return list(there)[(self._turn - 1) % len(there)]


class LoadAware(Baseline):
    """The GPU with the fewest active sessions (LAG)."""


class MemoryAware(Baseline):
    """The GPU whose sessions' states take the least memory (MAG); a session's is known once it has made a chunk."""

    def _there(self, view: View) -> dict[str, float]:
        taken = dict.fromkeys(loads(view), 0.0)
        for session in view.sessions.values():
            place = session.target or session.worker
            if place in taken and not session.idle:
                taken[place] += session.state_bytes or 0
        return taken

    def _put(self, view: View, there: dict[str, float], gpu: str, session: int) -> None:
        there[gpu] += view.sessions[session].state_bytes or _UNKNOWN_BYTES


_UNKNOWN_BYTES = 1e9  # As a state is on average: those that come together do not all go to one GPU.
