"""A recorded run as the simulator sees it: what `ctxflow simulate RUN` simulates, measured from its event log.

Nothing is fitted to the makespan. Seconds of an item and of a call beside its items are a weighted least-squares line
through the calls (a batch of n independent items varies as n, so that each is weighted by 1 / n); an item's spread is
what is left of each worker's calls around its own line; a worker's pace is how far it is from its kind, shrunk towards
it by how little it showed (DerSimonian and Laird's random effects). Loads are from the command to the context's being
ready, with what the first call on it takes longer than others (imports, caches, kernels) where that is no chance; and
a call's way is what it took on the driver's clock beyond what its worker says.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ctxflow.errors import counted
from ctxflow.observe.transfers import MANAGER, Transfers
from ctxflow.scheduler import Limits
from ctxflow.scheduler.log import RunSetup, read_setup
from ctxflow.simulator.fitted_pace import FittedPace, fit_pace
from ctxflow.simulator.recorded_log import RecordedPlace, Recording, Sums, call_cost, places_of, read_events, shrunk


@dataclasses.dataclass(frozen=True)
class FittedApp:
    """An app with its fitted parameters. `item_seconds` by kind, `arrivals` as (time, items).

    Of one whose calls overlap, `pace` is how engines ran them together.
    """

    name: str
    context: str
    arrivals: tuple[tuple[float, int], ...]
    item_seconds: Mapping[str, float]
    spread: float
    call_seconds: float
    salvage: bool
    batch: bool
    batch_size: int | None
    priority: int
    pace: FittedPace | None = None


@dataclasses.dataclass(frozen=True)
class FittedContext:
    """A context with its fitted parameters. `load_seconds` by kind; sizes in bytes.

    :ivar import_seconds: of these, by kind, those of imports and the process's start; None where none told them.
    """

    name: str
    load_seconds: Mapping[str, float]
    load_spread: float
    stage_seconds: float
    size: float
    gpus: int
    memory: int | None
    gpu_memory: int | None
    level: str
    import_seconds: Mapping[str, float] | None = None


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A recorded run: its outcome, and the parameters that were fitted to it.

    :ivar name: of its directory.
    :ivar seconds: when its last item was settled, on its clock.
    :ivar setup: how it decided, None where its log does not say.
    :ivar tiers: name -> (minimum, GPUs, price).
    :ivar dispatch_seconds: mean of a call's way to its worker and back.
    :ivar rates: bytes a second from the driver, and from a peer, where files were sent.
    """

    name: str
    seconds: float
    items: int
    done: int
    open: int
    failed: int
    evicted: int
    joined: int
    loads: int
    batches: int
    lost_items: int
    setup: RunSetup | None
    tiers: Mapping[str, tuple[int, int, float | None]]
    slots: int
    places: tuple[RecordedPlace, ...]
    apps: tuple[FittedApp, ...]
    contexts: tuple[FittedContext, ...]
    dispatch_seconds: float
    matching_seconds: float
    notice_seconds: float
    rates: tuple[float | None, float | None] = (None, None)
    tokens: int = 0

    @property
    def limits(self) -> Limits | None:
        """The limits that it ran with."""
        return self.setup.limits if self.setup is not None else None

    @property
    def doubts(self) -> list[str]:
        """Reasons for which a simulation of it may differ, a sentence each."""
        found = []
        own = [f for f, choice in self.setup.policies.items() if "object" in choice] if self.setup else []
        if self.setup is None:
            found.append(
                "its log is of an earlier version of ctxflow, which did not note the run's policies: the simulation "
                "has the default ones; give others with --set"
            )
        elif own:
            found.append(
                f"its {' and '.join(own)} policy was an object of the program's: the simulation has the default one; "
                f"give another with --set {own[0]}=..."
            )
        if self.open:
            found.append(f"{counted(self.open, 'item')} had no answer when its log ended, and no part in this")
        if self.failed:
            found.append(f"{counted(self.failed, 'call')} failed, which the simulation does not model")
        for app in self.apps:
            if app.pace is not None and not app.pace.known:
                least, most = app.pace.flying
                found.append(
                    f"{least:.0f} to {most:.0f} items of {app.name} were in flight on a worker nearly all the time: "
                    "what other windows would do is a guess"
                )
        if any(app.call_seconds == 0 and app.pace is None for app in self.apps):
            names = ", ".join(app.name for app in self.apps if app.call_seconds == 0 and app.pace is None)
            found.append(
                f"what a call costs beside its items is not known of {names}: it was nothing, or all calls had as many "
                "items"
            )
        return found

    def site_values(self) -> dict[str, Any]:
        """Return it as the values of a site file."""
        setup = self.setup
        tiers = []
        for name, (minimum, gpus, price) in self.tiers.items():
            if count := sum(place.tier == name for place in self.places):
                tiers.append({"name": name, "workers": count, "minimum": min(minimum, count), "gpus": gpus})
                tiers[-1] |= {} if price is None else {"price": price}
        values: dict[str, Any] = {"name": "recorded", "engine": "taskvine", "tiers": tiers, "slots": self.slots}
        if setup is not None:
            policies = {family: dict(choice) for family, choice in setup.policies.items() if "object" not in choice}
            values |= {**policies, "start_when": setup.start_when, "level": setup.level}
        return values

    def workload_values(self) -> dict[str, Any]:
        """Return it as the values of a workload file."""
        apps = []
        for app in self.apps:
            values = {k: value for k, value in vars(app).items() if value is not None and k not in ("arrivals", "pace")}
            apps.append({**values, **_arrivals(app.arrivals), "item_seconds": _one(app.item_seconds)})
            if (pace := app.pace) is not None:
                apps[-1] |= {"tokens": pace.tokens, "spread": pace.spread, "knee": pace.knee, "bend": pace.bend}
                apps[-1]["tokens_per_second"] = _one(pace.best)
        contexts = []
        for context in self.contexts:
            sizes = {"memory_gb": context.memory, "gpu_memory_gb": context.gpu_memory}
            imports = {} if context.import_seconds is None else {"import_seconds": _one(context.import_seconds)}
            contexts.append(
                {
                    "name": context.name, "load_seconds": _one(context.load_seconds),
                    "load_spread": context.load_spread, **imports, "files_gb": context.size / 1e9,
                    "unpack_seconds": context.stage_seconds, "gpus": context.gpus, "level": context.level,
                    **{key: size / 1e9 for key, size in sizes.items() if size},
                }
            )  # fmt: skip
        rates = {key: rate * 8 / 1e9 for key, rate in zip(("driver", "peers"), self.rates, strict=True) if rate}
        return {
            "apps": apps,
            "contexts": contexts,
            "links": rates,
            "evictions": {"trace": self.name, "notice_seconds": self.notice_seconds},
            "matching": {"seconds": self.matching_seconds},
            "dispatch_seconds": self.dispatch_seconds,
        }


def fit(lines: Iterable[str], name: str = "run", transfers: Transfers | None = None) -> Recorded:
    """Fit parameters to a recorded run.

    :param lines: of events.jsonl; a torn last line is left out.
    :param transfers: who sent which file to whom, where files were sent.
    :raises ValueError: for a line that is none, and for a run in which no call was answered.
    """
    log, lines = Recording(), iter(lines)
    first = next(lines, "")
    setup = read_setup(first) if first else None
    read_events(itertools.chain([first], lines), log.take)
    if not log.calls and not log.firsts:
        raise ValueError(f"no call was answered in {name}: there is nothing to simulate")
    return _Fit(log, transfers).recorded(name, setup)


class _Fit:
    """The parameters that a log's sums give."""

    def __init__(self, log: Recording, transfers: Transfers | None) -> None:
        self.log, self.transfers = log, transfers

    def recorded(self, name: str, setup: RunSetup | None) -> Recorded:
        """Return the recorded run."""
        log = self.log
        left = {app: log.apps[app].open for app in log.apps}
        for app, count in left.items():
            log.forget(app, count)
        self._take_firsts()
        self._add_up()
        self.costs = {app: call_cost(kinds.values()) for app, kinds in self.kinds.items()}
        self.spreads = {app: self._spread(app) for app in self.kinds}
        self.paces = self._paces()
        places = tuple(places_of(log.workers, self.paces))
        gaps = [b.joined - a.until for place in places for a, b in zip(place.stays, place.stays[1:], strict=False)]
        firsts = [place.stays[0].joined for place in places]
        notices = [w.gone - w.noticed for w in log.workers.values() if w.gone is not None and w.noticed is not None]
        names = _names({id: context["name"] or "none" for id, context in log.contexts.items()})
        apps = tuple(self._app(app, names) for app in self.costs if log.apps[app].arrivals)
        used = {log.apps[app].spec["context"] for app in self.costs}
        driver, peers = _rates(self.transfers)
        contexts = [self._context(id, names[id], peers or driver) for id in log.contexts if id in used]
        own = _names({id: app.spec["name"] for id, app in log.apps.items() if id in self.costs})
        return Recorded(
            name=name,
            seconds=log.settled,
            items=sum(count for app in apps for _, count in app.arrivals),
            done=log.counts["done"],
            open=sum(left.values()),
            failed=log.counts["failed"],
            evicted=log.counts["evicted"],
            joined=len(log.workers),
            loads=log.counts["loads"],
            batches=log.counts["batches"],
            lost_items=log.counts["lost"],
            setup=setup,
            tiers={key: (tier["minimum"], tier["gpus"], tier["price"]) for key, tier in log.tiers.items()},
            slots=max(worker.spec["slots"] for worker in log.workers.values()),
            places=places,
            apps=tuple(dataclasses.replace(app, name=own[app.name]) for app in apps),
            contexts=tuple(contexts),
            dispatch_seconds=statistics.fmean(log.ways) if log.ways else 0.0,
            matching_seconds=max(0.0, statistics.fmean(log.waits or [gap for gap in gaps if gap >= 0] or firsts)),
            notice_seconds=statistics.fmean(notices) if notices else 0.0,
            rates=(driver, peers),
            tokens=log.tokens,
        )

    def _take_firsts(self) -> None:
        """Count first calls with the others for apps that have no others: no warm-up can be estimated."""
        others = {app for app, _ in self.log.calls}
        for app, worker, count, seconds in self.log.firsts:
            if app not in others:
                self.log.calls.setdefault((app, worker), Sums()).add(count, seconds)
        self.log.firsts = [first for first in self.log.firsts if first[0] in others]

    def _add_up(self) -> None:
        """Add up each app's calls by worker, and by the kind of worker."""
        self.calls: dict[str, dict[str, Sums]] = {}
        self.kinds: dict[str, dict[str, Sums]] = {}
        for (app, worker), sums in self.log.calls.items():
            self.calls.setdefault(app, {})[worker] = sums
            kinds, kind = self.kinds.setdefault(app, {}), self.log.workers[worker].kind
            kinds[kind] = kinds.get(kind, Sums()).plus(sums)

    def _mean(self, app: str, kind: str) -> float:
        """Return seconds of an item on workers of a kind; for a kind that ran none, as on all others together."""
        kinds, cost = self.kinds[app], self.costs[app]
        sums = kinds.get(kind) or functools.reduce(Sums.plus, kinds.values())
        return max((sums.seconds - cost * sums.calls) / sums.items, 1e-9)

    def _spread(self, app: str) -> float:
        """Return the deviation of an item's seconds around each worker's own line, as a share of their mean."""
        squares = freedom = 0.0
        for sums in self.calls[app].values():
            item = (sums.seconds - self.costs[app] * sums.calls) / sums.items
            if sums.calls > 1 and item > 0:
                squares += sums.residual(self.costs[app], item) / item**2
                freedom += sums.calls - 1
        return math.sqrt(squares / freedom) if freedom else 0.0

    def _paces(self) -> dict[str, float]:
        """Return how many times longer each worker takes than its kind."""
        took: collections.defaultdict[str, float] = collections.defaultdict(float)
        usual: collections.defaultdict[str, float] = collections.defaultdict(float)
        noise: collections.defaultdict[str, float] = collections.defaultdict(float)
        for app, workers in self.calls.items():
            for worker, sums in workers.items():
                mean = self._mean(app, self.log.workers[worker].kind)
                took[worker] += sums.seconds - self.costs[app] * sums.calls
                usual[worker] += mean * sums.items
                noise[worker] += (mean * self.spreads[app]) ** 2 * sums.items
        paces = dict.fromkeys(self.log.workers, 1.0)
        for kind in {worker.kind for worker in self.log.workers.values()}:
            those = [name for name in usual if self.log.workers[name].kind == kind]
            paces |= shrunk({name: (took[name] / usual[name], noise[name] / usual[name] ** 2) for name in those})
        return paces

    def _warming(self, context: str, kind: str) -> float:
        """Return by how many seconds a context's first calls take longer than later ones; 0 if that may be chance."""
        excess, variance = [], 0.0
        for app, worker, count, seconds in self.log.firsts:
            if self.log.apps[app].spec["context"] == context and self.log.workers[worker].kind == kind:
                mean = self._mean(app, kind)
                excess.append(seconds - self.costs[app] - mean * self.paces[worker] * count)
                variance += (mean * self.spreads[app]) ** 2 * count
        chance = not excess or sum(excess) <= 2 * math.sqrt(variance)
        return 0.0 if chance else statistics.fmean(excess)

    def _by_kind(self, figure: Callable[[str], float]) -> dict[str, float]:
        """Return a figure for every kind of worker, and for a tier of several kinds the mean over its workers."""
        kinds: dict[str, list[str]] = {}
        for worker in self.log.workers.values():
            kinds.setdefault(worker.spec["tier"], []).append(worker.kind)
        found = {kind: figure(kind) for kind in dict.fromkeys(kind for those in kinds.values() for kind in those)}
        if len(found) == 1:
            return found
        return {tier: statistics.fmean(found[kind] for kind in those) for tier, those in kinds.items()} | found

    def _item_seconds(self, app: str, kind: str) -> float:
        """Return `_mean` for a worker of the usual pace."""
        workers = {w: sums.items for w, sums in self.calls[app].items() if self.log.workers[w].kind == kind}
        paced = sum(items * self.paces[worker] for worker, items in workers.items())
        return self._mean(app, kind) * (sum(workers.values()) / paced if paced else 1.0)

    def _pace(self, app: str) -> FittedPace | None:
        """Return how the app's calls ran together, with a figure for every kind of worker; None if they did not."""
        calls = self.log.overlapped.get(app)
        if not calls:
            return None
        found = fit_pace(calls)
        usual = statistics.fmean(found.best.values())
        return dataclasses.replace(found, best=self._by_kind(lambda kind: found.best.get(kind, usual)))

    def _app(self, app: str, names: Mapping[str, str]) -> FittedApp:
        spec = self.log.apps[app].spec
        return FittedApp(
            name=app,
            context=names[spec["context"]],
            arrivals=tuple((time, count) for time, count in self.log.apps[app].arrivals),
            item_seconds=self._by_kind(lambda kind: self._item_seconds(app, kind)),
            spread=self.spreads[app],
            call_seconds=self.costs[app],
            salvage=app in self.log.salvaged,
            batch=spec["batch"],
            batch_size=spec["batch_size"],
            priority=spec["priority"],
            pace=self._pace(app),
        )

    def _load_seconds(self, context: str, kind: str) -> float:
        """Return the mean of a context's loads with its warm-up; for a kind that built none, of all loads."""
        loads = {k: seconds for (each, k), seconds in self.log.loads.items() if each == context}
        seen = loads.get(kind) or [each for seconds in loads.values() for each in seconds] or [0.0]
        return statistics.fmean(seen) + self._warming(context, kind)

    def _import_seconds(self, context: str) -> dict[str, float] | None:
        """Return the mean of what imports and the process's start took of loads, as `_load_seconds`; None if untold."""
        told = {kind: seconds for (each, kind), seconds in self.log.imports.items() if each == context}
        every = [each for seconds in told.values() for each in seconds]
        return self._by_kind(lambda kind: statistics.fmean(told.get(kind) or every)) if every else None

    def _context(self, id: str, name: str, rate: float | None) -> FittedContext:
        spec = self.log.contexts[id]
        loads = [seconds for (context, _), seconds in self.log.loads.items() if context == id and len(seconds) > 1]
        shares = [s / statistics.fmean(each) for each in loads if any(each) for s in each]
        files = self.transfers.files.values() if self.transfers is not None else ()
        size = float(sum(file.bytes or 0 for file in files if file.context and file.context in (id, spec["name"])))
        stages = self.log.stages.get(id, [])
        sent = size if rate else 0.0
        # What the slowest part of staging does not explain by sending is a fixed time.
        fixed = max(0.0, min(stages) - sent / (rate or 1.0)) if sent and stages else statistics.fmean(stages or [0.0])
        return FittedContext(
            name=name,
            load_seconds=self._by_kind(lambda kind: self._load_seconds(id, kind)),
            load_spread=statistics.pstdev(shares) if shares else 0.0,
            stage_seconds=fixed,
            size=sent,
            gpus=spec["gpus"],
            memory=max(filter(None, (spec["memory"], self.log.memory.get((id, "memory")))), default=None),
            gpu_memory=max(filter(None, (spec["gpu_memory"], self.log.memory.get((id, "gpu_memory")))), default=None),
            level=spec.get("level", "pervasive"),
            import_seconds=self._import_seconds(id),
        )


def _names(given: Mapping[str, str]) -> dict[str, str]:
    """Return a name for each, made unique where several are called alike.

    >>> _names({"1": "add", "2": "add", "3": "a b"})
    {'1': 'add', '2': 'add-2', '3': 'a-b'}
    """
    found: dict[str, str] = {}
    for id, name in given.items():
        plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-") or "none"
        number = 1
        while (made := plain if number == 1 else f"{plain}-{number}") in found.values():
            number += 1
        found[id] = made
    return found


def _rates(transfers: Transfers | None) -> tuple[float | None, float | None]:
    """Return the median bytes a second that the manager and that workers sent at; None where none sent."""
    rates: tuple[list[float], list[float]] = ([], [])
    for transfer in transfers.transfers if transfers is not None else ():
        if transfer.kind == "sent" and not transfer.error and transfer.bytes_per_second:
            rates[transfer.sender != MANAGER].append(transfer.bytes_per_second)
    driver, peers = (statistics.median(each) if each else None for each in rates)
    return driver, peers


def _one(figures: Mapping[str, float]) -> float | dict[str, float]:
    """Return the one figure where there is but one."""
    return next(iter(figures.values())) if len(figures) == 1 else dict(figures)


def _arrivals(arrivals: Sequence[tuple[float, int]]) -> dict[str, Any]:
    if len(arrivals) == 1:
        return {"begin": arrivals[0][0], "items": arrivals[0][1]}
    return {"arrivals": [list(each) for each in arrivals]}
