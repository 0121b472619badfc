"""The offline profiler of `closed-loop`: which share of what workers can carry suits which volatility.

A workload, or a recorded run of sessions, is cut into windows by time; each is simulated with every candidate
(sessions by `session_serving.py`), and the policy's own `profile` chooses among them.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ctxflow.policies.registry import described
from ctxflow.policies.turboserve.autoscaling import Epochs, Parameters, Profiled, Replayed, constant, profile
from ctxflow.policies.turboserve.rebalancing import PowerCurve, most_sessions
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator.recorded_log import read_events
from ctxflow.simulator.scenario import Scenario
from ctxflow.simulator.session_serving import Cluster, SessionTrace, serve
from ctxflow.simulator.simulation import arrivals_of
from ctxflow.simulator.studies import build, run
from ctxflow.simulator.workload_file import WorkloadFile

SHARES = (0.25, 0.35, 0.5, 0.65, 0.8, 1.0)
"""The candidates: the paper's four, and two to tell whether the ends are at the ends."""
_PATIENCE = 24 * 3600.0  # A window that is not done by then, in virtual seconds, has missed any target.


@dataclasses.dataclass(frozen=True)
class Window:
    """The arrivals from `begin` on, as a scenario of its own; their `volatility` is in fully loaded workers."""

    begin: float
    items: int
    volatility: float
    scenario: Scenario


def closed_loop_of(scenario: Scenario) -> dict[str, Any]:
    """Return the options of the site's `closed-loop`, or the defaults where it has another scaling policy."""
    found = described("scaling", scenario.site.scaling)
    return found if found.get("policy") == "closed-loop" else described("scaling", "closed-loop")


def windows_of(scenario: Scenario, seconds: float, seed: int = 0) -> list[Window]:
    """Cut the workload into windows of so many seconds, without empty ones; `seed`: of random arrivals."""
    options = closed_loop_of(scenario)
    by_window: dict[int, list[tuple[float, str, int]]] = {}
    for time, app, count in arrivals_of(scenario.workload, seed):
        by_window.setdefault(int(time // seconds), []).append((time, app, count))
    per_call = {
        app.name: (app.batch_size or options["batch_size"]) * options["calls_per_worker"]
        for app in scenario.workload.apps
    }
    return [
        Window(
            number * seconds,
            sum(count for _, _, count in those),
            _volatility((time, count / per_call[app]) for time, app, count in those),
            dataclasses.replace(scenario, workload=_only(scenario.workload, those, number * seconds)),
        )
        for number, those in sorted(by_window.items())
    ]


def profiled(
    windows: Sequence[Window],
    target: float,
    shares: Sequence[float] = SHARES,
    seed: int = 0,
    tell: Callable[[float], None] = lambda share: None,
) -> list[Profiled]:
    """Find for each window the share with which it costs least while no item waits longer than the target.

    Where no share keeps the target, the window has the one that exceeds it least, and is not `valid`.

    :param target: the longest that an item may take from its submission to its answer, in seconds.
    :param tell: told now and then which share of all is done.
    :raises ValueError: without windows.
    """
    if not windows:
        raise ValueError("the workload has no items, so there is nothing to profile")
    steps = _steps(tell, len(windows) * len(shares))

    def replay(window: Window, parameters: Parameters) -> Replayed:
        found = replayed(window.scenario, parameters, seed, target)
        next(steps)
        return found

    tolerance = closed_loop_of(windows[0].scenario)["tolerance"]
    candidates = [Parameters(share, tolerance) for share in shares]
    return profile([(window.volatility, window) for window in windows], candidates, replay, target)


def _steps(tell: Callable[[float], None], number: int) -> Iterator[None]:
    """Tell the share of all that is done, at each step."""
    for done in range(1, number + 1):
        tell(done / number)
        yield


def replayed(scenario: Scenario, parameters: Parameters, seed: int = 0, target: float = math.inf) -> Replayed:
    """Simulate a scenario with one level for all volatilities: its worker-hours, and its longest wait.

    `over` is by how many seconds items waited longer than the target, all together; it is infinite where not all came.
    """
    options = {**closed_loop_of(scenario), "levels": [[parameters.utilization]], "tolerance": parameters.tolerance}
    site = scenario.site.model_copy(update={"scaling": options})
    waits = _Waits(target)
    result = run(build(dataclasses.replace(scenario, site=site), seed, waits.listen), _PATIENCE)
    cost = result.workers * result.seconds / 3600
    return Replayed(cost, waits.longest, waits.over) if result.finished else Replayed(cost, _PATIENCE, math.inf)


class _Waits:
    """A listener that measures how long items take from their submission to their result, and beyond a target."""

    def __init__(self, target: float) -> None:
        self.longest = self.over = 0.0
        self._target = target
        self._firsts: list[int] = []
        self._times: list[float] = []

    def listen(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        if isinstance(event, ev.ItemsSubmitted) and len(event.items):
            self._firsts.append(event.items[0])  # Items are numbered as they come.
            self._times.append(event.time)
        for command in commands:
            if isinstance(command, cmd.Deliver):
                for item in command.items:
                    submitted = self._times[bisect.bisect_right(self._firsts, item) - 1]
                    wait = event.time - submitted
                    self.longest = max(self.longest, wait)
                    self.over += max(0.0, wait - self._target)


def _volatility(arrivals: Iterable[tuple[float, float]]) -> float:
    """Return the mean volatility that the policy sees at its epochs, of arrivals in fully loaded workers."""
    epochs, found = Epochs(), []
    for time, workers in arrivals:
        epochs.add(time, workers)
        found.append(epochs.volatility)
    return statistics.fmean(found) if found else 0.0


def _only(workload: WorkloadFile, arrivals: Sequence[tuple[float, str, int]], begin: float) -> WorkloadFile:
    """Return the workload with these arrivals alone, as if its time began with the window."""
    by_app: dict[str, list[tuple[float, int]]] = {}
    for time, app, count in arrivals:
        by_app.setdefault(app, []).append((time - begin, count))
    apps = (
        app.model_copy(update={"arrivals": tuple(by_app[app.name]), "per_second": None})
        for app in workload.apps
        if app.name in by_app
    )
    return workload.model_copy(update={"apps": tuple(apps)})


_ENDS = ("SessionSuspended", "SessionClosed")
_BEGINS = ("SessionOpened", "SessionPrompted", "SessionResumed")


@dataclasses.dataclass(frozen=True)
class RecordedSessions:
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
        """The measured seconds of a chunk by the number of a worker's sessions."""
        return fitted(self.steps)


def fitted(points: Mapping[int, float]) -> PowerCurve:
    """Return the line through (sessions, seconds) by least squares that rises, and starts at 0 seconds or later.

    >>> fitted({1: 0.3, 2: 0.4, 4: 0.6})
    PowerCurve(fixed=0.2, each=0.1, exponent=1.0)
    >>> fitted({})
    PowerCurve(fixed=0.0, each=1.0, exponent=1.0)
    """
    if not points:
        return PowerCurve(0.0, 1.0)
    mean_count = sum(points) / len(points)
    mean = sum(points.values()) / len(points)
    spread = sum((count - mean_count) ** 2 for count in points)
    slope = sum((count - mean_count) * (each - mean) for count, each in points.items()) / spread if spread else 0.0
    slope = min(max(slope, 1e-3 * mean), mean / mean_count)
    return PowerCurve(round(max(0.0, mean - slope * mean_count), 9), round(slope, 9))


def read_sessions(lines: Iterable[str]) -> RecordedSessions:
    """Read the sessions of an event log; a ValueError for a line that is none."""
    reader = _Reader()
    read_events(lines, reader.take)
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

    def run(self) -> RecordedSessions:
        steps = {made: statistics.fmean(seconds) for made, seconds in self._steps.items()}
        size = statistics.fmean(self._sizes) if self._sizes else 0.0
        workers = sum(tier["maximum"] for tier in self._tiers.values())
        boots = [boot for tier in self._tiers.values() if (boot := tier["boot_seconds"]) is not None]
        return RecordedSessions(self._time, self._events, steps, size, workers, max(boots, default=None))


def cut(run: RecordedSessions, begin: float, end: float) -> SessionTrace:
    """Return a window of a run as a trace; sessions that are active when it begins are active from its start."""
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
    return SessionTrace("run", end - begin, 1, renamed, [run.state_bytes] * len(numbers), [come], [len(renamed) - come])


def profiled_sessions(
    run: RecordedSessions,
    target: float,
    window: float,
    shares: Sequence[float],
    tolerance: float,
    boot_seconds: float,
    tell: Callable[[float], None] = lambda share: None,
) -> list[Profiled]:
    """Find for each window the share with which it costs least while no chunk takes longer than the target.

    Where no share keeps the target, the window has the one that exceeds it least, and is not `valid`.

    :param target: the longest that a chunk may take, in seconds.
    :param boot_seconds: what a worker takes to join, where the site did not say it.
    :param tell: told now and then which share of all is done.
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
    segments = []
    for trace in traces:
        if trace.events:
            fresh = [(time, on / capacity) for time, _, on in trace.events if time > 0]
            segments.append((_volatility(fresh), trace))
    steps = _steps(tell, len(segments) * len(shares))

    def replay(trace: SessionTrace, parameters: Parameters) -> Replayed:
        there = sum(1 for time, _, on in trace.events if on and time == 0.0)
        initial = max(1, min(cluster.most, math.ceil(there / (capacity * parameters.utilization))))
        served = serve(trace, cluster, cluster.closed_loop(constant(parameters)), initial=initial, target=target)
        next(steps)
        return Replayed(served.gpu_seconds / 3600, served.worst, served.over)

    return profile(segments, [Parameters(share, tolerance) for share in shares], replay, target)
