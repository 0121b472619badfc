"""How attempts come off their workers: they ended, were stopped by force, or their library process is gone.

What does not live here: what becomes of their items then (items.py), and who is to be stopped (core.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ctxflow.scheduler import items, residency, sessions
from ctxflow.scheduler.commands import Abandon, Command
from ctxflow.scheduler.state import Attempt, Worker

if TYPE_CHECKING:
    from ctxflow.scheduler.run_state import RunState


def end(state: RunState, attempt: Attempt, worker: Worker) -> None:
    """An attempt runs no more."""
    del state.attempts[attempt.id], worker.running[attempt.id]
    state.streams.steps.pop(attempt.id, None)
    state.apps[attempt.app].attempts -= 1
    held = worker.contexts.get(attempt.context)
    if held is not None:
        held.last_used = state.now
    state.update_free(worker)


def stop(state: RunState, numbers: Iterable[int], out: list[Command]) -> None:
    """End running attempts by force, which costs their workers the contexts, and their items nothing."""
    for number in numbers:
        attempt = state.attempts.get(number)
        if attempt is None:  # It has gone with one beside it.
            continue
        worker = state.workers[attempt.worker]
        out.append(Abandon(worker.id, number, attempt.context))
        end(state, attempt, worker)
        lose_context(state, worker, attempt.context, out)
        items.requeue(state, attempt, items.unanswered(state, attempt), out)


def lose_context(state: RunState, worker: Worker, context: str, out: list[Command]) -> None:
    """A library process is gone, and with it what else it ran: none of that is to blame."""
    sessions.context_gone(state, worker, context)
    for attempt in [a for a in worker.running.values() if a.context == context]:
        end(state, attempt, worker)
        items.requeue(state, attempt, items.unanswered(state, attempt), out)
    residency.gone(state, worker, context, out)
