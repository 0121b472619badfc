"""The offline profiler of `closed-loop`: which share of what workers can carry suits which volatility.

A workload is cut into windows by when its items come; each is simulated on the site with every candidate. What does not
live here: the choice (policies/scaling/profiling.py), and how it is shown (cli/).
"""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctxflow.policies.registry import described
from ctxflow.policies.turboserve.autoscaling import Epochs, Parameters
from ctxflow.policies.turboserve.profiling import Profiled, Replayed, profile
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator.building import arrivals_of, build
from ctxflow.simulator.result import run
from ctxflow.simulator.scenario import Scenario
from ctxflow.simulator.workload_file import WorkloadFile

SHARES = (0.25, 0.35, 0.5, 0.65, 0.8, 1.0)
"""The candidates: the paper's four, and two to tell whether the ends are at the ends."""
_PATIENCE = 24 * 3600.0  # A window that is not done by then, in virtual seconds, has missed any target.


@dataclasses.dataclass(frozen=True)
class Window:
    """What came in a stretch of time, as a scenario of its own.

    :ivar begin: in seconds of the whole workload. :ivar volatility: of what came, in workers that it loads fully.
    """

    begin: float
    items: int
    volatility: float
    scenario: Scenario


def closed_loop_of(scenario: Scenario) -> dict[str, Any]:
    """The options of the site's `closed-loop`, or the defaults where it has another scaling policy."""
    found = described("scaling", scenario.site.scaling)
    return found if found.get("policy") == "closed-loop" else described("scaling", "closed-loop")


def windows_of(scenario: Scenario, seconds: float, seed: int = 0) -> list[Window]:
    """The workload in windows, those without items left out.

    :param seconds: of a window. :param seed: of arrivals that the workload leaves to chance.
    """
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
            _volatility(those, per_call, seconds),
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
    """For each window the share with which it costs least while no item waits longer than the target.

    :param target: the longest that an item may take from its submission to its answer, in seconds.
    :param tell: told now and then which part of all is done.
    :raises ValueError: without windows.
    """
    if not windows:
        raise ValueError("the workload has no items, so there is nothing to profile")
    done = 0

    def replay(window: Window, parameters: Parameters) -> Replayed:
        nonlocal done
        found = replayed(window.scenario, parameters, seed)
        done += 1
        tell(done / (len(windows) * len(shares)))
        return found

    tolerance = closed_loop_of(windows[0].scenario)["tolerance"]
    candidates = [Parameters(share, tolerance) for share in shares]
    return profile([(window.volatility, window) for window in windows], candidates, replay, target)


def replayed(scenario: Scenario, parameters: Parameters, seed: int = 0) -> Replayed:
    """What a scenario costs with one level for all volatilities, in hours of workers, and its longest wait."""
    options = {**closed_loop_of(scenario), "levels": [[parameters.utilization]], "tolerance": parameters.tolerance}
    site = scenario.site.model_copy(update={"scaling": options})
    waits = _Waits()
    result = run(build(dataclasses.replace(scenario, site=site), seed, waits.listen), _PATIENCE)
    return Replayed(result.workers * result.seconds / 3600, waits.longest if result.finished else _PATIENCE)


class _Waits:
    """How long items take from their submission to their answer."""

    def __init__(self) -> None:
        self.longest = 0.0
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
                    self.longest = max(self.longest, event.time - submitted)


def _volatility(arrivals: Sequence[tuple[float, str, int]], per_call: Mapping[str, float], seconds: float) -> float:
    """The mean over a window of what the policy sees at its epochs."""
    epochs, found = Epochs(), []
    for time, app, count in arrivals:
        epochs.add(time, count / per_call[app])
        found.append(epochs.volatility)
    return statistics.fmean(found)


def _only(workload: WorkloadFile, arrivals: Sequence[tuple[float, str, int]], begin: float) -> WorkloadFile:
    """The workload with these arrivals alone, as if its time began with the window."""
    by_app: dict[str, list[tuple[float, int]]] = {}
    for time, app, count in arrivals:
        by_app.setdefault(app, []).append((time - begin, count))
    apps = tuple(_with(app, by_app[app.name]) for app in workload.apps if app.name in by_app)
    return workload.model_copy(update={"apps": apps})


def _with(app: Any, arrivals: Sequence[tuple[float, int]]) -> Any:
    return app.model_copy(update={"arrivals": tuple(arrivals), "per_second": None})
