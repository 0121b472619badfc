"""Which server of a region takes a task, for many regions at once: TORTA's score and the baselines'.

Each is what `ctxflow.policies.torta` has for one region (`micro`; `policies.baselines`; `cyclic` here), on the
arrays of `lanes.Step`. The baselines know what fits; `suited` has them prefer the servers that a type of task is made
for.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ctxflow.policies.torta.micro import MISMATCH, Weights
from ctxflow.policies.torta.quantities import Bools, Floats, Ints
from ctxflow_papers.torta.lanes import Step
from ctxflow_papers.torta.settings import SECONDS, SLOT, UNSUITED
from ctxflow_papers.torta.world import TASKS_PER_SLOT

MEAN = sum(SECONDS) / 2
"""Seconds of a task, by which a backlog is counted in tasks."""


@dataclasses.dataclass(frozen=True)
class Scored:
    """TORTA's Eq. 7: hardware, load and locality; recent is each model's last task on a server that still has it.

    A server with so much work takes nothing ("sufficient remaining capacity") unless all have: then the least loaded.

    :ivar power: what the board's power counts, over the most of any: Eq. 1 has it, Eq. 7 not.
    """

    weights: Weights = dataclasses.field(default_factory=Weights)
    limit: float = 1.0
    power: float = 0.0

    def __call__(self, step: Step) -> Ints:
        """The server of the highest score."""
        weights = self.weights
        score = np.minimum(step.compute / step.tflops[:, None], 1.0)
        score *= np.where(step.suited, weights.hardware, weights.hardware * MISMATCH)
        rested = np.exp(np.minimum(step.free - step.now[:, None], 0.0) / SLOT)
        held = step.backlog / MEAN + rested * (step.backlog <= 0)
        score += weights.load * np.exp(held / -TASKS_PER_SLOT)
        here = step.used > -np.inf
        age = np.maximum(step.now[:, None] - step.used, 0.0, where=here, out=np.zeros_like(step.used))
        score += weights.locality * weights.same_model * np.where(here, np.exp(-weights.forgetting * age), 0.0)
        if self.power:
            score -= self.power * step.watts
        score = np.where(step.backlog < self.limit * MEAN, score, -1.0 - step.backlog)
        return _largest(score, step.allowed)


@dataclasses.dataclass(frozen=True)
class Soonest:
    """What Eq. 7's terms stand for, in seconds: where the task ends the soonest, what it costs others considered.

    Hardware is how long the task takes there, load the work before it, locality the switch that it saves.

    :ivar reluctance: what a second of a switch counts.
    :ivar power: seconds that a board's power counts, over the most of any.
    :ivar even: seconds that a server counts more which has just been at work, so that all take turns.
    """

    reluctance: float = 1.0
    power: float = 0.0
    even: float = 1.0

    def __call__(self, step: Step) -> Ints:
        """The server of the least cost."""
        slower = np.maximum(step.tflops[:, None] / step.compute, 1.0) * np.where(step.suited, 1.0, UNSUITED)
        cost = step.backlog + step.seconds[:, None] * slower + self.power * step.watts
        cost += np.where(step.used > -np.inf, 0.0, self.reluctance * step.switch)
        cost += self.even * np.exp(np.minimum(step.free - step.now[:, None], 0.0) / SLOT)
        return _largest(-cost, step.allowed)


@dataclasses.dataclass(frozen=True)
class InTurn:
    """Round-robin: the next one that has a place."""

    limit: float = 1.0
    suited: bool = False

    def __call__(self, step: Step) -> Ints:
        """The server whose turn it is; the least loaded if all are full."""
        allowed = _allowed(step, self.suited)
        width = allowed.shape[1]
        distance = (np.arange(width) - step.turn[: len(allowed), None]) % width
        open_to = allowed & (step.backlog < self.limit * MEAN)
        score = np.where(open_to, -1.0 - distance, -1.0 - width - step.backlog)
        chosen = _largest(score, allowed)
        step.turn[: len(allowed)] = (chosen + 1) % width
        return chosen


@dataclasses.dataclass(frozen=True)
class KnownPrefix:
    """SkyLB: of those that hold the model the least loaded, if one of them has a place; else of all."""

    limit: float = 1.0
    suited: bool = False

    def __call__(self, step: Step) -> Ints:
        """The server."""
        allowed = _allowed(step, self.suited)
        open_to = step.backlog < self.limit * MEAN
        known = open_to & (step.used > -np.inf)
        return _largest(4e9 * known + 2e9 * open_to - step.backlog, allowed)


@dataclasses.dataclass(frozen=True)
class Even:
    """SDIB: the least standard deviation of occupancy, and idle time; those that hold the model first."""

    limit: float = 1.0
    suited: bool = False
    idle_weight: float = 0.01

    def __call__(self, step: Step) -> Ints:
        """The server."""
        allowed = _allowed(step, self.suited)
        count = np.maximum(allowed.sum(axis=1, keepdims=True), 1)
        occupancy = np.where(allowed, step.backlog, 0.0) / (MEAN * TASKS_PER_SLOT)
        more = step.seconds[:, None] / (MEAN * TASKS_PER_SLOT)
        mean = (occupancy.sum(axis=1, keepdims=True) + more) / count
        squares = ((occupancy**2).sum(axis=1, keepdims=True) + 2 * occupancy * more + more**2) / count
        deviation = np.sqrt(np.maximum(squares - mean**2, 0.0))
        idle = np.maximum(step.now[:, None] - step.free, 0.0)
        known = (step.used > -np.inf) & (step.backlog < self.limit * MEAN)
        return _largest(1e9 * known - deviation + self.idle_weight * idle / count, allowed)


def _allowed(step: Step, suited: bool) -> Bools:
    if not suited:
        return step.allowed
    fitting = step.allowed & step.suited
    return np.where(fitting.any(axis=1, keepdims=True), fitting, step.allowed)


def _largest(score: Floats, allowed: Bools) -> Ints:
    return np.asarray(np.where(allowed, score, -np.inf).argmax(axis=1), dtype=np.int64)
