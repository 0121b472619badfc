"""The files by which a run is found, and by which it and a factory outside it speak; no network is needed.

ID.json is the connection file, which says where the run's manager listens. The run writes what it wants, whole, to
ID.wanted; the factory appends news of jobs, a line each, to ID.news, which the run made. All are readable by their user
alone. The run's end of the exchange: factory_client.py; who serves a run: service.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ctxflow.errors import CtxflowError
from ctxflow.factory.provider import JobChange
from ctxflow.factory.tier_providers import Lead
from ctxflow.process_identity import birth_of, lives
from ctxflow.safe_files import NotOwnError, make_own_folder, open_own, own_folder, read_own, tell_once, write_private


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """A live run, as published in its connection file.

    :ivar host: the machine that its driver runs on.
    :ivar pid: of the driver.
    :ivar directory: where it keeps its files.
    :ivar address: where its manager listens, with `port`.
    :ivar password_file: holds the key to the run; only its user can read it.
    :ivar program: the workers' program, one file.
    :ivar python: what starts it on workers.
    :ivar ssl: whether workers encrypt what they send.
    :ivar commands: tier -> the command that starts a worker of it by hand, on any machine that reaches the address and
        sees the files that the command names.
    :ivar variables: tier -> the names of the variables that its workers find in their environment.
    :ivar acquire: who acquires its workers: "run" or "factory", as the site says.
    :ivar born: when its driver began, which distinguishes it from another process with its number; "" if unknown.
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
            if run.host == socket.gethostname() and lives(run.pid, run.born):
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


_LOCK_SECONDS = 1.0  # How long a factory that is just ending may still hold its lock.


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What a run wants of its factory, and tells it; written whole each time.

    :ivar site: the name of the run's site.
    :ivar wanted: tier -> how many jobs to hold.
    :ivar joined: tier -> job -> a number that is new whenever another worker of that job has joined.
    :ivar removed: tier -> jobs to end, until the factory has told of their end.
    :ivar refused: tier -> job -> why its worker cannot be used.
    :ivar looks: how often the run asked for news at once.
    :ivar excluded: tier -> the hosts on which no worker is to be asked for.

    >>> Wishes.read(Wishes("campus", {"a10": 8}).text()).wanted
    {'a10': 8}
    """

    site: str
    wanted: Mapping[str, int] = dataclasses.field(default_factory=dict)
    joined: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    removed: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    looks: int = 0
    excluded: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)

    def text(self) -> str:
        """Return it as it is written."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str | bytes) -> Wishes:
        """Read what was written.

        :raises ValueError: if it is not whole.
        """
        try:
            found = json.loads(text)
            wishes = cls(**{key: value for key, value in found.items() if key in _WISHES})
        except (TypeError, AttributeError) as error:
            raise ValueError(str(error)) from None
        tables = (wishes.wanted, wishes.joined, wishes.removed, wishes.refused, wishes.excluded)
        if not all(isinstance(each, dict) for each in tables) or not all(
            type(count) is int for count in wishes.wanted.values()
        ):
            raise ValueError("they are not as wishes are written")
        return wishes


_WISHES = {field.name for field in dataclasses.fields(Wishes)}


def wanted_file(run: str) -> str:
    """Return the file in which a run says what it wants."""
    return os.path.join(runs_directory(), f"{run}.wanted")


def news_file(run: str) -> str:
    """Return the file in which a factory tells a run what happened."""
    return os.path.join(runs_directory(), f"{run}.news")


def factory_file(site: str) -> str:
    """Return the file that a site's factory locks while it serves; homes may be shared with other machines."""
    name = urllib.parse.quote(f"{site}@{socket.gethostname()}", safe="@")
    return os.path.join(runs_directory(), f"factory-{name}.lock")


def factory_pid(site: str) -> int | None:
    """Return the process of the factory that serves a site for this user on this machine, None if there is none."""
    if own_folder(runs_directory()):
        with contextlib.suppress(OSError, ValueError):
            pid, _, born = read_own(factory_file(site)).decode().partition(" ")
            if lives(int(pid), born):
                return int(pid)
    return None


def factory_mark() -> str:
    """Return what a factory writes into its lock file: its process."""
    return f"{os.getpid()} {birth_of(os.getpid()) or ''}"


@contextlib.contextmanager
def only_factory(site: str) -> Iterator[None]:
    """Hold the lock of a site's factory on this machine, for this user.

    :raises CtxflowError: if there is one.
    """
    path = factory_file(site)
    try:
        make_own_folder(runs_directory())
        descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise CtxflowError(f"no factory can be started here: {error}") from None
    with open(descriptor, "r+") as file:
        deadline = time.monotonic() + _LOCK_SECONDS  # One that is just ending may have it still.
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    who = factory_pid(site)
                    raise CtxflowError(
                        f'a factory serves the site "{site}" already, process {who}: end it first, or send it SIGHUP to'
                        " have it read the site file again"
                    ) from None
                time.sleep(0.05)
        file.truncate()
        file.write(factory_mark())
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)  # The file stays: whoever waits for it must not lock one that is gone.


class RunFiles:
    """A factory's end of the exchange with one run.

    :param run: the run's id.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._seen: tuple[int, int] | None = None
        self._untold = b""

    def read(self) -> Wishes | None:
        """Return what the run wants if that has changed since the last call, else None."""
        try:
            found = os.stat(wanted_file(self._run))
            sign = (found.st_mtime_ns, found.st_ino)
            if sign != self._seen and own_folder(runs_directory()):
                wishes = Wishes.read(read_own(wanted_file(self._run)))
                self._seen = sign
                return wishes
        except NotOwnError as error:
            tell_once(error)
        except (OSError, ValueError):
            pass
        return None

    def tell(self, tier: str, change: JobChange) -> None:
        """Pass on a change of a job."""
        self._add({"tier": tier, **dataclasses.asdict(change)})

    def explain(self, tier: str, reason: str) -> None:
        """Tell why a tier has fewer workers than the run wants, "" if it has them."""
        self._add({"tier": tier, "reason_to_wait": reason})

    def bound(self, tier: str, maximum: int) -> None:
        """Tell how many workers of a tier the run may have, until told otherwise."""
        self._add({"tier": tier, "maximum": maximum})

    def tell_limits(self, limits: Sequence[Mapping[str, Any]]) -> None:
        """Tell what is used of limits that other runs count towards, too."""
        self._add({"limits": limits})

    def fail(self, reason: str) -> None:
        """Tell that no worker can be had."""
        self._add({"failure": reason})

    def _add(self, line: dict[str, Any]) -> None:
        self._untold += json.dumps(line).encode() + b"\n"
        self.retry()

    def retry(self) -> None:
        """Write what could not be written yet, since the disk was full, say."""
        if not self._untold:
            return
        try:
            news = open_own(news_file(self._run), os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:  # The run is over.
            self._untold = b""
            return
        except NotOwnError as error:
            tell_once(error)
            return
        except OSError:
            return
        try:
            with contextlib.suppress(OSError):
                self._untold = self._untold[os.write(news, self._untold) :]
        finally:
            os.close(news)

    def discard(self) -> None:
        """Remove the files of a run that could not do so itself."""
        for path in (wanted_file(self._run), news_file(self._run)):
            with contextlib.suppress(OSError):
                os.unlink(path)
