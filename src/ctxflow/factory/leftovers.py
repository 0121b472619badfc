"""Find and remove what is left of runs that have ended: jobs in batch systems, connection files, temporary folders."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator

from ctxflow.factory.provider import FoundJob, ProviderError
from ctxflow.factory.run_files import all_directories, live_runs
from ctxflow.factory.tier_providers import provider_of, queue_of
from ctxflow.host.scratch import abandoned, remove_abandoned
from ctxflow.safe_files import own_folder, read_own
from ctxflow.sites import Site
from ctxflow.sites.site_model import Tier

_SETTLED_SECONDS = 60.0  # A file that is younger may belong to a run that is just beginning, or ending.
_OF_A_RUN = (".json", ".wanted", ".wanted.new", ".news")


@dataclasses.dataclass(frozen=True)
class Leftovers:
    """What is left of runs that have ended.

    :ivar jobs: with each, the first of the tiers whose batch system has it.
    :ivar files: paths.
    :ivar elsewhere: how many jobs were left out since their runs go on, or may, on another machine that shares the
        user's home.
    :ivar troubles: which batch systems could not be asked, a sentence each.
    """

    jobs: list[tuple[Tier, FoundJob]]
    files: list[str]
    elsewhere: int
    troubles: list[str]


def find_leftovers(site: Site) -> Leftovers:
    """Return all jobs of this user that are workers of no live run, and all files of dead ones."""
    found: list[tuple[Tier, FoundJob]] = []
    troubles = []
    for tier in {queue_of(tier): tier for tier in reversed(site.tiers)}.values():
        try:
            found += [(tier, job) for job in provider_of(tier, "clean").find()]
        except ProviderError as error:
            troubles.append(str(error))
    # Afterwards, so that no run that begins meanwhile is taken for dead.
    live, away = {run.id for run in live_runs()}, _away()
    jobs = [(tier, job) for tier, job in found if job.run not in live | away]
    elsewhere = sum(job.run in away for _, job in found)
    return Leftovers(jobs, files_left(), elsewhere, troubles)


def files_left() -> list[str]:
    """Return all files and folders of this machine's dead runs, but those that they keep for good: `runs/`."""
    return [*sorted(_dead_files({run.id for run in live_runs()}, _away())), *abandoned()]


def remove_leftovers(found: Leftovers) -> list[str]:
    """Remove all of it; return what could not be removed, a sentence each."""
    troubles = []
    for source, tier in {queue_of(tier): tier for tier, _ in found.jobs}.items():
        try:
            provider_of(tier, "clean").discard([job.job for its, job in found.jobs if queue_of(its) == source])
        except ProviderError as error:
            troubles.append(str(error))
    return troubles + remove_files(found.files)


def remove_files(paths: Iterable[str]) -> list[str]:
    """Remove what `files_left` found; return what could not be removed, a sentence each."""
    troubles = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            try:
                if os.path.isdir(path):
                    remove_abandoned(path)
                else:
                    os.unlink(path)
            except OSError as error:
                troubles.append(f"{path} cannot be removed: {error.strerror}")
    return troubles


def _away() -> set[str]:
    """Return the runs of other machines that share the user's home."""
    return {name for name, host in _connections().items() if host not in ("", socket.gethostname())}


def _connections() -> dict[str, str]:
    """Return the machine of each run's driver, "" where its file does not say."""
    hosts = {}
    for path in _files():
        name, kind = os.path.splitext(os.path.basename(path))
        if kind == ".json":
            hosts[name] = ""
            with contextlib.suppress(OSError, ValueError):
                told = json.loads(read_own(path))
                hosts[name] = str(told.get("host", "")) if isinstance(told, dict) else ""
    return hosts


def _dead_files(live: set[str], away: set[str]) -> Iterator[str]:
    now = functools.cache(_now_in)
    for path in _files():
        name = os.path.basename(path)
        run = next((name.removesuffix(kind) for kind in _OF_A_RUN if name.endswith(kind)), None)
        if run is None or run in live or run in away:
            continue
        with contextlib.suppress(OSError):
            whole = name.endswith(".json") and _connections().get(run)
            if whole or now(os.path.dirname(path)) - os.path.getmtime(path) > _SETTLED_SECONDS:
                yield path


def _now_in(directory: str) -> float:
    """Return the time by the clock that dates a folder's files, which may be a file server's."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".now-") as probe:
        return os.fstat(probe.fileno()).st_mtime


def _files() -> list[str]:
    found = []
    for directory in filter(own_folder, all_directories()):
        with contextlib.suppress(OSError):
            found += [entry.path for entry in os.scandir(directory)]
    return found
