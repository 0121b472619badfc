"""A recorded run as the simulator sees it: its outcome and fitted parameters, and the same as a site and a workload."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ctxflow.errors import counted
from ctxflow.scheduler import Limits
from ctxflow.scheduler.log import RunSetup


@dataclasses.dataclass(frozen=True)
class Stay:
    """One worker of a recorded run. Sizes in bytes.

    :ivar until: when it was taken; infinity if it never was.
    :ivar pace: how many times longer its items took than those of its kind.
    """

    worker: str
    host: str
    joined: float
    until: float
    gpu_model: str | None = None
    gpus: int = 0
    memory: int | None = None
    gpu_memory: int | None = None
    pace: float = 1.0


@dataclasses.dataclass(frozen=True)
class RecordedPlace:
    """Room for one worker at a time in a recorded run: a tier had as many as it had workers at most."""

    tier: str
    stays: tuple[Stay, ...]


@dataclasses.dataclass(frozen=True)
class FittedApp:
    """An app with its fitted parameters. `item_seconds` by kind, `arrivals` as (time, items)."""

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


@dataclasses.dataclass(frozen=True)
class FittedContext:
    """A context with its fitted parameters. `load_seconds` by kind; sizes in bytes."""

    name: str
    load_seconds: Mapping[str, float]
    load_spread: float
    stage_seconds: float
    size: float
    gpus: int
    memory: int | None
    gpu_memory: int | None
    level: str


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
        if any(app.call_seconds == 0 for app in self.apps):
            names = ", ".join(app.name for app in self.apps if app.call_seconds == 0)
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
            count = sum(place.tier == name for place in self.places)
            if count:
                tiers.append({"name": name, "workers": count, "minimum": min(minimum, count), "gpus": gpus})
                tiers[-1] |= {} if price is None else {"price": price}
        values: dict[str, Any] = {"name": "recorded", "engine": "taskvine", "tiers": tiers, "slots": self.slots}
        if setup is not None:
            policies = {family: dict(choice) for family, choice in setup.policies.items() if "object" not in choice}
            values |= {**policies, "start_when": setup.start_when, "level": setup.level}
        return values

    def workload_values(self) -> dict[str, Any]:
        """Return it as the values of a workload file."""
        apps = [
            {
                "name": app.name, "context": app.context, **_arrivals(app.arrivals),
                "item_seconds": _one(app.item_seconds), "spread": app.spread, "call_seconds": app.call_seconds,
                "salvage": app.salvage, "batch": app.batch, "priority": app.priority,
                **({} if app.batch_size is None else {"batch_size": app.batch_size}),
            }
            for app in self.apps
        ]  # fmt: skip
        contexts = []
        for context in self.contexts:
            sizes = {"memory_gb": context.memory, "gpu_memory_gb": context.gpu_memory}
            contexts.append(
                {
                    "name": context.name, "load_seconds": _one(context.load_seconds),
                    "load_spread": context.load_spread, "files_gb": context.size / 1e9,
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


def _one(figures: Mapping[str, float]) -> float | dict[str, float]:
    """Return the one figure where there is but one."""
    return next(iter(figures.values())) if len(figures) == 1 else dict(figures)


def _arrivals(arrivals: Sequence[tuple[float, int]]) -> dict[str, Any]:
    if len(arrivals) == 1:
        return {"begin": arrivals[0][0], "items": arrivals[0][1]}
    return {"arrivals": [list(each) for each in arrivals]}
