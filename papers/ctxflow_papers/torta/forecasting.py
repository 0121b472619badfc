"""Forecasts of demand: TORTA's trained predictor (section V-B2), and ones of a wanted accuracy for Fig. 12.

The paper's predictor has one input and one output for each region of one topology; here one network looks at a region
at a time, so that it serves any number of them: shares are a softmax over regions, times the predicted total. It sees
the demand alone, since demand does not depend on utilisation and queues here. Without networks,
`ctxflow.policies.torta.quantities.forecast` stands in.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from ctxflow.policies.torta.macro import Layers, Networks
from ctxflow.policies.torta.quantities import Floats, amounts, forecast
from ctxflow_papers.torta.methods import State, plain

SLOTS = 8
"""Slots that the predictor looks back. The paper's K is 5, fewer than it takes to tell a burst from noise."""
AHEAD = 3
"""Slots that it looks ahead."""


def features(arrivals: Floats) -> Floats:
    """(..., R, 2 * SLOTS) what the network sees of each region: its demand, and all, over their own means.

    :param arrivals: (..., SLOTS, R) tasks of the last slots, oldest first.
    """
    own = arrivals / (arrivals.mean(axis=-2, keepdims=True) + 1.0)
    total = arrivals.sum(axis=-1, keepdims=True)
    every = np.broadcast_to(total / (total.mean(axis=-2, keepdims=True) + 1.0), own.shape)
    return np.asarray(np.concatenate([own, every], axis=-2).swapaxes(-1, -2) - 1.0, dtype=np.float64)


def predict(layers: Layers, arrivals: npt.ArrayLike) -> Floats:
    """What will arrive in the next slots.

    Guarantees: (AHEAD, R), finite and not negative; with fewer than `SLOTS` slots of history, or a network whose
    numbers are none, it is `forecast.forecast`.

    :param arrivals: (K, R) tasks of the last slots, oldest first; what is negative or not a number counts as none.
    """
    history = amounts(arrivals)
    if len(history) < SLOTS:
        return forecast(history, AHEAD)
    found = combined(layers(features(history[-SLOTS:])), history[-SLOTS:])
    return found if np.isfinite(found).all() else forecast(history, AHEAD)


def combined(outputs: Floats, arrivals: Floats) -> Floats:
    """(..., AHEAD, R) demand from the network's outputs: shares of a softmax, times the total.

    :param outputs: (..., R, 2 * AHEAD) of each region: how its share grows, and how it thinks that the total does.
    """
    outputs = np.clip(outputs, -3.0, 3.0).swapaxes(-1, -2)
    recent = arrivals.mean(axis=-2)
    grown = recent[..., None, :] * np.exp(outputs[..., :AHEAD, :])
    sums = grown.sum(axis=-1, keepdims=True)
    weights = recent / np.maximum(recent.sum(axis=-1, keepdims=True), 1e-12)
    total = recent.sum(axis=-1)[..., None] * np.exp((outputs[..., AHEAD:, :] * weights[..., None, :]).sum(axis=-1))
    return np.asarray(grown / np.maximum(sums, 1e-12) * total[..., None], dtype=np.float64)


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


def write(networks: Networks, path: Path) -> None:
    """Write them as a file of arrays, half as exact as they were computed with."""
    arrays: dict[str, NDArray[Any]] = {"about": np.frombuffer(json.dumps(networks.about).encode(), dtype=np.uint8)}
    for name in ("predictor", "body", "head"):
        layers: Layers = getattr(networks, name)
        for number, (weight, bias) in enumerate(zip(layers.weights, layers.biases, strict=True)):
            arrays[f"{name}.{number}.weight"] = weight.astype(np.float32)
            arrays[f"{name}.{number}.bias"] = bias.astype(np.float32)
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
