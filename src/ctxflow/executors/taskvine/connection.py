"""How others find a run: a file, for its user alone, that says where its manager listens.

What does not live here: the commands that read it (cli/).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from ctxflow.executors.taskvine.setup import Setup


@dataclasses.dataclass(frozen=True)
class Run:
    """A live run, as its connection file tells.

    :ivar pid: of the driver, on the machine `host`.
    :ivar commands: tier -> the words that start a worker of it by hand, on any machine that reaches the address and
        sees the files that the words name.
    :ivar variables: tier -> the names of the variables that its workers find in their environment.
    """

    id: str
    host: str
    pid: int
    directory: str
    address: str
    port: int
    password_file: str
    program: str
    commands: dict[str, list[str]]
    variables: dict[str, list[str]]


def runs_directory() -> str:
    """Where connection files are kept: in the user's run-time directory if there is one, else in their home."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isdir(base):
        return os.path.join(base, "ctxflow")
    return os.path.join(os.path.expanduser("~"), ".ctxflow", "runs")


def live_runs() -> list[Run]:
    """The user's runs on this machine that are going on, the youngest first."""
    return sorted(_live_runs(), key=lambda run: _started(run.pid), reverse=True)


def _live_runs() -> Iterator[Run]:
    directory = runs_directory()
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError, ValueError, TypeError, psutil.Error):
                with open(path) as file:
                    run = Run(**json.load(file))
                # A home may be shared with other machines; and a driver that was killed left its file behind.
                if run.host == socket.gethostname() and _started(run.pid) <= os.path.getmtime(path) + 1:
                    yield run


def _started(pid: int) -> float:
    return psutil.Process(pid).create_time()


class Connection:
    """The connection file of a run, for as long as it lives; a home that cannot be written has none."""

    def __init__(self, setup: Setup, port: int) -> None:
        tiers, program, password = setup.site.tiers, setup.program, setup.password_file
        run = Run(
            setup.run.id,
            socket.gethostname(),
            os.getpid(),
            setup.run.directory,
            setup.address,
            port,
            password,
            program,
            {tier.name: setup.worker_command(port, tier, program, password) for tier in tiers},
            {tier.name: sorted(tier.environment) for tier in tiers},
        )
        directory = runs_directory()
        self._path = os.path.join(directory, f"{run.id}.json")
        with contextlib.suppress(OSError):
            os.makedirs(directory, mode=0o700, exist_ok=True)
            write_private(self._path, json.dumps(dataclasses.asdict(run)))

    def close(self) -> None:
        """Remove it."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)


def write_private(path: str, text: str) -> None:
    """Write a file that nobody but this user can read, whatever was there before."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as file:
        file.write(text)
