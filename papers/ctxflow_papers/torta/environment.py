"""The macro layer as a gymnasium environment, on the simulation: an allocation for each slot, and Eq. 3's reward.

It holds several environments side by side (gymnasium's `VectorEnv`): one for each run and type of task, since types are
routed by themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from ctxflow.policies.torta.macro import FEATURES, SlotState, features, on_simplex
from ctxflow.policies.torta.quantities import Floats
from ctxflow_papers.torta.demand import tasks_of
from ctxflow_papers.torta.methods import Torta, planned
from ctxflow_papers.torta.serving import Simulation
from ctxflow_papers.torta.settings import KINDS, SLOTS
from ctxflow_papers.torta.world import world

SMOOTHNESS, COST = 1.0, 0.2
"""lambda_1 and lambda_2 of Eq. 3: alignment first, as the paper says without numbers."""
MOST_WAITING = 1.0
"""Q_max: tasks that wait, over those that all regions do in a slot."""


@dataclasses.dataclass(frozen=True)
class Reward:
    """Eq. 3's parts, (n,) each."""

    aligned: Floats
    smooth: Floats
    cost: Floats

    @property
    def total(self) -> Floats:
        """Their sum, weighted."""
        return self.aligned + SMOOTHNESS * self.smooth + COST * self.cost


class Allocations(gymnasium.vector.VectorEnv):  # type: ignore[misc]
    """n = runs times types of task: an action is (n, R, R), rows of tasks' shares from region to region.

    An observation is (n, R, FEATURES + 2 R): what `gating.features` has of each region, P*_t and A_{t-1}. Rows of
    an action are scaled onto the simplex. All episodes end together, after the last slot, as truncated.

    :param topology: of the paper. :param seeds: a run for each. :param loads: the runs' loads, in turn.
    :param method: how it is served but for the allocation.
    """

    metadata: dict[str, Any] = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(
        self,
        topology: str,
        seeds: Sequence[int] = (0,),
        loads: Sequence[float] = (0.7,),
        slots: int = SLOTS,
        method: Torta | None = None,
    ) -> None:
        self.world, self.seeds, self.loads, self.slots = world(topology), list(seeds), list(loads), slots
        self.method = method or Torta()
        regions = self.world.regions
        self.num_envs = len(self.seeds) * len(KINDS)
        box = gymnasium.spaces.Box
        self.single_observation_space = box(-5.0, 5.0, (regions, FEATURES + 2 * regions))
        self.single_action_space = box(0.0, 1.0, (regions, regions))
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, self.num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, self.num_envs)
        self.seen: SlotState | None = None

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        """Begin new runs.

        :param seed: of the first run, the others' are the ones after it; None for the same as before.
        """
        if isinstance(seed, int):
            self.seeds = [seed + number for number in range(len(self.seeds))]
        tasks = [
            tasks_of(self.world, self.loads[n % len(self.loads)], each, self.slots) for n, each in enumerate(self.seeds)
        ]
        self.method.reset()
        self.simulation = Simulation(self.world, tasks, self.method)
        return self._look(None), {}

    def step(self, actions: Floats) -> tuple[Floats, Floats, Floats, Floats, dict[str, Any]]:
        """Serve a slot by an allocation."""
        if self.seen is None:
            raise ValueError("call reset() before step()")
        runs, kinds, regions = len(self.seeds), len(KINDS), self.world.regions
        alive = (self.seen.capacity > 0)[:, None, :]
        shares = on_simplex(np.asarray(actions, dtype=np.float64), alive, self.seen.transport)
        plan = planned(shares.reshape(runs, kinds, regions, regions), self.ahead, self.state)
        self.simulation.step(plan)
        reward = self._reward(shares)
        over = self.simulation.slot >= self.slots
        ended = np.full(self.num_envs, over)
        observation = self.last if over else self._look(shares)
        information = {"aligned": reward.aligned, "smooth": reward.smooth, "cost": reward.cost}
        return observation, reward.total, np.zeros(self.num_envs, dtype=bool), ended, information

    def _look(self, before: Floats | None) -> Floats:
        self.state = self.simulation.state()
        self.ahead = self.method.forecaster(self.state, self.method.horizon)
        self.seen = self.method.seen(self.state, self.ahead, before)
        self.last = np.concatenate([features(self.seen), self.seen.transport, self.seen.before], axis=-1)
        return self.last

    def _reward(self, shares: Floats) -> Reward:
        assert self.seen is not None
        state = self.simulation.state() if self.simulation.slot < self.slots else self.state
        waiting = state.waiting.transpose(0, 2, 1).sum(axis=2).reshape(-1)
        most = MOST_WAITING * self.seen.capacity.sum(axis=1)
        return Reward(
            -((shares - self.seen.transport) ** 2).sum(axis=(1, 2)),
            -((shares - self.seen.before) ** 2).sum(axis=(1, 2)),
            -np.minimum(waiting / np.maximum(most, 1e-9), 10.0),
        )
