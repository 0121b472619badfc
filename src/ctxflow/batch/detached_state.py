"""How a detached job stands, by the events that HTCondor wrote of its driver. Pure: it needs no HTCondor.

What does not live here: reading the events (factory/condor_driver.py), and the job's folder (detached.py).
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ctxflow.factory.condor_jobs import change_of

State = Literal["queued", "running", "held", "done", "failed", "cancelled", "lost"]
ENDED = ("done", "failed", "cancelled", "lost")
_EXECUTING, _EVICTED, _TERMINATED, _ABORTED = 1, 4, 5, 9
_SOME_DEAD, _INTERRUPTED = 3, 130


@dataclasses.dataclass(frozen=True)
class Standing:
    """How a job stands.

    :ivar state: "queued" (its driver waits to start, or to start again), "running", "held", or how it ended: "done"
        (every row was tried), "failed", "cancelled", "lost" (HTCondor has it no more, and does not say why).
    :ivar since: when that began, in seconds since 1970.
    :ivar restarts: how often the driver was started again.
    :ivar reason: why, "" where there is nothing to say.
    :ivar status: the driver's exit status, None if it has not ended by itself.
    """

    state: State
    since: float
    restarts: int = 0
    reason: str = ""
    status: int | None = None

    @property
    def exit_status(self) -> int:
        """What waiting for the job ends with: as the driver itself ended, 130 if it was cancelled.

        >>> Standing("done", since=0, status=3).exit_status, Standing("lost", since=0).exit_status
        (3, 1)
        """
        if self.state == "cancelled":
            return _INTERRUPTED
        return 1 if self.status is None else self.status


def standing_of(events: Iterable[Mapping[str, Any]], submitted: float) -> Standing:
    """How a job stands after some events.

    :param events: HTCondor's, each with "time"; in the order of its log.
    :param submitted: when the job was submitted.

    >>> begin = {"EventTypeNumber": 1, "Cluster": 12, "Proc": 0, "time": 5.0}
    >>> standing_of([begin], submitted=4.0).state
    'running'
    >>> standing_of([begin, {**begin, "EventTypeNumber": 5, "ReturnValue": 3, "time": 9.0}], submitted=4.0).status
    3
    """
    state: State = "queued"
    since, starts, reason = submitted, 0, ""
    status: int | None = None
    for event in events:
        kind = event["EventTypeNumber"]
        change = change_of(event)
        if change is None:
            continue
        reason, status = change.reason, None
        if kind == _EXECUTING:
            starts += 1
        if kind == _TERMINATED:
            if event.get("TerminatedNormally", True):
                status = int(event.get("ReturnValue", 0))
            state = "done" if status in (0, _SOME_DEAD) else "failed"
            reason = "" if state == "done" else change.reason
        elif kind == _ABORTED:
            state = "cancelled"
        elif change.state == "held":
            state = "held"
        elif change.state == "running":
            state = "running"
        else:
            state, reason = "queued", _why_again(event, change.reason) if kind == _EVICTED else change.reason
        since = float(event["time"])
    return Standing(state, since, max(0, starts - 1), " ".join(reason.split()), status)


def _why_again(event: Mapping[str, Any], reason: str) -> str:
    """Why a driver that ended starts again.

    >>> _why_again({"TerminatedAndRequeued": True, "TerminatedNormally": True, "ReturnValue": 130}, "OnExitRemove ...")
    'it was interrupted'
    """
    if not event.get("TerminatedAndRequeued"):
        return reason or "it was vacated"
    if event.get("TerminatedNormally"):
        status = int(event.get("ReturnValue", 0))
        return "it was interrupted" if status == _INTERRUPTED else f"it ended with status {status}"
    number = int(event.get("TerminatedBySignal", 0))
    try:
        return f"it was killed by {signal.Signals(number).name}"
    except ValueError:
        return f"it was killed by signal {number}"
