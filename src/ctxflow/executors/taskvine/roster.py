"""Who is connected to TaskVine's manager: which are the run's workers, and who only says so. Pure.

TaskVine lets in who has relayed a challenge of its password (docs/security.md), and takes names as they are told: so
none is believed here that another has, and the doorbell's worker has one that nobody can guess.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

_NAMELESS_SECONDS = 15.0  # A worker tells its name a moment after it has connected; after that none is waited for.
_LOOK_SECONDS = 0.1  # How often it is looked for meanwhile: TaskVine lists all workers each time.


@dataclasses.dataclass(frozen=True)
class Joined:
    """A worker is connected."""

    worker: str
    address: str
    host: str


@dataclasses.dataclass(frozen=True)
class Lost:
    """A worker's connection is gone."""

    worker: str


@dataclasses.dataclass(frozen=True)
class Stranger:
    """Somebody is connected who gets nothing."""

    host: str
    reason: str


class Roster:
    """The connections, from what TaskVine lists of them.

    >>> roster = Roster()
    >>> roster.look([{"addrport": "10.0.0.1:4", "factory_name": "n1.ab", "hostname": "n1"}], 0.0)
    [Joined(worker='n1.ab', address='10.0.0.1:4', host='n1')]
    >>> roster.look([], 1.0)
    [Lost(worker='n1.ab')]
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # Address -> worker.
        self._nameless: dict[str, float] = {}  # Address -> since when.
        self._strangers: set[str] = set()  # Addresses.
        self._seen: object = None
        self._next_look = 0.0

    def due(self, moved: object, now: float) -> bool:
        """Whether to look.

        :param moved: TaskVine's counts of connections made and ended, or what else differs when they do.
        """
        changed, self._seen = moved != self._seen, moved
        return changed or (bool(self._nameless) and now >= self._next_look)

    def look(self, rows: Sequence[Mapping[str, Any]], now: float) -> list[Joined | Lost | Stranger]:
        """What has happened since the last look.

        :param rows: TaskVine's list of workers.
        """
        self._next_look = now + _LOOK_SECONDS
        there = {each["addrport"]: each for each in rows}
        news: list[Joined | Lost | Stranger] = []
        for address in [address for address in self._names if address not in there]:
            news.append(Lost(self._names.pop(address)))
        self._strangers &= there.keys()
        self._nameless = {address: since for address, since in self._nameless.items() if address in there}
        for address, each in there.items():
            if address not in self._names and address not in self._strangers:
                found = self._appeared(address, each, now)
                news += [] if found is None else [found]
        return news

    def _appeared(self, address: str, each: Mapping[str, Any], now: float) -> Joined | Stranger | None:
        name, host = each.get("factory_name"), str(each.get("hostname", address))
        if name is None:
            if now < self._nameless.setdefault(address, now) + _NAMELESS_SECONDS:
                return None
            reason = "it tells no name"
        elif name in self._names.values():
            reason = "it has the name of another worker"
        else:
            self._nameless.pop(address, None)
            self._names[address] = str(name)
            return Joined(str(name), address, host)
        self._nameless.pop(address, None)
        self._strangers.add(address)
        return Stranger(host, reason)
