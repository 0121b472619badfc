"""What a game is: a workload drawn by a seed, on which one policy of a family decides, and what is measured of it.

The policy is the object that a site would load, in the scheduler of live runs, on the simulated engine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ctxflow.errors import CtxflowError, counted
from ctxflow.executors.simulated import SimulatedMachine
from ctxflow.league.lower_bounds import ScenarioBounds
from ctxflow.scheduler import commands as cmd
from ctxflow.scheduler import events as ev
from ctxflow.simulator.experiments import quantile
from ctxflow.simulator.scenario import Scenario
from ctxflow.simulator.simulation import Listener, SimulationOutcome
from ctxflow.simulator.studies import Built, build

STEPS = 2_000_000
"""The events of a game, unless it is said otherwise: twenty times what the longest needs."""


class GameLost(CtxflowError):
    """A policy did not bring a game to its end, and why, in a sentence."""


@dataclasses.dataclass(frozen=True)
class GameOutcome:
    """What came of a game.

    :ivar score: of the family's measure, less is better. :ivar bound: what no policy has less than.
    :ivar beside: other figures, by name.
    """

    score: float
    bound: float
    beside: Mapping[str, float]


class Arena(Protocol):
    """A workload drawn by a seed."""

    def play(self, choice: Any, steps: int) -> GameOutcome:
        """Let a policy decide, as it is chosen in a site file or as an object.

        :param steps: the events that the game may take.
        :raises GameLost: if the policy did not bring it to its end.
        """


class Steps:
    """A listener that ends a game that takes too many events."""

    def __init__(self, most: int, others: Sequence[Listener] = ()) -> None:
        self._most, self._others, self.taken = most, others, 0

    def __call__(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        """See an event."""
        self.taken += 1
        if self.taken > self._most:
            raise GameLost(f"it was not done after {self._most:,} events, at {event.time:,.0f} s of virtual time")
        for each in self._others:
            each(event, commands)


class Waits:
    """A listener that measures how long items take from their submission to their answer, in seconds."""

    def __init__(self) -> None:
        self.took: list[float] = []
        self.came: dict[int, tuple[float, str]] = {}  # Items that are not answered: when, and of which app.

    def __call__(self, event: ev.Event, commands: Sequence[cmd.Command]) -> None:
        """See an event."""
        if type(event) is ev.ItemsSubmitted:
            self.came.update(dict.fromkeys(event.items, (event.time, event.app)))
        for command in commands:
            if type(command) is cmd.Deliver:
                self.took.extend(event.time - self.came.pop(item)[0] for item in command.items)


def worker_seconds(presence: Sequence[tuple[float, SimulatedMachine, int]], end: float) -> dict[str, float]:
    """Return for how many seconds workers of each tier were there until the end.

    >>> machine = SimulatedMachine("m", tier="spot")
    >>> worker_seconds([(5.0, machine, 1), (8.0, machine, -1), (9.0, machine, 1)], 10.0)
    {'spot': 4.0}
    """
    found: dict[str, float] = {}
    for time, machine, change in presence:
        found[machine.tier] = found.get(machine.tier, 0.0) + change * (end - min(time, end))
    return found


Measure = Callable[[Scenario, ScenarioBounds, SimulationOutcome, Waits], tuple[float, float]]
"""Gives a game's score and its bound."""


@dataclasses.dataclass(frozen=True)
class ScenarioArena:
    """A scenario on which one family's policy decides; `others`: the policies of other families.

    :ivar complete: whether a game is lost in which an item is given up.
    """

    scenario: Scenario
    seed: int
    family: str
    measure: Measure
    others: Mapping[str, Any]
    hours: float
    complete: bool = True

    def play(self, choice: Any, steps: int) -> GameOutcome:
        """Let a policy decide."""
        site = self.scenario.site.model_copy(update={**self.others, self.family: choice})
        scenario, waits = dataclasses.replace(self.scenario, site=site), Waits()
        built = build(scenario, self.seed, Steps(steps, [waits]))
        outcome = built.simulation.run(self.hours * 3600)
        self._check(outcome)
        score, bound = self.measure(scenario, ScenarioBounds(scenario, self.seed), outcome, waits)
        return GameOutcome(score, bound, figures(scenario, built, outcome, waits))

    def _check(self, outcome: SimulationOutcome) -> None:
        left = outcome.items - outcome.done - outcome.dead
        if left:
            raise GameLost(f"{counted(left, 'item')} of {outcome.items:,} left after {self.hours:g} h of virtual time")
        if outcome.dead and self.complete:
            raise GameLost(f"{counted(outcome.dead, 'item')} of {outcome.items:,} given up")
        if not outcome.done:
            raise GameLost("nothing was answered")


def figures(scenario: Scenario, built: Built, outcome: SimulationOutcome, waits: Waits) -> dict[str, float]:
    """Return what is measured of every game of items."""
    account, took = outcome.account, waits.took
    there = worker_seconds(outcome.presence, outcome.seconds)
    work = account.call_seconds + account.lost_seconds
    return {
        "makespan_s": outcome.seconds,
        "response_mean_s": sum(took) / len(took),
        "response_p99_s": quantile(took, 0.99),
        "dollars": dollars(scenario, outcome),
        "worker_hours": sum(there.values()) / 3600,
        "loads": float(account.loads),
        "lost_share": account.lost_seconds / work if work else 0.0,
        "given_up": float(outcome.dead),
        "duplicates": float(outcome.duplicates),
    }


def dollars(scenario: Scenario, outcome: SimulationOutcome) -> float:
    """Return what the workers cost that were held, from their joining on."""
    prices = {tier.name: tier.price or 0.0 for tier in scenario.site.tiers}
    there = worker_seconds(outcome.presence, outcome.seconds)
    return sum(seconds * prices[tier] for tier, seconds in there.items()) / 3600


def mean_response(
    scenario: Scenario, bounds: ScenarioBounds, outcome: SimulationOutcome, waits: Waits
) -> tuple[float, float]:
    """Return the mean seconds from an item's arrival to its answer."""
    return sum(waits.took) / len(waits.took), bounds.responses() / len(waits.took)


def time_per_answer(
    scenario: Scenario, bounds: ScenarioBounds, outcome: SimulationOutcome, waits: Waits
) -> tuple[float, float]:
    """Return the seconds of the whole job for each item that was answered; those that are given up count as none."""
    return outcome.seconds / outcome.done, bounds.makespan() / outcome.items


def cost(patience: float) -> Measure:
    """Return the measure of dollars for workers, and for waiting.

    :param patience: the seconds of waiting that cost as much as the mean item's work on the cheapest workers.
    """

    def measured(
        scenario: Scenario, bounds: ScenarioBounds, outcome: SimulationOutcome, waits: Waits
    ) -> tuple[float, float]:
        work = bounds.dollars()
        second = work / outcome.items / patience
        return dollars(scenario, outcome) + second * math.fsum(waits.took), work + second * bounds.responses()

    return measured
