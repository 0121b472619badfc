"""Notes on contexts that are lost while a run goes on: where, why, and that they are built again."""

from __future__ import annotations

from ctxflow.errors import counted, one_line
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.faults import CRASHES, LONGEST_MESSAGE
from ctxflow.scheduler.run_state import RunState

LOSSES = frozenset((ev.BatchFailed, ev.ContextUnloaded))
"""The events that may tell of a loss."""
_SECONDS = 60.0  # Between two lines about one context.
_KINDS = (*CRASHES, "timeout")


class LossNotes:
    """Makes one line of each loss; of a context that is lost again and again one a minute, with how often it was."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, int]] = {}  # When, and how often it was lost since.

    def of(self, event: ev.Event, state: RunState) -> str:
        """Return what to tell of an event, "" if nothing; to be called before the scheduler handles it."""
        found = _loss(event, state)
        if found is None:
            return ""
        name, worker, failure = found
        at, times = self._told.get(name, (-_SECONDS, 0))
        if event.time - at < _SECONDS:
            self._told[name] = at, times + 1
            return ""
        self._told[name] = event.time, 0
        more = f", after {counted(times, 'loss', 'losses')} that were not reported" if times else ""
        what = f"the context {name}" if name else "a library process without a context"
        why = one_line(f"{failure.error}: {failure.message}", LONGEST_MESSAGE)
        return f"{what} was lost on worker {worker}{more}, and is built again if it is needed: {why}"


def _loss(event: ev.Event, state: RunState) -> tuple[str, str, ev.Failure] | None:
    """Return the context that is lost with an event, its worker, and why; the first event of a loss tells of it."""
    if isinstance(event, ev.BatchFailed):
        attempt = state.attempts.get(event.attempt)
        if attempt is None or not event.lost_context or event.failure.kind not in _KINDS:
            return None
        context, failure = attempt.context, event.failure
    elif isinstance(event, ev.ContextUnloaded) and event.failure is not None:
        context, failure = event.context, event.failure
    else:
        return None
    worker = state.workers.get(event.worker)
    if worker is None or (context not in worker.contexts and context not in worker.parked):
        return None
    return state.contexts[context].spec.name, worker.id, failure
