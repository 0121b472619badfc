"""What a pool is: its hosts, addresses and sizes, and where the testbed keeps things."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

TESTBED = Path(__file__).resolve().parent.parent
CHECKOUT = TESTBED.parent
NAME = "-".join(["ctxflow-testbed", *filter(None, [os.environ.get("CTXFLOW_TESTBED")])])
"""The testbed that is meant: a machine holds several, each of a name of its own, which share nothing but the root."""

STATE = Path("/run") / NAME
ROOT = STATE / "root"
DOMAIN = "testbed"
SUBMIT = "submit"
MINUTES = 60.0
USERS = ("alice", "bob")
"""The users in the root: alice's jobs are opportunistic, bob owns the machines and may take them back."""

WORKER_CPUS, WORKER_MEMORY_MB, WORKER_DISK_GB = 2, 10240, 72
"""What a host advertises for each GPU: about the paper's worker (2 cores, 10 GB, 70 GB of disk)."""

SOCKETS, NUMA_NODES, NUMA_CORES = 2, 8, 8
"""A --numa host: sockets, NUMA nodes over all sockets, cores in each node; one GPU hangs off each node."""


class TestbedError(Exception):
    """Something a person can mend, said in one sentence."""

    __test__ = False


class CannotBuild(TestbedError):
    """This machine lacks what the testbed needs."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """One pool, as `testbed/up` was asked for it.

    `hosts` execute hosts carry `gpus` GPUs each, on links of `link_mbit` Mbit/s in either direction.
    The last `far` of them are a region of their own, behind one link of `far_mbit` that they share.
    With `static` every GPU is a static slot of its own, else each host is one partitionable slot. With `numa`
    each host has 2 sockets, 8 NUMA nodes, 64 cores and 8 GPUs of one model. With `clocks` each host has a clock of
    its own (faults.py).
    """

    hosts: int = 4
    gpus: int = 3
    link_mbit: float = 1000.0
    static: bool = False
    numa: bool = False
    far: int = 0
    far_mbit: float = 100.0
    clocks: bool = False

    def __post_init__(self) -> None:
        if self.numa:
            object.__setattr__(self, "gpus", NUMA_NODES)
        if not 1 <= self.hosts <= 40:
            raise TestbedError(f"--hosts is {self.hosts}, and must lie between 1 and 40.")
        if not 0 <= self.gpus <= 64:
            raise TestbedError(f"--gpus is {self.gpus}, and must lie between 0 and 64.")
        if not 0 <= self.far < self.hosts:
            raise TestbedError(f"--far is {self.far}, and must lie between 0 and {self.hosts - 1}.")
        check_rate(self.link_mbit)
        check_rate(self.far_mbit)

    @property
    def execute_hosts(self) -> list[str]:
        """The names of the execute hosts, host1 first."""
        return [f"host{number}" for number in range(1, self.hosts + 1)]

    @property
    def far_hosts(self) -> list[str]:
        """The execute hosts of the other region."""
        return self.execute_hosts[self.hosts - self.far :]

    @property
    def names(self) -> list[str]:
        """The names of all hosts, the submit host (which is the central manager too) first."""
        return [SUBMIT, *self.execute_hosts]

    @property
    def cpus(self) -> int:
        """The cores that an execute host advertises."""
        return NUMA_NODES * NUMA_CORES if self.numa else WORKER_CPUS * max(1, self.gpus)

    @property
    def memory_mb(self) -> int:
        """The memory that an execute host advertises, in MB."""
        return WORKER_MEMORY_MB * max(1, self.gpus)

    @property
    def disk_gb(self) -> int:
        """The size of an execute host's scratch space, a tmpfs, in GB: a limit, not a reservation."""
        return WORKER_DISK_GB * max(1, self.gpus)


def check_rate(mbit: float) -> None:
    """Refuse a link speed that tc cannot shape."""
    if not 0.1 <= mbit <= 40000:
        raise TestbedError(f"A link of {mbit:g} Mbit/s cannot be made: name between 0.1 and 40000.")


def address(name: str) -> str:
    """The address of a host in the pool's own network."""
    return "10.77.0.1" if name == SUBMIT else f"10.77.0.{10 + int(name.removeprefix('host'))}"


def cache() -> Path:
    """Where the Debian roots are kept between runs."""
    return Path(os.environ.get("CTXFLOW_TESTBED_CACHE") or "/var/cache/ctxflow/testbed")


def save(settings: Settings, source: Path) -> None:
    """Remember what the running pool was asked to be, and the root that it runs."""
    record = {"settings": dataclasses.asdict(settings), "checkout": str(CHECKOUT), "root": str(source)}
    (STATE / "settings.json").write_text(json.dumps(record))


def load() -> tuple[Settings, str, str] | None:
    """What the running pool was asked to be: its settings, checkout and root; None where there is none."""
    try:
        record = json.loads((STATE / "settings.json").read_text())
        return Settings(**record["settings"]), record["checkout"], record["root"]
    except (OSError, ValueError, KeyError, TypeError, TestbedError):
        return None
