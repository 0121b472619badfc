"""A region's servers and the tasks for them, as the micro layer's functions see them.

*Server* and *task* are the paper's words for a worker and for a call that waits for one. Compute and memory are in any
units that are the same for both, such as TFLOP/s and GB. What does not live here: any decision.
"""

from __future__ import annotations

import dataclasses

from ctxflow.policies.routing.arrays import Bools, Floats, Ints


@dataclasses.dataclass(frozen=True)
class Servers:
    """S servers of one region.

    :ivar compute: (S,) what each can compute.
    :ivar memory: (S,) of its GPU.
    :ivar capacity: (S,) tasks that it is made for, running and waiting.
    :ivar used: (S,) the work it has under way, in tasks.
    :ivar queue: (S,) tasks that wait on it.
    :ivar places: (S,) tasks that it may still be given.
    :ivar suits: (S, K) whether its architecture is the right one for a type of task.
    """

    compute: Floats
    memory: Floats
    capacity: Floats
    used: Floats
    queue: Floats
    places: Ints
    suits: Bools


@dataclasses.dataclass(frozen=True)
class Tasks:
    """N tasks.

    :ivar compute: (N,) what each asks for.
    :ivar memory: (N,) what it needs of a GPU.
    :ivar kind: (N,) its type, a column of `Servers.suits`.
    :ivar model: (N,) the number of its model, or context.
    :ivar deadline: (N,) when its result is wanted; infinite for never.
    :ivar work: (N,) what it adds to the work of a server, in tasks.
    :ivar embedding: (N, D) of its input, None if the app gives none.
    """

    compute: Floats
    memory: Floats
    kind: Ints
    model: Ints
    deadline: Floats
    work: Floats
    embedding: Floats | None = None


@dataclasses.dataclass(frozen=True)
class Recent:
    """M tasks that ran lately: who holds what.

    :ivar server: (M,) where.
    :ivar model: (M,) which model.
    :ivar time: (M,) when, in seconds.
    :ivar embedding: (M, D) of their inputs, None if they had none.
    """

    server: Ints
    model: Ints
    time: Floats
    embedding: Floats | None = None
