"""Comparisons at the same cost and at the same worst-case latency: the searches that make them the same.

A fixed strategy has its number of GPUs to turn, an autoscaled one its target utilization.
"""

from __future__ import annotations

import dataclasses
import math

from ctxflow.policies.turboserve.autoscaling import Parameters, constant
from ctxflow.simulator.session_serving import Cluster, Served, SessionTrace, Strategy, serve

TOLERANCE = 0.05
"""delta of ours."""
MATCH = 0.01
"""Costs and latencies that are closer than this are the same."""
_LOWEST, _HIGHEST, _STEPS = 0.3, 1.7, 9


@dataclasses.dataclass
class Runs:
    """One trace on one cluster: every strategy is run once at most.

    :ivar cluster: with all that is fixed before anything is compared.
    """

    trace: SessionTrace
    cluster: Cluster
    _done: dict[Strategy, Served] = dataclasses.field(default_factory=dict)

    def serve(self, strategy: Strategy) -> Served:
        """What the strategy comes to."""
        if strategy not in self._done:
            self._done[strategy] = serve(self.trace, self.cluster, strategy)
        return self._done[strategy]

    def at(self, strategy: Strategy, utilization: float) -> Served:
        """The strategy with this target."""
        levels = (constant(Parameters(round(utilization, 4), TOLERANCE)),)
        return self.serve(dataclasses.replace(strategy, levels=levels))

    def of_cost(self, strategy: Strategy, gpu_seconds: float) -> Served:
        """The autoscaled strategy whose cost is closest to this, by bisection."""
        low, high, found = _LOWEST, _HIGHEST, []
        for _ in range(_STEPS):
            middle = (low + high) / 2
            found.append(self.at(strategy, middle))
            if abs(found[-1].gpu_seconds / gpu_seconds - 1) < MATCH / 4:
                break
            low, high = (middle, high) if found[-1].gpu_seconds > gpu_seconds else (low, middle)
        return min(found, key=lambda each: abs(each.gpu_seconds - gpu_seconds))

    def of_latency(self, strategy: Strategy, worst: float) -> Served | None:
        """The cheapest autoscaled strategy found by bisection whose chunks take no longer than this, None without.

        A higher target is not always slower, so the four steps around the end of the bisection are looked at too.
        """
        limit = worst * (1 + MATCH)
        low, high, found = _LOWEST, _HIGHEST, []
        for _ in range(_STEPS):
            middle = (low + high) / 2
            found.append(self.at(strategy, middle))
            low, high = (middle, high) if found[-1].worst <= limit else (low, middle)
        found += [self.at(strategy, low + step) for step in (0.02, 0.04, 0.08, 0.12)]
        valid = [each for each in found if each.worst <= limit]
        return min(valid, key=lambda each: each.gpu_seconds) if valid else None

    def fewest(self, strategy: Strategy, worst: float) -> Served | None:
        """The fixed strategy with the fewest GPUs whose chunks take no longer than this; None if four times the
        cluster's do not suffice."""
        limit = worst * (1 + MATCH)
        low, high = 0, 4 * self.cluster.most
        if self.serve(dataclasses.replace(strategy, gpus=high)).worst > limit:
            return None
        while high - low > 1:
            middle = math.ceil((low + high) / 2)
            enough = self.serve(dataclasses.replace(strategy, gpus=middle)).worst <= limit
            low, high = (low, middle) if enough else (middle, high)
        return self.serve(dataclasses.replace(strategy, gpus=high))
