"""What the answers of a library process to a call mean to the scheduler: the same for all engines that run calls.

What does not live here: how they come, and all other reports of a context host.
"""

from __future__ import annotations

import dataclasses
import pickle

from ctxflow.executors.futures import unpickled_error
from ctxflow.host.wire import Head
from ctxflow.scheduler import events as ev


def answer_events(now: float, worker: str, head: Head, body: bytes) -> list[ev.Event]:
    """The events that a report of results stands for: of a whole batch, of some of its items, or of a step.

    >>> answer_events(2.0, "w", {"is": "finished", "call": 7, "seconds": 1.5}, b"")
    [BatchFinished(time=2.0, worker='w', attempt=7, seconds=1.5)]
    >>> part = {"call": 7, "first": 3, "count": 2}
    >>> answer_events(2.0, "w", {"is": "part", **part}, b"")
    [ItemsFinished(time=2.0, worker='w', attempt=7, first=3, count=2)]
    >>> [type(event).__name__ for event in answer_events(2.0, "w", {"is": "finished", "seconds": 1.5, **part}, b"")]
    ['ItemsFinished', 'BatchEnded']
    """
    call = head["call"]
    if "outcomes" in head:
        return [ev.StepFinished(now, worker, call, head["seconds"], head["outcomes"], body)]
    if "first" not in head:
        return [ev.BatchFinished(now, worker, call, head["seconds"], body)]
    events: list[ev.Event] = []
    if head["count"]:
        events.append(ev.ItemsFinished(now, worker, call, head["first"], head["count"], results=body))
    if head["is"] == "finished":
        events.append(ev.BatchEnded(now, worker, call, head["seconds"]))
    return events


def opened(event: ev.Event) -> ev.Event:
    """Unpickle a batch's results or exception; results that cannot be unpickled here are a failure.

    >>> import pickle
    >>> opened(ev.BatchFinished(2.0, "w", 7, 1.5, pickle.dumps([4, 9]))).results
    [4, 9]
    """
    if isinstance(event, ev.BatchFailed) and isinstance(event.exception, bytes):
        return dataclasses.replace(event, exception=unpickled_error(event.exception))
    if not isinstance(event, (ev.BatchFinished, ev.ItemsFinished)):
        return event
    try:
        results = pickle.loads(event.results)
        if isinstance(event, ev.ItemsFinished):
            return ev.ItemsFinished(event.time, event.worker, event.attempt, event.first, event.count, results)
        return ev.BatchFinished(event.time, event.worker, event.attempt, event.seconds, results)
    except BaseException as error:  # Unpickling runs code of the user's, which must not end this thread.
        failure = ev.Failure(
            "exception",
            type(error).__name__,
            f"the app's result cannot be opened here ({error}): return plain data, or install its package here too",
            worker=event.worker,
        )
        return ev.BatchFailed(event.time, event.worker, event.attempt, failure)
