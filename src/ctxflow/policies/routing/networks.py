"""TORTA's trained networks: plain numbers in a file that holds nothing else, computed with numpy alone.

`networks.npz` was written by `ctxflow train torta` (its options are in the file). What does not live here: what goes in
and comes out (predictor.py, gating.py), and training (simulator/torta/training.py).
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
from ctxflow.policies.routing.arrays import Floats

SHIPPED = "networks.npz"


@dataclasses.dataclass(frozen=True)
class Layers:
    """A perceptron: linear layers with ReLU between them.

    :ivar weights: (in, out) of each layer. :ivar biases: (out,) of each.
    """

    weights: tuple[Floats, ...]
    biases: tuple[Floats, ...]

    def __call__(self, values: Floats) -> Floats:
        """(..., in) to (..., out).

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
    source = path or importlib.resources.files("ctxflow.policies.routing").joinpath(SHIPPED)
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
