"""Jobs of workers in places of one's choice, beside those of which a tier holds so many.

What does not live here: how a batch system is told of a place (condor_places.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

from ctxflow.factory.provider import Provider, ProviderError, WorkerJob
from ctxflow.topology import Topology, to_graph


@runtime_checkable
class Surveying(Protocol):
    """A provider that knows its machines."""

    def machines(self, job: WorkerJob) -> list[Topology]:
        """The machines that a worker may be on, with who uses their GPUs.

        :raises ProviderError: if the batch system cannot be asked.
        """


def machines_of(provider: Provider, job: WorkerJob) -> tuple[dict[str, Any], str]:
    """The topologies of the machines that a worker may be on, by name, as graphs; and why there are none."""
    if not isinstance(provider, Surveying):
        return {}, "its batch system does not tell which machines it has: leave machine_gpus out"
    try:
        found = provider.machines(job)
    except ProviderError as error:
        return {}, str(error)
    return {each.name: to_graph(dataclasses.replace(each, groups=())) for each in found}, ""


@dataclasses.dataclass
class Places:
    """A tier's jobs of that kind; whoever calls guards it.

    :ivar wanted: number -> a job that is still to be submitted.
    :ivar jobs: number -> the job's id.
    :ivar asked: whether the machines are to be surveyed.

    >>> places = Places()
    >>> places.submitted(1, ["7.0"]), places.pin_of("7.0"), places.forgo(1), places.pin_of("7.0")
    ([], 1, ['7.0'], None)
    """

    wanted: dict[int, WorkerJob] = dataclasses.field(default_factory=dict)
    jobs: dict[int, str] = dataclasses.field(default_factory=dict)
    asked: bool = False
    _forgone: set[int] = dataclasses.field(default_factory=set)

    @property
    def due(self) -> bool:
        """Whether there is something to do."""
        return self.asked or bool(self.wanted)

    def submitted(self, pin: int, jobs: list[str]) -> list[str]:
        """A job was taken by the batch system; gives those that nobody wants any more."""
        if pin in self._forgone:
            return jobs
        self.jobs.update((pin, job) for job in jobs)
        return []

    def forgo(self, pin: int) -> list[str]:
        """A worker is not wanted any more; gives the jobs to remove."""
        self._forgone.add(pin)
        if self.wanted.pop(pin, None) is not None or pin not in self.jobs:
            return []
        return [self.jobs.pop(pin)]

    def pin_of(self, job: str) -> int | None:
        """The number of the worker that a job was submitted for, None if it is none of these."""
        return next((pin for pin, name in self.jobs.items() if name == job), None)
