"""How many workers of each tier a live run may have: what its site says, or less.

Less where a person has it leave a tier or a host from another terminal (`ctxflow drain`, by a file of the run's
directory, which counts only if this user alone can have written it), its factory has fewer now, or a limit is reached.
What does not live here: what follows for workers that are there (scheduler/).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ctxflow.errors import counted
from ctxflow.executors.contract import Bounded, Engine, LimitReached
from ctxflow.factory.limits import reached
from ctxflow.files import NotOwnError, read_own, tell_once, write_private
from ctxflow.scheduler import events as ev
from ctxflow.scheduler.run_state import RunState

logger = logging.getLogger("ctxflow")
NAME = "drain.json"


def drained(directory: str) -> tuple[list[str], list[str]]:
    """Return the hosts and the tiers that a run is asked to leave.

    :raises OSError: if others may have written that.
    """
    try:
        told: Any = json.loads(read_own(os.path.join(directory, NAME)))
    except (FileNotFoundError, ValueError):
        return [], []
    if not isinstance(told, dict):
        return [], []
    return [str(each) for each in told.get("hosts", [])], [str(each) for each in told.get("tiers", [])]


def ask(directory: str, hosts: Iterable[str], tiers: Iterable[str]) -> None:
    """Ask a run to leave these hosts and tiers, and no others.

    :raises OSError: if its directory cannot be written.
    """
    path = os.path.join(directory, NAME)
    write_private(f"{path}.new", json.dumps({"hosts": sorted(set(hosts)), "tiers": sorted(set(tiers))}) + "\n")
    os.replace(f"{path}.new", path)


class DrainRequests:
    """Follows what is asked of a run.

    :param directory: the run's.
    :ivar tiers: those that are to be left (tier_bounds.py).
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._sign: tuple[int, int] | None = None
        self._asked: tuple[list[str], list[str]] = [], []
        self._told = self._asked
        self._hosts: set[str] = set()
        self.tiers: set[str] = set()

    def look(self) -> None:
        """Read what is asked, if that has changed; on a thread that may wait for a disk."""
        try:
            found = os.stat(os.path.join(self._directory, NAME))
            sign = found.st_mtime_ns, found.st_ino
            if sign != self._sign:
                self._sign = sign
                self._asked = drained(self._directory)
        except NotOwnError as error:
            tell_once(error)
        except OSError:
            pass

    def events(self, state: RunState, now: float) -> list[ev.Event]:
        """Return what is new in what was read last."""
        if self._asked == self._told:
            return []
        self._told = hosts, tiers = self._asked
        told: list[ev.Event] = [ev.HostDrained(now, host) for host in sorted(set(hosts) - self._hosts)]
        told += [ev.HostDrained(now, host, drained=False) for host in sorted(self._hosts - set(hosts))]
        self._hosts = set(hosts)
        for name in sorted(set(tiers) & set(state.tiers) - self.tiers):
            logger.warning("tier %s is drained: its workers leave when they have nothing to do", name)
        for name in sorted(self.tiers - set(tiers)):
            logger.warning("tier %s is used again", name)
        self.tiers = set(tiers) & set(state.tiers)
        return told


class TierBounds:
    """Remembers what the site offers, and tells what has changed."""

    def __init__(self) -> None:
        self._offered: dict[str, ev.TierSpec] = {}

    def events(
        self, state: RunState, now: float, left: Collection[str], maxima: Mapping[str, int], none: bool = False
    ) -> list[ev.Event]:
        """Return what the scheduler has to hear.

        :param left: the tiers that are to have no workers.
        :param maxima: tier -> how many workers there may be, where that is bounded besides.
        :param none: whether no tier may have any.
        """
        told: list[ev.Event] = []
        for name, tier in state.tiers.items():
            own = self._offered.setdefault(name, tier.spec)
            most = 0 if none or name in left else min(own.maximum, maxima.get(name, own.maximum))
            spec = dataclasses.replace(own, minimum=min(own.minimum, most), maximum=most)
            if spec != tier.spec:
                told.append(ev.TierOffered(now, spec))
        return told


class WorkerBounds:
    """All that bounds a live run's workers besides its site: what a person asks, a factory's numbers, and limits.

    :param directory: the run's.
    """

    def __init__(self, engine: Engine, directory: str) -> None:
        self._engine = engine
        self._drains = DrainRequests(directory)
        self._tiers = TierBounds()
        self._limit = ""  # What is said of a limit, once it is reached.

    def look(self) -> None:
        """Read what a person asks; on a thread that may wait for a disk."""
        self._drains.look()

    def events(self, state: RunState, now: float) -> list[ev.Event]:
        """Return what the scheduler has to hear.

        :raises LimitReached: if there are no workers any more, and something is not answered.
        """
        told = self._drains.events(state, now)
        maxima: Mapping[str, int] = {}
        if isinstance(self._engine, Bounded):
            maxima = self._engine.maxima()
            limit = reached(self._engine.limits())
            if limit and not self._limit:
                logger.warning("%s; no worker is asked for, and those that run end what they do and leave", limit)
            self._limit = limit
        if self._limit and not state.workers and state.open:
            own = "_per_run" in self._limit  # Else the next run has none left either.
            how = "" if own else "raise it in the factory's site file, send the factory SIGHUP, and "
            raise LimitReached(
                f"{self._limit}; its workers were given back with {counted(len(state.open), 'item')} not answered: "
                f"{how}call the same again, which goes on from what is kept"
            )
        return told + self._tiers.events(state, now, self._drains.tiers, maxima, none=bool(self._limit))
