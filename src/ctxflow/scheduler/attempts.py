"""Transitions of attempts once they run: answered, ended, failed, stopped by force, gone with their library process.

What does not live here: how they begin (dispatch.py, steps.py), and what becomes of items (items.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from ctxflow.scheduler import context_moves, evidence, items, session_moves, steps
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.commands import Abandon, Command
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.worker_state import Attempt, Worker


def _ended(state: RunState, worker_id: str, number: int) -> tuple[Attempt, Worker] | None:
    """End an attempt, if it runs on that worker."""
    attempt = state.attempts.get(number)
    if attempt is None or attempt.worker != worker_id:
        return None
    worker = state.workers[worker_id]
    end(state, attempt, worker)
    return attempt, worker


def batch_finished(state: RunState, event: ev.BatchFinished, out: list[Command]) -> None:
    """Handle an attempt that answered all its items."""
    found = _ended(state, event.worker, event.attempt)
    if found is None:
        return
    attempt, worker = found
    worker.done += 1
    app = state.apps[attempt.app]
    evidence.learn(app, worker, attempt, len(attempt.items), event.seconds, state.now)
    evidence.finished(state, worker, app, len(attempt.items), event.seconds)
    items.answer(state, attempt, attempt.items, out)
    context_moves.used(state, worker, attempt.context, out)
    # What another attempt answered first is closed; nothing of this attempt stays open.


def items_finished(state: RunState, event: ev.ItemsFinished, out: list[Command]) -> None:
    """Handle an attempt that answered some of its items, and goes on."""
    attempt = state.attempts.get(event.attempt)
    if attempt is not None and attempt.worker == event.worker:
        last = event.first + event.count
        state.answered[attempt.id] = max(state.answered.get(attempt.id, 0), last)
        items.answer(state, attempt, attempt.items[event.first : last], out)


def batch_ended(state: RunState, event: ev.BatchEnded, out: list[Command]) -> None:
    """Handle an attempt that answered its items one by one and has ended: what it did not answer is requeued."""
    answered = state.answered.get(event.attempt, 0)
    found = _ended(state, event.worker, event.attempt)
    if found is None:
        return
    attempt, worker = found
    worker.done += 1
    if answered:
        app = state.apps[attempt.app]
        evidence.learn(app, worker, attempt, answered, event.seconds, state.now)
        evidence.finished(state, worker, app, answered, event.seconds)
    context_moves.used(state, worker, attempt.context, out)
    items.requeue(state, attempt, items.unanswered(state, attempt), out)


def step_finished(state: RunState, event: ev.StepFinished, out: list[Command]) -> None:
    """Handle a step that has ended."""
    orders = state.streams.steps.get(event.attempt, ())
    found = _ended(state, event.worker, event.attempt)
    if found is not None:
        found[1].done += 1
        steps.finished(state, *found, orders, event, out)


def batch_failed(state: RunState, event: ev.BatchFailed, out: list[Command]) -> None:
    """Handle a failed attempt: count it for its worker, its context and its items."""
    orders = state.streams.steps.get(event.attempt)
    found = _ended(state, event.worker, event.attempt)
    if found is None:
        return
    attempt, worker = found
    if event.failure.kind == "crash":
        state.counters.crashes += 1
    if event.lost_context:
        lose_context(state, worker, attempt.context, out)
    else:
        context_moves.used(state, worker, attempt.context, out)
    if orders is not None:
        steps.failed(state, attempt, orders, event.failure, out)
        return
    left = items.unanswered(state, attempt)
    evidence.failed(state, attempt, worker, left if event.at is None else left[:1], event.failure)
    if event.failure.kind == "cancelled":  # Nobody waits for these, unless another call was ended along with that.
        items.requeue(state, attempt, left, out)
    elif event.at is None or event.failure.kind == "contract":
        items.failed(state, attempt, left, event.failure, out)
    else:
        items.raised(state, attempt, left, event.at, event.failure, out)


def end(state: RunState, attempt: Attempt, worker: Worker) -> None:
    """Take an attempt off its worker."""
    del state.attempts[attempt.id], worker.running[attempt.id]
    state.streams.steps.pop(attempt.id, None)
    if state.answered or state.interrupted:
        state.answered.pop(attempt.id, None)
        state.interrupted.discard(attempt.id)
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
    """Handle the end of a library process: requeue what else it ran, which is not to blame."""
    session_moves.context_gone(state, worker, context)
    for attempt in [a for a in worker.running.values() if a.context == context]:
        end(state, attempt, worker)
        items.requeue(state, attempt, items.unanswered(state, attempt), out)
    context_moves.gone(state, worker, context, out)
