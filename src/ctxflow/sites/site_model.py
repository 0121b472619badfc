"""The models that a site file fills in: a site, its tiers, and its regions."""

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
    key,
    relocated,
    with_new_keys,
)

_CONDOR_DISK_GB = 70.0


class Tier(pydantic.BaseModel):
    """One kind of worker, and the batch system that provides it. The defaults are the pervasive-context paper's worker.

    >>> Tier(name="a10").memory
    10000000000
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: str = key("gpu", "The name of the tier.", pattern=r"^[A-Za-z0-9-]+$")
    provider: str = key(
        "condor",
        'The source of workers: "condor", "slurm", "pbs", "grid-engine", "kubernetes", "local" (this '
        'machine), or "MODULE:NAME", a Parsl provider of your own or a function that returns one.',
    )
    workers: int = key(1, "The maximum number of workers.", ge=0)
    minimum: int = key(0, "The minimum number of workers, whatever the load.", ge=0)
    waiting: int = key(20, "Number of jobs that may be pending at first; more if they start soon.", ge=1)
    cores: int = key(2, "Cores of a worker.", ge=1)
    memory_gb: float = key(10, "Memory of a worker in GB.", gt=0)
    disk_gb: float | None = key(
        None,
        "Disk of a worker in GB: the default is 70 on HTCondor; elsewhere workers use their machine's free "
        "space. A worker with less than the given size does not start.",
        gt=0,
    )
    cache: str | None = key(
        None,
        "A folder on a local disk of the machines, for files of contexts that outlive workers and runs: a worker that "
        "comes back to a machine fetches nothing it has. By default, there is none.",
    )
    cache_gb: float = key(200, "The most that `cache` may hold on a machine, in GB, of each user.", gt=0)
    gpus: int = key(1, "GPUs of a worker.", ge=0)
    machine_gpus: int = key(
        0,
        "HTCondor: the largest number of GPUs of one machine, if a run may request specific GPUs: "
        "contexts with up to that many get a separate worker, for which the `preemption` policy makes room.",
        ge=0,
    )
    gpu_memory_gb: float | None = key(
        None, "Memory of each GPU in GB, for plans made before a worker has joined.", gt=0
    )
    machines: str | None = key(
        None,
        "A name shared by tiers that are the same machines, partitioned into workers with more or fewer "
        "GPUs: a plan holds no more GPUs of all of them than of the largest one alone.",
    )
    price: float | None = key(
        None, "The price of an hour of a worker, in dollars or GPU-hours: cheap tiers are used first.", ge=0
    )
    boot_seconds: float | None = key(
        None, "Seconds from the request for a worker to its joining, for simulations and plans.", ge=0
    )
    requirements: str | None = key(None, "HTCondor: the acceptable machines, as a ClassAd expression.")
    require_gpus: str | None = key(None, "HTCondor: the acceptable GPUs of a machine, as a ClassAd expression.")
    priority: int | None = key(None, "HTCondor: the order of your own jobs; higher first.")
    schedd: str | None = key(None, "HTCondor: the schedd's name; by default this machine's.")
    pool: str | None = key(None, "HTCondor: the central manager's host, if the schedd is in another pool.")
    image: str | None = key(None, "HTCondor, Kubernetes: the container image of the worker.")
    submit: dict[str, Any] = key({}, "HTCondor: additional lines for the submit description.")
    options: dict[str, Any] = key(
        {}, "Slurm, PBS, Grid Engine, Kubernetes: arguments of Parsl's provider, such as partition."
    )
    env: dict[str, str] = key({}, "Environment variables for the worker; secrets belong here.")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _renamed(cls, values: Any) -> Any:
        """Take keys by the names that they had in earlier versions."""
        return with_new_keys(values, TIER_KEYS, "a tier")

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
        return {name: value for name in keys if (value := getattr(self, name)) not in (None, {})}


class Region(pydantic.BaseModel):
    """A group of workers close to each other (a pool, a rack, a campus), with its distances and power price.

    >>> Region(name="north", hosts=["n*.example.org"]).has_host("n12.example.org")
    True
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: str = key("region", "The name of the region.", pattern=r"^[A-Za-z0-9-]+$")
    tiers: tuple[str, ...] = key(
        (), "The tiers whose workers are in it: one for each schedd, pool, or set of machines."
    )
    hosts: tuple[str, ...] = key(
        (), "Patterns of the names of its machines, such as `gpu*.example.org`; they precede tiers."
    )
    latency_ms: dict[str, float] = key(
        {}, "Milliseconds to other regions, by name; both ways, unless the other region sets another value."
    )
    bandwidth_mbit: dict[str, float] = key(
        {}, "Mbit/s to other regions, by name; both ways, unless the other region sets another value."
    )
    power_price: float | None = key(None, "The price of power there, in dollars per kWh.", ge=0)

    def has_host(self, host: str) -> bool:
        """Return whether one of its patterns is a machine's name."""
        return any(fnmatch.fnmatchcase(host, pattern) for pattern in self.hosts)


def region_of(regions: Sequence[Region], home: str, tier: str, host: str = "", told: str | None = None) -> str:
    """Return a worker's region: the one that it reports, else by its machine's name, else by its tier, else home.

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
    """Return a site's regions as the scheduler needs them, in seconds and bytes.

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
    """Return the values that a region gives for others, and others for it."""
    told = {other: values[name] for other, values in given.items() if name in values and other != name}
    return {**told, **{other: value for other, value in given[name].items() if other != name}}


class Site(pydantic.BaseModel):
    """The place where work runs, and its policies. Every key has a default.

    An engine's own keys are in a field of its name: those of ctxflow's own engines are always there, that of another
    package's engine where the site selects it.

    >>> Site(workers=2).engine
    'embedded'
    >>> Site(engine="taskvine", taskvine={"fan_out": 3}).taskvine.fan_out
    3
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    name: str = key("local", "The name of the site.")
    engine: str = key(
        "embedded",
        'The engine that runs the workers: "embedded" (this machine), "taskvine" (a cluster), '
        "or an engine of another package (see docs/extending.md).",
    )
    workers: int | None = key(
        None,
        "Number of workers. Embedded: by default one per GPU, else one for every two cores. Cluster: the "
        "maximum of the first tier, in place of the tier's key.",
        ge=1,
    )
    slots: int = key(1, "Calls that a worker runs at a time; calls on one context take turns.", ge=1)
    scratch: str | None = key(
        None, "The directory for workers' files while they live; by default the temporary directory."
    )
    level: Literal["none", "partial", "pervasive"] = key(
        "pervasive", "How much of a context workers keep between calls; less than all is for measurements."
    )
    tiers: tuple[Tier, ...] = key((), "Cluster: the kinds of workers.")
    regions: tuple[Region, ...] = key((), "Cluster: groups of workers close to each other, if there are several.")
    region: str | None = key(
        None,
        "Cluster: the region of this machine, the source of items and files, and of workers in no other "
        "region; by default the first.",
    )
    python_environment: str | None = key(
        None,
        "Cluster: the Python environment of the workers: a folder that they all see (a venv or a conda "
        "prefix), or an archive made by `ctxflow env pack`; by default the python3 on their PATH (or in their image).",
    )
    acquire: Literal["run", "factory"] = key(
        "run", "Cluster: what acquires workers: each run, or a `ctxflow factory` for all runs of its user."
    )
    start_when: float = key(
        0.0, "The share of the requested workers that must have joined before the first call.", ge=0, le=1
    )
    join_timeout: float = key(300.0, "Cluster: seconds that a job may run while no worker of it is connected.", gt=0)
    gpu_hours_per_run: float | None = key(
        None,
        "Cluster: the maximum of GPU-hours of the workers of a run, from their jobs' start to their "
        "end; a worker without GPUs counts as one with one. When it is reached, no more workers are requested, and "
        "running ones are drained.",
        gt=0,
    )
    cost_per_run: float | None = key(None, "Cluster: the same for the workers' cost, by their tiers' `price`.", gt=0)
    gpu_hours_per_factory: float | None = key(
        None, "Cluster: the same over all runs that a `ctxflow factory` serves, since it started.", gt=0
    )
    cost_per_factory: float | None = key(None, "Cluster: likewise, for cost.", gt=0)
    gpu_hours_per_user: float | None = key(
        None,
        "Cluster: the same over all runs of this user that any factory of the site served, by the factories' record.",
        gt=0,
    )
    cost_per_user: float | None = key(None, "Cluster: likewise, for cost.", gt=0)
    embedded: EmbeddedOptions = key(EmbeddedOptions.model_validate({}), "Keys of the embedded engine.")
    taskvine: TaskVineOptions = key(TaskVineOptions.model_validate({}), "Keys of the TaskVine engine.")
    routing: Any = key(DEFAULTS["routing"], "The choice of a worker for each call.")
    batching: Any = key(DEFAULTS["batching"], "The size of a batch.")
    placement: Any = key(DEFAULTS["placement"], "The choice of tiers for each context.")
    preemption: Any = key(
        DEFAULTS["preemption"],
        "The choice of victims when a context needs a separate worker with several GPUs close together.",
    )
    scaling: Any = key(DEFAULTS["scaling"], "The number of workers of each tier.")
    health: Any = key(DEFAULTS["health"], "The quarantine of bad hosts, workers and GPUs.")
    sessions: Any = key(DEFAULTS["sessions"], "The choice of a worker for each session.")

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
        values, moved = relocated(with_new_keys(values, SITE_KEYS, "a site"))
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
