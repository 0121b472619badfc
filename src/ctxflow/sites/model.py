"""The site's model.

What does not live here: how a site file or a name becomes one (loader.py), what is impossible together (rules.py), and
making engines and policies of it (executors/).
"""

from __future__ import annotations

from typing import Any, Literal

import pydantic

from ctxflow.policies.registry import DEFAULTS
from ctxflow.sites.region import Region
from ctxflow.sites.tier import Tier


class Site(pydantic.BaseModel):
    """Where work runs, and the policies that decide there. Every key has a default.

    >>> Site(workers=2).engine
    'embedded'
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    name: str = pydantic.Field("local", description="What people call the site.")
    engine: Literal["embedded", "taskvine"] = pydantic.Field(
        "embedded", description="What runs the workers: this machine, or a cluster through TaskVine."
    )
    workers: int | None = pydantic.Field(
        None,
        ge=1,
        description="How many workers. Embedded: by default one a GPU, else one for every two cores. TaskVine: at "
        "most so many of the first tier, in place of what that says.",
    )
    gpus_per_worker: int | None = pydantic.Field(
        None, ge=0, description="GPUs that each worker gets; by default all are dealt out evenly."
    )
    slots: int = pydantic.Field(
        1, ge=1, description="Calls that a worker runs at a time; those on one context take turns."
    )
    scratch: str | None = pydantic.Field(
        None, description="Where workers keep files while they live; by default the temporary directory."
    )
    level: Literal["none", "partial", "pervasive"] = pydantic.Field(
        "pervasive", description="What workers keep of a context from call to call; less than all is for measuring."
    )
    tiers: tuple[Tier, ...] = pydantic.Field((), description="TaskVine: the kinds of workers there are.")
    regions: tuple[Region, ...] = pydantic.Field(
        (), description="TaskVine: groups of workers close to each other, where there are several."
    )
    region: str | None = pydantic.Field(
        None,
        description="TaskVine: the region of this machine, from which items and files come, and of workers that no "
        "region claims; by default the first.",
    )
    environment: str | None = pydantic.Field(
        None,
        description="TaskVine: the Python environment of the workers: a folder that they all see (a venv or a conda "
        "prefix), or an archive made by `ctxflow env pack`; by default the python3 on their PATH (or in their image).",
    )
    address: str | None = pydantic.Field(
        None, description="TaskVine: where workers reach this machine; by default the address that it uses outwards."
    )
    port: int | tuple[int, int] = pydantic.Field(
        0, description="TaskVine: the port that workers connect to, or the lowest and highest that will do; 0 for any."
    )
    ssl: bool = pydantic.Field(
        False, description="TaskVine: encrypt what goes between this machine and the workers (see docs/security.md)."
    )
    fan_out: int = pydantic.Field(
        1, ge=1, description="TaskVine: how many workers one worker sends a file to at a time."
    )
    keepalive_interval: int = pydantic.Field(
        5, ge=1, description="TaskVine: seconds of silence after which a worker is asked whether it is there."
    )
    keepalive_timeout: int = pydantic.Field(
        15, ge=4, description="TaskVine: seconds after which a worker that does not answer is lost."
    )
    acquire: Literal["run", "factory"] = pydantic.Field(
        "run", description="TaskVine: who acquires workers: each run, or a `ctxflow factory` for all runs of its user."
    )
    start_when: float = pydantic.Field(
        0.0, ge=0, le=1, description="The share of the workers asked for that must have joined before the first call."
    )
    join_timeout: float = pydantic.Field(
        300.0, gt=0, description="TaskVine: seconds that a worker's job may run before the worker has joined."
    )
    gpu_hours_per_run: float | None = pydantic.Field(
        None,
        gt=0,
        description="TaskVine: the most GPU-hours that the workers of a run may use, from their jobs' start to their "
        "end; a worker without GPUs counts as one with one. Then no more are asked for, and those that are there end "
        "what they run and leave.",
    )
    cost_per_run: float | None = pydantic.Field(
        None, gt=0, description="TaskVine: the same of what workers cost, by their tiers' `price`."
    )
    gpu_hours_per_factory: float | None = pydantic.Field(
        None, gt=0, description="TaskVine: the same over all runs that a `ctxflow factory` serves, since it started."
    )
    cost_per_factory: float | None = pydantic.Field(None, gt=0, description="TaskVine: likewise, of cost.")
    gpu_hours_per_user: float | None = pydantic.Field(
        None,
        gt=0,
        description="TaskVine: the same over all runs of this user that any factory of the site served, by the record "
        "that factories keep.",
    )
    cost_per_user: float | None = pydantic.Field(None, gt=0, description="TaskVine: likewise, of cost.")
    routing: Any = pydantic.Field(DEFAULTS["routing"], description="Which work goes to which worker.")
    batching: Any = pydantic.Field(DEFAULTS["batching"], description="How many items a batch takes.")
    placement: Any = pydantic.Field(DEFAULTS["placement"], description="Which contexts go on which tiers.")
    preemption: Any = pydantic.Field(
        DEFAULTS["preemption"],
        description="Who gives way when a context needs a worker of its own, with several GPUs close together.",
    )
    scaling: Any = pydantic.Field(DEFAULTS["scaling"], description="How many workers of each tier to hold.")
    health: Any = pydantic.Field(
        DEFAULTS["health"], description="Which hosts, workers and GPUs are bad, and get no work for a while."
    )
    sessions: Any = pydantic.Field(DEFAULTS["sessions"], description="Which worker carries which session.")

    @property
    def home(self) -> str:
        """The region of this machine."""
        return self.region or (self.regions[0].name if self.regions else "default")
