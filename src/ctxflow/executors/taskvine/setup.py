"""What a run on TaskVine needs before its first worker: its files, its secret, its address, its workers' command.

What does not live here: starting the manager (link.py) and the providers (factory/).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ctxflow.environments.opening import read_manifest
from ctxflow.errors import CtxflowError
from ctxflow.executors.contract import RunServices
from ctxflow.executors.taskvine.manager_messages import StartManager
from ctxflow.factory.acquirer import Acquirer
from ctxflow.factory.condor_machines import unpinned
from ctxflow.factory.exchange import FactoryClient
from ctxflow.factory.run_files import Connection, Lead, PublishedRun, python_of, worker_command, worker_job
from ctxflow.factory.site_check import own_address
from ctxflow.factory.tier_providers import provider_of
from ctxflow.files import digest_path, make_own_folder, write_private
from ctxflow.host import own_modules
from ctxflow.host.machine_errors import advice
from ctxflow.host.scratch import Guard, Scratch, sweep
from ctxflow.host.seal import key_of
from ctxflow.host.worker_program import build_program
from ctxflow.ownership import birth_of
from ctxflow.scheduler import events as ev
from ctxflow.sites import Site

_EXTRA_SLOTS = 16  # Beside calls: the standing call, and what is staged, built and unloaded at the same time.


@dataclass(frozen=True)
class PackedEnvironment:
    """A packed environment: the archive, the digest of its bytes, and the version of its Python."""

    path: str
    digest: str
    python: str


class Setup:
    """A run's own files, and what follows from the site.

    :raises CtxflowError: if files cannot be written, or the environment is none.
    """

    def __init__(self, site: Site, run: RunServices) -> None:
        self.site, self.run = site, run
        self.directory = os.path.join(run.directory, "taskvine")
        self.packed = _packed(site.python_environment)
        try:
            make_own_folder(self.directory)  # What is in it runs on workers.
            self.password_file = self._write_secret()
            self.rest = self.path(own_modules.NAME)
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

    def _write_secret(self) -> str:
        path = self.path("password")
        password = secrets.token_hex(32)
        write_private(path, password)
        self.key = key_of(password.encode())
        return path

    def manager_settings(self) -> StartManager:
        """Return what the manager's process is told first."""
        options = self.site.taskvine
        return StartManager(
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
        return Lead(self.address, port, self.program, self.password_file, python, self.site.taskvine.ssl)

    def connection(self, port: int) -> Connection:
        """Let others find the run."""
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
            )
        )

    def close(self) -> None:
        """Remove what nobody needs afterwards."""
        self.staging_log.close()
        self._guard.close()
        self._private.close()


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
    """Return what holds a site's workers."""
    lead, run = setup.lead(port), setup.run.id
    if site.acquire == "factory":
        return FactoryClient(run, site.name, changed, site.tiers)
    tiers = {tier.name: (provider_of(tier, run), worker_job(unpinned(tier), lead)) for tier in site.tiers}
    waiting = {tier.name: tier.waiting for tier in site.tiers}
    prices = {tier.name: tier.price for tier in site.tiers}
    return Acquirer(tiers, setup.path("jobs"), changed, waiting=waiting, join_timeout=site.join_timeout, prices=prices)


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
