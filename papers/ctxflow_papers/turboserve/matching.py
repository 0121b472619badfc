"""Comparisons at the same cost and at the same worst-case latency: the searches that make them the same.

A fixed strategy has its number of GPUs to turn, an autoscaled one its target utilization. Each run takes seconds, so
the searches start where the answer is likely to be, and share what was run before.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from ctxflow.policies.turboserve.autoscaling import Parameters, constant
from ctxflow.simulator.session_serving import Cluster, Served, SessionTrace, serve
from ctxflow_papers.turboserve.baselines import LoadAware, MemoryAware, RoundRobin

TOLERANCE = 0.05
"""delta of the paper's loop."""
MATCH = 0.01
"""Costs and latencies that are closer than this are the same."""
_LOWEST, _HIGHEST, _STEPS = 0.3, 1.7, 5


@dataclasses.dataclass(frozen=True, eq=False)
class Strategy:
    """How sessions are placed and GPUs scaled: choices as a site file has them, or what makes an object.

    :ivar sessions: the policy that places sessions. :ivar options: of `closed-loop`.
    """

    sessions: str | Callable[[], Any] | Mapping[str, Any] = "turboserve"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def placing(self) -> Any:
        """The policy of one run: an object serves one only, since it may learn."""
        return self.sessions() if callable(self.sessions) else self.sessions


OURS = Strategy()
"""The policies as they are shipped, with their defaults."""
UNMOVED = Strategy(LoadAware)
"""Ours without migration: sessions are placed by load when they become active, and stay."""
PAPERS_LOOP = Strategy(options={"anticipates": False})
"""The paper's loop, which does not anticipate, with its hysteresis around rho."""
BASELINES = {
    "round_robin": Strategy(RoundRobin),
    "load_aware": Strategy(LoadAware),
    "memory_aware": Strategy(MemoryAware),
}


class Runs:
    """One trace on one cluster: every strategy is run once at most at each setting.

    :param cluster: with all that is fixed before anything is compared.
    """

    def __init__(self, trace: SessionTrace, cluster: Cluster) -> None:
        self.trace, self.cluster = trace, cluster
        self._done: dict[tuple[Strategy, float, bool], Served] = {}

    def fixed(self, strategy: Strategy, gpus: int) -> Served:
        """What a strategy comes to on so many GPUs."""
        return self._run(strategy, gpus, fixed=True)

    def at(self, strategy: Strategy, utilization: float) -> Served:
        """What the autoscaled strategy comes to with a target, which is rounded to hundredths of K."""
        return self._run(strategy, round(utilization, 3), fixed=False)

    def _run(self, strategy: Strategy, setting: float, fixed: bool) -> Served:
        key = strategy, setting, fixed
        if key not in self._done:
            scaling: dict[str, Any] = {"policy": "fixed", "workers": setting}
            if not fixed:
                levels = constant(Parameters(setting, TOLERANCE))
                scaling = self.cluster.closed_loop(levels, **strategy.options)
            self._done[key] = serve(self.trace, self.cluster, scaling, strategy.placing)
        return self._done[key]

    def of_cost(self, strategy: Strategy, gpu_seconds: float, near: float = 0.9) -> Served:
        """The autoscaled strategy whose cost is closest to this: the target is changed in proportion, until it is."""
        found: list[Served] = []
        for _ in range(_STEPS):
            found.append(self.at(strategy, near))
            if abs(found[-1].gpu_seconds / gpu_seconds - 1) < MATCH / 2:
                break
            near = min(_HIGHEST, max(_LOWEST, near * found[-1].gpu_seconds / gpu_seconds))
        return min(found, key=lambda each: abs(each.gpu_seconds - gpu_seconds))

    def of_latency(self, strategy: Strategy, worst: float) -> Served | None:
        """The cheapest autoscaled strategy found by bisection whose chunks take no longer than this, None without."""
        limit = worst * (1 + MATCH)
        low, high, found = _LOWEST, _HIGHEST, []
        for _ in range(_STEPS):
            middle = (low + high) / 2
            found.append(self.at(strategy, middle))
            low, high = (middle, high) if found[-1].worst <= limit else (low, middle)
        valid = [each for each in found if each.worst <= limit]
        return min(valid, key=lambda each: each.gpu_seconds) if valid else None

    def fewest(self, strategy: Strategy, worst: float) -> Served | None:
        """The fixed strategy with the fewest GPUs whose chunks take no longer than this, None if twice the cluster's do
        not suffice."""
        limit = worst * (1 + MATCH)
        keeps = functools.partial(self._keeps, strategy, limit)
        # With fewer, even the best placement has too many sessions on a GPU.
        low, most = self._least(limit) - 1, 2 * self.cluster.most
        high = low + 1
        while high < most and not keeps(high):
            low, high = high, min(most, math.ceil(1.3 * high))
        if not keeps(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if keeps(middle) else (middle, high)
        return self.fixed(strategy, high)

    def _keeps(self, strategy: Strategy, limit: float, gpus: int) -> bool:
        return self.fixed(strategy, gpus).worst <= limit

    def _least(self, limit: float) -> int:
        together = 1
        while self.cluster.curve(together + 1) <= limit:
            together += 1
        return max(1, math.ceil(int(self.trace.counts(1.0)[1].max()) / together))
