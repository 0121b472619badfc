"""TORTA's demand predictor (section V-B2): a small network that says how each region's demand goes on.

The paper's has one input and one output for each region of one topology; here one network looks at a region at a time,
so that it serves any number of them: shares are a softmax over regions, times the predicted total. It sees the demand
alone, since demand does not depend on utilisation and queues here. Without networks, `forecast.forecast` stands in.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ctxflow.policies.torta.forecast import forecast
from ctxflow.policies.torta.inputs import Floats, amounts
from ctxflow.policies.torta.networks import Layers

SLOTS = 8
"""Slots it looks back. The paper's K is 5, fewer than it takes to tell a burst from noise."""
AHEAD = 3
"""Slots it looks ahead."""


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
