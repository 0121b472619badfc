"""How much a workload fluctuates, and which parameters its level has (Appendix A).

What does not live here: where a table comes from (profiling.py).
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence

from ctxflow.policies.scaling.autoscaling import Parameters


def volatility(activations: Sequence[int]) -> float:
    """(6): the standard deviation, over a sliding window of events, of the sessions newly activated at each.

    >>> volatility([0, 0, 0, 4])
    1.7320508075688772
    """
    if not activations:
        return 0.0
    mean = sum(activations) / len(activations)
    return math.sqrt(sum((each - mean) ** 2 for each in activations) / len(activations))


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
