"""The manager's process as the engine has it: what it and its workers need, who lends them, starting and talking."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ctxflow.environments.opening import read_manifest
from ctxflow.errors import CtxflowError
from ctxflow.executors.contract import EngineFailed, RunServices
from ctxflow.executors.taskvine import manager_messages as msg
from ctxflow.factory.acquirer import Acquirer
from ctxflow.factory.condor_machines import pinned, unpinned
from ctxflow.factory.exchange import FactoryClient
from ctxflow.factory.provider import tail
from ctxflow.factory.run_files import Connection, Lead, PublishedRun, python_of, worker_command, worker_job
from ctxflow.factory.site_check import own_address, port_problem
from ctxflow.factory.tier_providers import provider_of
from ctxflow.files import digest_path, make_own_folder, write_private
from ctxflow.host import worker_program
from ctxflow.host.linux import activity, advice, ended_within, kill_tree, python_path, scarcity
from ctxflow.host.local_files import Guard, Scratch, sweep
from ctxflow.host.vine_protocol import key_of
from ctxflow.host.wire import Channel, pack
from ctxflow.host.worker_program import build_program
from ctxflow.ownership import birth_of
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.sites import Site

_EXTRA_SLOTS = 16  # Beside calls: the standing call, and what is staged, built and unloaded at the same time.
_MISSED_SECONDS = 4.0  # Without its beat, once a second, for so long it is busy with something else than its loop.
_BUSY_SECONDS = 900.0  # For how long it may be.
_KILL_SECONDS = 2.0
_MOST_REPLACED, _REPLACED_SECONDS = 3, 600.0  # So many may be replaced in so short a time.


@dataclass(frozen=True)
class PackedEnvironment:
    """A packed environment: the archive, the digest of its bytes, and the version of its Python."""

    path: str
    digest: str
    python: str


class Setup:
    """A run's own files, and what follows from the site; a CtxflowError if they cannot be made."""

    def __init__(self, site: Site, run: RunServices) -> None:
        self.site, self.run = site, run
        self.directory = os.path.join(run.directory, "taskvine")
        self.packed = _packed(site.python_environment)
        password = secrets.token_hex(32)
        self.key = key_of(password.encode())
        try:
            make_own_folder(self.directory)  # What is in it runs on workers.
            self.password_file = self.path("password")
            write_private(self.password_file, password)
            self.rest = self.path(worker_program.NAME)
            self.program = build_program(self.path("ctxflow.pyz"), self.rest)
            self.rest_digest = digest_path(self.rest)
            sweep()
            self._private = Scratch()  # A socket's path must be short.
            self._guard = Guard([self.password_file, self.program, self.rest, self._private.path])
            self.staging_log = open(self.path("staging.jsonl"), "a", buffering=1)  # noqa: SIM115 - closed in `close`
        except OSError as error:
            raise CtxflowError(f"the run cannot keep its files in {self.directory}: {error}{advice(error)}") from error
        self.doorbell = os.path.join(self._private.path, "bell")
        self.address = site.taskvine.address or own_address()
        self.note({"is": "origin", "unix": time.time() - run.clock()})

    def path(self, name: str) -> str:
        """Return the path of a file of the run's own."""
        return os.path.join(self.directory, name)

    def note(self, line: Mapping[str, Any]) -> None:
        """Add a line to the log of stagings, which `ctxflow report` reads."""
        with contextlib.suppress(OSError):  # A full disk must not end the run.
            self.staging_log.write(json.dumps(line) + "\n")

    def manager_settings(self) -> msg.StartManager:
        """Return the first message to the manager's process."""
        options = self.site.taskvine
        return msg.StartManager(
            directory=self.directory,
            port=options.port,
            password_file=self.password_file,
            program=self.program,
            ssl=options.ssl,
            fan_out=options.fan_out,
            keepalive_interval=options.keepalive_interval,
            keepalive_timeout=options.keepalive_timeout,
            slots=self.site.slots + _EXTRA_SLOTS,
            doorbell=self.doorbell,
        )

    def lead(self, port: int) -> Lead:
        """Return what workers must know to join."""
        python = python_of(None if self.packed else self.site.python_environment)
        options = self.site.taskvine
        where = (self.address, port, self.program, self.password_file)
        return Lead(*where, python, options.ssl, options.transfer_ports)

    def connection(self, port: int) -> Connection:
        """Publish the run, so that others find it."""
        lead, tiers = self.lead(port), self.site.tiers
        return Connection(
            PublishedRun(
                self.run.id,
                socket.gethostname(),
                os.getpid(),
                self.run.directory,
                self.address,
                port,
                self.password_file,
                self.program,
                {tier.name: worker_command(tier, lead) for tier in tiers},
                {tier.name: sorted(tier.env) for tier in tiers},
                lead.python,
                lead.ssl,
                self.site.acquire,
                birth_of(os.getpid()) or "",
                lead.transfer_ports,
            )
        )

    def close(self) -> None:
        """Remove what nobody needs afterwards."""
        self.staging_log.close()
        self._guard.close()
        self._private.close()


def _packed(environment: str | None) -> PackedEnvironment | None:
    """Return the packed environment that a site names, if it does."""
    if environment is None or os.path.isdir(environment):
        return None
    if not os.path.isfile(environment):
        if environment.endswith((".tar.gz", ".tgz")):
            raise CtxflowError(f"there is no environment {environment}: make one with `ctxflow env pack`")
        return None  # A folder that only the workers see.
    manifest = read_manifest(environment)
    return PackedEnvironment(os.path.abspath(environment), digest_path(environment), manifest["python"])


def tiers_of(site: Site) -> list[ev.TierSpec]:
    """Return what a site offers."""
    first, *others = site.tiers
    most = first.workers if site.workers is None else site.workers
    own = site.acquire == "run"  # A factory is told of numbers only.
    return [
        ev.TierSpec(
            tier.name,
            min(tier.minimum, maximum),
            maximum,
            tier.gpus,
            tier.price,
            tier.boot_seconds,
            tier.gpu_memory,
            tier.machines or "",
            machine_gpus=tier.machine_gpus if own else 0,
        )
        for tier, maximum in ((first, most), *((other, other.workers) for other in others))
    ]


def acquirer_of(site: Site, setup: Setup, port: int, changed: Callable[[], None]) -> Acquirer | FactoryClient:
    """Return what requests and holds a site's workers."""
    lead, run = setup.lead(port), setup.run.id
    if site.acquire == "factory":
        return FactoryClient(run, site.name, changed, site.tiers)
    tiers = {tier.name: (provider_of(tier, run), worker_job(unpinned(tier), lead)) for tier in site.tiers}
    waiting = {tier.name: tier.waiting for tier in site.tiers}
    prices = {tier.name: tier.price for tier in site.tiers}
    return Acquirer(tiers, setup.path("jobs"), changed, waiting=waiting, join_timeout=site.join_timeout, prices=prices)


def acquire(acquirer: Acquirer | FactoryClient, command: cmd.Command, setup: Setup, port: int) -> None:
    """Carry out a command that is about other workers than there are."""
    if isinstance(command, cmd.Acquire):
        acquirer.hold(command.tier, command.workers)
    elif isinstance(command, cmd.Exclude):
        acquirer.exclude(command.tier, command.hosts)
    elif isinstance(acquirer, FactoryClient):  # No tier of this run has `machine_gpus`.
        return
    elif isinstance(command, cmd.AcquireAt):
        tier = next(each for each in setup.site.tiers if each.name == command.tier)
        there = pinned(tier, command.pin, command.machine, command.devices)
        acquirer.pin(command.tier, command.pin, worker_job(there, setup.lead(port)))
    elif isinstance(command, cmd.Forgo):
        acquirer.forgo(command.tier, command.pin)
    elif isinstance(command, cmd.Survey):
        acquirer.survey(command.tier)


def require_ndcctools() -> None:
    """Raise a CtxflowError if TaskVine is not installed, saying how to get it."""
    try:
        import ndcctools.taskvine  # noqa: F401
    except ImportError:
        raise CtxflowError(
            "the TaskVine engine needs ndcctools 7.15 or newer in this Python: `conda install -c conda-forge "
            "ndcctools`, or Debian's packages python3-workqueue and coop-computing-tools"
        ) from None


def require_port(site: Site) -> None:
    """Raise a CtxflowError if the manager cannot listen where the site says, saying what to write."""
    if problem := port_problem(site.taskvine.ports):
        raise CtxflowError(problem)


class ManagerLink:
    """The process that holds the ndcctools manager. Its owner locks.

    :param settings: its first message. :param log: the file of its output. :ivar up: whether it has started.
    """

    def __init__(self, settings: msg.StartManager, log: str) -> None:
        self._settings = settings
        self._log = log
        self._files: dict[str, msg.DeclareFile | msg.DeclareTemp] = {}  # Those that it knows.
        self._replaced: list[float] = []  # When.
        self._spawn()

    def _spawn(self) -> None:
        self.up = False
        near, far = socket.socketpair()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        shared = os.memfd_create("ctxflow-asleep")
        os.ftruncate(shared, msg.BYTES)
        self._bell = msg.Bell(mmap.mmap(shared, msg.BYTES), self._settings.doorbell)
        with far, open(self._log, "ab") as output:
            words = [str(far.fileno()), str(shared), str(os.getpid())]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ctxflow.executors.taskvine.manager", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[far.fileno(), shared],
                env={**os.environ, **python_path()},
                cwd=os.path.dirname(self._log),
                start_new_session=True,  # Ctrl-C is the driver's.
            )
        os.close(shared)
        self.channel = Channel(near)
        self._heard_at = self._looked_at = time.monotonic()
        self._activity: tuple[str, ...] = ()
        self._idle = 0.0
        self.send(self._settings)

    def started(self, seconds: float) -> int:
        """Return the port that it listens at, its first message; an EngineFailed if there is none in time."""
        deadline = time.monotonic() + seconds
        while not self.channel.closed and time.monotonic() < deadline:
            self.channel.wait(0.5)
            for said in self.received():
                if isinstance(said, msg.ManagerStarted):
                    return said.port
        words = self.last_words()
        raise EngineFailed(f"TaskVine's manager does not start: {words}{'' if 'ulimit' in words else scarcity()}")

    def replace(self, port: int) -> bool:
        """Start another, at this port, which knows the same files and no worker.

        :returns: False if too many were replaced, or this one does not end.
        """
        now = time.monotonic()
        self._replaced = [at for at in self._replaced if at > now - _REPLACED_SECONDS] + [now]
        if len(self._replaced) > _MOST_REPLACED:
            return False
        kill_tree(self.process.pid)
        if not ended_within(self.process, _KILL_SECONDS):
            return False
        self.channel.close()
        self._bell.close()
        self._settings = dataclasses.replace(self._settings, port=port)
        self._spawn()
        for file in self._files.values():
            self.send(file)
        return True

    def send(self, message: msg.ToManager) -> None:
        """Send a message, now or as soon as it fits."""
        if isinstance(message, (msg.DeclareFile, msg.DeclareTemp)):
            self._files[message.key] = message
        elif isinstance(message, msg.Undeclare):
            self._files.pop(message.key, None)
        self.channel.send_frame(pack(message))

    def received(self) -> list[msg.FromManager]:
        """Return what it has said."""
        said = [msg.FROM_MANAGER.open(head, body) for head, body in self.channel.receive()]
        if said:
            self._heard_at = time.monotonic()
            self._idle = 0.0
        self.up |= any(isinstance(each, msg.ManagerStarted) for each in said)
        return said

    @property
    def hearing(self) -> bool:
        """Whether it is in its loop, so that answers can come: while it sends a file it does nothing else."""
        return time.monotonic() < self._heard_at + _MISSED_SECONDS

    def idle(self) -> float:
        """Return for how long it has said and done nothing, as far as this process looked: once a second, or so."""
        now = time.monotonic()
        seconds, self._looked_at = min(now - self._looked_at, _MISSED_SECONDS), now
        if self.hearing:
            return 0.0
        seen = activity(self.process.pid)
        busy = seen != self._activity and now < self._heard_at + _BUSY_SECONDS
        self._activity = seen
        self._idle = 0.0 if busy else self._idle + seconds
        return self._idle

    def ring(self) -> None:
        """Wake the manager, if it sleeps; to be called after `send`."""
        self._bell.ring()

    def last_words(self) -> str:
        """Return the last line of its output."""
        return (tail(self._log).splitlines() or ["it wrote nothing"])[-1].strip()

    def end(self, seconds: float) -> None:
        """End it: asked to first, killed after so many seconds."""
        self.send(msg.StopManager())
        self.ring()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.process.kill()
        ended_within(self.process, _KILL_SECONDS)
        self.channel.close()
        self._bell.close()
