"""What a recorded run says of its sessions, and which levels of `closed-loop` would have suited them.

The run's event log says when each session had something to do, and how long steps with so many of them took; windows of
it are served in simulation with every candidate. What does not live here: the serving (session_serving.py), and
profiles of calls (scaling_profile.py).
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ctxflow.policies.turboserve.assignment import PowerCurve, most_sessions
from ctxflow.policies.turboserve.autoscaling import Epochs, Parameters, constant
from ctxflow.policies.turboserve.profiling import Profiled, Replayed, profile
from ctxflow.policies.turboserve.session_placement import fitted
from ctxflow.simulator.session_serving import Cluster, Strategy, Trace, serve

_ENDS = ("SessionSuspended", "SessionClosed")
_BEGINS = ("SessionOpened", "SessionPrompted", "SessionResumed")


@dataclasses.dataclass(frozen=True)
class SessionRun:
    """The sessions of a run.

    :ivar events: (time, session, whether it has something to do from then on), ascending.
    :ivar steps: how many chunks a step made -> the mean of its seconds.
    :ivar state_bytes: the mean of what was kept of a state. :ivar workers: the most that there might be.
    :ivar boot_seconds: from asking for a worker to its joining, None if the site did not say.
    """

    seconds: float
    events: Sequence[tuple[float, int, bool]]
    steps: dict[int, float]
    state_bytes: float
    workers: int
    boot_seconds: float | None = None

    @property
    def curve(self) -> PowerCurve:
        """Seconds of a chunk by the sessions of a worker, as measured."""
        return fitted(self.steps)


def read_sessions(lines: Iterable[str]) -> SessionRun:
    """The sessions that an event log tells of; none, if there were none.

    :raises ValueError: for a line that is no line of an event log.
    """
    reader = _Reader()
    for number, text in enumerate(lines, 1):
        try:
            record = json.loads(text)
        except ValueError as error:
            if not text.endswith("\n"):
                break  # The run was killed while it wrote this.
            raise ValueError(f"line {number} is no line of an event log ({error})") from None
        if "event" in record:
            reader.take(record["event"], record["commands"])
    return reader.run()


class _Reader:
    def __init__(self) -> None:
        self._active: dict[int, bool] = {}
        self._events: list[tuple[float, int, bool]] = []
        self._steps: dict[int, list[float]] = {}
        self._sizes: list[float] = []
        self._tiers: dict[str, dict[str, Any]] = {}
        self._time = 0.0

    def take(self, event: dict[str, Any], commands: list[dict[str, Any]]) -> None:
        kind, self._time = event["is"], event["time"]
        if kind in _BEGINS or kind in _ENDS:
            self._now(event["session"], kind in _BEGINS)
        elif kind == "TierOffered":
            self._tiers[event["tier"]["name"]] = event["tier"]
        elif kind == "StepFinished":
            made = sum("made" in outcome for outcome in event["outcomes"])
            if made:
                self._steps.setdefault(made, []).append(event["seconds"])
            self._sizes += [outcome["kept"] for outcome in event["outcomes"] if "kept" in outcome]
        for command in commands:
            if command["is"] in ("EndTurn", "EndSession"):
                self._now(command["session"], False)

    def _now(self, session: int, active: bool) -> None:
        if self._active.get(session, False) is not active:
            self._active[session] = active
            self._events.append((self._time, session, active))

    def run(self) -> SessionRun:
        steps = {made: statistics.fmean(seconds) for made, seconds in self._steps.items()}
        size = statistics.fmean(self._sizes) if self._sizes else 0.0
        workers = sum(tier["maximum"] for tier in self._tiers.values())
        boots = [boot for tier in self._tiers.values() if (boot := tier["boot_seconds"]) is not None]
        return SessionRun(self._time, self._events, steps, size, workers, max(boots, default=None))


def cut(run: SessionRun, begin: float, end: float) -> Trace:
    """A window of a run as a trace: those that have something to do when it begins do so from its start on."""
    numbers: dict[int, int] = {}
    events: list[tuple[float, int, bool]] = []
    active: dict[int, None] = {}
    for time, session, on in run.events:
        if time >= end:
            break
        if time >= begin:
            events.append((time - begin, session, on))
        elif on:
            active[session] = None
        else:
            active.pop(session, None)
    events = [(0.0, session, True) for session in active] + events
    renamed = [(time, numbers.setdefault(session, len(numbers)), on) for time, session, on in events]
    come = sum(on for _, _, on in renamed)
    return Trace("run", end - begin, 1, renamed, [run.state_bytes] * len(numbers), [come], [len(renamed) - come])


def profiled_sessions(
    run: SessionRun,
    target: float,
    window: float,
    shares: Sequence[float],
    tolerance: float,
    boot_seconds: float,
    tell: Callable[[float], None] = lambda share: None,
) -> list[Profiled]:
    """For each window the share with which it costs least while no chunk takes longer than the target.

    :param target: the longest that a chunk may take, in seconds.
    :param boot_seconds: what a worker takes to join, where the site did not say it.
    :param tell: told now and then which part of all is done.
    :raises ValueError: where no step was measured, or a chunk of one session alone takes longer than the target.
    """
    if not run.steps:
        raise ValueError("no session of the run made a chunk, so there is nothing to profile")
    capacity = most_sessions(run.curve, target)
    if not capacity:
        alone = run.curve(1)
        raise ValueError(f"a chunk of one session alone takes {alone:.3g} s: give --target more than that")
    boot = boot_seconds if run.boot_seconds is None else run.boot_seconds
    cluster = Cluster(max(1, run.workers), 1, capacity, run.curve, boot)
    count = max(1, math.ceil(run.seconds / window))
    traces = [cut(run, n * window, min(run.seconds, (n + 1) * window)) for n in range(count)]
    segments = [(_volatility(trace, capacity), trace) for trace in traces if trace.events]
    done = 0

    def replay(trace: Trace, parameters: Parameters) -> Replayed:
        nonlocal done
        there = sum(1 for time, _, on in trace.events if on and time == 0.0)
        initial = max(1, min(cluster.most, math.ceil(there / (capacity * parameters.utilization))))
        served = serve(trace, cluster, Strategy(levels=(constant(parameters),), spare=None), initial)
        done += 1
        tell(done / (len(segments) * len(shares)))
        return Replayed(served.gpu_seconds / 3600, served.worst)

    return profile(segments, [Parameters(share, tolerance) for share in shares], replay, target)


def _volatility(trace: Trace, capacity: int) -> float:
    """The mean of what the policy sees at its epochs, in workers that it loads fully."""
    epochs, found = Epochs(), []
    for time, _, on in trace.events:
        if time > 0:
            epochs.add(time, on / capacity)
            found.append(epochs.volatility)
    return statistics.fmean(found) if found else 0.0
