"""The regions of a topology: who is where, how far apart, and what power costs there."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import zlib
from typing import Any

import numpy as np

from ctxflow.policies.torta.quantities import Bools, Floats, Ints
from ctxflow_papers.torta.settings import (
    BANDWIDTH,
    FOOTPRINT,
    GPUS,
    KINDS,
    LATENCY,
    PAYLOAD,
    POPULARITY,
    SLOT,
    STOP_STAGES,
    SWITCH_STAGES,
    UNEVEN,
    UNSUITED,
    V100_WEIGHTS,
    warm_up,
)

TOPOLOGIES = tuple(LATENCY)
MODELS = len(KINDS) * len(POPULARITY)
KIND_OF_MODEL: Ints = np.repeat(np.arange(len(KINDS)), len(POPULARITY))
FOOTPRINTS: Floats = np.array([KINDS[kind].weights * FOOTPRINT for kind in KIND_OF_MODEL])


@dataclasses.dataclass(frozen=True)
class World:
    """R regions of at most S servers each; what is not there is False in `there`.

    :ivar names: of the regions. :ivar latency: (R, R) seconds one way. :ivar transfer: seconds of a task's payload.
    :ivar price: (24, R) dollars for a kWh by the hour of the day.
    :ivar demand: (R,) shares of all demand, before it swings.
    :ivar gpu: (R, S) its number in `GPUS`. :ivar there: (R, S).
    """

    name: str
    names: tuple[str, ...]
    latency: Floats
    transfer: float
    price: Floats
    demand: Floats
    gpu: Ints
    there: Bools

    @property
    def regions(self) -> int:
        """R."""
        return len(self.names)

    @functools.cached_property
    def servers(self) -> Ints:
        """(R, K) of each region, those that suit each type of task."""
        suits = np.array([gpu.suits for gpu in GPUS])[self.gpu]
        counts = [(self.there & (suits == kind)).sum(axis=1) for kind in range(len(KINDS))]
        return np.stack(counts, axis=1).astype(np.int64)

    @property
    def types(self) -> Floats:
        """(K,) the shares of the types of tasks: as the servers that suit them, so that a load is every type's."""
        counts = self.servers.sum(axis=0)
        return np.asarray(counts / counts.sum(), dtype=np.float64)


def rates() -> Floats:
    """(G, K) how fast a kind of GPU does a type of task, on average, over one that suits it; 0 if it does not fit.

    >>> rates().round(2)[3].tolist()
    [0.46, 1.0, 0.8]
    """
    found = np.zeros((len(GPUS), len(KINDS)))
    for g, gpu in enumerate(GPUS):
        for k, kind in enumerate(KINDS):
            if kind.weights * FOOTPRINT > gpu.memory:
                continue
            asked = np.linspace(*kind.tflops, 101)
            slower = np.maximum(asked / gpu.tflops, 1.0).mean()
            found[g, k] = 1.0 / slower / (1.0 if gpu.suits == k else UNSUITED)
    return found


def switch_seconds() -> Floats:
    """(G, M) seconds to bring a model onto a server of each kind in the place of another."""
    weights = np.array([KINDS[kind].weights for kind in KIND_OF_MODEL]) / V100_WEIGHTS
    stages = np.array([gpu.stages * sum(SWITCH_STAGES) for gpu in GPUS])
    return stages[:, np.newaxis] * weights


def start_seconds() -> Floats:
    """(G,) seconds from cold to ready."""
    return np.array([warm_up(gpu) for gpu in GPUS])


def stop_seconds() -> Floats:
    """(G,) seconds of a stop."""
    return np.array([gpu.stages * sum(STOP_STAGES) for gpu in GPUS])


@functools.cache
def world(name: str) -> World:
    """A topology of the paper with its servers; it is the same every time.

    :raises ValueError: if there is no such topology.

    >>> abilene = world("abilene")
    >>> abilene.regions, round(float(abilene.latency.sum() / (12 * 11)), 6), bool(200 <= abilene.there.sum() <= 300)
    (12, 0.025, True)
    """
    if name not in TOPOLOGIES:
        raise ValueError(f"there is no topology {name!r}: choose one of {', '.join(TOPOLOGIES)}")
    chance = np.random.default_rng(zlib.crc32(name.encode()))
    data = _data()
    nodes = tuple(data["topologies"][name]["nodes"])
    count = len(nodes)
    latency = _paths(count, data["topologies"][name]["edges_km"])
    latency *= LATENCY[name] * count * (count - 1) / latency.sum()
    prices = np.array(list(data["prices_per_kwh"].values())).T
    gpu, there = _servers(chance, count)
    return World(
        name,
        nodes,
        latency,
        PAYLOAD * 8 / (BANDWIDTH[name] * 1e9),
        prices[:, np.arange(count) % prices.shape[1]],
        chance.dirichlet(np.full(count, UNEVEN)),
        gpu,
        there,
    )


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


def _servers(chance: np.random.Generator, regions: int) -> tuple[Ints, Bools]:
    """Table I's servers over the regions, unevenly; each region has one V100 at least, so that it can do any task."""
    shares = chance.dirichlet(np.full(regions, UNEVEN))
    held: list[list[int]] = [[] for _ in range(regions)]
    for number, gpu in enumerate(GPUS):
        total = int(chance.integers(gpu.count[0], gpu.count[1] + 1))
        first = 1 if gpu.name == "V100" else 0
        for region, servers in enumerate(chance.multinomial(total - first * regions, shares) + first):
            held[region] += [number] * int(servers)
    most = max(map(len, held))
    kinds = np.array([each + [0] * (most - len(each)) for each in held], dtype=np.int64)
    there = np.arange(most)[None, :] < np.array([len(each) for each in held])[:, None]
    return kinds, there


TASKS_PER_SLOT = SLOT / 15.0
"""What a server does in a slot where all its tasks suit it, on average."""
