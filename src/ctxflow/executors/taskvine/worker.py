"""A TaskVine worker as the engine knows it, and whether it may stay.

What does not live here: what it is told (engine.py).
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence

from ctxflow.host.messages import BuildFailed, CallRaised, ContextBuilt, LibraryDied
from ctxflow.host.vine_messages import FromWorker, WorkerFacts
from ctxflow.scheduler import events as ev
from ctxflow.sites.site_model import Site, Tier, region_of
from ctxflow.version import __version__


@dataclasses.dataclass
class VineWorker:
    """One worker that is connected.

    :ivar name: its feature, which calls are pinned to.
    :ivar job: the job that it is, None if it was started by hand.
    :ivar calls: how many it was sent: each has the next number in its seal.
    :ivar keys: context -> the key of its latest load, which tells reports about it from those about earlier ones.
    :ivar due: number of an open call -> when it times out, on this machine's monotonic clock.
    :ivar reason: why it was given up, if it was.
    :ivar functions: those that its host was given.
    :ivar coming: of each call that brings it some, those that calls still need.
    :ivar unneeded: those that it was given and has not been told yet to forget.
    :ivar forgotten: context -> how often its files were removed.
    """

    name: str
    host: str
    address: str
    since: float  # When it connected, on the run's clock.
    ip: str = ""  # Where it connects from; its address is a name, by which TaskVine knows it.
    tier: str = ""
    job: str | None = None
    place: str = ""
    cache: str = ""  # Its host's, on its machine.
    transfer_port: int | None = None  # Where it serves files to its peers.
    joined: bool = False
    leaving: bool = False  # It was released, or had notice: nobody is to blame for its end.
    noticed: bool = False
    running: int = 0
    calls: int = 0
    reason: str = ""
    due: dict[int, float] = dataclasses.field(default_factory=dict)
    keys: dict[str, str] = dataclasses.field(default_factory=dict)
    functions: set[str] = dataclasses.field(default_factory=set)
    unneeded: list[str] = dataclasses.field(default_factory=list)
    coming: list[set[str]] = dataclasses.field(default_factory=list)
    forgotten: dict[str, int] = dataclasses.field(default_factory=dict)

    def is_late(self, report: FromWorker) -> bool:
        """Return whether a report is about an earlier load of its context."""
        if not isinstance(report, (ContextBuilt, BuildFailed, LibraryDied, CallRaised)):
            return False
        return report.key is not None and self.keys.get(report.context) != report.key

    def learn(self, facts: WorkerFacts, tiers: Sequence[Tier]) -> None:
        """Take note of what its host told."""
        self.host = facts.host
        self.job = facts.job
        names = [tier.name for tier in tiers]
        self.tier = facts.tier if facts.tier in names else names[0]
        self.cache = facts.cache
        self.transfer_port = facts.port
        # Hard links work between workers of one machine whose directories are on one file system.
        self.place = f"{facts.host}:{facts.device}"

    def spec(self, facts: WorkerFacts, site: Site) -> ev.WorkerSpec:
        """What the scheduler hears of it."""
        tier = next(each for each in site.tiers if each.name == self.tier)
        memory = facts.memory if facts.pin is not None else min(tier.memory, facts.memory)
        return ev.WorkerSpec(
            self.name,
            host=self.host,
            tier=self.tier,
            region=region_of(site.regions, site.home, self.tier, self.host, facts.region),
            slots=site.slots,
            gpus=max(tier.gpus, facts.gpus),
            gpu_model=facts.gpu_model,
            memory=memory,
            gpu_memory=facts.gpu_memory,
            acquired=self.job is not None,
            topology=facts.topology,
            machine=facts.machine or "",
            devices=tuple(facts.devices),
            pin=None if facts.pin is None else int(facts.pin),
        )


def refusal(facts: WorkerFacts, python: str | None) -> str | None:
    """Why a worker cannot be used, in a sentence; None if it can.

    :param python: the version that library processes have, where it is not the host's own.

    >>> refusal(WorkerFacts(host="n1", ctxflow="0.0.1", python="3.11.2"), None)  # doctest: +ELLIPSIS
    'the worker on n1 runs ctxflow 0.0.1, and this is ctxflow ...: start it with the line that `ctxflow ...
    """
    host = facts.host
    if facts.problem:
        return f"the worker on {host} cannot be used: {facts.problem}"
    if facts.ctxflow != __version__:
        return (
            f"the worker on {host} runs ctxflow {facts.ctxflow}, and this is ctxflow {__version__}: start it with "
            "the line that `ctxflow worker-command` prints"
        )
    theirs, ours = str(python or facts.python), platform.python_version()
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        return (
            f"the worker on {host} has Python {theirs}, and this is Python {ours}: they must agree up to the second "
            "number, so name an environment of the site with Python " + ".".join(ours.split(".")[:2])
        )
    return None
