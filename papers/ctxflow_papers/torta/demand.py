"""What arrives: each region's tasks of a run, drawn from a seed.

A region's demand swings slowly, wobbles, and has bursts that rise within minutes; tasks are Poisson. What does not live
here: where the tasks go.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ctxflow.policies.torta.quantities import Floats, Ints
from ctxflow_papers.torta.settings import (
    BURST,
    BURSTS,
    KINDS,
    LASTS,
    MEMORY,
    OPENING,
    POPULARITY,
    RAMP,
    SECONDS,
    SLOT,
    SLOTS,
    SWING,
    WOBBLE,
)
from ctxflow_papers.torta.world import TASKS_PER_SLOT, World


@dataclasses.dataclass(frozen=True)
class Tasks:
    """N tasks in the order of their arrival.

    :ivar time: seconds. :ivar origin: its region. :ivar kind: its type. :ivar model: its model's number.
    :ivar seconds: of processing on a server that suits it. :ivar tflops: what it asks for.
    :ivar starts: (T + 1,) the first task of each slot.
    """

    time: Floats
    origin: Ints
    kind: Ints
    model: Ints
    seconds: Floats
    tflops: Floats
    starts: Ints

    def counts(self, regions: int) -> Ints:
        """(T, R, K) how many arrive in each slot and region of each type."""
        slots = len(self.starts) - 1
        slot = np.repeat(np.arange(slots), np.diff(self.starts))
        flat = (slot * regions + self.origin) * len(KINDS) + self.kind
        counted = np.bincount(flat, minlength=slots * regions * len(KINDS))
        return counted.reshape(slots, regions, len(KINDS)).astype(np.int64)


Shape = Callable[[World, np.random.Generator, int], Floats]
"""The expected demand (T, R) of a run of so many slots, in any unit: its highest slot becomes the load."""


def usual(world: World, chance: np.random.Generator, slots: int) -> Floats:
    """The demand of the paper's comparison: slow swings, wobbles and bursts of each region."""
    swing = world.demand * (1 + SWING * np.sin(2 * np.pi * np.arange(slots)[:, None] / SLOTS + world.phase))
    swing /= swing.sum(axis=1, keepdims=True)  # Who asks moves around; how much is asked of all regions stays.
    noise = chance.normal(0, WOBBLE, (slots, world.regions))
    wobble = np.empty_like(noise)
    wobble[0] = noise[0]
    for slot in range(1, slots):
        wobble[slot] = MEMORY * wobble[slot - 1] + np.sqrt(1 - MEMORY**2) * noise[slot]
    demand: Floats = swing * np.exp(wobble) * (1 + _bursts(world.regions, chance, slots))
    return demand


def _bursts(regions: int, chance: np.random.Generator, slots: int) -> Floats:
    rise = np.linspace(0, 1, RAMP + 1)[1:]
    form = BURST * np.concatenate([rise, np.ones(LASTS - 2 * RAMP), rise[::-1]])
    begun = (chance.random((slots, regions)) < BURSTS / SLOTS).astype(np.float64)
    added = np.zeros((slots + LASTS, regions))
    for after, height in enumerate(form):
        added[after : after + slots] = np.maximum(added[after : after + slots], begun * height)
    return added[:slots]


def tasks_of(world: World, load: float, seed: int, slots: int = SLOTS, shape: Shape = usual) -> Tasks:
    """A run's tasks.

    :param load: what is expected in the slot of the highest demand, over what all servers do together.
    :param seed: of all chance; a seed's tasks are the same for all methods.
    """
    chance = np.random.default_rng((seed, world.regions))
    expected = shape(world, chance, slots)
    expected *= load * TASKS_PER_SLOT * len(world.gpu) / expected.sum(axis=1).max()
    expected *= np.minimum(1.0, np.arange(1, slots + 1) / OPENING)[:, None]
    counts = chance.poisson(expected)
    total = int(counts.sum())
    slot = np.repeat(np.arange(slots), counts.sum(axis=1))
    origin = np.repeat(np.tile(np.arange(world.regions), slots), counts.ravel())
    time = SLOT * (slot + chance.random(total))
    order = np.argsort(time, kind="stable")
    kind = chance.choice(len(KINDS), total, p=world.types)
    model = kind * len(POPULARITY) + chance.choice(len(POPULARITY), total, p=POPULARITY)
    lowest, highest = (np.array([each.tflops[end] for each in KINDS])[kind] for end in (0, 1))
    return Tasks(
        time[order],
        origin[order].astype(np.int64),
        kind.astype(np.int64),
        model.astype(np.int64),
        chance.uniform(*SECONDS, total),
        chance.uniform(lowest, highest),
        np.concatenate([[0], np.cumsum(counts.sum(axis=1))]).astype(np.int64),
    )
