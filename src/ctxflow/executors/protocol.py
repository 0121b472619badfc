"""What engines with real workers share: commands as messages to a context host, its reports as events, heartbeats.

Heartbeats go by the driver's own monotonic clock. A worker that says nothing for a while is asked whether it is there,
and lost if it does not answer; its context host answers, which runs none of the user's code.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence

from ctxflow.executors.contract import CallPayload, ContextPayload
from ctxflow.host.library_messages import (
    BuildFailed,
    CallFinished,
    CallFolder,
    CallRaised,
    ContextAsleep,
    ContextAwake,
    ContextBuilt,
    ParkContext,
    ParkRaised,
    PartFinished,
    RunCall,
    WakeContext,
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
    PreloadModules,
    StagingFailed,
    ToHost,
)
from ctxflow.host.wire import Message, Trouble
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev

logger = logging.getLogger("ctxflow")


def call_message(
    command: cmd.Run,
    payload: CallPayload,
    key: str | None = None,
    every: float | None = None,
    files: CallFolder | None = None,
) -> RunCall:
    """Return the message to a host, or library process, for a `Run` or `Step`; the fields are those of `RunCall`."""
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
        payload.threads,
        payload.body,
    )


def plain_message(command: cmd.Command) -> ToHost | None:
    """Return the message to a host for a command that needs nothing besides; None for others.

    >>> plain_message(cmd.Interrupt("w", 7, "c"))
    InterruptCall(context='c', call=7)
    """
    if isinstance(command, cmd.Interrupt):
        return InterruptCall(command.context, command.attempt)
    if isinstance(command, (cmd.Unload, cmd.Abandon)):
        return EndLibrary(command.context)
    if isinstance(command, cmd.Park):
        return ParkContext(command.context)
    if isinstance(command, cmd.Wake):
        return WakeContext(command.context)
    if isinstance(command, cmd.Drain):
        return DrainCalls()
    if isinstance(command, cmd.Release):
        return LeaveWorker()
    return None


class LearnedModules:
    """What contexts were seen to import where they were built: a zygote imports it before the next build.

    >>> learned, payload = LearnedModules(), ContextPayload("c", "model", b"", {}, {}, None, None, preload=["torch"])
    >>> learned.of(payload)
    ['torch']
    >>> learned.learn(ContextBuilt("c", "1", 2.0, modules=["torch", "transformers"]))
    >>> learned.of(payload), learned.all()
    (['torch', 'transformers'], ['torch', 'transformers'])
    >>> learned.latest().modules
    ['torch', 'transformers']
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # Context -> its function's name: variants of one import the same.
        self._environments: dict[str, Mapping[str, str]] = {}
        self._modules: dict[str, dict[str, None]] = {}
        self._told: set[str] = set()
        self._latest: ContextPayload | None = None

    def of(self, context: ContextPayload) -> list[str] | None:
        """Return what is to be imported before a context is built; None if its process is to be spawned."""
        if context.preload is None or context.level == ev.NONE:
            return None
        self._names[context.id], self._environments[context.name] = context.name, context.environment
        known = self._modules.setdefault(context.name, {})
        known.update(dict.fromkeys(context.preload))
        self._latest = context
        return list(known)

    def message(self, context: ContextPayload) -> PreloadModules | None:
        """Return the message to import that while the context's files are on their way."""
        modules = self.of(context)
        return PreloadModules(context.environment, modules) if modules else None

    def latest(self) -> PreloadModules | None:
        """Return the message for a worker that has just come: to import what the context does that was built last."""
        return None if self._latest is None else self.message(self._latest)

    def learn(self, report: ContextBuilt) -> None:
        """Take what was imported for a context; tell once why its process was not forked."""
        _, _, why = report.artifacts.partition(": ")
        if why and why not in self._told:
            self._told.add(why)
            logger.warning("artifacts of the context %s: %s", self._names.get(report.context, report.context), why)
        name = self._names.get(report.context)
        if name is None:
            return
        self._modules[name].update(dict.fromkeys(report.modules))
        _, _, why = report.started.partition(": ")
        if why and why not in self._told:
            self._told.add(why)
            logger.info("the context %s was built in a process that was spawned, not forked: %s", name, why)

    def all(self, serves: Callable[[Mapping[str, str]], bool] = lambda environment: True) -> list[str]:
        """Return what all contexts import that were built, or are about to be, with variables that somebody serves."""
        known = [modules for name, modules in self._modules.items() if serves(self._environments[name])]
        return list(dict.fromkeys(module for modules in known for module in modules))


def failure_of(trouble: Trouble, worker: str, host: str = "") -> ev.Failure:
    """Return why something failed on a worker, or on its machine `host`, as the scheduler knows it."""
    kind, error, message, traceback, output, machine = trouble
    return ev.Failure(kind, error, message, traceback, output, worker, host, machine)


def events_of(now: float, worker: str, report: Message, host: str = "") -> Sequence[ev.Event]:
    """Return the events that a report of a worker stands for; none if the scheduler does not need it.

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
        return _died(now, worker, report, failure_of(report.trouble, worker, host))
    if isinstance(report, (ContextBuilt, ContextAsleep, ContextAwake)):
        return [_measured(now, worker, report)]
    if isinstance(report, (BuildFailed, StagingFailed, ParkRaised)):
        kind = ev.ParkFailed if isinstance(report, ParkRaised) else ev.ContextFailed
        return [kind(now, worker, report.context, failure_of(report.trouble, worker, host))]
    if isinstance(report, FilesStaged):
        return [ev.ContextStaged(now, worker, report.context)]
    if isinstance(report, LibraryEnded):
        return [ev.ContextUnloaded(now, worker, report.context)]
    if isinstance(report, NoticeGiven):
        return [ev.EvictionNotice(now, worker)]
    return ()


def _measured(now: float, worker: str, report: ContextBuilt | ContextAsleep | ContextAwake) -> ev.Event:
    """Return the event of a context that is built, parked, or awake."""
    place, measured = (now, worker, report.context), (report.seconds, report.memory, report.gpu_memory)
    if isinstance(report, ContextBuilt):
        return ev.ContextReady(*place, *measured, report.parts, report.started, report.parks)
    return (ev.ContextParked if isinstance(report, ContextAsleep) else ev.ContextWoken)(*place, *measured)


def _died(now: float, worker: str, report: LibraryDied, failure: ev.Failure) -> list[ev.Event]:
    """Return the events of a library process's end, of those first that it was ended for.

    These are told even if the report answers only others, which must not be blamed if it comes first.
    """
    blamed, others = list(report.blamed), failure
    events: list[ev.Event] = []
    if blamed:
        others = dataclasses.replace(failure, kind="cancelled")
        events.append(ev.BatchFailed(now, worker, blamed[0], failure, lost_context=True, beside=blamed[1:]))
    for call in report.calls:
        if call not in blamed[:1]:
            why = failure if call in blamed else others
            events.append(ev.BatchFailed(now, worker, call, why, lost_context=True))
    return events or [ev.ContextUnloaded(now, worker, report.context, failure)]


ABOUT_LOADS = (ContextBuilt, BuildFailed, ContextAsleep, ContextAwake, ParkRaised)
"""The reports about one load of a context, beside the end of its library process."""


def is_late(report: Message, keys: Mapping[str, str]) -> bool:
    """Return whether a report is about an earlier load of its context than the latest.

    :param keys: the key of each context's latest load on that worker.

    >>> is_late(ContextBuilt("c", "1", 2.0), {"c": "2"}), is_late(LibraryEnded("c"), {"c": "2"})
    (True, False)
    """
    if not isinstance(report, (*ABOUT_LOADS, LibraryDied, CallRaised)):
        return False
    return report.key is not None and keys.get(report.context) != report.key


def _finished(now: float, worker: str, report: CallFinished) -> list[ev.Event]:
    call, seconds = report.call, report.seconds
    if report.outcomes is not None:
        return [ev.StepFinished(now, worker, call, seconds, report.outcomes, report.body)]
    return [*_items(now, worker, report, report.first or 0), ev.BatchEnded(now, worker, call, seconds)]


def _items(now: float, worker: str, report: PartFinished | CallFinished, first: int) -> list[ev.Event]:
    if not report.count:
        return []
    return [ev.ItemsFinished(now, worker, report.call, first, report.count, results=report.body)]


def opened(event: ev.Event) -> ev.Event:
    """Unpickle a batch's results or exception; results that cannot be unpickled here are a failure.

    >>> import pickle
    >>> opened(ev.BatchFinished(2.0, "w", 7, 1.5, pickle.dumps([4, 9]))).results
    [4, 9]
    """
    if isinstance(event, ev.BatchFailed) and isinstance(event.exception, bytes):
        return dataclasses.replace(event, exception=_unpickled_error(event.exception))
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


ENDS = (StopIteration, StopAsyncIteration)
"""What would silently end a loop of the driver's, if it were raised there."""


def _unpickled_error(pickled: bytes) -> BaseException | None:
    """Return the exception that a library process sent, None if it cannot be had here."""
    if not pickled:
        return None
    try:
        error = pickle.loads(pickled)
    except BaseException:  # It runs code of the user's.
        return None
    # SystemExit and KeyboardInterrupt of the worker must not end the driver, and StopIteration no loop in it.
    return error if isinstance(error, Exception) and not isinstance(error, ENDS) else None


_LONGEST_LOOK = 2.0


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long an engine waits, in seconds.

    :ivar ask: for word of a worker, before it is asked whether it is there.
    :ivar answer: for the answer.
    :ivar overdue: beyond a call's timeout, which its host enforces, before the driver sees to it.
    :ivar urgent: for the host's answer then.
    :ivar longest: for a host that gets on with something else than answering.
    :ivar report: for a host's report that a library process has ended, once its connection has.
    :ivar leave: for a worker that was told to go.
    :ivar manager: for a sign of life of TaskVine's manager.
    :ivar start: for a manager to start.
    """

    ask: float = 6.0
    answer: float = 15.0
    overdue: float = 3.0
    urgent: float = 4.0
    longest: float = 120.0
    report: float = 10.0
    leave: float = 15.0
    manager: float = 15.0
    start: float = 60.0

    @property
    def look(self) -> float:
        """How often to look."""
        return min(1.0, self.urgent / 4)


class Heartbeats:
    """The workers that are to be heard of.

    Only time counts in which this process looked, and in which answers could reach it: if it was stopped itself, or
    starved, nobody is taken for dead.

    :param ask: has a worker's host say that it is there.

    >>> asked = []
    >>> beats = Heartbeats(Patience(ask=1, answer=1.5), asked.append)
    >>> beats.watch("w1")
    >>> [beats.look(now) for now in (10.0, 11.0, 12.0)], asked
    ([[], [], []], ['w1'])
    >>> beats.heard("w1")
    >>> [beats.look(now) for now in (13.0, 14.0, 15.0)], asked
    ([[], [], ['w1']], ['w1', 'w1'])
    """

    def __init__(self, patience: Patience, ask: Callable[[str], None]) -> None:
        self.patience = patience
        self._ask = ask
        self._now = 0.0  # Of the clock that counts.
        self._looked_at: float | None = None
        self._heard_at: dict[str, float] = {}
        self._answer_by: dict[str, float] = {}  # Those that were asked.

    def watch(self, worker: str) -> None:
        """Watch a worker, which answers from now on."""
        self._heard_at[worker] = self._now

    def forget(self, worker: str) -> None:
        """Forget a worker, which is gone, or is to go."""
        self._heard_at.pop(worker, None)
        self._answer_by.pop(worker, None)

    def heard(self, worker: str) -> None:
        """Note that a worker's host said something."""
        if worker in self._heard_at:
            self._heard_at[worker] = self._now
            self._answer_by.pop(worker, None)

    def urge(self, worker: str) -> None:
        """Ask it now, and lose it soon if it does not answer."""
        if worker not in self._heard_at:
            return
        if worker not in self._answer_by:
            self._ask(worker)
        by = self._now + self.patience.urgent
        self._answer_by[worker] = min(by, self._answer_by.get(worker, by))

    def spare(self, worker: str) -> None:
        """Wait a little longer for a worker, which lives although it does not answer."""
        self._answer_by[worker] = self._now + self.patience.urgent

    def silent_for(self, worker: str) -> float:
        """Return the seconds since something was heard of a worker."""
        return self._now - self._heard_at.get(worker, self._now)

    def look(self, now: float, hearing: bool = True) -> list[str]:
        """Ask those that have said nothing for a while; gives those that did not answer.

        :param hearing: whether answers have been able to come since the last look.
        """
        if self._looked_at is not None and hearing:
            self._now += min(now - self._looked_at, _LONGEST_LOOK * self.patience.look)
        self._looked_at = now
        for worker, heard_at in self._heard_at.items():
            if worker not in self._answer_by and self._now - heard_at >= self.patience.ask:
                self._answer_by[worker] = self._now + self.patience.answer
                self._ask(worker)
        return [worker for worker, by in self._answer_by.items() if by <= self._now]
