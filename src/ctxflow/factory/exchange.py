"""The exchange between a run and the factory that acquires its workers, by files; no network is needed.

The run (`FactoryClient`) writes what it wants, whole, to ID.wanted; the factory (`RunFiles`) appends news of jobs, a
line each, to ID.news, which the run made. Both are readable by their user alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctxflow.causes import ShortfallCause, lasting
from ctxflow.errors import CtxflowError
from ctxflow.factory.limits import SpendingMeter, Spent, total
from ctxflow.factory.provider import JobChange, Provider
from ctxflow.factory.run_files import factory_pid, runs_directory
from ctxflow.files import NotOwnError, make_own_folder, open_own, own_folder, read_own, tell_once, write_private
from ctxflow.sites.site_model import Tier

logger = logging.getLogger("ctxflow")
_LOOK_SECONDS = 0.25
_END_SECONDS = 10.0
_CHANGE_FIELDS = {field.name for field in dataclasses.fields(JobChange)}


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What a run wants of its factory, and reports to it; written whole each time.

    :ivar wanted: tier -> how many jobs to hold.
    :ivar joined: tier -> job whose worker is connected -> a number that is new whenever another worker has joined, 0
        until one has.
    :ivar removed: tier -> jobs to end, until the factory has reported their end.
    :ivar refused: tier -> job -> why its worker cannot be used.
    :ivar looks: how often the run requested news at once.
    :ivar excluded: tier -> the hosts on which no worker is to be requested.

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
        """Read what was written; a ValueError says that it is not whole."""
        try:
            found = json.loads(text)
            wishes = cls(**{key: value for key, value in found.items() if key in _WISHES})
        except (TypeError, AttributeError) as error:
            raise ValueError(str(error)) from None
        tables = (wishes.wanted, wishes.joined, wishes.removed, wishes.refused, wishes.excluded)
        tables_only = all(isinstance(each, dict) for each in tables)
        if not tables_only or not all(type(count) is int for count in wishes.wanted.values()):
            raise ValueError("they are not as wishes are written")
        return wishes


_WISHES = {field.name for field in dataclasses.fields(Wishes)}


def wanted_file(run: str) -> str:
    """Return the path of what a run wants."""
    return os.path.join(runs_directory(), f"{run}.wanted")


def news_file(run: str) -> str:
    """Return the path of a factory's news for a run."""
    return os.path.join(runs_directory(), f"{run}.news")


class RunFiles:
    """A factory's end of the exchange with one run."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._seen = b""
        self._unwritten = b""

    def read(self) -> Wishes | None:
        """Return what the run wants if that has changed since the last call, else None."""
        try:
            # Compared by content: mtime and inode may both recur if it is written twice within one tick of the clock.
            if own_folder(runs_directory()) and (found := read_own(wanted_file(self._run))) != self._seen:
                wishes = Wishes.read(found)
                self._seen = found
                return wishes
        except NotOwnError as error:
            tell_once(error)
        except (OSError, ValueError):
            pass
        return None

    def tell(self, tier: str, change: JobChange) -> None:
        """Pass on a change of a job."""
        self._add({"tier": tier, **dataclasses.asdict(change)})

    def explain(self, tier: str, causes: Sequence[ShortfallCause]) -> None:
        """Report why a tier has fewer workers than the run wants, nothing if it has them."""
        # Runs of earlier versions read the words alone.
        told = {"reason_to_wait": lasting(causes, tier), "causes": [dataclasses.asdict(each) for each in causes]}
        self._add({"tier": tier, **told})

    def bound(self, tier: str, maximum: int) -> None:
        """Report how many workers of a tier the run may have from now on."""
        self._add({"tier": tier, "maximum": maximum})

    def tell_limits(self, limits: Sequence[Mapping[str, Any]]) -> None:
        """Report what is used of limits that other runs count towards, too."""
        self._add({"limits": limits})

    def fail(self, reason: str) -> None:
        """Report that no worker can be had."""
        self._add({"failure": reason})

    def _add(self, line: dict[str, Any]) -> None:
        self._unwritten += json.dumps(line).encode() + b"\n"
        self.retry()

    def retry(self) -> None:
        """Write what could not be written yet, for instance since the disk was full."""
        if not self._unwritten:
            return
        try:
            with open(open_own(news_file(self._run), os.O_WRONLY | os.O_APPEND), "wb", buffering=0) as news:
                self._unwritten = self._unwritten[news.write(self._unwritten) :]
        except FileNotFoundError:  # The run is over.
            self._unwritten = b""
        except NotOwnError as error:
            tell_once(error)
        except OSError:
            pass

    def discard(self) -> None:
        """Remove the files of a run that has ended."""
        for path in (wanted_file(self._run), news_file(self._run)):
            with contextlib.suppress(OSError):
                os.unlink(path)


class FactoryClient:
    """A run whose workers a factory acquires; it is used as an `Acquirer` is.

    :param site: the name of its site, by which its factory knows it.
    :param changed: called, on a thread of this object's own, when `take` or `failure` has something.
    :param tiers: the site's, for their workers' GPUs and prices.
    :param alone_seconds: after which it says that no factory serves the site.
    """

    def __init__(
        self,
        run: str,
        site: str,
        changed: Callable[[], None],
        tiers: Sequence[Tier] = (),
        *,
        alone_seconds: float = 10.0,
    ) -> None:
        self._run, self._site, self._alone_seconds = run, site, alone_seconds
        self._changed = changed
        self._condition = threading.Condition()  # Guards all below.
        self._wanted: dict[str, int] = {}
        self._joined: dict[str, dict[str, int]] = {}
        self._removed: dict[str, list[str]] = {}
        self._refused: dict[str, dict[str, str]] = {}
        self._excluded: dict[str, list[str]] = {}
        self._joins = self._looks = 0
        self._dirty = self._stopped = False
        self._news: list[tuple[str, JobChange]] = []
        self._causes: dict[str, list[ShortfallCause]] = {}
        self._maxima: dict[str, int] = {}
        self._limits_beyond: list[dict[str, Any]] = []
        self._meters = {tier.name: SpendingMeter(tier.gpus, tier.price) for tier in tiers}
        self._news_bytes = 0  # Bytes of news that were read.
        self._alone_since: float | None = time.monotonic()
        self._served = True  # Until it is known that no factory does.
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._work, name="ctxflow-factory-client", daemon=True)

    def start(self) -> None:
        """Announce the run to its factory.

        :raises CtxflowError: if the files cannot be written.
        """
        try:
            make_own_folder(runs_directory())
            write_private(news_file(self._run), "")
            self._write(self._wishes().text())
        except OSError as error:
            raise CtxflowError(
                f"the run cannot tell a factory what it wants: {error}; make {runs_directory()} writable, or set"
                ' acquire = "run"'
            ) from error
        self._thread.start()

    def hold(self, tier: str, count: int) -> None:
        """Request this many jobs of a tier from now on."""
        with self._changing():
            self._wanted[tier] = count

    def hold_none(self) -> None:
        """Request nothing more: the run is about to end."""
        with self._changing():
            self._wanted = dict.fromkeys(self._wanted, 0)

    def remove(self, tier: str, job: str) -> None:
        """Have a job ended."""
        with self._changing():
            self._disconnect(tier, job)
            if job not in self._removed.setdefault(tier, []):
                self._removed[tier].append(job)

    def connected(self, tier: str, job: str) -> None:
        """Record that a worker of a job is connected and answers."""
        with self._changing():
            self._joined.setdefault(tier, {}).setdefault(job, 0)

    def disconnected(self, tier: str, job: str) -> None:
        """Record that no worker of a job is connected any more."""
        with self._changing():
            self._disconnect(tier, job)

    def joined(self, tier: str, job: str) -> None:
        """Record that the worker of a job has joined."""
        with self._changing():
            self._joins += 1
            self._joined.setdefault(tier, {})[job] = self._joins

    def refused(self, tier: str, job: str, reason: str) -> None:
        """Record that the worker of a job joined and cannot be used."""
        with self._changing():
            self._disconnect(tier, job)
            self._refused.setdefault(tier, {})[job] = reason

    def exclude(self, tier: str, hosts: Sequence[str]) -> None:
        """Request no worker of a tier on these hosts from now on."""
        with self._changing():
            self._excluded[tier] = sorted(hosts)

    def look(self) -> None:
        """Ask for news at once."""
        with self._changing():
            self._looks += 1

    def take(self) -> list[tuple[str, JobChange]]:
        """Return what happened to jobs since the last call, each change with its tier."""
        with self._condition:
            news, self._news = self._news, []
        return news

    def pin_of(self, tier: str, job: str) -> None:
        """Return None: a factory gets numbers only, so that no job is pinned."""
        return

    def surveyed(self) -> list[Any]:
        """Return nothing: a factory is not asked for machines."""
        return []

    def output(self, tier: str, job: str) -> str:
        """Return "": only the factory knows the path of what a job writes."""
        return ""

    def provider(self, tier: str) -> Provider:
        """Raise a CtxflowError: only the factory knows its providers."""
        raise CtxflowError(f"the workers of tier {tier} are lent to the factory of {self._site}: ask there")

    def counts(self) -> dict[str, dict[str, int]]:
        """Return how many workers of each tier are wanted, and have joined; the rest only the factory counts."""
        with self._condition:
            return {tier: {"wanted": wanted, "joined": self._count(tier)} for tier, wanted in self._wanted.items()}

    def _count(self, tier: str) -> int:
        return sum(number > 0 for number in self._joined.get(tier, {}).values())

    def _disconnect(self, tier: str, job: str) -> None:
        self._joined.get(tier, {}).pop(job, None)

    def spent(self) -> Spent:
        """Return what the run's jobs have used so far."""
        now = time.monotonic()
        with self._condition:
            return total(meter.spent(now) for meter in self._meters.values())

    def maxima(self) -> dict[str, int]:
        """Return how many workers of each tier the factory would lend to this run."""
        with self._condition:
            return dict(self._maxima)

    def limits_beyond(self) -> list[dict[str, Any]]:
        """Return what is used of the factory's limits, and of its user's, as last reported by the factory."""
        with self._condition:
            return list(self._limits_beyond)

    def causes(self) -> list[ShortfallCause]:
        """Return why tiers have fewer workers than are wanted; none of those that have them."""
        alone = "" if self._served else f'no factory serves the site "{self._site}" here, as far as is known'
        with self._condition:
            lacking = [tier for tier, wanted in self._wanted.items() if self._count(tier) < wanted]
            unserved = {tier: [ShortfallCause("factory", alone, tier=tier)] if alone else [] for tier in lacking}
            return [each for tier in lacking for each in self._causes.get(tier) or unserved[tier]]

    def stop(self) -> None:
        """Leave: the factory then ends all jobs of the run."""
        with self._changing():
            self._stopped = True
        if self._thread.ident:
            self._thread.join(_END_SECONDS)
        RunFiles(self._run).discard()

    @contextlib.contextmanager
    def _changing(self) -> Any:
        with self._condition:
            yield
            self._dirty = True
            self._condition.notify_all()

    def _wishes(self) -> Wishes:
        return Wishes(self._site, self._wanted, self._joined, self._removed, self._refused, self._looks, self._excluded)

    def _write(self, text: str) -> None:
        path = wanted_file(self._run)
        write_private(f"{path}.new", text)
        os.replace(f"{path}.new", path)

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
                self._read_news()
                said = ""
            except OSError as error:  # A full disk must not end the run.
                with self._condition:
                    self._dirty = True
                if str(error) != said:
                    said = str(error)
                    logger.warning("the run and its factory cannot speak: %s; it is tried again", said)
                time.sleep(_LOOK_SECONDS)
            self._look_for_factory()

    def _read_news(self) -> None:
        path = news_file(self._run)
        if os.path.getsize(path) <= self._news_bytes:
            return
        data = read_own(path, self._news_bytes)
        whole = data[: data.rfind(b"\n") + 1]
        self._news_bytes += len(whole)
        with self._condition:
            self._served = True
            for line in whole.splitlines():
                try:
                    self._apply(json.loads(line))
                except (ValueError, TypeError, LookupError, AttributeError) as error:  # Of another version, say.
                    logger.warning(
                        "news of the factory cannot be read and is left out (%s: %s): %.200s; is it of this ctxflow?",
                        type(error).__name__, error, line.decode(errors="replace"),
                    )  # fmt: skip
        self._changed()

    def _apply(self, line: dict[str, Any]) -> None:
        if "failure" in line:
            self.failure = str(line["failure"])
            return
        if "limits" in line:
            self._limits_beyond = [dict(each) for each in line["limits"]]
            return
        tier = line["tier"]
        if "maximum" in line:
            self._maxima[tier] = int(line["maximum"])
            return
        if "reason_to_wait" in line:
            words = [{"kind": "factory", "text": line["reason_to_wait"]}] if line["reason_to_wait"] else []
            self._causes[tier] = [ShortfallCause.of({**each, "tier": tier}) for each in line.get("causes", words)]
            return
        change = JobChange(**{key: value for key, value in line.items() if key in _CHANGE_FIELDS})
        if not all(isinstance(each, str) for each in (tier, change.job, change.state)):
            raise TypeError("a tier, a job and a state are words")
        self._news.append((tier, change))
        if tier in self._meters:
            self._meters[tier].changed(change, time.monotonic())
        if change.state == "ended":
            self._refused.get(tier, {}).pop(change.job, None)
            if change.job in self._removed.get(tier, []):
                self._removed[tier].remove(change.job)
        self._dirty = True

    def _look_for_factory(self) -> None:
        """Warn once, after a while, if no factory serves the site."""
        if self._alone_since is None or time.monotonic() < self._alone_since + self._alone_seconds:
            return
        self._alone_since = None
        self._served = factory_pid(self._site) is not None
        if not self._served:
            logger.warning(
                'this run has its workers from a factory, and none serves the site "%s" here: start one with'
                " `ctxflow factory` and the site file, and the run goes on",
                self._site,
            )
