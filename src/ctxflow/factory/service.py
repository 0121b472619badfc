"""Serve the live runs of a user as a factory, within what the site says, and its figures to Prometheus."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ctxflow.errors import CtxflowError, UsageError, counted
from ctxflow.factory.exchange import RunFiles
from ctxflow.factory.limits import (
    FactoryLimits,
    Spent,
    bounds,
    grants,
    limit_metrics,
    limits_of,
    maximum_of,
    shares,
    standing,
    to_reclaim,
    total,
)
from ctxflow.factory.provider import ProviderError
from ctxflow.factory.run_files import PublishedRun, is_over, live_runs, may_discard
from ctxflow.factory.served_run import Say, ServedRun
from ctxflow.factory.tier_providers import check_site, site_differences
from ctxflow.installing import how_to_install
from ctxflow.sites import Site

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.core import Metric

_LOOK_SECONDS = 0.25  # How often what runs want is looked at: a few files' dates.
_RUNS_SECONDS = 1.0
_AGAIN_SECONDS = 60.0
_LIMITS_SECONDS = 30.0  # How often what is used of limits is reported to runs, while none is reached.
_STATES = ("queued", "running", "joined", "evicted", "held")


@dataclass
class _Reported:
    """What was last reported to one tier's runs, so that it is reported once, and the totals of runs that ended."""

    shares: dict[str, tuple[int, int]] = field(default_factory=dict)
    totals: Counter[str] = field(default_factory=Counter)


class Service:
    """Serve runs until `stop`.

    :param read: reads the site file again.
    :param say: records decisions; called from several threads.
    :param summaries: seconds without a decision after which a line says how things are; None for never.
    :raises CtxflowError: if the site cannot be served.
    """

    def __init__(self, read: Callable[[], Site], say: Say, summaries: float | None = None) -> None:
        self._read = read
        self._tell = say
        self._summaries = summaries
        self.site = check_site(read())
        self._said_at = time.monotonic()
        self._read_end, self._write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lock = threading.Lock()  # Guards how much of a tier there is.
        self._counting = threading.Lock()  # A job is counted once, whether its run is served, ends or has ended.
        self._serving: dict[str, ServedRun] = {}
        self._ending: dict[str, tuple[ServedRun, threading.Thread]] = {}
        self._reported: dict[str, _Reported] = {}
        self._foreign: set[str] = set()
        self._troubles: dict[tuple[str, str], float] = {}  # Run and tier -> when it is tried again.
        self._runs_at = 0.0
        self._limits = FactoryLimits(self.site.name, lambda sentence: self._say("", "", sentence))
        self._spent = Spent()  # By runs that have ended.
        self._limits_told: list[dict[str, Any]] = []
        self._limits_at = 0.0
        self._limits.look(self.site, Spent())
        self._reload = False
        self.stopping = False

    def stop(self) -> None:
        """Have `run` end everything and return."""
        self.stopping = True
        self._wake()

    def reload(self) -> None:
        """Read the site file again."""
        self._reload = True
        self._wake()

    def _wake(self) -> None:
        """Wake the loop, by a pipe, since a signal's handler must not wait for a lock."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_end, b".")

    def counts(self) -> dict[str, Counter[str]]:
        """Return each tier's jobs by state, the workers wanted and granted, and totals since the start."""
        found = {tier.name: Counter(maximum=maximum_of(self.site, tier)) for tier in self.site.tiers}
        with self._counting:
            for tier, reported in self._reported.items():
                found.setdefault(tier, Counter()).update(reported.totals)
            for run in [*self._serving.values(), *(run for run, _ in self._ending.values())]:
                for tier, counts in run.counts().items():
                    found.setdefault(tier, Counter()).update(counts)
        return found

    def runs(self) -> int:
        """Return how many runs are served."""
        return len(self._serving)

    def limits(self) -> list[dict[str, Any]]:
        """Return what is used of each limit of GPU-hours and cost, of each run's with its id as "run"."""
        own = limits_of(self.site, "run")
        with self._counting:
            runs = list(self._serving.values())
        told = [{**each, "run": run.run.id} for run in runs for each in standing("run", run.spent(), own)]
        return [*self._limits.standing, *told]

    def lacking(self) -> list[tuple[str, str, str, int]]:
        """Return what runs lack: the run, the tier, the reason, and how many workers."""
        with self._counting:
            runs = list(self._serving.values())
        return [(run.run.id, *each) for run in runs for each in run.lacking()]

    def run(self) -> None:
        """Serve runs until `stop`, then end all jobs."""
        told = ", ".join(f"{tier.name} (at most {maximum_of(self.site, tier)})" for tier in self.site.tiers)
        self._say("", "", f'serves the site "{self.site.name}": {told}')
        while not self.stopping:
            if self._reload:
                self._reload = False
                self._read_again()
            if time.monotonic() >= self._runs_at:
                self._runs_at = time.monotonic() + _RUNS_SECONDS
                self._find_runs()
            for run in self._serving.values():
                run.poll()
            self._look_at_limits()
            for tier in {tier for run in self._serving.values() for tier in run.offers()}:
                self._share(tier)
            if self._summaries is not None and time.monotonic() > self._said_at + self._summaries:
                self._say("", "", self.summary())
            select.select([self._read_end], [], [], _LOOK_SECONDS)
            with contextlib.suppress(BlockingIOError):
                os.read(self._read_end, 4096)
        self._end()

    def _look_at_limits(self) -> None:
        """Check the limits over all runs, and report them to the runs."""
        with self._counting:
            each = [*self._serving.values(), *(run for run, _ in self._ending.values())]
            spent = total([self._spent, *(run.spent() for run in each)])
        before = self._limits.reached
        try:
            self._limits.look(self.site, spent, last=self.stopping)
        except CtxflowError as error:
            self.stopping = True
            self._say("", "", f"it ends, for {error}")
        now = time.monotonic()
        if before != self._limits.reached or (now >= self._limits_at and self._limits.standing != self._limits_told):
            self._limits_at, self._limits_told = now + _LIMITS_SECONDS, self._limits.standing
            for run in self._serving.values():
                run.tell_limits(self._limits_told)

    def _say(self, tier: str, run: str, sentence: str) -> None:
        self._said_at = time.monotonic()
        self._tell(tier, run, sentence)

    def _read_again(self) -> None:
        try:
            site = check_site(self._read())
            if site.name != self.site.name:
                raise CtxflowError(f'its name was "{self.site.name}", which cannot change while its factory runs')
        except (CtxflowError, ValueError, OSError) as error:
            self._say("", "", f"the site file is refused, and what it said before stays in force: {error}")
            return
        before, self.site = self.site, site
        self._troubles.clear()
        for run in self._serving.values():
            self._lend(run)
        for sentence in site_differences(before, site):
            self._say("", "", sentence)

    def _find_runs(self) -> None:
        alive = {run.id: run for run in live_runs() if run.acquire == "factory"}
        for name in [name for name, its in self._serving.items() if name not in alive and is_over(its.run)]:
            self._end_run(name)
        for name, (served, thread) in list(self._ending.items()):
            if not thread.is_alive():
                self._forget(name, served)
        for run in reversed(alive.values()):  # The oldest first.
            if run.id in self._serving:
                self._lend(self._serving[run.id])
            elif run.id not in self._ending:
                self._serve(run)
        self._foreign &= set(alive)

    def _serve(self, run: PublishedRun) -> None:
        """Serve a run, if it is one of this site's, as soon as its wishes are there."""
        files = RunFiles(run.id)
        wishes = files.read()
        if wishes is None:
            return
        if wishes.site != self.site.name:
            if run.id not in self._foreign:
                self._foreign.add(run.id)
                self._say("", run.id, f'it wants workers of the site "{wishes.site}": another factory is to serve it')
            return
        served = ServedRun(run, wishes, files, self._lock, self._say, self._wake, self._limits.behind)
        with self._counting:
            self._serving[run.id] = served
        self._say("", run.id, f"it is served: its driver is process {run.pid}, its files are in {run.directory}")
        self._lend(served)
        if self._limits.standing:
            served.tell_limits(self._limits.standing)

    def _lend(self, run: ServedRun) -> None:
        for tier in self.site.tiers:
            key = run.run.id, tier.name
            if tier.name not in run.run.commands or time.monotonic() < self._troubles.get(key, 0.0):
                continue
            try:
                run.lend(tier, self.site.join_timeout)
            except (ProviderError, OSError) as error:
                self._troubles[key] = time.monotonic() + _AGAIN_SECONDS
                self._say(tier.name, run.run.id, f"tried again in {_AGAIN_SECONDS:.0f} s: {error}")

    def _share(self, name: str) -> None:
        """Grant each run its part of a tier."""
        tier = next((tier for tier in self.site.tiers if tier.name == name), None)
        maximum = maximum_of(self.site, tier) if tier and not self._limits.reached else 0
        runs = {run.run.id: run for run in self._serving.values() if name in run.offers()}
        wants = {each: run.wanted(name) if tier else 0 for each, run in runs.items()}
        with self._lock:
            held = {each: run.held(name) for each, run in runs.items()}
            leaving = {each: run.held(name) for each, (run, _) in self._ending.items() if name in run.offers()}
            for each, count in grants(wants, held | leaving, maximum).items():
                runs[each].allow(name, count)
        for each, most in bounds(wants, held, leaving, maximum).items():
            runs[each].bound(name, most)
        for run in runs.values():
            run.hold(name)
        running = {each: run.running(name) for each, run in runs.items()}
        for each, count in to_reclaim(wants, held | leaving, running, maximum).items():
            if count:
                runs[each].reclaim(name, count)
                self._say(name, each, f"gives {count} running workers to runs that have less than their share")
        self._say_shares(name, wants, maximum)

    def _say_shares(self, name: str, wants: dict[str, int], maximum: int) -> None:
        share = shares(wants, maximum)
        sharing = "1 run shares" if len(wants) == 1 else f"{len(wants)} runs share"
        with self._counting:
            reported = self._reported.setdefault(name, _Reported())
        before, reported.shares = reported.shares, {run: (want, share[run]) for run, want in wants.items()}
        for run, (want, its) in reported.shares.items():
            if before.get(run) != (want, its):
                less = f", and gets {its}: {sharing} {maximum}" if its < want else ""
                self._say(name, run, f"wants {want}{less}")

    def _end_run(self, name: str) -> None:
        """End a run's jobs, while others are served."""
        served = self._serving[name]
        self._say("", name, "it is over: its jobs are ended")
        thread = threading.Thread(target=served.end, name="ctxflow-ending", daemon=True)
        thread.start()
        with self._counting:
            del self._serving[name]
            self._ending[name] = served, thread

    def _forget(self, name: str, served: ServedRun) -> None:
        with self._counting:
            del self._ending[name]
            for tier, counts in served.counts().items():
                keep = {key: value for key, value in counts.items() if key not in (*_STATES, "wanted", "granted")}
                self._reported.setdefault(tier, _Reported()).totals.update(keep)
            self._spent += served.spent()
        if may_discard(served.run):
            RunFiles(name).discard()
        self._say("", name, self._what_is_left([served]) or "nothing of it is left")

    def _end(self) -> None:
        with self._lock:
            jobs = sum(run.held(tier) for run in self._serving.values() for tier in run.offers())
        self._say("", "", f"ends, and gives back {counted(jobs, 'job')} of {counted(len(self._serving), 'run')}")
        for run in self._serving.values():
            run.report_end()
        threads = [threading.Thread(target=run.end, daemon=True) for run in self._serving.values()]
        for thread in threads:
            thread.start()
        for thread in [*threads, *(thread for _, thread in self._ending.values())]:
            thread.join()
        self._look_at_limits()
        ended = [*self._serving.values(), *(run for run, _ in self._ending.values())]
        self._say("", "", self._what_is_left(ended) or "nothing is left")

    def _what_is_left(self, ended: list[ServedRun]) -> str:
        with self._lock:
            left = sum(run.held(tier) for run in ended for tier in run.offers())
        return f"{counted(left, 'job')} may be left: call `ctxflow factory` with --clean later" if left else ""

    def summary(self) -> str:
        """Return how things are, in a line."""
        told = [counted(self.runs(), "run")]
        for tier, counts in self.counts().items():
            waiting = counts["queued"] + counts["evicted"] + counts["held"]
            told.append(f"{tier}: {counts['joined']} of {counts['granted']} work, {waiting} wait")
        return "; ".join(told)


_GAUGES = {
    "wanted": ("workers_wanted", "Workers that runs want now"),
    "granted": ("workers_granted", "Workers that runs may have now, within the tier's maximum"),
    "maximum": ("workers_maximum", "The tier's maximum"),
    "joined": ("workers_joined", "Workers that have joined their runs"),
}
_COUNTERS = {
    "submissions": ("submissions", "Submissions to the batch system"),
    "submitted": ("jobs_submitted", "Jobs submitted"),
    "removed": ("removals", "Jobs that the factory removed"),
    "evictions": ("evictions", "Evictions by the batch system"),
    "holds": ("holds", "Jobs that the batch system put on hold"),
    "failures": ("failures", "Submissions and workers that failed"),
    "queries": ("queries", "Times that the batch system was asked something"),
}


class FactoryCollector:
    """Collect a factory's counts when Prometheus asks."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield the figures, by tier."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts = self._service.counts()
        yield GaugeMetricFamily("ctxflow_factory_runs", "Runs that are served", value=self._service.runs())
        jobs = GaugeMetricFamily(
            "ctxflow_factory_jobs", "Jobs now; those that run and have joined count as joined", labels=("tier", "state")
        )
        for tier, its in counts.items():
            for state in _STATES:
                jobs.add_metric((tier, state), its[state])
        yield jobs
        for family, named in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for key, (name, help_text) in named.items():
                metric = family(f"ctxflow_factory_{name}", help_text, labels=("tier",))
                for tier, its in counts.items():
                    metric.add_metric((tier,), its[key])
                yield metric
        why = "Workers that a run's tier lacks, and why"
        lacking = GaugeMetricFamily("ctxflow_factory_workers_lacking", why, labels=("run", "tier", "reason"))
        for *labels, lacks in self._service.lacking():
            lacking.add_metric(labels, lacks)
        yield lacking
        yield from limit_metrics("ctxflow_factory", self._service.limits(), ("scope", "run"))


def place_of(text: str) -> tuple[str, int]:
    """Return the address and the port that `[ADDRESS:]PORT` means; a ValueError says that it means none.

    >>> place_of("9464"), place_of("[::1]:9464")
    (('127.0.0.1', 9464), ('::1', 9464))
    """
    address, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise ValueError(f"metrics cannot be served at {text!r}: write a port, or ADDRESS:PORT")
    return address.strip("[]") or "127.0.0.1", int(port)


def serve_metrics(service: Service, address: str, port: int) -> int:
    """Serve a factory's figures, as `start_server` does, for as long as this process lives, and return the port."""
    return int(start_server(FactoryCollector(service), address, port).server_port)


def start_server(collector: Any, address: str, port: int) -> WSGIServer:
    """Serve a collector's figures on a thread of its own, and return the server, to be ended; port 0 is any.

    :raises CtxflowError: if prometheus-client is missing; a UsageError, if the address cannot be listened at.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        advice = how_to_install("prometheus-client", extra="factory")
        raise CtxflowError(f"metrics need prometheus-client: {advice}") from None
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, _ = start_http_server(port, address, registry)
    except OSError as error:
        raise UsageError(f"metrics cannot be served at {address}:{port}: {error.strerror}; name another") from None
    return server
