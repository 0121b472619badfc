"""Workloads that the league plays on: seeded generators, fitted to public traces whose parameters are in fits.json.

A seed draws phases, rates, times, zones and bad hosts, and not noise alone: an item takes as long as its app says, so
that bounds hold on every seed. What fits.json holds is made by benchmarks/league_fits.py, which names the sources.
"""

from __future__ import annotations

import functools
import importlib.resources
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ctxflow.simulator.scenario import Scenario
from ctxflow.simulator.workload_file import WorkloadFile
from ctxflow.sites import Site

Arrival = tuple[float, int]
"""When, and how many items."""

A10, TITAN = "a10", "titan"
SECONDS = {A10: 0.2727, TITAN: 0.3846}
"""Seconds of an item of the pervasive-context paper on its two kinds of GPU (derived from what it prints)."""
SLOWER = SECONDS[TITAN] / SECONDS[A10]
LOAD = 15.0
"""Seconds of loading its context (derived: the mean of what it prints)."""
PRICES = {A10: 1.0, TITAN: 0.6, "spot": 0.3, "steady": 1.0}
"""Dollars an hour, chosen in the proportions of clouds' offers: the slower kind is the cheaper one for each item."""
BOOT = {A10: 60.0, TITAN: 120.0, "spot": 120.0, "steady": 60.0}


@functools.cache
def fits() -> Mapping[str, Any]:
    """Return the parameters that were fitted to public traces."""
    found: Mapping[str, Any] = json.loads(
        importlib.resources.files("ctxflow.league").joinpath("fits.json").read_text(encoding="utf-8")
    )
    return found


def poisson(chance: random.Random, per_second: float, begin: float, end: float) -> Iterator[float]:
    """Yield random times at a rate."""
    time = begin
    while per_second > 0 and (time := time + chance.expovariate(per_second)) < end:
        yield time


def spot_nodes(chance: random.Random, zone: Mapping[str, Any], seconds: float) -> list[tuple[float, int]]:
    """Draw how many nodes of a spot market there are from when on: stretches of none, some or all of them.

    What is drawn begins within a stretch, and after so many seconds all nodes stay.
    """
    states, nodes = zone["states"], int(zone["nodes"])
    state, time = chance.choice(sorted(states)), -chance.uniform(0.0, 3600.0)
    steps: list[tuple[float, int]] = []
    while time < seconds:
        some = chance.randrange(1, nodes) if nodes > 1 else nodes
        count = {"none": 0, "some": some, "all": nodes}[state]
        steps.append((max(0.0, time), count))
        time += chance.lognormvariate(states[state]["mu"], states[state]["sigma"])
        after = states[state]["then"]
        state = chance.choices(list(after), list(after.values()))[0]
    begun = max(number for number, (when, _) in enumerate(steps) if when == 0.0)
    return [*steps[begun:], (seconds, nodes)]


def flash(chance: random.Random, usual: float, times: float, begin: float, lasts: float, end: float) -> list[float]:
    """Draw arrivals at a usual rate that for a while is so many times as high, after a minute's rise."""
    shares = [(0.0, 1.0), (begin, 1.0), *((begin + 10 * n, 1 + (times - 1) * n / 6) for n in range(1, 7))]
    shares += [(begin + lasts, 1.0), (end, 1.0)]
    steps = itertools.pairwise(shares)
    return [time for (since, share), (until, _) in steps for time in poisson(chance, usual * share, since, until)]


def _scenario(
    apps: Iterable[Mapping[str, Any]],
    contexts: Iterable[Mapping[str, Any]],
    workers: Mapping[str, int],
    traces: Mapping[str, Sequence[tuple[float, int]]] | None = None,
    **more: Any,
) -> Scenario:
    tiers = [
        {"name": name, "workers": count, "price": PRICES[name], "boot_seconds": BOOT[name], "memory_gb": 64}
        for name, count in workers.items()
    ]
    names = {name: name for name in traces or {}}
    workload = WorkloadFile.model_validate(
        {
            "apps": [{"spread": 0.0, "call_seconds": 0.2, **app} for app in apps],
            "contexts": [{"load_spread": 0.0, **context} for context in contexts],
            "matching": {"spread": 0.0},
            **({"evictions": {"trace": names}} if names else {}),
            **more,
        }
    )
    site = Site.model_validate({"name": "league", "engine": "taskvine", "tiers": tiers})
    return Scenario(site, workload, {name: list(steps) for name, steps in (traces or {}).items()})


def _grouped(times: Iterable[float], count: int = 1) -> list[Arrival]:
    return [(time, count) for time in sorted(times)]


def _by_tier(seconds: float, workers: Iterable[str]) -> dict[str, float]:
    return {tier: seconds * (SLOWER if tier in (TITAN, "steady") else 1.0) for tier in workers}


def azure_code(seed: int) -> Scenario:
    """Draw requests of Azure's code assistant: its arrivals from some phase on, thinned, in four classes of sizes."""
    chance = random.Random(f"azure-code/{seed}")
    found = fits()["azure"]
    counts, bin_seconds, classes = found["arrivals"], found["seconds"], found["classes"]
    phase, share = chance.randrange(len(counts)), chance.uniform(0.4, 0.9)
    times: dict[str, list[float]] = {each["name"]: [] for each in classes}
    for number, count in enumerate([*counts[phase:], *counts[:phase]]):
        for each in chance.choices(classes, [each["share"] for each in classes], k=count):
            if chance.random() < share:
                times[each["name"]].append((number + chance.random()) * bin_seconds)
    workers = {A10: 8, TITAN: 8}
    apps = [
        {
            "name": each["name"],
            "context": each["name"].partition("-")[0],
            "arrivals": _grouped(times[each["name"]]),
            # Chosen: an engine that reads 6,000 tokens a second and writes 40.
            "item_seconds": _by_tier(each["prompt_tokens"] / 6000 + each["answer_tokens"] / 40, workers),
        }
        for each in classes
    ]
    contexts = [{"name": "short", "load_seconds": 20.0}, {"name": "long", "load_seconds": 40.0}]
    return _scenario(apps, contexts, workers)


def flash_crowd(seed: int) -> Scenario:
    """Draw three apps' items over forty minutes, of which one's come six to ten times as fast for some minutes."""
    chance = random.Random(f"flash-crowd/{seed}")
    workers, end, crowd = {A10: 10, TITAN: 10}, 2400.0, chance.randrange(3)
    apps = []
    for number in range(3):
        usual, seconds = chance.uniform(0.4, 1.2), chance.uniform(0.5, 1.2)
        times = chance.uniform(6.0, 10.0) if number == crowd else 1.0
        came = flash(chance, usual, times, chance.uniform(600.0, 1200.0), chance.uniform(240.0, 420.0), end)
        apps.append(
            {
                "name": f"app-{number}",
                "context": f"model-{number}",
                "arrivals": _grouped(came),
                "item_seconds": _by_tier(seconds, workers),
            }
        )
    return _scenario(apps, [{"name": f"model-{n}", "load_seconds": LOAD} for n in range(3)], workers)


def many_models(seed: int) -> Scenario:
    """Draw bursts of items of eight apps, each with a model of its own, on ten workers: every model wants each GPU."""
    chance = random.Random(f"many-models/{seed}")
    workers, end = {A10: 5, TITAN: 5}, 1800.0
    load, burst = chance.uniform(0.4, 0.7), 40
    weights = [chance.uniform(0.3, 1.7) for _ in range(8)]
    mean = 0.5 * (1 + SLOWER)
    apps = []
    for number, weight in enumerate(weights):
        bursts = load * weight / sum(weights) * sum(workers.values()) / mean / burst
        came = [(time, chance.randint(burst // 2, 3 * burst // 2)) for time in poisson(chance, bursts, 0.0, end)]
        arrivals = came or [(end / 2, burst)]
        apps.append(
            {"name": f"app-{number}", "context": f"model-{number}", "arrivals": arrivals,
             "item_seconds": _by_tier(1.0, workers)}
        )  # fmt: skip
    return _scenario(apps, [{"name": f"model-{n}", "load_seconds": LOAD} for n in range(8)], workers)


_DAY = ((0.0, 10.0), (3.0, 12.0), (4.0, 14.4), (8.0, 5.0), (13.0, 2.2), (21.0, 2.2), (24.0, 14.4))
"""Hours from 10 in the morning on, and workers: a fifth of the pervasive-context paper's opportunistic cluster, whose
averages were 64 in the afternoon and 11 at night (what is between them is chosen)."""


def campus_steps(chance: random.Random, start: float, wave: float = 0.25) -> dict[str, list[tuple[float, int]]]:
    """Draw the workers of a campus cluster by ten minutes, from an hour of its day on, of either kind.

    :param wave: what its owners take or leave, as a share of what there usually is.
    """
    steps: dict[str, list[tuple[float, int]]] = {A10: [], TITAN: []}
    for slot in range(24 * 6):
        hour = (start + slot / 6) % 24
        (since, low), (until, high) = next(pair for pair in itertools.pairwise(_DAY) if hour < pair[1][0])
        usual = low + (high - low) * (hour - since) / (until - since)
        count = max(1, min(20, round(usual * chance.lognormvariate(0.0, wave))))
        steps[A10].append((600.0 * slot, (count + 1) // 2))
        steps[TITAN].append((600.0 * slot, count // 2))
    for each in steps.values():  # Nobody waits for ever.
        each.append((24 * 3600.0, 10))
    return steps


def campus_day(seed: int) -> Scenario:
    """Draw jobs of three apps that are submitted over half a day of a campus cluster, from some hour on."""
    chance = random.Random(f"campus-day/{seed}")
    workers = {A10: 10, TITAN: 10}
    traces = campus_steps(chance, chance.uniform(0.0, 20.0))

    def came() -> list[Arrival]:
        return [(chance.uniform(0.0, 6 * 3600.0), chance.randint(300, 1800)) for _ in range(4)]

    return _jobs_of_three(chance, workers, traces, came, item_seconds=(2.0, 4.0), load_seconds=(15.0, 60.0))


_ZONES = ("16-node_us-east-2b", "16-node_us-west-2a", "4-node_us-west-2c")


def spot_market(seed: int) -> Scenario:
    """Draw jobs of three apps over four hours, on the cheap nodes of one zone's spot market and four steady workers."""
    chance = random.Random(f"spot-market/{seed}")
    zone = fits()["spot"][_ZONES[seed % len(_ZONES)]]
    workers = {"spot": int(zone["nodes"]), "steady": 4}
    traces = {"spot": spot_nodes(chance, zone, 8 * 3600.0)}

    def came() -> list[Arrival]:
        jobs = [(time, chance.randint(200, 1000)) for time in poisson(chance, 1 / 3600, 0.0, 4 * 3600.0)]
        return [(chance.uniform(0, 600), 500), *jobs]

    return _jobs_of_three(chance, workers, traces, came, item_seconds=(1.0, 4.0), load_seconds=(15.0, 90.0))


def _jobs_of_three(
    chance: random.Random, workers: Mapping[str, int], traces: Any, came: Callable[[], list[Arrival]], *,
    item_seconds: tuple[float, float], load_seconds: tuple[float, float],
) -> Scenario:  # fmt: skip
    """Return jobs of three apps with a model each; seconds are drawn from their ranges."""
    apps = [
        {"name": f"job-{number}", "context": f"model-{number}", "arrivals": sorted(came()),
         "item_seconds": _by_tier(chance.uniform(*item_seconds), workers), "call_seconds": 0.5}
        for number in range(3)
    ]  # fmt: skip
    contexts = [{"name": f"model-{n}", "load_seconds": chance.uniform(*load_seconds)} for n in range(3)]
    return _scenario(apps, contexts, workers, traces)


def _job(
    chance: random.Random, workers: Mapping[str, int], traces: Any, items: int, seconds: float, **more: Any
) -> Scenario:
    app = {"name": "job", "context": "model", "items": items, "item_seconds": _by_tier(seconds, workers)}
    app |= {"call_seconds": chance.uniform(0.2, 3.0)}
    return _scenario([app], [{"name": "model", "load_seconds": chance.uniform(10, 60)}], workers, traces, **more)


def spot_job(seed: int) -> Scenario:
    """Draw one large job on the nodes of a zone's spot market."""
    chance = random.Random(f"spot-job/{seed}")
    zone = fits()["spot"][_ZONES[seed % len(_ZONES)]]
    nodes = int(zone["nodes"])
    seconds = math.exp(chance.uniform(math.log(0.3), math.log(6.0)))
    return _job(
        chance,
        {"spot": nodes},
        {"spot": spot_nodes(chance, zone, 24 * 3600.0)},
        round(nodes * chance.uniform(2.0, 4.0) * 3600 / seconds),
        seconds,
    )


def campus_job(seed: int) -> Scenario:
    """Draw one large job on a campus cluster, begun at some hour of its day."""
    chance = random.Random(f"campus-job/{seed}")
    seconds = math.exp(chance.uniform(math.log(0.3), math.log(6.0)))
    traces = campus_steps(chance, chance.uniform(0.0, 24.0), wave=0.35)
    return _job(chance, {A10: 10, TITAN: 10}, traces, round(chance.uniform(30e3, 90e3) / seconds), seconds)


def drained_job(seed: int) -> Scenario:
    """Draw the pervasive-context paper's job on a pool of twenty, of which all but a few are taken one by one."""
    chance = random.Random(f"drained-job/{seed}")
    begin, every, left = chance.uniform(600.0, 1200.0), chance.uniform(30.0, 120.0), chance.randint(2, 6)
    traces = {
        tier: [(0.0, 10), *((begin + every * (n + 8 * late), 9 - n) for n in range(10 - left // 2))]
        for late, tier in enumerate((A10, TITAN))
    }
    return _job(chance, {A10: 10, TITAN: 10}, traces, 100_000, SECONDS[A10])


def few_long_items(seed: int) -> Scenario:
    """Draw a job of few, long items on a spot market: what is lost with a batch is a large part of it."""
    chance = random.Random(f"few-long-items/{seed}")
    zone = fits()["spot"][_ZONES[seed % 2]]
    nodes = int(zone["nodes"])
    seconds = chance.uniform(30.0, 120.0)
    traces = {"spot": spot_nodes(chance, zone, 24 * 3600.0)}
    more = {"faults": [{"kind": "slow", "share": 0.2, "factor": chance.uniform(1.5, 3.0)}]}
    return _job(chance, {"spot": nodes}, traces, round(nodes * 5400 / seconds), seconds, **more)


def owners_return(seed: int) -> Scenario:
    """Draw a job on a campus's desktops, each of which its owner takes back two to twelve times an hour."""
    chance = random.Random(f"owners-return/{seed}")
    evictions = {
        "per_hour": chance.uniform(2.0, 12.0),
        "away_seconds": chance.uniform(60.0, 600.0),
        "notice_seconds": chance.choice((0.0, 10.0)),
    }
    seconds = math.exp(chance.uniform(math.log(0.3), math.log(6.0)))
    return _job(chance, {A10: 10, TITAN: 10}, None, round(40e3 / seconds), seconds, evictions=evictions)


def azure_in_flight(seed: int) -> Scenario:
    """Draw a job of Azure's requests for engines that run several in flight, on a campus cluster."""
    chance = random.Random(f"azure-in-flight/{seed}")
    classes = fits()["azure"]["classes"]
    tokens = sum(each["share"] * (each["prompt_tokens"] / 10 + each["answer_tokens"]) for each in classes)
    workers = {A10: 10, TITAN: 10}
    knee = math.exp(chance.uniform(math.log(8.0), math.log(48.0)))
    app = {
        "name": "job",
        "context": "model",
        "items": 15_000,
        "tokens": tokens,
        "spread": 1.2,
        "tokens_per_second": {tier: 500.0 / factor for tier, factor in _by_tier(1.0, workers).items()},
        "knee": knee,
        "bend": chance.uniform(1.5, 6.0),
    }
    context = {"name": "model", "load_seconds": chance.uniform(20.0, 60.0)}
    return _scenario([app], [context], workers, campus_steps(chance, chance.uniform(0.0, 24.0), wave=0.35))


def bad_hosts(seed: int, kind: str) -> Scenario:
    """Draw a job on forty workers of ten hosts, of which one to three are bad in one way, from some time on."""
    chance = random.Random(f"bad-hosts/{kind}/{seed}")
    workers = {A10: 20, TITAN: 20}
    fault = {
        "black-hole": {"seconds": chance.uniform(0.0, 2.0)},
        "slow": {"factor": chance.uniform(4.0, 12.0)},
        "flaky-gpu": {"calls": chance.uniform(0.1, 0.5), "seconds": 1.0},
        "no-builds": {"seconds": chance.uniform(1.0, 20.0)},
    }[kind]
    begin = chance.choice((0.0, chance.uniform(150.0, 400.0)))
    faults = [{"kind": kind, "hosts": chance.randint(1, 3), "begin": begin, **fault}]
    return _job(chance, workers, None, 30_000, chance.uniform(0.3, 1.0), faults=faults, workers_per_host=4)
