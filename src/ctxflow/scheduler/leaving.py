"""Workers that are to go: what of sessions is on them and nowhere else.

What does not live here: how it comes away from there (steps.py), and who goes (tiers.py, reservations.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxflow.scheduler.state import Session, Worker

if TYPE_CHECKING:
    from ctxflow.scheduler.run_state import RunState


def goes(worker: Worker) -> bool:
    """Whether a worker is about to go: it has notice, or is to be given back."""
    return worker.noticed is not None or worker.draining


def unkept(state: RunState, worker: Worker) -> list[Session]:
    """The sessions that nobody carries, and whose states are in a worker's cache alone."""
    return [
        session
        for session in state.streams.open.values()
        if session.worker is None
        and session.frozen is not None
        and session.frozen.worker == worker.id
        and session.frozen.made > session.kept
    ]


def empty(state: RunState, worker: Worker) -> bool:
    """Whether a worker could go now at no cost to sessions.

    A state counts no more that no library process there could bring out of the cache.
    """
    if worker.sessions or any(number in state.streams.steps for number in worker.running):
        return False
    if any(_hands_over(session, worker) for session in state.streams.open.values()):
        return False
    return not any(can_be_kept(state, session, worker) for session in unkept(state, worker))


def can_be_kept(state: RunState, session: Session, worker: Worker) -> bool:
    """Whether a state in a worker's cache can be brought out: its context is there, or may be built there once more."""
    context = state.contexts[session.context]
    if context.broken is not None:
        return False
    if session.context in worker.contexts:
        return True
    return worker.noticed is None and worker.id not in context.suspects and session.context not in worker.rebuilt


def _hands_over(session: Session, worker: Worker) -> bool:
    """Whether a session's state is on its way from or to a worker."""
    if session.state != "migrating":
        return False
    return session.worker == worker.id or (session.frozen is not None and session.frozen.worker == worker.id)
