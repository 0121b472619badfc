"""What no scheduler could do better: the fluid bound.

What does not live here: what a scheduler did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from ctxflow.executors.simulated import Machine


def fluid_seconds(
    presence: Iterable[tuple[float, Machine, int]], item_seconds: Callable[[Machine], float], items: int
) -> float:
    """When the items would be done if every worker worked from its joining to its going, and work could be split at
    will.

    Nothing is counted for staging, loading, dispatch, what evictions destroy, and the tail.

    :param presence: (time, machine, +1 or -1) for every worker that joined or went, in order of time.
    :param item_seconds: of an item on a machine.
    :returns: seconds on the run's clock; infinity if the workers could not do it.

    >>> machines = [Machine(f"m{n}", "A10" if n < 10 else "TITAN X") for n in range(20)]
    >>> seconds = {"A10": 0.2727, "TITAN X": 0.3846}
    >>> round(fluid_seconds([(0.0, m, 1) for m in machines], lambda m: seconds[m.gpu_model], 150_000))
    2393
    """
    rate = done = last = 0.0
    for time, machine, change in presence:
        if rate > 0 and done + rate * (time - last) >= items:
            break
        done += rate * (time - last)
        last = time
        rate += change / item_seconds(machine)
    # What is left of a rate that was added and subtracted is no rate.
    return last + max(0.0, items - done) / rate if rate > 1e-9 else math.inf
