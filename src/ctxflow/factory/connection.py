"""How others find a run: a file, for its user alone, that says where its manager listens.

What does not live here: what the run and a factory outside it tell each other later (exchange.py), and the commands
that read the file (cli/).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from socket import gethostname

import psutil

from ctxflow.factory.worker_job import Lead


@dataclasses.dataclass(frozen=True)
class Run:
    """A live run, as its connection file tells.

    :ivar host: the machine that its driver runs on.
    :ivar pid: of the driver.
    :ivar directory: where it keeps its files.
    :ivar address: where its manager listens, with `port`.
    :ivar password_file: holds the key to the run; only its user can read it.
    :ivar program: the workers' program, one file.
    :ivar python: what starts it on workers.
    :ivar ssl: whether workers encrypt what they send.
    :ivar commands: tier -> the words that start a worker of it by hand, on any machine that reaches the address and
        sees the files that the words name.
    :ivar variables: tier -> the names of the variables that its workers find in their environment.
    :ivar acquire: who acquires its workers: "run" or "factory", as the site says.
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
    python: str = "python3"
    ssl: bool = False
    acquire: str = "run"

    @property
    def lead(self) -> Lead:
        """What its workers must know to join."""
        return Lead(self.address, self.port, self.program, self.password_file, self.python, self.ssl)


def runs_directory() -> str:
    """Where connection files are kept: in the user's run-time directory if there is one, else in their home."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isdir(base):
        return os.path.join(base, "ctxflow")
    return os.path.join(os.path.expanduser("~"), ".ctxflow", "runs")


def all_directories() -> list[str]:
    """Where they may be: a driver that is a job itself, or a service's, has no directory of the login's."""
    return list(dict.fromkeys([runs_directory(), os.path.join(os.path.expanduser("~"), ".ctxflow", "runs")]))


def live_runs() -> list[Run]:
    """The user's runs on this machine that are going on, the youngest first."""
    return [run for _, run in sorted(_live_runs(), key=lambda found: found[0], reverse=True)]


def is_over(run: Run) -> bool:
    """Whether a run that was live is not any more: its file is gone, or its driver. Not so if that cannot be seen."""
    paths = [os.path.join(directory, f"{run.id}.json") for directory in all_directories()]
    path = next(filter(os.path.exists, paths), paths[0])
    try:
        return _started(run.pid) > os.path.getmtime(path) + 1
    except (FileNotFoundError, psutil.NoSuchProcess):
        return True
    except (OSError, psutil.Error):
        return False


def _live_runs() -> Iterator[tuple[float, Run]]:
    """When its driver was started, and the run."""
    for directory in all_directories():
        with contextlib.suppress(OSError):
            for name in os.listdir(directory):
                path = os.path.join(directory, name)
                with contextlib.suppress(OSError, ValueError, TypeError, psutil.Error):
                    with open(path) as file:
                        run = Run(**json.load(file))
                    # A home may be shared with other machines; and a driver that was killed left its file behind.
                    if run.host == gethostname() and (started := _started(run.pid)) <= os.path.getmtime(path) + 1:
                        yield started, run


def _started(pid: int) -> float:
    process = psutil.Process(pid)
    if process.status() == psutil.STATUS_ZOMBIE:  # It was killed, and nobody has asked how it ended.
        raise psutil.ZombieProcess(pid)
    return process.create_time()


class Connection:
    """The connection file of a run, for as long as it lives; a home that cannot be written has none."""

    def __init__(self, run: Run) -> None:
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
