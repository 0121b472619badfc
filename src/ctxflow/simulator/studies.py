"""Running scenarios: one, and many cases side by side, each with several seeds, on all cores.

What comes of a run is a `Result`, of a case's runs a `Summary`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TextIO

from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import first_line, line
from ctxflow.simulator.building import Built, build
from ctxflow.simulator.scenario import Scenario
from ctxflow.simulator.simulation import Listener, mixed_fluid_seconds

LOG = "events.jsonl"
_POOL_SECONDS = 3.0  # What is sooner done than this is not worth another process.


@dataclasses.dataclass(frozen=True)
class Result:
    """The figures of a simulated run. Seconds of virtual time; bytes.

    :ivar seconds: the makespan, or the time at which the simulation was ended.
    :ivar finished: whether every item was settled by then.
    :ivar fluid_seconds: no scheduler could have been done earlier with these workers.
    :ivar workers: connected, averaged over the run.
    :ivar lost_items: items of batches that an eviction ended, and `lost_seconds` of work on them.
    :ivar wasted_items: items that duplicates answered second.
    :ivar dead: items that were given up.
    :ivar raised: calls that raised and builds that failed, on bad hosts.
    :ivar moved: bytes that came from each origin, and from "peers".
    """

    seconds: float
    finished: bool
    items: int
    done: int
    fluid_seconds: float
    workers: float
    joined: int
    evicted: int
    batches: int
    duplicates: int
    wasted_items: int
    lost_items: int
    lost_seconds: float
    loads: int
    load_seconds: float
    stage_seconds: float
    moved: Mapping[str, float]
    dead: int = 0
    raised: int = 0

    @property
    def items_per_second(self) -> float:
        """Items a second over the whole run."""
        return self.done / self.seconds if self.seconds else 0.0

    @property
    def efficiency(self) -> float:
        """The fluid bound divided by the makespan: at most 1."""
        return self.fluid_seconds / self.seconds if self.seconds and self.finished else 0.0


def play(scenario: Scenario, seed: int = 0, until: float = math.inf, listener: Listener | None = None) -> Result:
    """Simulate a scenario once.

    :param until: when to end at the latest, in virtual seconds.
    :param listener: told of every event with its commands.

    >>> from ctxflow.sites import Site
    >>> from ctxflow.simulator.workload_file import WorkloadFile
    >>> workload = WorkloadFile(apps=[{"items": 100, "spread": 0}], contexts=[{"load_spread": 0}], dispatch_seconds=0,
    ...     matching={"seconds": 0})
    >>> result = play(Scenario(Site(workers=2, batching={"policy": "fixed", "size": 10}), workload))
    >>> result.seconds, result.fluid_seconds, result.loads
    (65.0, 50.0, 2)
    """
    return run(build(scenario, seed, listener), until)


def run(built: Built, until: float = math.inf) -> Result:
    """Run a simulation that is built, and return its figures."""
    outcome = built.simulation.run(until)
    account, seconds = outcome.account, outcome.seconds
    return Result(
        seconds=seconds,
        finished=outcome.done + outcome.dead == outcome.items,
        items=outcome.items,
        done=outcome.done,
        fluid_seconds=mixed_fluid_seconds(outcome.presence, built.times.item, built.items),
        workers=account.worker_seconds / seconds if seconds else 0.0,
        joined=account.joined,
        evicted=account.evicted,
        batches=outcome.batches,
        duplicates=outcome.duplicates,
        wasted_items=outcome.wasted_items,
        lost_items=account.lost_items,
        lost_seconds=account.lost_seconds,
        loads=account.loads,
        load_seconds=account.load_seconds,
        stage_seconds=account.stage_seconds,
        moved={name: size for name, size in built.staging.moved.items() if size},
        dead=outcome.dead,
        raised=account.raised,
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """One scenario with its name.

    :ivar log: the folder for the event log of its first run, None for none.
    """

    name: str
    scenario: Scenario
    log: Path | None = None


@dataclasses.dataclass(frozen=True)
class Summary:
    """The figures of a case, over its runs."""

    case: Case
    results: tuple[Result, ...]

    def median(self, figure: str) -> float:
        """Return the median of a figure of `Result` over the runs."""
        return float(statistics.median(getattr(result, figure) for result in self.results))

    def spread(self, figure: str) -> float:
        """Return the largest less the smallest."""
        values = [getattr(result, figure) for result in self.results]
        return float(max(values) - min(values))

    @property
    def finished(self) -> bool:
        """Whether every run was finished."""
        return all(result.finished for result in self.results)

    @property
    def moved(self) -> dict[str, float]:
        """Mean bytes by source."""
        sources = dict.fromkeys(source for result in self.results for source in result.moved)
        return {s: statistics.fmean(result.moved.get(s, 0.0) for result in self.results) for s in sources}


@dataclasses.dataclass(frozen=True)
class _Job:
    scenario: Scenario
    seed: int
    until: float
    log: Path | None


def study(
    cases: Sequence[Case], seeds: Sequence[int], until: float, tell: Callable[[float], None] = lambda share: None
) -> list[Summary]:
    """Simulate every case with every seed.

    The results do not depend on how many cores there are. An interrupt ends all processes.

    :param until: when to end each at the latest, in virtual seconds.
    :param tell: told now and then which share of all is done.
    """
    jobs = [
        _Job(case.scenario, seed, until, case.log if seed == seeds[0] else None) for case in cases for seed in seeds
    ]
    results: dict[int, Result] = {}
    begun = time.monotonic()
    for number, job in enumerate(jobs):
        left = len(jobs) - number
        if number and (time.monotonic() - begun) / number * left > _POOL_SECONDS and left > 1:
            break
        results[number] = _play(job, lambda share, n=number: tell((n + share) / len(jobs)))  # type: ignore[misc]
        tell((number + 1) / len(jobs))
    for number, result in _on_all_cores(jobs, len(results)):
        results[number] = result
        tell(len(results) / len(jobs))
    count = len(seeds)
    return [Summary(case, tuple(results[n * count + k] for k in range(count))) for n, case in enumerate(cases)]


def _on_all_cores(jobs: Sequence[_Job], first: int) -> Iterator[tuple[int, Result]]:
    if first == len(jobs):
        return
    cores = min(len(os.sched_getaffinity(0)), len(jobs) - first)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(cores, context)
    try:
        # Who is started with Ctrl-C blocked does not hear it: this process ends the others.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            waiting = {pool.submit(_play, jobs[number]): number for number in range(first, len(jobs))}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _play(job: _Job, tell: Callable[[float], None] | None = None) -> Result:
    """Run a job once, with its event log if there is to be one."""
    listeners: list[Listener] = []

    def listen(event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        for each in listeners:
            each(event, commands)

    with contextlib.ExitStack() as stack:
        built = build(job.scenario, job.seed, listen if tell or job.log else None)
        if tell is not None:
            listeners.append(_counting(built, tell))
        if job.log is not None:
            job.log.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(job.log / LOG, "w", encoding="utf-8"))
            file.write(first_line(built.simulation.scheduler, job.scenario.site.level, simulated=True) + "\n")
            listeners.append(lambda event, commands: _write(file, event, commands))
        return run(built, job.until)


def _write(file: TextIO, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
    file.write(line(event, commands) + "\n")


def _counting(built: Built, tell: Callable[[float], None]) -> Listener:
    """Return a listener that tells now and then which share of the items is done."""
    total, counters = sum(built.items.values()), built.simulation.scheduler.state.counters
    events = 0

    def listen(event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        nonlocal events
        events += 1
        if events % 1000 == 0:
            tell((counters.done + counters.dead) / total)

    return listen
