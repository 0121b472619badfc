"""How many workers of each tier a live run may have: what its site says, or less.

Less, for a person has it leave a tier, its factory has fewer now, or a limit is reached. What does not live here: what
follows for workers that are there (scheduler/tiers.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from ctxflow.scheduler import events as ev
from ctxflow.scheduler.run_state import RunState


class TierBounds:
    """Remembers what the site offers, and tells what has changed."""

    def __init__(self) -> None:
        self._offered: dict[str, ev.TierSpec] = {}

    def events(
        self, state: RunState, now: float, left: Collection[str], maxima: Mapping[str, int], none: bool = False
    ) -> list[ev.Event]:
        """What the scheduler has to hear.

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
