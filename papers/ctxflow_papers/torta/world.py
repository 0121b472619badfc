"""The regions of a topology: who is where, how far apart, what power costs there, and which servers they have."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import itertools
import json
import math
import zlib
from typing import Any

import numpy as np

from ctxflow.policies.torta.quantities import Floats, Ints
from ctxflow_papers.torta.settings import (
    BANDWIDTH,
    FOOTPRINT,
    GPUS,
    KINDS,
    LATENCY,
    PAYLOAD,
    POPULARITY,
    SLOT,
    SWITCH_STAGES,
    UNEVEN,
    UNSUITED,
    V100_WEIGHTS,
    warm_up,
)

TOPOLOGIES = tuple(LATENCY)
RANDOM = "random-"
MODELS = len(KINDS) * len(POPULARITY)
KIND_OF_MODEL: Ints = np.repeat(np.arange(len(KINDS)), len(POPULARITY))
FOOTPRINTS: Floats = np.array([KINDS[kind].weights * FOOTPRINT for kind in KIND_OF_MODEL])


@dataclasses.dataclass(frozen=True)
class World:
    """R regions with S servers.

    :ivar names: of the regions. :ivar latency: (R, R) seconds one way. :ivar transfer: seconds of a task's payload.
    :ivar price: (24, R) dollars for a kWh by the hour of the day; `hour`: at which runs start.
    :ivar demand: (R,) shares of all demand, before it swings; `phase`: (R,) of the swing.
    :ivar gpu: (S,) each server's number in `GPUS`. :ivar region: (S,) its region.
    """

    name: str
    names: tuple[str, ...]
    latency: Floats
    transfer: float
    price: Floats
    hour: int
    demand: Floats
    phase: Floats
    gpu: Ints
    region: Ints

    @property
    def regions(self) -> int:
        """R."""
        return len(self.names)

    @property
    def types(self) -> Floats:
        """(K,) the shares of the types of tasks: as the servers that suit them, so that a load is every type's."""
        suits = np.array([gpu.suits for gpu in GPUS])[self.gpu]
        return np.asarray(np.bincount(suits, minlength=len(KINDS)) / len(suits), dtype=np.float64)

    def way(self, origin: int, region: int) -> float:
        """Return the seconds of a task's way to a region and of its result's way back."""
        return 0.0 if origin == region else float(2 * self.latency[origin, region] + self.transfer)


def slower(gpu: int, kind: int, tflops: float) -> float:
    """Return how many times longer a task takes on a GPU than on one that suits it.

    >>> slower(3, 1, 100.0), slower(3, 0, 250.0)
    (1.0, 2.5)
    """
    return max(tflops / GPUS[gpu].tflops, 1.0) * (1.0 if GPUS[gpu].suits == kind else UNSUITED)


def switch_seconds() -> Floats:
    """(G, M) seconds to bring a model onto a server of each kind in the place of another."""
    weights = np.array([KINDS[kind].weights for kind in KIND_OF_MODEL]) / V100_WEIGHTS
    stages = np.array([gpu.stages * sum(SWITCH_STAGES) for gpu in GPUS])
    return stages[:, np.newaxis] * weights


def start_seconds() -> Floats:
    """(G,) seconds from cold to ready."""
    return np.array([warm_up(gpu) for gpu in GPUS])


@functools.lru_cache(16)
def world(name: str, seed: int = 0, share: float = 1.0) -> World:
    """Return a topology of the paper, with the servers, the demand and the power prices that a seed places in it.

    :param name: one of `TOPOLOGIES`, or "random-" and a number: a Gabriel graph that nobody has seen.
    :param share: of Table I's servers.
    :raises ValueError: if there is no such topology.

    >>> abilene = world("abilene")
    >>> abilene.regions, round(float(abilene.latency.sum() / (12 * 11)), 6), 200 <= len(abilene.gpu) <= 300
    (12, 0.025, True)
    """
    data = _data()
    if name in TOPOLOGIES:
        known = data["topologies"][name]
        nodes, edges, mean, bandwidth = known["nodes"], known["edges_km"], LATENCY[name], BANDWIDTH[name]
    elif name.startswith(RANDOM) and name.removeprefix(RANDOM).isdecimal():
        nodes, edges, mean, bandwidth = _drawn(int(name.removeprefix(RANDOM)))
    else:
        raise ValueError(
            f"there is no topology {name!r}: choose one of {', '.join(TOPOLOGIES)}, or {RANDOM}1 and so on"
        )
    chance = np.random.default_rng((zlib.crc32(name.encode()), seed))
    count = len(nodes)
    latency = _paths(count, edges)
    latency *= mean * count * (count - 1) / latency.sum()
    prices = np.array(list(data["prices_per_kwh"].values())).T
    places = chance.permutation(np.arange(count) % prices.shape[1])
    shares = chance.dirichlet(np.full(count, UNEVEN))
    counts = [max(1, round(share * chance.integers(gpu.count[0], gpu.count[1] + 1))) for gpu in GPUS]
    gpu = np.repeat(np.arange(len(GPUS)), counts)
    return World(
        name,
        tuple(nodes),
        latency,
        PAYLOAD * 8 / (bandwidth * 1e9),
        prices[:, places],
        int(chance.integers(24)),
        chance.dirichlet(np.full(count, UNEVEN)),
        chance.uniform(0, 2 * np.pi, count),
        gpu.astype(np.int64),
        chance.choice(count, len(gpu), p=shares).astype(np.int64),
    )


def _drawn(number: int) -> tuple[list[str], list[tuple[int, int, float]], float, float]:
    """The nodes of a Gabriel graph of 8 to 25 places in a square of 2,000 km, its edges, mean latency and Gbit/s.

    Two places are joined if no other is within the circle that has their line as its diameter.
    """
    chance = np.random.default_rng((zlib.crc32(RANDOM.encode()), number))
    count = int(chance.integers(8, 26))
    place = chance.uniform(0, 2000, (count, 2))
    apart = ((place[:, None] - place[None]) ** 2).sum(axis=-1)
    edges = [
        (u, v, math.sqrt(apart[u, v]))
        for u, v in itertools.combinations(range(count), 2)
        if all(apart[u, w] + apart[v, w] >= apart[u, v] for w in range(count) if w not in (u, v))
    ]
    mean = float(chance.uniform(min(LATENCY.values()), max(LATENCY.values())))
    return [str(node) for node in range(count)], edges, mean, float(chance.choice(list(BANDWIDTH.values())))


def _data() -> dict[str, Any]:
    text = importlib.resources.files("ctxflow_papers.torta").joinpath("data.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def _paths(count: int, edges: list[tuple[int, int, float]]) -> Floats:
    """(R, R) the shortest ways (Floyd and Warshall's)."""
    ways = np.full((count, count), np.inf)
    np.fill_diagonal(ways, 0.0)
    for u, v, length in edges:
        ways[u, v] = ways[v, u] = min(length, ways[u, v])
    for middle in range(count):
        ways = np.minimum(ways, ways[:, middle, None] + ways[None, middle, :])
    return ways


TASKS_PER_SLOT = SLOT / 15.0
"""What a server does in a slot where all its tasks suit it, on average."""
