"""Plans: asked of the placement policy, made beside the run where that takes long, and followed.

What does not live here: what is in a plan (policies/placement), where one is computed (executors/), and what follows
from one for contexts (residency.py), items (shares.py) and workers (tiers.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctxflow.policies.protocols import Planning, PlanningPolicy
from ctxflow.scheduler import residency, shares
from ctxflow.scheduler.commands import Command, MakePlan, Note, Place
from ctxflow.scheduler.events import PlanMade

if TYPE_CHECKING:
    from ctxflow.scheduler.run_state import RunState


def place(state: RunState, out: list[Command]) -> None:
    """Place anew: on ticks, when a tier, a context or a worker is new, and when a plan was made."""
    policy = state.policies.placement
    plan = policy.plan(state)
    if plan != state.plan:
        state.plan = plan
        out.append(Place.of(plan))
        shares.follow(state, out)
    residency.follow(state, out)
    if state.planning is None and isinstance(policy, PlanningPolicy):
        state.planning = policy.planning(state)
        if state.planning is not None:
            out.append(MakePlan(state.planning))


def made(state: RunState, event: PlanMade, out: list[Command]) -> None:
    """What was to be computed is there, or could not be: then the plan in place stays."""
    planning, state.planning = state.planning, None
    policy = state.policies.placement
    if planning is None or not isinstance(policy, PlanningPolicy):
        return
    if event.failure is None:
        policy.planned(planning() if event.results is None else event.results)
    elif event.failure != state.planning_failure:  # It may fail again each time: who reads it knows already.
        text = f"placement: no new plan could be made ({event.failure}), and the one in place stays: please report it"
        out.append(Note(text, trouble=True))
    state.planning_failure = event.failure
    place(state, out)


def computed(planning: Planning, time: float = 0.0) -> PlanMade:
    """Compute a plan, wherever that is: the event that tells of it.

    >>> computed(lambda: 1 / 0).failure
    'ZeroDivisionError: division by zero'
    """
    try:
        return PlanMade(time, planning())
    except Exception as error:
        return PlanMade(time, failure=f"{type(error).__name__}: {error}")
