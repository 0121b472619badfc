"""How much a workload fluctuates, and which parameters its level has (Appendix A).

What does not live here: where a table comes from (profiling.py).
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import deque
from collections.abc import Sequence

from ctxflow.policies.scaling.autoscaling import Parameters

EPOCH, EPOCHS = 10.0, 20
"""Seconds of an epoch, and how many of them volatility looks back: with these Table 5 is found again."""


def volatility(activations: Sequence[float]) -> float:
    """(6): the standard deviation, over a sliding window of events, of the sessions newly activated at each.

    >>> volatility([0, 0, 0, 4])
    1.7320508075688772
    """
    if not activations:
        return 0.0
    mean = sum(activations) / len(activations)
    return math.sqrt(sum((each - mean) ** 2 for each in activations) / len(activations))


class Epochs:
    """What was activated in the last epochs, as time goes on.

    >>> epochs = Epochs()
    >>> epochs.add(0.0, 3.0), epochs.add(25.0, 1.0), list(epochs.activated)[-4:]
    (None, None, [0.0, 3.0, 0.0, 1.0])
    """

    def __init__(self) -> None:
        self.activated: deque[float] = deque([0.0] * EPOCHS, EPOCHS)
        self._number: int | None = None

    def add(self, now: float, activations: float) -> None:
        """Count activations, of which there may be none, in the epoch of a time; times do not go back."""
        number = int(now // EPOCH)
        for _ in range(min(EPOCHS, number - (number if self._number is None else self._number))):
            self.activated.append(0.0)
        self._number = number
        self.activated[-1] += activations

    @property
    def volatility(self) -> float:
        """(6) over the epochs that are looked back at."""
        return volatility(self.activated)


@dataclasses.dataclass(frozen=True)
class Levels:
    """Parameters by level of volatility.

    :ivar bounds: where a level ends and the next begins, ascending: one fewer than there are levels.
    :ivar parameters: of each level.

    >>> PAPER.at(1.0).utilization, PAPER.at(4.4).utilization
    (0.8, 0.5)
    """

    bounds: tuple[float, ...]
    parameters: tuple[Parameters, ...]

    def __post_init__(self) -> None:
        if len(self.parameters) != len(self.bounds) + 1 or list(self.bounds) != sorted(self.bounds):
            raise ValueError("levels need ascending bounds, and parameters for one level more than there are bounds")

    def at(self, value: float) -> Parameters:
        """The parameters of the level that a volatility is in: measure, quantize, look up."""
        return self.parameters[bisect.bisect_right(self.bounds, value)]

    def scaled(self, factor: float) -> Levels:
        """The same with every utilization times a factor."""
        found = (dataclasses.replace(each, utilization=each.utilization * factor) for each in self.parameters)
        return Levels(self.bounds, tuple(found))


PAPER = Levels((1.62, 3.46, 5.325), tuple(Parameters(rho) for rho in (0.80, 0.65, 0.50, 0.25)))
"""Table 6, with bounds half-way between the volatilities of neighbouring levels."""


def constant(parameters: Parameters) -> Levels:
    """Target tracking without volatility: one level."""
    return Levels((), (parameters,))
