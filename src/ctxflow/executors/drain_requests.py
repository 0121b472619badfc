"""What a person asks of a live run from another terminal: hosts and tiers that it is to leave (`ctxflow drain`).

They stand in a file of the run's directory, which counts only if this user alone can have written it. What does not
live here: what follows from them (scheduler/quarantine.py, tier_bounds.py).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from typing import Any

from ctxflow.safe_files import NotOwnError, read_own, tell_once, write_private
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
        """What is new in what was read last."""
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
