"""Publish a run to this user's other commands: a file that says where its manager listens.

The file is readable by its user alone. What a run and a factory tell each other later: run_files.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from socket import gethostname

from ctxflow.factory.tier_providers import Lead
from ctxflow.process_identity import lives
from ctxflow.safe_files import NotOwnError, make_own_folder, own_folder, read_own, tell_once, write_private


@dataclasses.dataclass(frozen=True)
class PublishedRun:
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
    :ivar born: by which its driver is told from another process of its number, "" where that is not known.
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
    born: str = ""

    @classmethod
    def read(cls, text: bytes) -> PublishedRun:
        """Read a connection file; keys of other versions are left out.

        :raises ValueError, TypeError: if it says no run.
        """
        told = json.loads(text)
        if not isinstance(told, dict) or not isinstance(told.get("pid"), int):
            raise ValueError("it tells of no run")
        return cls(**{name: value for name, value in told.items() if name in _FIELDS})

    @property
    def lead(self) -> Lead:
        """What its workers must know to join."""
        return Lead(self.address, self.port, self.program, self.password_file, self.python, self.ssl)


_FIELDS = {field.name for field in dataclasses.fields(PublishedRun)}


def runs_directory() -> str:
    """Return where connection files are kept: in the user's run-time directory if there is one, else in their home."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isdir(base):
        return os.path.join(base, "ctxflow")
    return os.path.join(os.path.expanduser("~"), ".ctxflow", "runs")


def all_directories() -> list[str]:
    """Return where connection files may be: a driver that is a job itself has no run-time directory of the login's."""
    return list(dict.fromkeys([runs_directory(), os.path.join(os.path.expanduser("~"), ".ctxflow", "runs")]))


def live_runs() -> list[PublishedRun]:
    """Return the user's live runs on this machine, the youngest first."""
    return [run for _, run in sorted(_live_runs(), key=lambda found: found[0], reverse=True)]


def is_over(run: PublishedRun) -> bool:
    """Return whether a run has ended: its file is gone, or its driver. Not so if that cannot be seen."""
    there = [os.path.join(directory, f"{run.id}.json") for directory in all_directories()]
    return not any(map(_may_be_there, there)) or not lives(run.pid, run.born)


def _may_be_there(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # A file server that does not answer.
        return True
    return True


def _live_runs() -> Iterator[tuple[int, PublishedRun]]:
    """Yield each live run, with when its file was written."""
    for directory in all_directories():
        for run, written in runs_in(directory):
            # A home may be shared with other machines; and a driver that was killed left its file behind.
            if run.host == gethostname() and lives(run.pid, run.born):
                yield written, run


def runs_in(directory: str) -> Iterator[tuple[PublishedRun, int]]:
    """Yield the runs of a folder's connection files, with when each was written; only this user's own count."""
    if not own_folder(directory):
        return
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            if name.endswith(".json"):
                with contextlib.suppress(OSError, ValueError, TypeError):
                    yield PublishedRun.read(read_own(path)), os.stat(path).st_mtime_ns


class Connection:
    """The connection file of a run, for as long as it lives; a home that cannot be written has none."""

    def __init__(self, run: PublishedRun) -> None:
        directory = runs_directory()
        self._path = os.path.join(directory, f"{run.id}.json")
        try:
            make_own_folder(directory)
            write_private(self._path, json.dumps(dataclasses.asdict(run)))
        except NotOwnError as error:
            tell_once(error)
        except OSError:
            pass

    def close(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)
