"""Surveys: which machines workers may be on, as the batch system tells when it is asked.

What does not live here: what is decided on them (reservations.py, policies/preemption).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING

from ctxflow.scheduler.commands import Command, Note, Survey
from ctxflow.scheduler.events import MachinesFound
from ctxflow.topology import Topology, from_graph

if TYPE_CHECKING:
    from ctxflow.scheduler.run_state import RunState

SURVEY_SECONDS = 30.0  # How long a survey may take.


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """A machine as it was surveyed."""

    name: str
    tier: str
    topology: Topology


class Surveys:
    """What the surveys found; only this module changes it.

    :ivar machines: as they were surveyed last, by tier and name.
    :ivar awaited: the tiers whose survey is not there yet, and when it was asked for.
    :ivar fresh: the tiers whose machines nobody has decided on since they were surveyed.
    :ivar told: why a survey failed, as it was told last.
    """

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.awaited: dict[str, float] = {}
        self.fresh: set[str] = set()
        self.told = ""

    def found(self, event: MachinesFound, out: list[Command]) -> None:
        """The batch system has told which machines there are."""
        if event.reason:  # It is asked again when an answer would be overdue.
            if event.reason != self.told:
                self.told = event.reason
                out.append(Note(f"tier {event.tier}: {event.reason}", trouble=True))
            return
        self.awaited.pop(event.tier, None)
        self.told = ""
        self.machines = {key: each for key, each in self.machines.items() if each.tier != event.tier}
        for name, graph in event.machines.items():
            # Tiers may share a machine, and each have other GPUs of it.
            self.machines[f"{event.tier} {name}"] = Machine(name, event.tier, from_graph(graph))
        self.fresh.add(event.tier)

    def known(self, state: RunState, tiers: Collection[str], out: list[Command]) -> bool:
        """Whether all these tiers' machines are known as they are now; asks for what is not."""
        for tier in tiers:
            if tier not in self.fresh and self.awaited.get(tier, -SURVEY_SECONDS) + SURVEY_SECONDS <= state.now:
                self.awaited[tier] = state.now
                state.wake(state.now + SURVEY_SECONDS)
                out.append(Survey(tier))
        return self.fresh.issuperset(tiers)

    def decided(self) -> None:
        """Something is decided on them, so that they are known no longer for who comes next."""
        self.fresh.clear()
