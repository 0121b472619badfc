"""How others find a run: a file, for its user alone, that says where its manager listens.

What does not live here: the commands that read it (cli/).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxflow.executors.taskvine.setup import Setup


@dataclasses.dataclass(frozen=True)
class Run:
    """A live run, as its connection file tells.

    :ivar command: the words that start a worker of it by hand, on any machine that reaches it and sees its files.
    """

    id: str
    pid: int
    directory: str
    address: str
    port: int
    password_file: str
    program: str
    command: list[str]


def runs_directory() -> str:
    """Where connection files are kept: in the user's run-time directory if there is one, else in their home."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isdir(base):
        return os.path.join(base, "ctxflow")
    return os.path.join(os.path.expanduser("~"), ".ctxflow", "runs")


def live_runs() -> Iterator[Run]:
    """The user's runs on this machine that are going on, the youngest first."""
    directory = runs_directory()
    with contextlib.suppress(OSError):
        names = [os.path.join(directory, name) for name in os.listdir(directory) if name.endswith(".json")]
        for path in sorted(names, key=os.path.getmtime, reverse=True):
            with contextlib.suppress(OSError, ValueError, TypeError):
                with open(path) as file:
                    run = Run(**json.load(file))
                os.kill(run.pid, 0)
                yield run


class Connection:
    """The connection file of a run, for as long as it lives; a home that cannot be written has none."""

    def __init__(self, setup: Setup, port: int) -> None:
        run = Run(
            setup.run.id,
            os.getpid(),
            setup.run.directory,
            setup.address,
            port,
            setup.password_file,
            setup.program,
            setup.worker_command(port, setup.site.tiers[0], setup.program, setup.password_file),
        )
        directory = runs_directory()
        self._path = os.path.join(directory, f"{run.id}.json")
        with contextlib.suppress(OSError):
            os.makedirs(directory, mode=0o700, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w") as file:
                json.dump(dataclasses.asdict(run), file)

    def close(self) -> None:
        """Remove it."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
