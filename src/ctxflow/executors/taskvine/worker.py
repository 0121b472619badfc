"""A TaskVine worker as the engine knows it, and whether it may stay.

What does not live here: what it is told (engine.py).
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence

from ctxflow.host.wire import Head
from ctxflow.scheduler import events as ev
from ctxflow.sites.site_model import Site, Tier, region_of
from ctxflow.version import __version__


@dataclasses.dataclass
class Worker:
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

    def learn(self, hello: Head, tiers: Sequence[Tier]) -> None:
        """Take note of what its host told."""
        self.host = hello["host"]
        self.job = hello.get("environment_job")
        names = [tier.name for tier in tiers]
        given = hello.get("tier")
        self.tier = given if given in names else names[0]
        self.cache = hello["transfer"].get("cache", "")
        self.transfer_port = hello["transfer"].get("port")
        # Hard links work between workers of one machine whose directories are on one file system.
        self.place = f"{hello['host']}:{hello['transfer']['device']}"

    def spec(self, hello: Head, site: Site) -> ev.WorkerSpec:
        """What the scheduler hears of it."""
        tier = next(each for each in site.tiers if each.name == self.tier)
        pin = hello.get("pin")
        memory = hello["memory"] if pin is not None else min(tier.memory, hello["memory"])
        return ev.WorkerSpec(
            self.name,
            host=self.host,
            tier=self.tier,
            region=region_of(site.regions, site.home, self.tier, self.host, hello.get("region")),
            slots=site.slots,
            gpus=max(tier.gpus, hello["gpus"]),
            gpu_model=hello["gpu_model"],
            memory=memory,
            gpu_memory=hello["gpu_memory"],
            acquired=self.job is not None,
            topology=hello.get("topology"),
            machine=hello.get("machine") or "",
            devices=tuple(hello.get("devices") or ()),
            pin=None if pin is None else int(pin),
        )


def refusal(hello: Head, python: str | None) -> str | None:
    """Why a worker cannot be used, in a sentence; None if it can.

    :param python: the version that library processes have, where it is not the host's own.

    >>> refusal({"host": "n1", "problem": None, "ctxflow": "0.0.1", "python": "3.11.2"}, None)  # doctest: +ELLIPSIS
    'the worker on n1 runs ctxflow 0.0.1, and this is ctxflow ...: start it with the line that `ctxflow ...
    """
    host = hello["host"]
    if hello.get("problem"):
        return f"the worker on {host} cannot be used: {hello['problem']}"
    if hello["ctxflow"] != __version__:
        return (
            f"the worker on {host} runs ctxflow {hello['ctxflow']}, and this is ctxflow {__version__}: start it with "
            "the line that `ctxflow worker-command` prints"
        )
    theirs, ours = str(python or hello["python"]), platform.python_version()
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        return (
            f"the worker on {host} has Python {theirs}, and this is Python {ours}: they must agree up to the second "
            "number, so name an environment of the site with Python " + ".".join(ours.split(".")[:2])
        )
    return None
