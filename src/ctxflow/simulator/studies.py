"""Scenarios: what one becomes, one run of it, and many cases side by side, with several seeds, on all cores."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from ctxflow.executors.simulated import Fault, SharedPace, SimulatedEngine, SimulatedMachine
from ctxflow.policies.registry import FAMILIES
from ctxflow.scheduler import Policies
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.log import first_line, line
from ctxflow.simulator import pools
from ctxflow.simulator.pools import Drawn, GpuTimes, Kind, MixedTimes
from ctxflow.simulator.recorded_log import RecordedPlace
from ctxflow.simulator.scenario import Scenario, ScenarioTier, tiers_of_site
from ctxflow.simulator.simulation import Listener, Simulation, Workload, arrivals_of, mixed_fluid_seconds
from ctxflow.simulator.tree_staging import TreeStaging, has_files, staging_of
from ctxflow.simulator.workload_file import ContextEntry
from ctxflow.sites import Site
from ctxflow.sites.site_model import region_of, region_specs

LOG = "events.jsonl"
_POOL_SECONDS = 3.0  # What takes less than this is not worth another process.


def machines_of(scenario: Scenario) -> tuple[list[SimulatedMachine], dict[str, float]]:
    """Return all machines, and by name how many times longer than their kind those of a recorded run take."""
    machines: list[SimulatedMachine] = []
    paces: dict[str, float] = {}
    for tier in tiers_of_site(scenario.site):
        places, steps = scenario.places(tier.spec.name), scenario.steps(tier.spec.name)
        if places:
            machines += _as_recorded(scenario.site, tier, places, paces)
        elif steps:
            machines += pools.with_counts(
                _plain(scenario, tier), [(time, min(count, tier.spec.maximum)) for time, count in steps]
            )
        else:
            machines += _plain(scenario, tier)
    evictions = scenario.workload.evictions
    if evictions.drain_from is not None:
        machines = pools.drained(machines, evictions.drain_from, evictions.drain_every)
    return machines, paces


def _plain(scenario: Scenario, tier: ScenarioTier) -> list[SimulatedMachine]:
    """Return a tier's machines, which are always available or evicted at random."""
    evictions, spec = scenario.workload.evictions, tier.spec
    rate = evictions.per_hour if isinstance(evictions.per_hour, float) else evictions.per_hour.get(spec.name, 0.0)
    available = pools.evicted(3600 / rate, evictions.away_seconds) if rate else pools.during(0.0)
    together = scenario.workload.workers_per_host
    return [
        SimulatedMachine(
            f"{spec.name}-{number}",
            tier.gpu_model,
            spec.name,
            region_of(scenario.site.regions, scenario.site.home, spec.name),
            f"{spec.name}-host-{number // together}" if together > 1 else "",
            gpus=spec.gpus,
            slots=scenario.site.slots,
            memory=tier.memory,
            available=available,
        )
        for number in range(spec.maximum)
    ]


def _as_recorded(
    site: Site, tier: ScenarioTier, places: Sequence[RecordedPlace], paces: dict[str, float]
) -> Iterator[SimulatedMachine]:
    """Yield a tier's machines as a recorded run had them; more workers than it had are copies of its first ones."""
    for number in range(tier.spec.maximum):
        copy, which = divmod(number, len(places))
        for stay in places[which].stays:
            name = f"{stay.worker}{'+' * copy}"
            paces[name] = stay.pace
            host = f"{stay.host}{'+' * copy}"
            region = region_of(site.regions, site.home, tier.spec.name, host)
            model = stay.gpu_model or tier.gpu_model
            yield SimulatedMachine(
                name, model, tier.spec.name, region, host, stay.gpus, site.slots, stay.memory, stay.gpu_memory,
                pools.during(stay.joined, stay.until),
            )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Built:
    """A simulation that is ready to run, and what its figures are computed with; `items`: of each app."""

    simulation: Simulation
    times: MixedTimes
    staging: TreeStaging
    items: Mapping[str, int]
    faults: Sequence[Fault] = ()


def build(scenario: Scenario, seed: int = 0, listener: Listener | None = None) -> Built:
    """Build the simulation of a scenario; a ValueError if the workload has no seconds for some worker."""
    site, workload = scenario.site, scenario.workload
    machines, paces = machines_of(scenario)
    tiers = tiers_of_site(site)
    times = _times(scenario, machines, paces, tiers)
    staging = staging_of(workload, site.taskvine.fan_out)
    salvage = {app.name for app in workload.apps if app.salvage}
    faults = pools.faults_of(workload.faults, machines, seed)
    notice = workload.evictions.notice_seconds
    poison = {app.name: app.poison for app in workload.apps if app.poison is not None}
    engine = SimulatedEngine(
        machines, times, staging, seed, notice, salvage, faults=faults, poison=poison, zygote=workload.zygote
    )
    policies = Policies.chosen({family: getattr(site, family) for family in FAMILIES})
    arrivals = arrivals_of(workload, seed)
    apps = [
        ev.AppSpec(
            app.name,
            app.name,
            workload.context_of(app),
            app.batch,
            app.batch_size,
            app.priority,
            overlaps=app.tokens_per_second is not None,
        )
        for app in workload.apps
    ]
    specs = [tier.spec for tier in tiers]
    simulation = Simulation(
        engine, policies, Workload(list(_contexts(scenario, tiers)), apps, arrivals), specs, scenario.limits, seed,
        site.start_when, listener=listener, regions=region_specs(site.regions, site.home),
    )  # fmt: skip
    items = {app.name: sum(count for _, name, count in arrivals if name == app.name) for app in workload.apps}
    return Built(simulation, times, staging, items, faults)


def _times(
    scenario: Scenario, machines: Iterable[SimulatedMachine], paces: Mapping[str, float], tiers: Sequence[ScenarioTier]
) -> MixedTimes:
    workload = scenario.workload
    models = {tier.spec.name: tier.gpu_model for tier in tiers}
    kinds = list(dict.fromkeys((machine.tier, machine.gpu_model) for machine in machines))
    shared = {
        app.name: {
            kind: SharedPace(
                _figure(app.tokens_per_second, kind, models), app.knee, app.bend, None, 1.0, app.tokens, app.spread
            )
            for kind in kinds
        }
        for app in workload.apps
        if app.tokens_per_second is not None
    }
    items = {
        app.name: {
            kind: GpuTimes(
                # With enough of them in flight, where they overlap.
                {
                    "": app.tokens / shared[app.name][kind].best
                    if app.name in shared
                    else _figure(app.item_seconds, kind, models)
                },
                app.spread,
                Drawn(app.call_seconds),
            )
            for kind in kinds
        }
        for app in workload.apps
    }
    loading = {context.name: {kind: _load(context, kind, models) for kind in kinds} for context in workload.contexts}
    importing = {
        context.name: {kind: _import_share(context, kind, models) for kind in kinds} for context in workload.contexts
    }
    matching = {}
    for tier in tiers:
        if scenario.places(tier.spec.name):
            continue  # They join when they joined.
        mean = workload.matching.seconds if tier.spec.boot_seconds is None else tier.spec.boot_seconds
        matching[tier.spec.name] = Drawn(mean, workload.matching.spread * mean)
    dispatched = Drawn(workload.dispatch_seconds)
    return MixedTimes(items, loading, matching, dispatched, paces, shared, importing)


def _figure(given: float | dict[str, float], kind: Kind, models: Mapping[str, str]) -> float:
    if not isinstance(given, dict):
        return given
    tier, model = kind
    found = next((given[key] for key in (model, tier, models[tier]) if key in given), None)
    if found is None:
        raise ValueError(f"the workload has no seconds for workers of tier {tier} with {model}: add {tier} = SECONDS")
    return found


def _load(context: ContextEntry, kind: Kind, models: Mapping[str, str]) -> Drawn:
    mean = _figure(context.load_seconds, kind, models)
    return Drawn(mean, context.load_spread * mean)


def _import_share(context: ContextEntry, kind: Kind, models: Mapping[str, str]) -> float:
    """Return the share of a load that its imports and the start of its process take."""
    load = _figure(context.load_seconds, kind, models)
    if context.import_seconds is None or not load:
        return 0.0
    return min(1.0, _figure(context.import_seconds, kind, models) / load)


def _contexts(scenario: Scenario, tiers: Iterable[ScenarioTier]) -> Iterator[ev.ContextSpec]:
    yield ev.ContextSpec(ev.PLAIN, "")
    usual = min((tier.spec.gpus for tier in tiers), default=0)
    for context in scenario.workload.contexts:
        yield ev.ContextSpec(
            context.name,
            context.name,
            has_files(context),
            min(1, usual) if context.gpus is None else context.gpus,
            None if context.memory_gb is None else int(context.memory_gb * 1e9),
            None if context.gpu_memory_gb is None else int(context.gpu_memory_gb * 1e9),
            context.level or scenario.site.level,
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """The figures of a simulated run. Seconds of virtual time; bytes.

    :ivar seconds: the makespan, or the time at which the simulation was ended.
    :ivar fluid_seconds: no scheduler could have been done earlier with these workers.
    :ivar workers: connected, averaged over the run.
    :ivar lost_items: items of batches that an eviction ended, and `lost_seconds` of work on them.
    :ivar wasted_items: items that duplicates answered second.
    :ivar raised: calls that raised and builds that failed, on bad hosts.
    :ivar moved: bytes that came from each origin, and from "peers".
    :ivar tokens: of items of apps whose calls overlap, that were answered.
    :ivar call_seconds: of the workers in calls that were answered; those that overlap share each second.
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
    tokens: float = 0.0
    call_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second over the whole run, of apps whose calls overlap."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def items_per_second(self) -> float:
        """Items a second over the whole run."""
        return self.done / self.seconds if self.seconds else 0.0

    @property
    def efficiency(self) -> float:
        """The fluid bound divided by the makespan: at most 1."""
        return self.fluid_seconds / self.seconds if self.seconds and self.finished else 0.0


def play(scenario: Scenario, seed: int = 0, until: float = math.inf, listener: Listener | None = None) -> Result:
    """Simulate a scenario once, until virtual seconds at the latest; `listener` is called with every event.

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
        tokens=account.tokens,
        call_seconds=account.call_seconds,
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """One scenario with its name; `log`: the folder for the event log of its first run, None for none."""

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
    """Simulate every case with every seed, on all cores; an interrupt ends all processes.

    :param until: when to end each at the latest, in virtual seconds.
    :param tell: called now and then with the share of all that is done.
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
        # Processes that are started with Ctrl-C blocked ignore it: this one ends them.
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
            listeners.append(lambda event, commands: file.writelines((line(event, commands), "\n")))
        return run(built, job.until)


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
