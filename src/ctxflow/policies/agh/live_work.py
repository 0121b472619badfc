"""What a live plan is about: what apps want answered, by contexts whose speeds were measured, and what tiers offer."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

UTILIZATION = 0.9  # Of a worker's time.
LEAST_LOAD = 1e-3  # Seconds.


class Margin(NamedTuple):
    """Shares by which items are planned to take longer than is known: in workers' time, and in what has a limit."""

    work: float = 0.0
    delay: float = 0.0


@dataclasses.dataclass(frozen=True)
class ContextOption:
    """A context that may answer an app's items, the seconds of one by tier (one at least), its error, and margins.

    :ivar seconds: of a worker's time. :ivar beside: how many items share that, by tier; one where none is named.
    :ivar measured: the tiers on which the seconds were measured, and not taken from other tiers or apps.
    """

    context: str
    seconds: dict[str, float]
    load_seconds: float
    error: float = 0.0
    margins: Mapping[str, Margin] = dataclasses.field(default_factory=dict)
    measured: frozenset[str] = frozenset()
    beside: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def delay(self, tier: str) -> float:
        """Return the seconds until a worker of a tier has answered an item, with their margin."""
        return self.known_delay(tier) * (1 + self.margins.get(tier, Margin()).delay)

    def known_delay(self, tier: str) -> float:
        """Return these seconds as they were measured."""
        return self.seconds[tier] * self.beside.get(tier, 1.0)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The items of one app that should be answered in an hour; of active sessions, one each second.

    :ivar candidates: the contexts that may answer, the app's own first; there is one at least.
    :ivar max_delay: seconds, None for no limit; `max_error` likewise, a share.
    :ivar queued: the items that wait now.
    """

    app: str
    per_hour: float
    candidates: tuple[ContextOption, ...]
    max_delay: float | None = None
    max_error: float | None = None
    queued: float = 0.0


@dataclasses.dataclass(frozen=True)
class Offer:
    """A tier of the site: how many workers are available, and the price of one, an hour."""

    name: str
    workers: int
    price: float


@dataclasses.dataclass
class ContextWork:
    """What a context has to do: items in an hour, and the worker's seconds that they take, by tier.

    :ivar urgent: the items in an hour of apps with a limit on the delay; `urgent_work`: the seconds until all of them
        are answered, one after the other.
    :ivar queued: the items that wait now.
    :ivar measured: the tiers on which some app's seconds were measured.
    """

    context: str
    load_seconds: float
    per_hour: float = 0.0
    max_delay: float | None = None
    work: Counter[str] = dataclasses.field(default_factory=Counter)
    urgent: float = 0.0
    urgent_work: Counter[str] = dataclasses.field(default_factory=Counter)
    queued: float = 0.0
    measured: set[str] = dataclasses.field(default_factory=set)

    @property
    def workers(self) -> float:
        """Return how many it would keep busy where it is fastest."""
        return min(self.work.values()) / 3600

    def item_seconds(self, tier: str) -> float:
        """Return seconds of a mean item on a worker of a tier that can run it."""
        return self.work[tier] / self.per_hour

    def delay(self, tier: str) -> float:
        """Return seconds until a mean urgent item is answered; 0 where none is."""
        return self.urgent_work[tier] / self.urgent if self.urgent else 0.0
