"""What no scheduler could do better: the fluid bound.

What does not live here: what a scheduler did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from ctxflow.executors.simulated import Machine


def fluid_seconds(
    presence: Iterable[tuple[float, Machine, int]], item_seconds: Callable[[Machine], float], items: float
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


def mixed_fluid_seconds(
    presence: Iterable[tuple[float, Machine, int]],
    item_seconds: Callable[[str, Machine], float],
    items: Mapping[str, int],
) -> float:
    """The bound for several apps, of which each may be better on other workers.

    A second of a worker is priced by how many items of the apps' mix it does. Whatever is run where, an item costs at
    least the price of its seconds where those are cheapest; so the sum of these is work that must be done. (By the
    duality of linear programs, any prices give a bound; these give the best one for one app, and for several
    whose speeds are in the same proportion on all workers.)

    :param item_seconds: of an app's item on a machine.
    :param items: of each app.

    >>> mixed_fluid_seconds([(0.0, Machine("m"), 1)], lambda app, m: 0.5 if app == "a" else 2.0, {"a": 10, "b": 10})
    25.0
    """
    presence = list(presence)
    kinds: dict[tuple[float, ...], Machine] = {}
    for _, machine, _ in presence:
        kinds.setdefault(tuple(item_seconds(app, machine) for app in items), machine)
    if not kinds or not any(items.values()):
        return 0.0 if not any(items.values()) else math.inf

    def mix(machine: Machine) -> float:
        return sum(count * item_seconds(app, machine) for app, count in items.items()) / sum(items.values())

    prices = {speeds: 1 / mix(machine) for speeds, machine in kinds.items()}
    work = sum(count * min(prices[speeds] * speeds[n] for speeds in kinds) for n, count in enumerate(items.values()))
    return fluid_seconds(presence, mix, work)
