"""Forecasts for the simulation: the trained network's, and ones of a wanted accuracy for Fig. 12."""

from __future__ import annotations

import dataclasses

import numpy as np

from ctxflow.policies.torta.inputs import Floats
from ctxflow.policies.torta.networks import Networks
from ctxflow_papers.torta.methods import State, plain
from ctxflow_papers.torta.predictor import AHEAD, SLOTS, combined, features


@dataclasses.dataclass(frozen=True)
class Trained:
    """The predictor network's, for all runs and types at once; `plain` until there is history enough."""

    networks: Networks

    def __call__(self, state: State, horizon: int) -> Floats:
        """(B, H, R, K): what has come in this slot, and what is expected after it."""
        if len(state.arrived) < SLOTS - 1 or horizon - 1 > AHEAD:
            return plain(state, horizon)
        seen = np.concatenate([state.arrived[1 - SLOTS :], state.counts[None]]).astype(np.float64)
        by_type = seen.transpose(1, 3, 0, 2)  # (B, K, SLOTS, R)
        found = combined(self.networks.predictor(features(by_type)), by_type)[..., : horizon - 1, :]
        return np.concatenate([state.counts[:, None], found.transpose(0, 2, 3, 1)], axis=1)


@dataclasses.dataclass(frozen=True)
class Imperfect:
    """What will come, times noise, so that Eq. 12 gives an accuracy: it looks at what no predictor can see.

    The noise is logarithmically normal with median 1, so that a forecast is too high as often as too low, and each
    region's, type's and slot's is its own.
    """

    accuracy: float
    seed: int = 0

    def __call__(self, state: State, horizon: int) -> Floats:
        """(B, H, R, K): what has come in this slot, and what comes after it, wrongly."""
        coming = state.coming[1:horizon].astype(np.float64)
        if len(coming) < horizon - 1:  # The run ends: the last slot goes on.
            last = state.coming[-1:].astype(np.float64)
            coming = np.concatenate([coming, np.repeat(last, horizon - 1 - len(coming), axis=0)])
        chance = np.random.default_rng((self.seed, state.slot))
        noise = np.exp(deviation(self.accuracy) * chance.normal(size=coming.shape))
        return np.concatenate([state.counts[:, None], (coming * noise).transpose(1, 0, 2, 3)], axis=1)


def deviation(accuracy: float) -> float:
    """The standard deviation of a logarithm, such that the mean relative error is minus the logarithm of an accuracy.

    :raises ValueError: if the accuracy is not above 0 and at most 1.

    >>> round(deviation(0.9), 3), deviation(1.0)
    (0.132, 0.0)
    """
    if not 0 < accuracy <= 1:
        raise ValueError("an accuracy is above 0 and at most 1")
    if accuracy == 1:
        return 0.0
    points, weights = np.polynomial.hermite_e.hermegauss(101)
    weights = weights / weights.sum()
    low, high = 0.0, 5.0
    for _ in range(60):
        middle = (low + high) / 2
        error = float(weights @ np.abs(np.exp(middle * points) - 1))
        low, high = (middle, high) if error < -np.log(accuracy) else (low, middle)
    return (low + high) / 2
