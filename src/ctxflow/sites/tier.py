"""A tier: one kind of worker that a cluster's site offers.

What does not live here: the site around it (model.py), and how its workers are acquired (factory/).
"""

from __future__ import annotations

from typing import Any

import pydantic

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
    variables: dict[str, str] = pydantic.Field(
        {}, description="Environment variables for the worker; secrets belong here."
    )

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
