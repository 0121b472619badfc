"""TORTA's trained networks: their file, and the allocation policy that they are (section V-B2), with numpy alone.

`networks.npz`, plain numbers and nothing else, was written by `ctxflow train torta` (its options are in the file).

The policy says how far to go from the last allocation towards optimal transport. The paper's network has an output for
each pair of regions of one topology. Ours sees one region at a time, and the mean of all, so one network serves any
number of regions. For each it says a *gate*, how far its row moves, and a *pull*, how much more its column takes than
transport gives it:

    A_t[i] = (1 - gate_i) A_{t-1}[i] + gate_i softmax_j(log P*_t[i, j] + pull_j)

so that rows are on the simplex whatever the network says.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctxflow.errors import CtxflowError
from ctxflow.policies.torta.quantities import Bools, Floats, amounts, prices
from ctxflow.policies.torta.transport import capped

SHIPPED = "networks.npz"


@dataclasses.dataclass(frozen=True)
class Layers:
    """A perceptron: linear layers with ReLU between them.

    :ivar weights: (in, out) of each layer. :ivar biases: (out,) of each.
    """

    weights: tuple[Floats, ...]
    biases: tuple[Floats, ...]

    def __call__(self, values: Floats) -> Floats:
        """Return (..., in) to (..., out).

        >>> Layers((np.eye(2), np.ones((2, 1))), (np.zeros(2), np.zeros(1)))(np.array([3.0, -1.0])).tolist()
        [3.0]
        """
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            values = values @ weight + bias
            if number < len(self.weights) - 1:
                values = np.maximum(values, 0.0)
        return values


@dataclasses.dataclass(frozen=True)
class Networks:
    """What was trained.

    :ivar predictor: of the demand. :ivar body, head: of the allocation.
    :ivar about: how it was trained and what it reached, for people.
    """

    predictor: Layers
    body: Layers
    head: Layers
    about: dict[str, object] = dataclasses.field(default_factory=dict)


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


def read(path: Path | None = None) -> Networks:
    """Read them; those that come with ctxflow if no path is given.

    :raises CtxflowError: if there are none, or they are damaged.
    """
    source = path or importlib.resources.files("ctxflow.policies.torta").joinpath(SHIPPED)
    try:
        with source.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            about = json.loads(arrays["about"].tobytes().decode())
            predictor, body, head = (_layers(arrays, name) for name in ("predictor", "body", "head"))
            return Networks(predictor, body, head, about)
    except FileNotFoundError:
        raise CtxflowError(f"there are no trained networks at {source}: `ctxflow train torta` writes them") from None
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise CtxflowError(f"{source} holds no networks of `ctxflow train torta` ({error})") from None


def _layers(arrays: np.lib.npyio.NpzFile, name: str) -> Layers:
    count = sum(1 for key in arrays.files if key.startswith(f"{name}.") and key.endswith(".weight"))
    if not count:
        raise KeyError(name)
    found = ([arrays[f"{name}.{n}.{what}"].astype(np.float64) for n in range(count)] for what in ("weight", "bias"))
    weights, biases = found
    return Layers(tuple(weights), tuple(biases))


FEATURES = 14
LEAST = 1e-4
"""What transport's share counts at least in a column that is there: a pull can then reach it."""
MOST_PULL = 2.0


@dataclasses.dataclass(frozen=True)
class SlotState:
    """What is known before a slot: arrays of one decision, or of several (...).

    :ivar demand: (..., R) tasks of the slot. :ivar ahead: (..., H, R) those expected after it.
    :ivar capacity: (..., R) tasks that a region could do in a slot; nothing for one that has vanished.
    :ivar room: (..., R) what a plan may use of it. :ivar waiting: (..., R) tasks. :ivar active: (..., R) tasks that the
        servers that are active could do. :ivar price: (..., R) of power.
    :ivar transport: (..., R, R) P*. :ivar before: (..., R, R) A_{t-1}.
    """

    demand: Floats
    ahead: Floats
    capacity: Floats
    room: Floats
    waiting: Floats
    active: Floats
    price: Floats
    transport: Floats
    before: Floats


def features(seen: SlotState) -> Floats:
    """Return (..., R, FEATURES) of each region, all without units."""
    mean = seen.capacity.mean(axis=-1, keepdims=True) + 1e-9
    own = seen.capacity + 0.1 * mean
    planned = np.einsum("...i,...ij->...j", seen.demand, seen.transport)
    kept = np.einsum("...i,...ij->...j", seen.demand, seen.before)
    later = seen.ahead.max(axis=-2)
    apart = np.sqrt(((seen.transport - seen.before) ** 2).sum(axis=-1))
    home = (np.diagonal(each, axis1=-2, axis2=-1) for each in (seen.transport, seen.before))
    price = seen.price / (seen.price.mean(axis=-1, keepdims=True) + 1e-9) - 1.0
    columns = (
        seen.demand / mean, later / mean, seen.capacity / mean, seen.room / own, seen.waiting / own, seen.active / own,
        planned / own, kept / own, apart, price, (later - seen.demand) / mean, np.broadcast_to(
            (seen.demand.sum(axis=-1) / (seen.capacity.sum(axis=-1) + 1e-9))[..., None], apart.shape
        ), *home,
    )  # fmt: skip
    return np.asarray(np.clip(np.nan_to_num(np.stack(columns, axis=-1)), -5.0, 5.0), dtype=np.float64)


def outputs(networks: Networks, seen: SlotState) -> Floats:
    """Return (..., R, 2) the gate and the pull of each region, before `allocated` bounds them."""
    hidden = np.maximum(networks.body(features(seen)), 0.0)
    pooled = np.broadcast_to(hidden.mean(axis=-2, keepdims=True), hidden.shape)
    return networks.head(np.concatenate([hidden, pooled], axis=-1))


def allocated(decided: Floats, seen: SlotState) -> Floats:
    """Return (..., R, R) A_t from gates and pulls.

    Guarantees: rows on the simplex; nothing for a region without capacity while another has some; what is not a number
    is a gate wide open and no pull, which is transport.

    :param decided: (..., R, 2).
    """
    gate = 1.0 / (1.0 + np.exp(-np.clip(np.nan_to_num(decided[..., 0], nan=50.0), -50.0, 50.0)))
    pull = MOST_PULL * np.tanh(np.nan_to_num(decided[..., 1]))
    alive = amounts(seen.capacity) > 0
    alive = np.where(alive.any(axis=-1, keepdims=True), alive, True)[..., None, :]
    aim = on_simplex((seen.transport + LEAST) * np.exp(pull)[..., None, :], alive)
    kept = on_simplex(seen.before, alive, aim)
    return np.asarray((1 - gate[..., None]) * kept + gate[..., None] * aim, dtype=np.float64)


def on_simplex(rows: Floats, alive: Bools, otherwise: Floats | None = None) -> Floats:
    """Return rows without the columns that are gone, scaled to one; an empty row is even, or as in `otherwise`."""
    masked = np.where(alive, amounts(rows), 0.0)
    sums = masked.sum(axis=-1, keepdims=True)
    even = np.broadcast_to(alive / alive.sum(axis=-1, keepdims=True), masked.shape)
    instead = even if otherwise is None else otherwise
    return np.where(sums > 0, masked / np.where(sums > 0, sums, 1.0), instead)


def allocate(networks: Networks, seen: SlotState) -> Floats:
    """Return (..., R, R) A_t, as the policy decides."""
    return allocated(outputs(networks, seen), seen)


MOST = 0.6
"""The share of a region's capacity that transport fills, and the networks were trained with."""


@dataclasses.dataclass(frozen=True)
class ByNetworks:
    """The trained policy as a form of the macro layer (`allocation.Allocate`).

    It knows of queues what the demand of the first slot has of them, and takes all capacity for active.
    """

    networks: Networks

    def __call__(self, demand: Floats, capacity: Floats, costs: Floats, previous: Floats | None) -> Floats:
        """Return the shares of the first slot: (R, R), rows on the simplex."""
        wanted, possible, dear = amounts(np.atleast_2d(demand)), amounts(capacity), prices(costs)
        transport = capped(wanted.mean(axis=0), MOST * possible, dear)
        nothing = np.zeros(len(possible))
        before = transport if previous is None else amounts(previous)
        ahead = wanted[1:] if len(wanted) > 1 else wanted
        column = dear.mean(axis=0)
        return allocate(
            self.networks,
            SlotState(wanted[0], ahead, possible, MOST * possible, nothing, possible, column, transport, before),
        )
