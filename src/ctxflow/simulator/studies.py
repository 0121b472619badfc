"""Many simulations: cases side by side, each with several seeds, on all cores.

What does not live here: one simulation (building.py, result.py), and how cases are shown (cli/).
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TextIO

from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import first_line, line
from ctxflow.simulator.building import Built, build
from ctxflow.simulator.result import Result, run
from ctxflow.simulator.scenario import Scenario
from ctxflow.simulator.simulation import Listener

LOG = "events.jsonl"
_POOL_SECONDS = 3.0  # What is sooner done than this is not worth another process.


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
    """What came of a case, over its runs."""

    case: Case
    results: tuple[Result, ...]

    def median(self, figure: str) -> float:
        """Of a figure of `Result`."""
        return float(statistics.median(getattr(result, figure) for result in self.results))

    def spread(self, figure: str) -> float:
        """The largest less the smallest."""
        values = [getattr(result, figure) for result in self.results]
        return float(max(values) - min(values))

    @property
    def finished(self) -> bool:
        """Whether every run came to its end."""
        return all(result.finished for result in self.results)

    @property
    def moved(self) -> dict[str, float]:
        """Bytes by source, the means."""
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
    """One run, with its event log if there is to be one."""
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
    """A listener that tells which share of the items is done, now and then."""
    total, counters = sum(built.items.values()), built.simulation.scheduler.state.counters
    events = 0

    def listen(event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        nonlocal events
        events += 1
        if events % 1000 == 0:
            tell((counters.done + counters.dead) / total)

    return listen
