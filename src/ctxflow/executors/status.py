"""What is going on in a run, as figures at a moment.

What does not live here: how it is shown, and what happened over time (the event log).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ctxflow.executors.engine import ContextPayload
from ctxflow.scheduler.run_state import RunState
from ctxflow.scheduler.tiers import first_needed


@dataclasses.dataclass(frozen=True)
class Status:
    """A run at a moment: items by state, workers, contexts, and what went wrong and was mended.

    :ivar time: seconds since the run began.
    :ivar retried_items: how often an item went back to the queue.
    :ivar contexts: name -> how many workers are staging, loading or holding it ready.
    :ivar loads: how often a context was built or began to be.
    """

    time: float
    items_submitted: int
    items_queued: int
    items_running: int
    items_done: int
    items_dead: int
    items_cancelled: int
    retried_items: int
    batches: int
    workers: int
    workers_joined: int
    workers_lost: int
    evictions: int
    crashes: int
    loads: int
    contexts: Mapping[str, Mapping[str, int]]


def awaiting_text(state: RunState) -> str:
    """What a run says that waits for workers before its first call."""
    asked = sum(tier.asked or 0 for tier in state.tiers.values())
    return (
        f"waiting for {first_needed(state):,} of {asked:,} workers before the first call "
        f"(start_when = {state.start_when:g}), {len(state.workers):,} here: "
        "lower start_when if so many do not come"
    )


def status_of(state: RunState, contexts: Mapping[str, ContextPayload], now: float) -> Status:
    """The figures of a run's state.

    :param contexts: for the contexts' names.
    :param now: the time of the moment.
    """
    counters = state.counters
    queued = sum(app.backlog for app in state.apps.values())
    by_state: dict[str, dict[str, int]] = {}
    for worker in state.workers.values():
        for held in worker.contexts.values():
            counts = by_state.setdefault(contexts[held.context].name, {})
            shown = held.state if held.building else "ready"
            counts[shown] = counts.get(shown, 0) + 1
    return Status(
        time=now,
        items_submitted=counters.submitted,
        items_queued=queued,
        items_running=len(state.open) - queued,
        items_done=counters.done,
        items_dead=counters.dead,
        items_cancelled=counters.cancelled,
        retried_items=counters.retried,
        batches=counters.batches,
        workers=len(state.workers),
        workers_joined=counters.joined,
        workers_lost=counters.lost,
        evictions=counters.evicted,
        crashes=counters.crashes,
        loads=counters.loads,
        contexts=by_state,
    )
