"""Apps and contexts that nobody uses any more: whether that is so, and what is forgotten with them.

What does not live here: when it is asked (executors/retirement.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ctxflow.scheduler import residency
from ctxflow.scheduler.commands import Command
from ctxflow.scheduler.events import PLAIN, Retired
from ctxflow.scheduler.state import App, Worker

if TYPE_CHECKING:
    from ctxflow.scheduler.run_state import RunState


MOST_LEFT = 8  # Contexts without an app that a worker keeps: whoever uses one again need not have it built.


def retired(state: RunState, event: Retired, out: list[Command]) -> None:
    """Forget apps, with their alternatives, and then contexts; those that are used meanwhile stay."""
    for name in event.apps:
        app = state.apps.get(name)
        if app is not None and not app_is_used(state, app):
            for each in [*app.alternatives, name]:
                _forget_app(state, state.apps[each])
    if event.apps:
        for worker in state.workers.values():
            _thin_out(state, worker, out)
    for name in event.contexts:
        if name in state.contexts and not context_is_used(state, name):
            _forget_context(state, name)


def _thin_out(state: RunState, worker: Worker, out: list[Command]) -> None:
    """Of the contexts that a worker keeps and that no app is for any more, the least recently used go."""
    if len(worker.contexts) > MOST_LEFT:
        left = [name for name in residency.idle(state, worker) if name != PLAIN and not state.contexts[name].apps]
        for name in left[: max(0, len(left) - MOST_LEFT)]:
            residency.unload(state, worker, name, out)


def app_is_used(state: RunState, app: App) -> bool:
    """Whether an app, or an alternative of it, has items or sessions; one of another's is used as long as that is."""
    if app.alternative_of:
        return app.alternative_of in state.apps
    return any(_has_work(state, each) for each in (app, *(state.apps[name] for name in app.alternatives)))


def _has_work(state: RunState, app: App) -> bool:
    if app.backlog or app.claims or app.attempts or app.open_sessions:
        return True
    return any(name == app.id for _, name in state.streams.drops)


def context_is_used(state: RunState, name: str, but: Collection[str] = ()) -> bool:
    """Whether a context has apps, is on a worker, or has a place of its own.

    :param but: apps that do not count.
    """
    context = state.contexts[name]
    if name == PLAIN or context.holders or any(app not in but for app in context.apps):
        return True
    return any(each.context == name for each in state.reservations.all.values())


def _forget_app(state: RunState, app: App) -> None:
    del state.apps[app.id], state.contexts[app.context].apps[app.id]
    state.deals.pop(app.id, None)
    for name in app.measured_on:
        worker = state.workers.get(name)
        if worker is not None:
            worker.paces.pop(app.id, None)
            worker.steps.pop(app.id, None)


def _forget_context(state: RunState, name: str) -> None:
    state.forget_holders(name)
    state.reservations.wants.pop(name, None)
    del state.contexts[name]
    for worker in state.workers.values():
        worker.context_seconds.pop(name, None)
        worker.staging_seconds.pop(name, None)
        worker.staged.discard(name)
        worker.rebuilt.discard(name)
