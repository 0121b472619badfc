"""The models that a site file fills in: a site, its tiers, and its regions.

What does not live here: an engine's own keys (engine_kinds.py), what is impossible together (site_rules.py).
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pydantic

from ctxflow.policies.registry import DEFAULTS
from ctxflow.renamed import tell
from ctxflow.scheduler.events import RegionSpec
from ctxflow.sites.engine_kinds import (
    MOVED,
    OWN,
    SITE_KEYS,
    TIER_KEYS,
    Capabilities,
    EmbeddedOptions,
    EngineKind,
    TaskVineOptions,
    engine_kind,
    relocated,
    told_renamed,
)

_CONDOR_DISK_GB = 70.0


class Tier(pydantic.BaseModel):
    """One kind of worker, and who lends it. The defaults are the pervasive-context paper's worker.

    >>> Tier(name="a10").memory
    10000000000
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: str = pydantic.Field("gpu", pattern=r"^[A-Za-z0-9-]+$", description="What the tier is called.")
    provider: str = pydantic.Field(
        "condor",
        description='Who lends the workers: "condor", "slurm", "pbs", "grid-engine", "kubernetes", "local" (this '
        'machine), or "MODULE:NAME", a Parsl provider of your own or a function that makes one.',
    )
    workers: int = pydantic.Field(1, ge=0, description="How many workers to hold at most.")
    minimum: int = pydantic.Field(0, ge=0, description="How many workers to hold at least, whatever the load.")
    waiting: int = pydantic.Field(
        20, ge=1, description="How many jobs may wait in the queue at first; more, when they do not wait long."
    )
    cores: int = pydantic.Field(2, ge=1, description="Cores of a worker.")
    memory_gb: float = pydantic.Field(10, gt=0, description="Memory of a worker in GB.")
    disk_gb: float | None = pydantic.Field(
        None,
        gt=0,
        description="Disk of a worker in GB: HTCondor is asked for 70 if it is not said, and workers elsewhere use "
        "what their machine has free. One that finds less than is said does not start.",
    )
    gpus: int = pydantic.Field(1, ge=0, description="GPUs of a worker.")
    machine_gpus: int = pydantic.Field(
        0,
        ge=0,
        description="HTCondor: the most GPUs of one of the machines, where a run may ask for workers on GPUs of its "
        "choice: contexts with up to as many get a worker of their own, for which the `preemption` policy makes room.",
    )
    gpu_memory_gb: float | None = pydantic.Field(
        None, gt=0, description="Memory of each GPU in GB, for plans that are made before a worker has joined."
    )
    machines: str | None = pydantic.Field(
        None,
        description="What several tiers have in common that are the same machines, cut into workers with more or fewer "
        "GPUs: a plan holds no more GPUs of all of them than of the largest one alone.",
    )
    price: float | None = pydantic.Field(
        None, ge=0, description="What an hour of a worker costs, in dollars or GPU-hours: cheap tiers are used first."
    )
    boot_seconds: float | None = pydantic.Field(
        None, ge=0, description="How long it takes from asking for a worker to its joining, for simulations and plans."
    )
    requirements: str | None = pydantic.Field(
        None, description="HTCondor: which machines will do, as a ClassAd expression."
    )
    require_gpus: str | None = pydantic.Field(
        None, description="HTCondor: which of a machine's GPUs will do, as a ClassAd expression."
    )
    priority: int | None = pydantic.Field(None, description="HTCondor: which of your own jobs go first; higher first.")
    schedd: str | None = pydantic.Field(None, description="HTCondor: the schedd's name; by default this machine's.")
    pool: str | None = pydantic.Field(
        None, description="HTCondor: the central manager's host, where the schedd is in another pool."
    )
    image: str | None = pydantic.Field(
        None, description="HTCondor, Kubernetes: the container image that the worker runs in."
    )
    submit: dict[str, Any] = pydantic.Field({}, description="HTCondor: more lines for the submit description.")
    options: dict[str, Any] = pydantic.Field(
        {}, description="Slurm, PBS, Grid Engine, Kubernetes: what Parsl's provider takes, such as partition."
    )
    env: dict[str, str] = pydantic.Field({}, description="Environment variables for the worker; secrets belong here.")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _renamed(cls, values: Any) -> Any:
        """Take keys by the names that they had in earlier versions."""
        return told_renamed(values, TIER_KEYS, "a tier")

    @property
    def memory(self) -> int:
        """Memory of a worker in bytes."""
        return int(self.memory_gb * 1e9)

    @property
    def gpu_memory(self) -> int | None:
        """Memory of each GPU in bytes, None if the site does not say."""
        return None if self.gpu_memory_gb is None else int(self.gpu_memory_gb * 1e9)

    @property
    def disk(self) -> int | None:
        """Disk of a worker in bytes, None if none is promised to it: only HTCondor deals disks out."""
        promised = self.disk_gb or (_CONDOR_DISK_GB if self.provider == "condor" else None)
        return None if promised is None else int(promised * 1e9)

    @property
    def wishes(self) -> dict[str, Any]:
        """What only the provider understands: HTCondor's keys."""
        keys = ("requirements", "require_gpus", "priority", "image", "submit")
        return {key: value for key in keys if (value := getattr(self, key)) not in (None, {})}


class Region(pydantic.BaseModel):
    """A group of workers close to each other: a pool, a rack, a campus; with what is known of its place.

    >>> Region(name="north", hosts=["n*.example.org"]).has_host("n12.example.org")
    True
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: str = pydantic.Field("region", pattern=r"^[A-Za-z0-9-]+$", description="What the region is called.")
    tiers: tuple[str, ...] = pydantic.Field(
        (), description="The tiers whose workers are in it: one for each schedd, pool, or set of machines."
    )
    hosts: tuple[str, ...] = pydantic.Field(
        (), description="Patterns of the names of its machines, such as `gpu*.example.org`; they go before tiers."
    )
    latency_ms: dict[str, float] = pydantic.Field(
        {}, description="Milliseconds to other regions, by name; both ways, where the other does not say otherwise."
    )
    bandwidth_mbit: dict[str, float] = pydantic.Field(
        {}, description="Mbit/s to other regions, by name; both ways, where the other does not say otherwise."
    )
    power_price: float | None = pydantic.Field(None, ge=0, description="What power costs there, in dollars a kWh.")

    def has_host(self, host: str) -> bool:
        """Return whether one of its patterns is a machine's name."""
        return any(fnmatch.fnmatchcase(host, pattern) for pattern in self.hosts)


def region_of(regions: Sequence[Region], home: str, tier: str, host: str = "", told: str | None = None) -> str:
    """Return a worker's region: the one that it tells itself, else by its machine's name, else by its tier, else home.

    :param told: what the worker's environment has as `CTXFLOW_REGION`; a name that no region has does not count.

    >>> regions = [Region(name="north"), Region(name="south", tiers=["a40"], hosts=["s*"])]
    >>> [region_of(regions, "north", *worker) for worker in (("a40", "x"), ("a10", "s1"), ("a10", "x", "south"))]
    ['south', 'south', 'south']
    >>> region_of(regions, "north", "a10", "x", "east")
    'north'
    """
    if any(region.name == told for region in regions):
        return str(told)
    by_host = (region.name for region in regions if region.has_host(host))
    by_tier = (region.name for region in regions if tier in region.tiers)
    return next(by_host, next(by_tier, home))


def region_specs(regions: Sequence[Region], home: str) -> list[RegionSpec]:
    """Return what the scheduler hears of a site's regions, in seconds and bytes.

    >>> regions = [Region(name="north", latency_ms={"south": 40.0}), Region(name="south", bandwidth_mbit={"north": 80})]
    >>> [(spec.name, spec.home, spec.latency, spec.bandwidth) for spec in region_specs(regions, "north")]
    [('north', True, {'south': 0.04}, {'south': 10000000.0}), ('south', False, {'north': 0.04}, {'north': 10000000.0})]
    """
    latency = {region.name: region.latency_ms for region in regions}
    bandwidth = {region.name: region.bandwidth_mbit for region in regions}
    return [
        RegionSpec(
            region.name,
            {name: ms / 1e3 for name, ms in _both_ways(region.name, latency).items()},
            {name: mbit * 1e6 / 8 for name, mbit in _both_ways(region.name, bandwidth).items()},
            region.power_price,
            region.tiers,
            region.name == home,
        )
        for region in regions
    ]


def _both_ways(name: str, given: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return what a region says of others, and what others say of it."""
    told = {other: values[name] for other, values in given.items() if name in values and other != name}
    return {**told, **{other: value for other, value in given[name].items() if other != name}}


class Site(pydantic.BaseModel):
    """Where work runs, and the policies that decide there. Every key has a default.

    An engine's own keys are in a field of its name: those of ctxflow's own engines are always there, that of another
    package's engine where the site selects it.

    >>> Site(workers=2).engine
    'embedded'
    >>> Site(engine="taskvine", taskvine={"fan_out": 3}).taskvine.fan_out
    3
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    name: str = pydantic.Field("local", description="What people call the site.")
    engine: str = pydantic.Field(
        "embedded",
        description='What runs the workers: "embedded", which is this machine, "taskvine", a cluster through TaskVine, '
        "or an engine that another package offers (see docs/extending.md).",
    )
    workers: int | None = pydantic.Field(
        None,
        ge=1,
        description="How many workers. Embedded: by default one a GPU, else one for every two cores. Cluster: at "
        "most so many of the first tier, in place of what that says.",
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
    tiers: tuple[Tier, ...] = pydantic.Field((), description="Cluster: the kinds of workers there are.")
    regions: tuple[Region, ...] = pydantic.Field(
        (), description="Cluster: groups of workers close to each other, where there are several."
    )
    region: str | None = pydantic.Field(
        None,
        description="Cluster: the region of this machine, from which items and files come, and of workers that no "
        "region claims; by default the first.",
    )
    python_environment: str | None = pydantic.Field(
        None,
        description="Cluster: the Python environment of the workers: a folder that they all see (a venv or a conda "
        "prefix), or an archive made by `ctxflow env pack`; by default the python3 on their PATH (or in their image).",
    )
    acquire: Literal["run", "factory"] = pydantic.Field(
        "run", description="Cluster: who acquires workers: each run, or a `ctxflow factory` for all runs of its user."
    )
    start_when: float = pydantic.Field(
        0.0, ge=0, le=1, description="The share of the workers asked for that must have joined before the first call."
    )
    join_timeout: float = pydantic.Field(
        300.0, gt=0, description="Cluster: seconds that a worker's job may run before the worker has joined."
    )
    gpu_hours_per_run: float | None = pydantic.Field(
        None,
        gt=0,
        description="Cluster: the most GPU-hours that the workers of a run may use, from their jobs' start to their "
        "end; a worker without GPUs counts as one with one. Then no more are asked for, and those that are there end "
        "what they run and leave.",
    )
    cost_per_run: float | None = pydantic.Field(
        None, gt=0, description="Cluster: the same of what workers cost, by their tiers' `price`."
    )
    gpu_hours_per_factory: float | None = pydantic.Field(
        None, gt=0, description="Cluster: the same over all runs that a `ctxflow factory` serves, since it started."
    )
    cost_per_factory: float | None = pydantic.Field(None, gt=0, description="Cluster: likewise, of cost.")
    gpu_hours_per_user: float | None = pydantic.Field(
        None,
        gt=0,
        description="Cluster: the same over all runs of this user that any factory of the site served, by the record "
        "that factories keep.",
    )
    cost_per_user: float | None = pydantic.Field(None, gt=0, description="Cluster: likewise, of cost.")
    embedded: EmbeddedOptions = pydantic.Field(
        EmbeddedOptions.model_validate({}), description="Keys of the embedded engine."
    )
    taskvine: TaskVineOptions = pydantic.Field(
        TaskVineOptions.model_validate({}), description="Keys of the TaskVine engine."
    )
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
    def environment(self) -> str | None:
        """Return `python_environment`, by its old name."""
        tell("Site.environment", "environment of a site is now called python_environment")
        return self.python_environment

    @property
    def home(self) -> str:
        """The region of this machine."""
        return self.region or (self.regions[0].name if self.regions else "default")

    @property
    def kind(self) -> EngineKind:
        """What is known of the site's engine."""
        return engine_kind(self.engine)

    @property
    def capabilities(self) -> Capabilities:
        """What the site's engine can do."""
        return self.kind.capabilities

    @property
    def options(self) -> Any:
        """The keys of the site's engine, as the engine's own model has them."""
        return getattr(self, self.engine)

    @pydantic.field_validator("engine")
    @classmethod
    def _known(cls, name: str) -> str:
        engine_kind(name)
        return name

    @pydantic.model_validator(mode="before")
    @classmethod
    def _relocated(cls, values: Any) -> Any:
        """Take an engine's keys also beside the others, as earlier versions did."""
        if not isinstance(values, Mapping):
            return values
        values, moved = relocated(told_renamed(values, SITE_KEYS, "a site"))
        for table, keys in moved.items():
            inner = ", ".join(f"{key!r}: ..." for key in keys)
            text = f"{' and '.join(keys)} of a site: write Site({table}={{{inner}}})"
            tell(f"a site: {table}: {inner}", f"{text}, since each engine has its own keys")
        return values

    if not TYPE_CHECKING:

        def __new__(cls, **values: Any) -> Site:
            """Make a site that has the table of its engine too, where that is another package's."""
            return super().__new__(site_class(values.get("engine")) if cls is Site else cls)

        def __getattr__(self, name: str) -> Any:
            """Give an engine's keys under the names that a site had for them in earlier versions."""
            if name in MOVED:
                return getattr(getattr(self, MOVED[name]), name)
            return super().__getattr__(name)


def site_class(engine: Any) -> type[Site]:
    """Return the model of sites with an engine: `Site`, with a field for the engine's table if it has none."""
    if not isinstance(engine, str) or engine in OWN:
        return Site
    try:
        return _with_table(engine_kind(engine))
    except ValueError:
        return Site  # Which says what is wrong with the engine.


@functools.cache
def _with_table(kind: EngineKind) -> type[Site]:
    field = (kind.options, pydantic.Field({}, validate_default=True, description=f"Keys of the {kind.name} engine."))
    made: type[Site] = pydantic.create_model("Site", __base__=Site, __doc__=Site.__doc__, **{kind.name: field})  # type: ignore[call-overload]
    return made
