"""A tier: one kind of worker that a cluster's site offers.

What does not live here: the site around it (model.py), and how its workers are acquired (factory/).
"""

from __future__ import annotations

from typing import Any, Literal

import pydantic


class Tier(pydantic.BaseModel):
    """One kind of worker, and who lends it. The defaults are the pervasive-context paper's worker.

    >>> Tier(name="a10").memory
    10000000000
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: str = pydantic.Field("gpu", pattern=r"^[A-Za-z0-9-]+$", description="What the tier is called.")
    provider: Literal["condor", "local"] = pydantic.Field(
        "condor", description="Who lends the workers: HTCondor, or this machine (for trying things out)."
    )
    workers: int = pydantic.Field(1, ge=0, description="How many workers to hold at most.")
    cores: int = pydantic.Field(2, ge=1, description="Cores of a worker.")
    memory_gb: float = pydantic.Field(10, gt=0, description="Memory of a worker in GB.")
    disk_gb: float = pydantic.Field(70, gt=0, description="Disk of a worker in GB.")
    gpus: int = pydantic.Field(1, ge=0, description="GPUs of a worker.")
    requirements: str | None = pydantic.Field(None, description="HTCondor: which machines will do, as a ClassAd.")
    image: str | None = pydantic.Field(None, description="HTCondor: the container image that the worker runs in.")
    submit: dict[str, Any] = pydantic.Field({}, description="HTCondor: more lines for the submit description.")
    environment: dict[str, str] = pydantic.Field({}, description="Variables for the worker.")

    @property
    def memory(self) -> int:
        """Memory of a worker in bytes."""
        return int(self.memory_gb * 1e9)

    @property
    def disk(self) -> int:
        """Disk of a worker in bytes."""
        return int(self.disk_gb * 1e9)

    @property
    def options(self) -> dict[str, Any]:
        """What only the provider understands."""
        given = {"requirements": self.requirements, "image": self.image, "submit": self.submit}
        return {key: value for key, value in given.items() if value}
