"""What the reports of a context host, and the changes of a worker's job, mean to the scheduler.

What does not live here: reports about the worker itself and about files (engine.py, stagings.py).
"""

from __future__ import annotations

from collections.abc import Callable

from ctxflow.executors.answers import answer_events
from ctxflow.executors.taskvine.worker import Worker
from ctxflow.factory.provider import JobChange
from ctxflow.host.wire import Head
from ctxflow.scheduler import events as ev


def events_of(now: float, worker: Worker, head: Head, body: bytes) -> list[ev.Event]:
    """The events that a report stands for; none if it is about an earlier load of its context.

    >>> events_of(2.0, Worker("w", "node1", "", 0.0), {"is": "unloaded", "context": "c"}, b"")
    [ContextUnloaded(time=2.0, worker='w', context='c')]
    """
    translate = _TRANSLATIONS.get(head["is"])
    if translate is None or ("key" in head and worker.keys.get(head["context"]) != head["key"]):
        return []
    return translate(now, worker, head, body)


def events_of_job(now: float, tier: str, change: JobChange, pin: int | None = None) -> list[ev.Event]:
    """The events that a change of a worker's job stands for; none if it only waits, or has ended.

    :param pin: the number of the `AcquireAt` that it was submitted for, None for others.

    >>> events_of_job(2.0, "a10", JobChange("7.0", "held", "the disk is full"))
    [JobHeld(time=2.0, tier='a10', job='7.0', reason='the disk is full')]
    """
    if change.state == "running":
        return [ev.JobStarted(now, tier, change.job, change.waited, pin)]
    if change.state == "evicted":
        return [ev.JobEvicted(now, tier, change.job, change.reason)]
    if change.state == "held":
        return [ev.JobHeld(now, tier, change.job, change.reason)]
    return []


def _answered(now: float, worker: Worker, head: Head, body: bytes) -> list[ev.Event]:
    return answer_events(now, worker.name, head, body)


def _failure(worker: Worker, head: Head) -> ev.Failure:
    return ev.Failure(**head["failure"], worker=worker.name, host=worker.host)


def _raised(now: float, worker: Worker, head: Head, body: bytes) -> list[ev.Event]:
    failure = _failure(worker, head)
    return [ev.BatchFailed(now, worker.name, head["call"], failure, exception=body, at=head.get("at"))]


def _died(now: float, worker: Worker, head: Head, body: bytes) -> list[ev.Event]:
    failure = _failure(worker, head)
    if head["calls"]:
        return [ev.BatchFailed(now, worker.name, call, failure, lost_context=True) for call in head["calls"]]
    return [ev.ContextUnloaded(now, worker.name, head["context"])]


def _ready(now: float, worker: Worker, head: Head, body: bytes) -> list[ev.Event]:
    return [ev.ContextReady(now, worker.name, head["context"], head["seconds"], head["memory"], head["gpu_memory"])]


def _failed(now: float, worker: Worker, head: Head, body: bytes) -> list[ev.Event]:
    return [ev.ContextFailed(now, worker.name, head["context"], _failure(worker, head))]


def _unloaded(now: float, worker: Worker, head: Head, body: bytes) -> list[ev.Event]:
    return [ev.ContextUnloaded(now, worker.name, head["context"])]


_TRANSLATIONS: dict[str, Callable[[float, Worker, Head, bytes], list[ev.Event]]] = {
    "part": _answered,
    "finished": _answered,
    "raised": _raised,
    "died": _died,
    "ready": _ready,
    "failed": _failed,
    "unloaded": _unloaded,
}
