"""The workload file of `ctxflow simulate`: what is to be done, how long it takes, and what the cluster is like.

What does not live here: the site (ctxflow.sites), what is wrong with a file (workload_problems.py), and what is made of
both (scenario.py).
"""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

Positive = Annotated[float, pydantic.Field(gt=0)]
NotNegative = Annotated[float, pydantic.Field(ge=0)]
_Name = Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9_-]+$")]


class _Entry(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class AppEntry(_Entry):
    """One app: its items, when they come, and how long they take."""

    name: _Name = pydantic.Field("app", description="What it is called.")
    context: str | None = pydantic.Field(None, description="The context that it needs; by default the first.")
    items: int = pydantic.Field(1000, ge=1, description="How many items.")
    begin: NotNegative = pydantic.Field(0.0, description="When the first come, in seconds.")
    per_second: Positive | None = pydantic.Field(
        None, description="How many come in a second, at random times; by default all come at once."
    )
    arrivals: tuple[tuple[NotNegative, Annotated[int, pydantic.Field(ge=1)]], ...] | None = pydantic.Field(
        None, description="`[[seconds, items], ...]`: when how many come, in place of the three above."
    )
    item_seconds: Positive | dict[str, Positive] = pydantic.Field(
        1.0, description="Seconds of an item: a number, or a table by GPU model or tier."
    )
    spread: NotNegative = pydantic.Field(
        0.3, description="The standard deviation of an item's seconds, as a share of their mean."
    )
    call_seconds: NotNegative = pydantic.Field(0.0, description="What a call takes beside its items, on the worker.")
    salvage: bool = pydantic.Field(
        False, description="Whether it answers its items one by one, so that an eviction costs only the one in flight."
    )
    batch: bool = pydantic.Field(True, description="Whether items may share a call.")
    batch_size: int | None = pydantic.Field(None, ge=1, description="The app's own wish for the items of a batch.")
    priority: int = pydantic.Field(0, description="Higher goes first.")
    poison: int | None = pydantic.Field(
        None, ge=1, description="Of so many items one raises wherever it runs, and the call that it is in."
    )


class ContextEntry(_Entry):
    """One context: its files, and how long building it takes."""

    name: _Name = pydantic.Field("context", description="What it is called.")
    load_seconds: NotNegative | dict[str, NotNegative] = pydantic.Field(
        15.0, description="Seconds of building it: a number, or a table by GPU model or tier."
    )
    load_spread: NotNegative = pydantic.Field(
        0.3, description="Their standard deviation, as a share of their mean; log-normal."
    )
    files_gb: NotNegative = pydantic.Field(0.0, description="GB of its files (weights, an environment).")
    files: int = pydantic.Field(1, ge=1, description="How many files those are, where opening them takes its time.")
    origin: Literal["driver", "filesystem", "internet"] = pydantic.Field(
        "driver", description="Where they come from: the machine of the program, a shared filesystem, the internet."
    )
    shared: bool = pydantic.Field(True, description="Whether workers pass them on; else each gets them from there.")
    unpack_seconds: NotNegative = pydantic.Field(0.0, description="From the files' arrival until they can be used.")
    gpus: int | None = pydantic.Field(None, ge=0, description="GPUs it needs; by default 1 where all workers have one.")
    memory_gb: Positive | None = pydantic.Field(None, description="Memory it takes on a worker.")
    gpu_memory_gb: Positive | None = pydantic.Field(None, description="GPU memory it takes; by default all of it.")
    level: Literal["none", "partial", "pervasive"] | None = pydantic.Field(
        None, description="What workers keep of it; by default as the site says."
    )


class Links(_Entry):
    """How fast files come. Gbit/s."""

    driver: Positive = pydantic.Field(1.0, description="Gbit/s from the program's machine, all transfers together.")
    filesystem: Positive = pydantic.Field(10.0, description="Gbit/s of the shared filesystem, all readers together.")
    filesystem_reader: Positive = pydantic.Field(1.0, description="Gbit/s of the shared filesystem for one reader.")
    filesystem_opens: Positive | None = pydantic.Field(
        None, description="Files that the shared filesystem opens in a second; by default that is no limit."
    )
    internet: Positive = pydantic.Field(1.0, description="Gbit/s of the line to the internet, all transfers together.")
    peers: Positive = pydantic.Field(1.0, description="Gbit/s of each worker's machine; the site says `fan_out`.")


class Evictions(_Entry):
    """When workers are taken. A table gives figures by tier; tiers that are not in it lose nobody."""

    per_hour: NotNegative | dict[str, NotNegative] = pydantic.Field(
        0.0, description="Evictions for each hour of a worker, at random times; a number, or a table by tier."
    )
    away_seconds: NotNegative = pydantic.Field(60.0, description="Mean seconds until another can have its place.")
    notice_seconds: NotNegative = pydantic.Field(0.0, description="From the notice of an eviction to the eviction.")
    drain_from: NotNegative | None = pydantic.Field(
        None, description="When the first worker is taken for good, the first tier's first."
    )
    drain_every: Positive = pydantic.Field(60.0, description="Seconds from one drained worker to the next.")
    trace: str | dict[str, str] | None = pydantic.Field(
        None,
        description="How many workers can be had when: a spot trace (JSON with metadata.gap_seconds and data), or "
        "the directory of a recorded run, whose joins and losses count; a path, or a table by tier. In place of "
        "`per_hour`.",
    )


class Matching(_Entry):
    """From asking for a worker to its joining."""

    seconds: NotNegative = pydantic.Field(10.0, description="Mean seconds, for tiers without `boot_seconds`.")
    spread: NotNegative = pydantic.Field(0.5, description="Their standard deviation, as a share of their mean.")


class FaultEntry(_Entry):
    """Hosts with which something is wrong. Which ones is drawn from the seed."""

    kind: Literal["black-hole", "slow", "flaky-gpu", "no-builds"] = pydantic.Field(
        "black-hole",
        description="Every call raises at once; calls take longer; calls on one of the host's workers raise now and "
        "then; no context can be built.",
    )
    tier: str | None = pydantic.Field(None, description="The tier whose hosts they are; by default any.")
    hosts: Annotated[int, pydantic.Field(ge=1)] | None = pydantic.Field(
        None, description="How many; by default 1, or as `share` says."
    )
    share: Annotated[float, pydantic.Field(gt=0, le=1)] | None = pydantic.Field(
        None, description="Which share of the hosts, in place of `hosts`."
    )
    begin: NotNegative = pydantic.Field(0.0, description="From when on, in seconds.")
    end: Positive | None = pydantic.Field(None, description="Until when; by default for ever.")
    factor: Annotated[float, pydantic.Field(ge=1)] = pydantic.Field(
        10.0, description="How many times longer calls take on slow hosts."
    )
    calls: Annotated[float, pydantic.Field(gt=0, le=1)] = pydantic.Field(
        0.1, description="The share of a flaky GPU's calls that raise."
    )
    seconds: NotNegative = pydantic.Field(0.0, description="After which calls raise, and builds fail.")


class WorkloadFile(_Entry):
    """All that a workload file says. Every key has a default.

    >>> WorkloadFile.model_validate({"apps": [{"items": 10}]}).apps[0].item_seconds
    1.0
    """

    apps: tuple[AppEntry, ...] = pydantic.Field(
        (AppEntry.model_validate({}),), min_length=1, description="Who has items."
    )
    contexts: tuple[ContextEntry, ...] = pydantic.Field(
        (ContextEntry.model_validate({}),), description="What they need."
    )
    links: Links = pydantic.Field(Links.model_validate({}), description="How fast files come.")
    evictions: Evictions = pydantic.Field(Evictions.model_validate({}), description="When workers are taken.")
    matching: Matching = pydantic.Field(
        Matching.model_validate({}), description="How long it takes until workers come."
    )
    faults: tuple[FaultEntry, ...] = pydantic.Field((), description="Hosts with which something is wrong.")
    workers_per_host: Annotated[int, pydantic.Field(ge=1)] = pydantic.Field(
        1, description="How many workers of a tier are on one host."
    )
    dispatch_seconds: NotNegative = pydantic.Field(
        0.01, description="A call's way to its worker and its answer's way back, in which the worker waits."
    )

    def context_of(self, app: AppEntry) -> str:
        """The name of the context that an app needs; "" for none."""
        if app.context is not None:
            return app.context
        return self.contexts[0].name if self.contexts else ""
