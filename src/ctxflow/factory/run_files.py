"""The exchange between a run and a factory outside it: two files beside the run's connection file, and no network.

The run writes what it wants, whole, to ID.wanted; the factory appends news of jobs, a line each, to ID.news, which the
run made. Both are readable by their user alone. The run's end: factory_client.py; who serves a run: service.py.
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
from ctxflow.factory.connection import runs_directory
from ctxflow.factory.provider import JobChange
from ctxflow.process_identity import birth_of, lives
from ctxflow.safe_files import NotOwnError, make_own_folder, open_own, own_folder, read_own, tell_once

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
