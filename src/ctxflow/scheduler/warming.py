"""Contexts that are loaded ahead of demand, as the routing policy says.

What does not live here: which ones, and where (policies).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxflow.policies.protocols import WarmingPolicy
from ctxflow.scheduler import residency
from ctxflow.scheduler.commands import Command
from ctxflow.scheduler.events import PERVASIVE

if TYPE_CHECKING:
    from ctxflow.scheduler.run_state import RunState


def warm(state: RunState, out: list[Command]) -> None:
    """Load what the routing policy wants ahead of demand, on free workers that run nothing."""
    policy = state.policies.routing
    if state.awaiting or not isinstance(policy, WarmingPolicy):
        return
    for assignment in policy.warm(state):
        worker, app = state.free.get(assignment.worker), state.apps.get(assignment.app)
        if worker is None or app is None or worker.running or app.context in worker.contexts:
            continue
        context = state.contexts[app.context]
        # What ends with its call is not built before there is one.
        if context.spec.level != PERVASIVE or context.broken is not None:
            continue
        if residency.loadable(state, worker, context):
            residency.begin(state, worker, app, out, ahead=True)
