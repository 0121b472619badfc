#!/usr/bin/env python3
"""What the windows of the policy `opportunistic` are worth: jobs on simulated engines of many shapes.

    benchmarks/window_jobs.py [--json] [--quick] [--only GROUP] [--first NUMBER] [--cases NUMBER]

Backs the figures of docs/batching.md. A case is drawn by its number: how an engine's throughput depends on the items in
flight (`SHAPES`), kinds of workers, lengths of items, evictions and their notice. All policies meet the same items and
the same evictions. An engine tells tokens read and written alike, although the former take a tenth of the time, or none
(a quarter of the cases).

- `found_97`, `found_95`: of cases of 10,000 items for each worker, the share (%) in which the last window has at
  least 0.97, 0.95 of the throughput of the best; `found_changes`, the mean number of changes.
- `few_...`: jobs of 64 to 256 items on one worker. `many_...`: of 2,000 to 8,000 on one to four workers of one or two
  kinds. `evicted_...`: of 1,500 to 5,000 longer items on workers evicted once in 1 to 16 minutes, with notice of 0, 5
  or 30 s, until nine tenths are answered (what is last is luck). `..._job_...`: the seconds of the best fixed window of
  a sweep, divided by those with `opportunistic`; `..._window_...`: divided by those with the last windows that it had
  chosen. `least`, `median`, and `97`: the share (%) of cases with at least 0.97.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping

from common import Figure, figure, progress, report, single, versions

from ctxflow.executors.simulated import SharedPace, SimulatedEngine, SimulatedMachine
from ctxflow.policies.opportunistic import Opportunistic
from ctxflow.policies.protocols import View
from ctxflow.policies.simple import Fixed
from ctxflow.policies.throughput_curves import LEVELS
from ctxflow.policies.views import AppView, WorkerView
from ctxflow.scheduler import Policies
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Drawn, GpuTimes, Simulation, SimulationOutcome, Workload, pools
from ctxflow.simulator.pools import MixedTimes
from ctxflow.simulator.simulation import tiers_of

GROUPS = ("found", "few", "many", "evicted")
FIRST = 3000
"""The number of the first case on which nothing was chosen."""

TIER = "default"
BEST = 2000.0
READ = 0.1
"""The time of a token that is read, as a share of that of one that is written."""

RELOAD = 20.0
"""Seconds of building a context where workers are evicted; elsewhere it is there at once."""

SHAPES: Mapping[str, Callable[[float], float]] = {
    "saturating": lambda x: x / (1 + x**1.7) ** (1 / 1.7),
    "hyperbolic": lambda x: x / (1 + x),
    "hard": lambda x: min(1.0, x),
    "exponential": lambda x: -math.expm1(-x),
    "logarithmic": math.log1p,
    "flat": lambda x: 1.0,
    "falling": lambda x: x if x <= 1 else 1 / (1 + 0.3 * math.log2(x)),
    "cliff": lambda x: x / math.hypot(1, x) * (0.55 if x > 3 else 1.0),  # The memory does not suffice for more.
}
"""Throughput by the items in flight over the knee; by the number of a case, one after the other."""


@dataclasses.dataclass(frozen=True)
class ShapedPace(SharedPace):
    """The pace of an engine by one of the shapes."""

    shape: str = "saturating"

    def rate(self, flying: int) -> float:
        """Return tokens a second with so many items in flight, 1 or more."""
        return self.best * SHAPES[self.shape](flying / self.knee)

    def share(self, window: int) -> float:
        """Return the throughput with a window as a share of that with the best one."""
        return self.rate(window) / max(map(self.rate, LEVELS))


@dataclasses.dataclass(frozen=True)
class ChangingTimes(MixedTimes):
    """Times of engines whose pace changes while they run: `later` is asked for the pace of each call."""

    later: Callable[[SharedPace], SharedPace] = dataclasses.field(default=lambda pace: pace)

    def pace(self, app: str, machine: SimulatedMachine) -> SharedPace | None:
        """Return how an engine runs an app's items together from now on."""
        usual = super().pace(app, machine)
        return None if usual is None else self.later(usual)


@dataclasses.dataclass(frozen=True)
class Case:
    """A job of items in flight.

    :ivar paces: of each kind of worker; `kinds`: each worker's kind, and `slower`: how many times longer its items take
        than usual for that.
    :ivar evictions: of a worker a second; `notice`: seconds, 0 without.
    :ivar counted: whether engines tell tokens.
    :ivar until: the share of the items with which the job ends.
    :ivar later: what becomes of a pace, asked for each call.
    """

    number: int
    paces: tuple[ShapedPace, ...]
    items: int
    kinds: tuple[int, ...] = (0,)
    slower: tuple[float, ...] = (1.0,)
    evictions: float = 0.0
    notice: float = 0.0
    counted: bool = True
    concurrency: int | None = None
    until: float = 1.0
    later: Callable[[SharedPace], SharedPace] = dataclasses.field(default=lambda pace: pace)

    @property
    def load(self) -> float:
        """Seconds of building the context."""
        return RELOAD if self.evictions else 0.0

    @property
    def name(self) -> str:
        """The shape, the knee and the workers."""
        pace = self.paces[0]
        return f"{pace.shape}({pace.knee:.1f})x{len(self.kinds)}{'k' * (len(self.paces) > 1)}"


class Watched(Opportunistic):
    """The policy `opportunistic`, which hears of tokens what an engine tells of a case.

    :ivar chosen: GPU model -> each window that was chosen for it, ascending in time.
    :ivar most: the largest window that was ever given.
    """

    def __init__(self, case: Case, window: int | None = None, most_window: int = LEVELS[-1]) -> None:
        super().__init__(window=window, most_window=most_window)
        self._case, self._chance = case, random.Random(case.number)
        self.chosen: dict[str | None, list[int]] = {}
        self.most = 0

    def window(self, view: View, app: AppView, worker: WorkerView) -> int:
        """Return the window."""
        found = super().window(view, app, worker)
        self.most = max(self.most, found)
        return found

    def finished(self, view: View, app: AppView, worker: WorkerView, seconds: float, tokens: int | None) -> None:
        """Learn of an item, with tokens that were read besides those that took the time."""
        mean = self._case.paces[0].tokens
        read = (1 - READ) * mean * self._chance.lognormvariate(-0.32, 0.8)
        super().finished(view, app, worker, seconds, round(tokens + read) if tokens and self._case.counted else None)
        chosen, window = self.chosen.setdefault(worker.gpu_model, []), self.last[worker.gpu_model]
        if not chosen or chosen[-1] != window:
            chosen.append(window)

    @property
    def last(self) -> dict[str | None, int]:
        """The present window of each kind of worker."""
        return {model: learner.window for (_, _, model), learner in self._learners.items()}

    @property
    def changes(self) -> int:
        """The most changes of a kind's window."""
        return max(learner.changes for learner in self._learners.values())


class PerKind(Fixed):
    """A fixed window for each kind of worker."""

    def __init__(self, windows: dict[str | None, int]) -> None:
        super().__init__()
        self._of = {kind: Fixed(window=window) for kind, window in windows.items()}

    def window(self, view: View, app: AppView, worker: WorkerView) -> int:
        """Return the window."""
        return self._of[worker.gpu_model].window(view, app, worker)


def play(case: Case, batching: object, until: float = math.inf) -> SimulationOutcome:
    """Run a case, until virtual seconds at the latest."""
    kinds = {(TIER, str(number)): pace for number, pace in enumerate(case.paces)}
    available = pools.evicted(1 / case.evictions, 0.0) if case.evictions else pools.during(0.0)
    machines = [SimulatedMachine(f"w{n}", str(kind), available=available) for n, kind in enumerate(case.kinds)]
    times = ChangingTimes(
        {"ask": dict.fromkeys(kinds, GpuTimes({"": 1.0}))},
        {"context": dict.fromkeys(kinds, Drawn(case.load))},
        paces={f"w{n}": slower for n, slower in enumerate(case.slower)},
        shared={"ask": kinds},
        later=case.later,
    )
    workload = Workload(
        [ev.ContextSpec("context", "context", gpus=1, concurrency=case.concurrency)],
        [ev.AppSpec("ask", "ask", "context", batch=False, overlaps=True)],
        [(0.0, "ask", case.items)],
    )
    engine = SimulatedEngine(machines, times, seed=case.number, notice=case.notice)
    outcome = Simulation(engine, Policies.chosen({"batching": batching}), workload, tiers_of(machines)).run(until)
    assert outcome.dead == 0
    return outcome


def seconds(case: Case, batching: object, limit: float = math.inf) -> float:
    """Return how long a job takes from its first call on; infinity if that is more than a limit."""
    outcome = play(case, batching, limit + case.load)
    enough = math.ceil(case.until * case.items)
    ends = (time for time, done in zip(outcome.times, outcome.answered, strict=True) if done >= enough)
    return next(ends, math.inf) - outcome.started


def sweep(case: Case, limit: float = math.inf, step: int = 3) -> float:
    """Return the seconds of the best fixed window: of every so many levels first, then of those beside the best."""

    @functools.cache
    def of(level: int) -> float:
        found[level] = seconds(case, Fixed(window=LEVELS[level]), min([limit, *found.values()]))
        return found[level]

    found: dict[int, float] = {}
    middle = len(LEVELS) // 2
    for level in sorted(range(0, len(LEVELS), step), key=lambda level: abs(level - middle)):
        of(level)
    best = min(found, key=found.__getitem__)
    for level in range(best - step + 1, best + step):
        if 0 <= level < len(LEVELS):
            of(level)
    return min(found.values())


def compare(case: Case, step: int = 3) -> tuple[float, float]:
    """Return the best fixed window's seconds, divided by the policy's, and by those with the windows that it chose."""
    policy = Watched(case)
    ours = seconds(case, policy)
    best = sweep(case, 20 * ours, step)
    last = policy.last
    windows = seconds(case, PerKind(last), 20 * best)
    progress(f"case {case.number}, {case.name}: {best / ours:.3f}, {best / windows:.3f} with {last}")
    return best / ours, best / windows


def drawn(number: int, group: str) -> Case:
    """Return the case of that number: always the same."""
    chance = random.Random(f"{group} {number}")
    shape = [*SHAPES][number % len(SHAPES)]
    knee = 2 ** chance.uniform(0, 8.5)
    spread = chance.choice([0.5, 1.0, 1.5])
    evicted = group == "evicted"
    pace = ShapedPace(BEST, knee, tokens=440.0 if evicted else 110.0, spread=spread, shape=shape)
    if group == "few":
        return Case(number, (pace,), chance.choice([64, 128, 256]))
    workers = chance.choice([1, 2, 4])
    paces = [pace]
    if workers > 1 and chance.random() < 0.4:
        slower = chance.uniform(0.4, 1.0)
        paces.append(dataclasses.replace(pace, best=BEST * slower, knee=knee * chance.choice([0.5, 2.0])))
    return Case(
        number, tuple(paces), round(2 ** (chance.uniform(10.5, 12.3) if evicted else chance.uniform(11, 13))),
        tuple(n % len(paces) for n in range(workers)), tuple(math.exp(chance.gauss(0, 0.03)) for _ in range(workers)),
        2 ** -chance.uniform(5.9, 9.9) if evicted else 0.0, chance.choice([0.0, 0.0, 5.0, 30.0]) if evicted else 0.0,
        chance.random() < 0.75, until=0.9 if evicted else 1.0,
    )  # fmt: skip


def endless(number: int, items: int = 10_000, knees: tuple[float, float] = (1.0, 512.0)) -> Case:
    """Return a case of one kind of worker that is there to stay, with as many items for each worker.

    Every third has engines whose pace drifts by 3 %.
    """
    chance = random.Random(number)
    knee = math.exp(chance.uniform(*map(math.log, knees)))
    spread, workers = chance.choice([0.5, 1.0]), chance.choice([1, 1, 2])
    drift = {"factor": 1.0}

    def drifting(pace: SharedPace) -> SharedPace:
        if chance.random() < 0.01:
            drift["factor"] = math.exp(chance.gauss(0, 0.03))
        return dataclasses.replace(pace, best=pace.best * drift["factor"])

    pace = ShapedPace(BEST, knee, tokens=70.0, spread=spread, shape=[*SHAPES][number % len(SHAPES)])
    return Case(
        number, (pace,), items * workers, (0,) * workers,
        tuple(math.exp(chance.gauss(0, 0.03)) for _ in range(workers)), counted=chance.random() < 0.75,
        **({"later": drifting} if chance.random() < 1 / 3 else {}),
    )  # fmt: skip


def found(case: Case) -> tuple[float, int]:
    """Return the share of the best throughput with the last window that was chosen, and how often it changed."""
    policy = Watched(case)
    play(case, policy)
    window, changes = policy.last["0"], policy.changes
    progress(f"case {case.number}, {case.name}: {window}, {case.paces[0].share(window):.3f} after {changes} changes")
    return case.paces[0].share(window), changes


def shares(name: str, found: list[float]) -> Iterator[tuple[str, Figure]]:
    """Yield the figures of a group."""
    yield f"{name}_least", single(min(found), "times", "higher", len(found))
    yield f"{name}_median", figure(found, "times")
    yield f"{name}_97", enough(found, 0.97)


def enough(found: list[float], least: float) -> Figure:
    """The share of the cases with at least so much."""
    return single(100 * sum(share >= least for share in found) / len(found), "%", "higher", len(found))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Jobs with the windows of opportunistic, over the best fixed window.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="few short cases: to see that it runs")
    parser.add_argument("--only", choices=GROUPS, action="append", help="this group alone (may be given again)")
    parser.add_argument("--first", type=int, default=FIRST, help="the number of the first job")
    parser.add_argument("--cases", type=int, default=16, help="cases of each group")
    given = parser.parse_args()
    count = 2 if given.quick else given.cases
    figures: dict[str, Figure] = {}
    for group in given.only or GROUPS:
        if group == "found":
            ends = [found(endless(number, 1000 if given.quick else 10_000)) for number in range(count)]
            figures |= {f"found_{least}": enough([share for share, _ in ends], least / 100) for least in (97, 95)}
            figures["found_changes"] = single(statistics.fmean(each for _, each in ends), "changes", "lower", count)
            continue
        pairs = [compare(drawn(number, group)) for number in range(given.first, given.first + count)]
        figures |= shares(f"{group}_job", [job for job, _ in pairs])
        if group != "few":
            figures |= shares(f"{group}_window", [window for _, window in pairs])
    report("window_jobs", figures, versions(["numpy"]), given.json)


if __name__ == "__main__":
    main()
