"""What a run and a factory outside it tell each other: two files beside the run's connection file, and no network.

The run writes what it wants, whole, to ID.wanted; the factory adds news of jobs, a line each, to ID.news, which the run
made. Both are for their user alone. What does not live here: who serves a run (service.py), and the connection file
itself (connection.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from ctxflow.errors import CtxflowError
from ctxflow.factory.connection import runs_directory, write_private
from ctxflow.factory.provider import JobChange, Provider

logger = logging.getLogger("ctxflow")
_LOOK_SECONDS = 0.25
_ALONE_SECONDS = 10.0  # After which a run says that no factory serves it.
_CHANGE_FIELDS = {field.name for field in dataclasses.fields(JobChange)}


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What a run wants of its factory, and tells it: the whole of it, each time.

    :ivar site: the name of the run's site.
    :ivar wanted: tier -> how many jobs to hold.
    :ivar joined: tier -> job -> a number that is new whenever another worker of that job has joined.
    :ivar removed: tier -> jobs to end, until the factory has told of their end.
    :ivar refused: tier -> job -> why its worker cannot be used.
    :ivar looks: how often the run asked for news at once.

    >>> Wishes.read(Wishes("campus", {"a10": 8}).text()).wanted
    {'a10': 8}
    """

    site: str
    wanted: Mapping[str, int] = dataclasses.field(default_factory=dict)
    joined: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    removed: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    looks: int = 0

    def text(self) -> str:
        """As it is written."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> Wishes:
        """From what was written.

        :raises ValueError: if it is not whole.
        """
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(str(error)) from None


def wanted_file(run: str) -> str:
    """Where a run says what it wants."""
    return os.path.join(runs_directory(), f"{run}.wanted")


def news_file(run: str) -> str:
    """Where a factory tells a run what happened."""
    return os.path.join(runs_directory(), f"{run}.news")


def factory_file(site: str) -> str:
    """The file that a site's factory holds while it serves; homes may be shared with other machines."""
    name = urllib.parse.quote(f"{site}@{socket.gethostname()}", safe="@")
    return os.path.join(runs_directory(), f"factory-{name}.lock")


def factory_pid(site: str) -> int | None:
    """The process of the factory that serves a site for this user on this machine, None if there is none."""
    path = factory_file(site)
    with contextlib.suppress(OSError, ValueError, psutil.Error), open(path) as file:
        pid = int(file.read())
        if psutil.Process(pid).create_time() <= os.path.getmtime(path) + 1:
            return pid
    return None


class FactoryClient:
    """A run's end: it has its workers from a factory, and is spoken to as an `Acquirer` is.

    :param run: the run's id.
    :param site: the name of its site, by which its factory knows it.
    :param changed: called, on a thread of this object's own, when `take` or `failure` has something.
    """

    def __init__(self, run: str, site: str, changed: Callable[[], None]) -> None:
        self._run, self._site = run, site
        self._changed = changed
        self._condition = threading.Condition()  # Guards all below.
        self._wanted: dict[str, int] = {}
        self._joined: dict[str, dict[str, int]] = {}
        self._removed: dict[str, list[str]] = {}
        self._refused: dict[str, dict[str, str]] = {}
        self._joins = self._looks = 0
        self._dirty = self._stopped = False
        self._news: list[tuple[str, JobChange]] = []
        self._heard = 0  # Bytes of news that were read.
        self._alone_since: float | None = time.monotonic()
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._work, name="ctxflow-factory-client", daemon=True)

    def start(self) -> None:
        """Make the run known to its factory.

        :raises CtxflowError: if the files cannot be written.
        """
        try:
            os.makedirs(runs_directory(), mode=0o700, exist_ok=True)
            write_private(news_file(self._run), "")
            self._write(self._wishes().text())
        except OSError as error:
            raise CtxflowError(
                f"the run cannot tell a factory what it wants: {error}; make {runs_directory()} writable, or set"
                ' acquire = "run"'
            ) from error
        self._thread.start()

    def hold(self, tier: str, count: int) -> None:
        """Want so many jobs of a tier from now on."""
        with self._telling():
            self._wanted[tier] = count

    def hold_none(self) -> None:
        """Want nothing more: the end is near."""
        with self._telling():
            self._wanted = dict.fromkeys(self._wanted, 0)

    def remove(self, tier: str, job: str) -> None:
        """Have a job ended."""
        with self._telling():
            self._drop(tier, job)
            if job not in self._removed.setdefault(tier, []):
                self._removed[tier].append(job)

    def joined(self, tier: str, job: str) -> None:
        """The worker of a job has joined."""
        with self._telling():
            self._joins += 1
            self._joined.setdefault(tier, {})[job] = self._joins

    def refused(self, tier: str, job: str, reason: str) -> None:
        """The worker of a job joined, and cannot be used."""
        with self._telling():
            self._drop(tier, job)
            self._refused.setdefault(tier, {})[job] = reason

    def look(self) -> None:
        """Ask for news at once."""
        with self._telling():
            self._looks += 1

    def take(self) -> list[tuple[str, JobChange]]:
        """What happened to jobs since the last call, each with its tier."""
        with self._condition:
            news, self._news = self._news, []
        return news

    def pin_of(self, tier: str, job: str) -> None:
        """A factory is told of numbers only: no job is for a place of one's choice."""
        return

    def surveyed(self) -> list[Any]:
        """Likewise."""
        return []

    def provider(self, tier: str) -> Provider:
        """Nobody: only the factory knows.

        :raises CtxflowError: always.
        """
        raise CtxflowError(f"the workers of tier {tier} are lent to the factory of {self._site}: ask there")

    def counts(self) -> dict[str, dict[str, int]]:
        """Tier -> how many workers are wanted, and have joined; the rest only the factory counts."""
        with self._condition:
            return {
                tier: {"wanted": wanted, "joined": len(self._joined.get(tier, ()))}
                for tier, wanted in self._wanted.items()
            }

    def stop(self) -> None:
        """Take leave: the factory then ends all jobs of the run."""
        with self._telling():
            self._stopped = True
        if self._thread.ident:
            self._thread.join()
        for path in (wanted_file(self._run), news_file(self._run)):
            with contextlib.suppress(OSError):
                os.unlink(path)

    @contextlib.contextmanager
    def _telling(self) -> Any:
        with self._condition:
            yield
            self._dirty = True
            self._condition.notify_all()

    def _drop(self, tier: str, job: str) -> None:
        """A job has no worker that works any more."""
        self._joined.get(tier, {}).pop(job, None)

    def _wishes(self) -> Wishes:
        return Wishes(self._site, self._wanted, self._joined, self._removed, self._refused, self._looks)

    def _write(self, text: str) -> None:
        path = wanted_file(self._run)
        write_private(f"{path}.new", text)
        os.replace(f"{path}.new", path)

    # --- on the thread

    def _work(self) -> None:
        said = ""
        while not self._stopped:
            with self._condition:
                if not self._dirty:
                    self._condition.wait(_LOOK_SECONDS)
                if self._stopped:
                    return
                text = self._wishes().text() if self._dirty else ""
                self._dirty = False
            try:
                if text:
                    self._write(text)
                self._hear()
                said = ""
            except OSError as error:  # A full disk must not end the run.
                with self._condition:
                    self._dirty = True
                if str(error) != said:
                    said = str(error)
                    logger.warning("the run and its factory cannot speak: %s; it is tried again", said)
                time.sleep(_LOOK_SECONDS)
            self._look_for_factory()

    def _hear(self) -> None:
        path = news_file(self._run)
        if os.path.getsize(path) <= self._heard:
            return
        with open(path, "rb") as file:
            file.seek(self._heard)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._heard += len(whole)
        with self._condition:
            for line in whole.splitlines():
                self._take_in(json.loads(line))
        self._changed()

    def _take_in(self, line: dict[str, Any]) -> None:
        if "failure" in line:
            self.failure = line["failure"]
            return
        tier = line["tier"]
        change = JobChange(**{key: value for key, value in line.items() if key in _CHANGE_FIELDS})
        self._news.append((tier, change))
        if change.state != "running":
            self._drop(tier, change.job)
        if change.state == "ended":
            self._refused.get(tier, {}).pop(change.job, None)
            if change.job in self._removed.get(tier, []):
                self._removed[tier].remove(change.job)
        self._dirty = True

    def _look_for_factory(self) -> None:
        """Say once, after a while, that nobody is there who would ask for workers."""
        if self._alone_since is None or time.monotonic() < self._alone_since + _ALONE_SECONDS:
            return
        self._alone_since = None
        if factory_pid(self._site) is None:
            logger.warning(
                'this run has its workers from a factory, and none serves the site "%s" here: start one with'
                " `ctxflow factory` and the site file, and the run goes on",
                self._site,
            )


class RunFiles:
    """A factory's end of the exchange with one run.

    :param run: the run's id.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._seen: tuple[int, int] | None = None
        self._untold = b""

    def read(self) -> Wishes | None:
        """What the run wants, if that has changed since the last call."""
        with contextlib.suppress(OSError, ValueError):
            found = os.stat(wanted_file(self._run))
            sign = (found.st_mtime_ns, found.st_ino)
            if sign != self._seen:
                with open(wanted_file(self._run)) as file:
                    wishes = Wishes.read(file.read())
                self._seen = sign
                return wishes
        return None

    def tell(self, tier: str, change: JobChange) -> None:
        """Pass news of a job on."""
        self._add({"tier": tier, **dataclasses.asdict(change)})

    def fail(self, reason: str) -> None:
        """Tell that no worker can be had."""
        self._add({"failure": reason})

    def _add(self, line: dict[str, Any]) -> None:
        self._untold += json.dumps(line).encode() + b"\n"
        self.retry()

    def retry(self) -> None:
        """Tell what could not be told yet, since the disk was full, say."""
        if not self._untold:
            return
        try:
            news = os.open(news_file(self._run), os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:  # The run is over.
            self._untold = b""
            return
        except OSError:
            return
        try:
            with contextlib.suppress(OSError):
                self._untold = self._untold[os.write(news, self._untold) :]
        finally:
            os.close(news)

    def discard(self) -> None:
        """Remove what a run left that could not do so itself."""
        for path in (wanted_file(self._run), news_file(self._run)):
            with contextlib.suppress(OSError):
                os.unlink(path)
