"""What the events of HTCondor's job log mean for a worker. Pure: it needs no HTCondor.

What does not live here: reading the log (condor.py).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Any

from ctxflow.factory.provider import JobChange, JobState

_EXECUTING, _EVICTED, _TERMINATED, _SHADOW_FAILED, _ABORTED = 1, 4, 5, 7, 9
_USER_REQUEST = 1  # Among the codes of why a job is held.
_HELD, _RELEASED, _DISCONNECTED, _RECONNECTED, _GAVE_UP = 12, 13, 22, 23, 24


def change_of(event: Mapping[str, Any]) -> JobChange | None:
    """The change that an event stands for, None for those that are none (an image's size, a file transfer).

    A connection that HTCondor lost counts as an eviction, since to us the worker is lost with it, and `running` if it
    is found again.

    >>> change = change_of({"EventTypeNumber": 4, "Cluster": 12, "Proc": 0, "Reason": "Job vacated by schedd"})
    >>> change.job, change.state, change.reason
    ('12.0', 'evicted', 'Job vacated by schedd')
    >>> change_of({"EventTypeNumber": 1, "Cluster": 12, "Proc": 0, "SlotName": "slot1_2@node7.site"}).host
    'node7.site'
    """
    kind = event["EventTypeNumber"]
    reason = str(event.get("Reason", ""))
    told: dict[int, tuple[JobState, str]] = {
        _EXECUTING: ("running", ""),
        _RECONNECTED: ("running", "HTCondor found it again"),
        _EVICTED: ("evicted", reason),
        _SHADOW_FAILED: ("evicted", str(event.get("Message", "")).strip()),
        _DISCONNECTED: ("evicted", f"HTCondor lost its connection: {event.get('DisconnectReason', '')}".rstrip(": ")),
        _GAVE_UP: ("evicted", reason),
        _HELD: ("held", str(event.get("HoldReason", "it was put on hold"))),
        _RELEASED: ("queued", reason),
        _TERMINATED: ("ended", _how(event)),
        _ABORTED: ("ended", reason or "it was removed"),
    }
    if kind not in told:
        return None
    state, why = told[kind]
    host = _host(event) if state == "running" else None
    by_hand = kind == _HELD and event.get("HoldReasonCode") == _USER_REQUEST
    return JobChange(f"{event['Cluster']}.{event['Proc']}", state, why, host, by_hand=by_hand)


def _host(event: Mapping[str, Any]) -> str | None:
    """The machine's name: it follows the slot's, or is part of an address."""
    for key in ("SlotName", "StartdName"):
        if "@" in str(event.get(key, "")):
            return str(event[key]).rpartition("@")[2]
    address = str(event.get("ExecuteHost", event.get("StartdAddr", "")))
    found = re.search(r"[?&]alias=([^&>]+)", address) or re.search(r"<\[?([^>?\]]+?)\]?(:\d+)?[>?]", address)
    return found.group(1) if found else None


def _how(event: Mapping[str, Any]) -> str:
    if event.get("TerminatedNormally", True):
        return f"it ended with status {event.get('ReturnValue', 0)}"
    number = int(event.get("TerminatedBySignal", 0))
    try:
        return f"it was killed by {signal.Signals(number).name}"
    except ValueError:  # Those for real-time use have no names.
        return f"it was killed by signal {number}"
