"""Building the simulation of a scenario: machines and when they are available, times, staging, items."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ctxflow.executors.simulated import Fault, SimulatedEngine, SimulatedMachine
from ctxflow.policies.registry import FAMILIES
from ctxflow.scheduler import Policies
from ctxflow.scheduler import events as ev
from ctxflow.simulator import pools
from ctxflow.simulator.recorded_run import RecordedPlace
from ctxflow.simulator.scenario import Scenario, ScenarioTier, tiers_of_site
from ctxflow.simulator.simulation import Listener, Simulation, Workload
from ctxflow.simulator.times import Drawn, GpuTimes, Kind, MixedTimes
from ctxflow.simulator.tree_staging import Origin, Part, TreeStaging
from ctxflow.simulator.workload_file import AppEntry, ContextEntry, WorkloadFile
from ctxflow.sites import Site
from ctxflow.sites.site_model import region_of, region_specs

_BYTES = 1e9 / 8  # A second, of 1 Gbit/s.


# --- machines, and when they can be had


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


# --- the simulation


@dataclasses.dataclass(frozen=True)
class Built:
    """A simulation that is ready to run, and what its figures are computed with.

    :ivar items: of each app.
    :ivar faults: what is wrong with hosts.
    """

    simulation: Simulation
    times: MixedTimes
    staging: TreeStaging
    items: Mapping[str, int]
    faults: Sequence[Fault] = ()


def build(scenario: Scenario, seed: int = 0, listener: Listener | None = None) -> Built:
    """Build the simulation of a scenario.

    :raises ValueError: if the workload has no seconds for some worker.
    """
    site, workload = scenario.site, scenario.workload
    machines, paces = machines_of(scenario)
    tiers = tiers_of_site(site)
    times = _times(scenario, machines, paces, tiers)
    staging = _staging(workload, site.taskvine.fan_out)
    salvage = {app.name for app in workload.apps if app.salvage}
    faults = pools.faults_of(workload.faults, machines, seed)
    notice = workload.evictions.notice_seconds
    poison = {app.name: app.poison for app in workload.apps if app.poison is not None}
    engine = SimulatedEngine(machines, times, staging, seed, notice, salvage, faults=faults, poison=poison)
    policies = Policies.chosen({family: getattr(site, family) for family in FAMILIES})
    arrivals = arrivals_of(workload, seed)
    apps = [
        ev.AppSpec(app.name, app.name, workload.context_of(app), app.batch, app.batch_size, app.priority)
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
    items = {
        app.name: {
            kind: GpuTimes({"": _figure(app.item_seconds, kind, models)}, app.spread, Drawn(app.call_seconds))
            for kind in kinds
        }
        for app in workload.apps
    }
    loading = {context.name: {kind: _load(context, kind, models) for kind in kinds} for context in workload.contexts}
    matching = {}
    for tier in tiers:
        if scenario.places(tier.spec.name):
            continue  # They join when they joined.
        mean = workload.matching.seconds if tier.spec.boot_seconds is None else tier.spec.boot_seconds
        matching[tier.spec.name] = Drawn(mean, workload.matching.spread * mean)
    dispatched = Drawn(workload.dispatch_seconds)
    return MixedTimes(items, loading, matching, dispatched, paces)


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


def _staging(workload: WorkloadFile, fan_out: int) -> TreeStaging:
    links = workload.links
    files = {
        context.name: [
            Part(
                context.name, context.files_gb * 1e9, context.origin, context.files, context.shared,
                context.unpack_seconds,
            )
        ]
        for context in workload.contexts
        if _has_files(context)
    }  # fmt: skip
    origins = {
        "driver": Origin(links.driver * _BYTES),
        "filesystem": Origin(
            links.filesystem * _BYTES, links.filesystem_reader * _BYTES, links.filesystem_opens or math.inf
        ),
        "internet": Origin(links.internet * _BYTES),
    }
    return TreeStaging(files, origins, links.peers * _BYTES, fan_out)


def _has_files(context: ContextEntry) -> bool:
    return context.files_gb > 0 or context.unpack_seconds > 0


def _contexts(scenario: Scenario, tiers: Iterable[ScenarioTier]) -> Iterator[ev.ContextSpec]:
    yield ev.ContextSpec(ev.PLAIN, "")
    usual = min((tier.spec.gpus for tier in tiers), default=0)
    for context in scenario.workload.contexts:
        yield ev.ContextSpec(
            context.name,
            context.name,
            _has_files(context),
            min(1, usual) if context.gpus is None else context.gpus,
            None if context.memory_gb is None else int(context.memory_gb * 1e9),
            None if context.gpu_memory_gb is None else int(context.gpu_memory_gb * 1e9),
            context.level or scenario.site.level,
        )


def arrivals_of(workload: WorkloadFile, seed: int) -> list[tuple[float, str, int]]:
    """Return (time, app, items) of all arrivals, in order of time."""
    return sorted(arrival for app in workload.apps for arrival in _arrivals(app, seed))


def _arrivals(app: AppEntry, seed: int) -> Iterator[tuple[float, str, int]]:
    if app.arrivals is not None:
        yield from ((time, app.name, count) for time, count in app.arrivals)
    elif app.per_second is None:
        yield app.begin, app.name, app.items
    else:
        generator, time = random.Random(f"{seed}/arrivals/{app.name}"), app.begin
        for _ in range(app.items):
            yield time, app.name, 1
            time += generator.expovariate(app.per_second)
