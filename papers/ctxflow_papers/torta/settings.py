"""Every constant of TORTA's experiments: what is printed and what is ours.

Printed in the paper: Table I, 480 slots of 45 s, the stage times of Fig. 3a, its peak of 237 W of a V100's 250 W, 1 to
3 minutes for a cold start (section II-A), task times that are uniform (VI-A), 80 % of a region at most (Fig. 5b), and
Eq. 8's 0.5 for an unsuited architecture, which is a score. All else the paper leaves open, and is ours. docs/routing.md
says which of them were changed after first runs, and why.
"""

from __future__ import annotations

import dataclasses

SLOT = 45.0
"""Seconds."""
SLOTS = 480
START_HOUR = 8
"""The time of day at which a run starts: Fig. 2 shows a morning. Prices go by the hour."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A kind of GPU; each is a server.

    :ivar count: Table I's, from and to: servers of all regions together.
    :ivar suits: the number of the type of task that its architecture is for (Table I).
    :ivar tflops: half precision, dense. :ivar memory: GB. :ivar watts: of the board.
    :ivar stages: seconds of a stage of Fig. 3 over the V100's: the geometric mean of the V100's PCIe and memory
        bandwidths (generation 3, 900 GB/s) over this one's.
    """

    name: str
    count: tuple[int, int]
    suits: int
    tflops: float
    memory: float
    watts: float
    stages: float


@dataclasses.dataclass(frozen=True)
class Kind:
    """A type of task.

    :ivar tflops: what a task asks for, from and to: more than a server has makes it slower (Eq. 8).
    :ivar weights: GB of its models.
    """

    name: str
    tflops: tuple[float, float]
    weights: float


KINDS = (
    Kind("compute-intensive", (125.0, 312.0), 14.0),
    Kind("memory-intensive", (65.0, 125.0), 14.0),
    Kind("lightweight", (30.0, 65.0), 6.0),
)
GPUS = (
    Gpu("A100", (40, 60), 0, 312.0, 80.0, 400.0, 0.47),
    Gpu("H100", (20, 40), 0, 990.0, 80.0, 700.0, 0.26),
    Gpu("RTX 4090", (40, 60), 2, 165.0, 24.0, 450.0, 0.67),
    Gpu("V100", (60, 80), 1, 125.0, 32.0, 250.0, 1.0),
    Gpu("T4", (40, 60), 2, 65.0, 16.0, 70.0, 1.68),
)
POPULARITY = (0.8, 0.2)
"""Each type of task has two models, and so many of its tasks ask for each."""
FOOTPRINT = 1.3
"""GB of GPU memory that a model takes, over its weights: the rest is its cache. A server holds what fits."""
SECONDS = (5.0, 25.0)
"""A task's processing time on a server that suits it: uniform, 15 s on average, near Fig. 11's."""
UNSUITED = 1.25
"""A task takes that much longer where the architecture is not its type's."""

SWITCH_STAGES = (3.5, 2.1, 6.8, 14.2, 3.4)
"""Fig. 3a, seconds on a V100 for weights of 14 GB: unload, clean up, load, initialise, reconfigure."""
MIGRATION_STAGES = (15.2, 4.8, 5.6, 5.1)
"""Fig. 3a: serialise, deserialise, load into memory, warm up."""
V100_WEIGHTS = 14.0
STOP_STAGES = SWITCH_STAGES[:2]
"""Stopping a server unloads and cleans up."""


def warm_up(gpu: Gpu) -> float:
    """Seconds from cold to ready: between the paper's 1 and 3 minutes, as the GPU's stages go.

    >>> [round(warm_up(gpu)) for gpu in GPUS]
    [93, 78, 107, 130, 178]
    """
    return 60.0 + 70.0 * gpu.stages


WORKING_WATTS, IDLE_WATTS = 237 / 250, 0.25
"""Shares of a board's power: while it computes, loads or starts (Fig. 3c), and while it is active without work."""

LATENCY = {"abilene": 0.025, "polska": 0.045, "gabriel": 0.080, "cost2": 0.150}
"""Table I's, seconds: the mean of all pairs of regions; what is near and far is as in the topology."""
BANDWIDTH = {"abilene": 10.0, "polska": 10.0, "gabriel": 15.0, "cost2": 20.0}
"""Table I's, Gbit/s."""
PAYLOAD = 1e6
"""Bytes of a task and its result."""

LOADS = (0.5, 0.7, 0.9)
"""The demand that is expected in a run's highest slot, over the capacity of all servers where each does what suits it:
3 tasks in a slot. At the mean it would be more than there is at times: the paper's waits of 2.4 s at most say that its
servers are never overloaded."""
UNEVEN = 2.0
"""Servers and demand are spread over regions by a Dirichlet distribution of this parameter, each by its own draw."""
SWING = 0.4
"""A region's demand swings by that share in the course of a run; the phase is the region's own."""
WOBBLE, MEMORY = 0.15, 0.9
"""Beside it the standard deviation and the autocorrelation of a region's (logarithmic) demand from slot to slot."""
BURSTS, BURST, RAMP, LASTS = 2.0, 1.0, 6, 20
"""A region's bursts in a run on average, what a burst adds to demand, and in how many slots it rises, lasts, falls."""
OPENING = 12
"""Slots in which demand rises from nothing at the start of a run: servers start and models are loaded in them."""
