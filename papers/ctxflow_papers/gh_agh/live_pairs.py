"""Sites drawn for live placement beside each scaling policy, and what each pair of them costs on the simulated engine.

A pair is compared with either policy alone: the placement with `fixed` scaling, the scaling with the default placement.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ctxflow.executors.simulated import Availability, SimulatedEngine, SimulatedMachine
from ctxflow.policies.registry import DEFAULTS, names
from ctxflow.scheduler import Policies
from ctxflow.scheduler import events as ev
from ctxflow.simulator import Drawn, GpuTimes, Simulation, Workload, pools
from ctxflow.simulator.pools import MixedTimes

Arrivals = list[tuple[float, str, int]]
HOUR = 3600.0
SPREAD = 0.2
"""The standard deviation of an item's seconds, as a share of their mean."""


@dataclasses.dataclass(frozen=True)
class PairTier:
    """A tier of a drawn site.

    :ivar price: dollars an hour of a worker. :ivar workers: what the site file says.
    :ivar gives: how many there are in truth, from `since` on.
    :ivar up, down: mean seconds between evictions and until the worker can be had again; None for no evictions.
    """

    price: float
    workers: int
    boot_seconds: float = 10.0
    gives: int | None = None
    since: float = 0.0
    up: float | None = None
    down: float = 60.0

    def available(self) -> Availability:
        """Return when a machine of it can be had."""
        if self.up is not None:
            return pools.evicted(self.up, self.down)
        return pools.during(self.since)


@dataclasses.dataclass(frozen=True)
class PairApp:
    """An app: the seconds of an item by tier, of a load, the items of a call, and when how many arrive."""

    seconds: Mapping[str, float]
    load_seconds: float
    batch_size: int
    arrivals: Sequence[tuple[float, int]]


@dataclasses.dataclass(frozen=True)
class PairSite:
    """Tiers and apps by name."""

    tiers: Mapping[str, PairTier]
    apps: Mapping[str, PairApp]
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class PairOutcome:
    """What a run came to.

    :ivar dollars: of all workers' hours, at their tiers' prices. :ivar seconds: until the last answer.
    :ivar hours: of workers by tier.
    """

    dollars: float
    seconds: float
    hours: Mapping[str, float]


def run_pair(site: PairSite, placement: Any, scaling: Any, **options: Any) -> PairOutcome:
    """Run a site's work with two policies, by name or with options.

    :param options: of `Simulation`, such as a listener.
    :raises RuntimeError: if work is left that nothing will do any more.
    """
    machines = [
        SimulatedMachine(f"{name}-{n}", name, name, gpus=1, available=tier.available())
        for name, tier in site.tiers.items()
        for n in range(tier.workers if tier.gives is None else tier.gives)
    ]
    times = MixedTimes(
        {
            name: {(tier, tier): GpuTimes({tier: seconds}, SPREAD) for tier, seconds in app.seconds.items()}
            for name, app in site.apps.items()
        },
        {name: {(tier, tier): Drawn(app.load_seconds) for tier in site.tiers} for name, app in site.apps.items()},
        {name: Drawn(tier.boot_seconds) for name, tier in site.tiers.items()},
    )
    contexts = [ev.ContextSpec(name, name, gpus=1) for name in site.apps]
    apps = [ev.AppSpec(name, name, name, batch_size=app.batch_size) for name, app in site.apps.items()]
    arrivals = sorted((time, name, count) for name, app in site.apps.items() for time, count in app.arrivals)
    tiers = [
        ev.TierSpec(name, 0, tier.workers, gpus=1, price=tier.price, boot_seconds=tier.boot_seconds)
        for name, tier in site.tiers.items()
    ]
    policies = Policies.chosen({"placement": placement, "scaling": scaling})
    engine = SimulatedEngine(machines, times, None, site.seed)
    found = Simulation(engine, policies, Workload(contexts, apps, arrivals), tiers, seed=site.seed, **options).run()
    hours = worker_hours(found.presence, found.seconds)
    dollars = sum(held * site.tiers[name].price for name, held in hours.items())
    return PairOutcome(dollars, found.seconds, hours)


def worker_hours(presence: Iterable[tuple[float, SimulatedMachine, int]], end: float) -> dict[str, float]:
    """Return the hours that workers were there until a time, by tier.

    >>> worker_hours([(0.0, SimulatedMachine("m", tier="a"), 1), (1800.0, SimulatedMachine("m", tier="a"), -1)], 7200)
    {'a': 0.5}
    """
    found: dict[str, float] = {}
    for time, machine, change in presence:
        found[machine.tier] = found.get(machine.tier, 0.0) + change * max(0.0, end - time) / HOUR
    return found


@dataclasses.dataclass(frozen=True)
class PairComparison:
    """A pair of policies beside the placement alone, with `fixed` scaling, and the scaling alone, placed everywhere."""

    pair: PairOutcome
    placement: PairOutcome
    scaling: PairOutcome

    @property
    def cost(self) -> float:
        """Return its dollars, those of the cheaper one being 1."""
        return self.pair.dollars / min(self.placement.dollars, self.scaling.dollars)

    @property
    def makespan(self) -> float:
        """Return its seconds, those of the faster one being 1."""
        return self.pair.seconds / min(self.placement.seconds, self.scaling.seconds)

    def worse(self, tolerance: float, seconds: float) -> str:
        """Return in what it is worse than the better of the two; "" if in nothing.

        It may cost `tolerance` more than the cheaper; it may take as much longer than the faster, and `seconds` besides
        for finding out what tiers give, or longer if it costs as much less. It is never that slower than both.
        """
        faster, slower = sorted((self.placement, self.scaling), key=lambda each: each.seconds)
        if self.cost > 1 + tolerance:
            return f"costs {self.cost:.2f} times as much as the cheaper one"
        late = self.pair.seconds - (1 + tolerance) * faster.seconds - seconds
        if late > 0 and self.pair.dollars > (1 - tolerance) * faster.dollars:
            return f"takes {self.makespan:.2f} times as long as the faster one, and costs no less"
        if self.pair.seconds > (1 + tolerance) * slower.seconds:
            return f"takes {self.pair.seconds / slower.seconds:.2f} times as long as the slower one"
        return ""


def compare_pairs(site: PairSite) -> dict[tuple[str, str], PairComparison]:
    """Return all pairs of a placement and a scaling policy, but those in which either is the default's."""
    placements = [name for name in names("placement") if name != DEFAULTS["placement"]]
    scalings = [name for name in names("scaling") if name != DEFAULTS["scaling"]]
    placed = {name: run_pair(site, name, DEFAULTS["scaling"]) for name in placements}
    scaled = {name: run_pair(site, DEFAULTS["placement"], name) for name in scalings}
    return {
        (one, other): PairComparison(run_pair(site, one, other), placed[one], scaled[other])
        for one in placements
        for other in scalings
    }


def slow_boot_site(seed: int = 0, minutes: int = 60) -> PairSite:
    """Return three tiers at 0.27, 0.81 and 1.54 $ an hour, the cheaper the slower to boot, and a steady load.

    The price grows more than the speed: the cheapest tier does most for a dollar.
    """
    paces = {"cheap": 1.0, "middle": 0.6, "fast": 0.4}
    boots = {"cheap": 60.0, "middle": 20.0, "fast": 5.0}
    prices = {"cheap": 0.27, "middle": 0.81, "fast": 1.54}
    tiers = {name: PairTier(prices[name], 8, boots[name]) for name in paces}
    apps = {
        name: PairApp(
            {t: seconds * pace for t, pace in paces.items()}, load, 20, [(60.0 * n, of) for n in range(minutes)]
        )
        for name, seconds, load, of in (("short", 0.8, 15.0, 200), ("long", 3.0, 40.0, 60))
    }
    return PairSite(tiers, apps, seed)


def draw_site(seed: int) -> PairSite:
    """Draw a site: two to four tiers, one to three apps, and how their items arrive.

    Prices are 0.2 to 2 $ an hour, speeds grow with them less or more than in proportion, apps prefer other tiers
    besides. A third of the tiers have evictions, a third give fewer workers than the site says, of which some come
    late; one tier gives all it promises. The work takes 15 to 60 % of what is there for an hour.
    """
    drawn = random.Random(f"pairs/{seed}")
    tiers: dict[str, PairTier] = {}
    count = drawn.choice([2, 3, 3, 4])
    sure = drawn.randrange(count)
    paces: dict[str, float] = {}
    for number in range(count):
        price = round(math.exp(drawn.uniform(math.log(0.2), math.log(2.0))), 2)
        workers = drawn.choice([4, 6, 8, 12, 16])
        kind = "sure" if number == sure else drawn.choice(["sure", "evicted", "fewer", "late"])
        gives = drawn.choice([0, 1, workers // 3]) if kind == "fewer" else None
        since = drawn.uniform(300.0, 1800.0) if kind == "late" else 0.0
        up = drawn.uniform(400.0, 1800.0) if kind == "evicted" else None
        boot = math.exp(drawn.uniform(math.log(5.0), math.log(120.0)))
        tiers[f"tier{number}"] = PairTier(price, workers, boot, gives, since, up)
        paces[f"tier{number}"] = price ** -drawn.uniform(0.2, 1.1)
    there = {name: tier.workers if tier.gives is None else tier.gives for name, tier in tiers.items()}
    apps: dict[str, PairApp] = {}
    many, load = drawn.choice([1, 2, 2, 3]), drawn.uniform(0.15, 0.6)
    for number in range(many):
        usual = math.exp(drawn.uniform(math.log(0.3), math.log(4.0)))
        seconds = {name: usual * pace * drawn.uniform(0.7, 1.4) for name, pace in paces.items()}
        power = sum(there[name] / seconds[name] for name in tiers)
        items = max(100, int(load * HOUR * power / many * drawn.uniform(0.5, 1.5)))
        size = max(1, min(100, round(drawn.uniform(10.0, 40.0) / usual)))
        apps[f"app{number}"] = PairApp(seconds, drawn.uniform(5.0, 60.0), size, _drawn_arrivals(drawn, items))
    return PairSite(tiers, apps, seed)


def _drawn_arrivals(drawn: random.Random, items: int) -> list[tuple[float, int]]:
    """Return how many items come when: all at once, steadily, in bursts, or ever more, over up to an hour."""
    kind = drawn.choice(["bulk", "steady", "bursts", "rise"])
    if kind == "bulk":
        return [(0.0, items)]
    if kind == "bursts":
        times = [n * HOUR / 5 for n in range(5)]
        return [(time, max(1, items // 5)) for time in times]
    weights = [1.0 if kind == "steady" else 0.2 + n / 40 for n in range(60)]
    return [(60.0 * n, max(1, round(items * weight / sum(weights)))) for n, weight in enumerate(weights)]
