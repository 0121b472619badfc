"""What commands are to a context host, and its reports to the scheduler: the same for all engines with real workers.

What does not live here: how messages get to a host and back, and what an engine has to do besides.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctxflow.executors.contract import CallPayload
from ctxflow.host.library_messages import (
    BuildFailed,
    CallFinished,
    CallFolder,
    CallRaised,
    ContextBuilt,
    PartFinished,
    RunCall,
)
from ctxflow.host.messages import (
    DrainCalls,
    EndLibrary,
    FilesStaged,
    InterruptCall,
    LeaveWorker,
    LibraryDied,
    LibraryEnded,
    NoticeGiven,
    StagingFailed,
    ToHost,
)
from ctxflow.host.wire import Message, Trouble
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev


def call_message(
    command: cmd.Run,
    payload: CallPayload,
    key: str | None = None,
    every: float | None = None,
    files: CallFolder | None = None,
) -> RunCall:
    """Return what a host, or library process, is told for a `Run` or `Step`; the fields are those of `RunCall`."""
    function, constants = payload.function, payload.constants
    return RunCall(
        command.attempt,
        command.context,
        "" if function is None else function.name,
        payload.style,
        payload.insert,
        "" if constants is None else constants.name,
        payload.timeout,
        key,
        every,
        files,
        payload.body,
    )


def plain_message(command: cmd.Command) -> ToHost | None:
    """Return what a host is told for a command that needs nothing besides; None for others.

    >>> plain_message(cmd.Interrupt("w", 7, "c"))
    InterruptCall(context='c', call=7)
    """
    if isinstance(command, cmd.Interrupt):
        return InterruptCall(command.context, command.attempt)
    if isinstance(command, (cmd.Unload, cmd.Abandon)):
        return EndLibrary(command.context)
    if isinstance(command, cmd.Drain):
        return DrainCalls()
    if isinstance(command, cmd.Release):
        return LeaveWorker()
    return None


def failure_of(trouble: Trouble, worker: str, host: str = "") -> ev.Failure:
    """Return why something failed on a worker as the scheduler knows it.

    :param host: the worker's machine, if it is another.
    """
    kind, error, message, traceback, output, machine = trouble
    return ev.Failure(kind, error, message, traceback, output, worker, host, machine)


def events_of(now: float, worker: str, report: Message, host: str = "") -> Sequence[ev.Event]:
    """Return the events that a report of a worker stands for; none if it is no matter of the scheduler.

    :param host: as of `failure_of`.

    >>> events_of(2.0, "w", CallFinished(7, 1.5))
    [BatchFinished(time=2.0, worker='w', attempt=7, seconds=1.5)]
    >>> events_of(2.0, "w", PartFinished(7, 3, 2))
    [ItemsFinished(time=2.0, worker='w', attempt=7, first=3, count=2)]
    >>> [type(event).__name__ for event in events_of(2.0, "w", CallFinished(7, 1.5, 3, 2))]
    ['ItemsFinished', 'BatchEnded']
    >>> events_of(2.0, "w", LibraryEnded("c"))
    [ContextUnloaded(time=2.0, worker='w', context='c')]
    """
    if isinstance(report, CallFinished):
        if report.first is None and report.outcomes is None:
            return [ev.BatchFinished(now, worker, report.call, report.seconds, report.body)]
        return _finished(now, worker, report)
    if isinstance(report, PartFinished):
        return _items(now, worker, report, report.first)
    if isinstance(report, CallRaised):
        failure = failure_of(report.trouble, worker, host)
        return [ev.BatchFailed(now, worker, report.call, failure, exception=report.body, at=report.at)]
    if isinstance(report, LibraryDied):
        failure = failure_of(report.trouble, worker, host)
        failed = [ev.BatchFailed(now, worker, call, failure, lost_context=True) for call in report.calls]
        return failed or [ev.ContextUnloaded(now, worker, report.context)]
    if isinstance(report, ContextBuilt):
        return [ev.ContextReady(now, worker, report.context, report.seconds, report.memory, report.gpu_memory)]
    if isinstance(report, (BuildFailed, StagingFailed)):
        return [ev.ContextFailed(now, worker, report.context, failure_of(report.trouble, worker, host))]
    if isinstance(report, FilesStaged):
        return [ev.ContextStaged(now, worker, report.context)]
    if isinstance(report, LibraryEnded):
        return [ev.ContextUnloaded(now, worker, report.context)]
    if isinstance(report, NoticeGiven):
        return [ev.EvictionNotice(now, worker)]
    return ()


def _finished(now: float, worker: str, report: CallFinished) -> list[ev.Event]:
    call, seconds = report.call, report.seconds
    if report.outcomes is not None:
        return [ev.StepFinished(now, worker, call, seconds, report.outcomes, report.body)]
    return [*_items(now, worker, report, report.first or 0), ev.BatchEnded(now, worker, call, seconds)]


def _items(now: float, worker: str, report: PartFinished | CallFinished, first: int) -> list[ev.Event]:
    if not report.count:
        return []
    return [ev.ItemsFinished(now, worker, report.call, first, report.count, results=report.body)]
