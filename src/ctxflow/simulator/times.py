"""How long things take on simulated workers, by GPU model, with their spread."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence

from ctxflow.executors.simulated import SimulatedMachine


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Seconds that vary: log-normal above a least, with a given mean and standard deviation.

    Waits, loads and transfers are never below some time and now and then far above it, which this has and a normal
    distribution has not.

    :param mean: seconds.
    :param deviation: their standard deviation; 0 for a constant.
    :param least: what it never takes less than.
    :param most: what it never takes more than; where that cuts much off, mean and deviation are smaller than given.
    :raises ValueError: unless 0 <= least <= mean <= most, and deviation >= 0.

    >>> Drawn(15.0).draw(random.Random(1))
    15.0
    >>> draws = [Drawn(15.0, 27.0, 5.0).draw(random.Random(n)) for n in range(2000)]
    >>> min(draws) > 5.0, 13 < sum(draws) / 2000 < 17
    (True, True)
    """

    mean: float = 0.0
    deviation: float = 0.0
    least: float = 0.0
    most: float = math.inf
    _mu: float = dataclasses.field(init=False, repr=False, compare=False, default=0.0)
    _sigma: float = dataclasses.field(init=False, repr=False, compare=False, default=0.0)

    def __post_init__(self) -> None:
        above = self.mean - self.least
        if self.least < 0 or above < 0 or self.mean > self.most or self.deviation < 0:
            raise ValueError("give 0 <= least <= mean <= most and deviation >= 0, in seconds")
        if above and self.deviation:
            # The moments of a log-normal: mean exp(mu + s^2/2), variance (exp(s^2) - 1) exp(2 mu + s^2).
            variance = math.log1p((self.deviation / above) ** 2)
            object.__setattr__(self, "_sigma", math.sqrt(variance))
            object.__setattr__(self, "_mu", math.log(above) - variance / 2)

    def draw(self, generator: random.Random) -> float:
        """Draw one."""
        if not self._sigma:
            return self.mean
        return min(self.most, self.least + generator.lognormvariate(self._mu, self._sigma))


@dataclasses.dataclass(frozen=True)
class GpuTimes:
    """Times of one app's items by GPU model.

    :ivar item_seconds: GPU model -> mean seconds of an item; "" for any other model.
    :ivar item_spread: standard deviation of an item's seconds, as a share of their mean.
    :ivar call_overhead: seconds of a call beside its items, in which the worker is busy with it.
    :ivar dispatched: seconds from sending a call until it begins.
    :ivar loading: seconds of building the context.
    :ivar matching: seconds from asking for a worker until it has joined.

    >>> times = GpuTimes({"A10": 0.25})
    >>> times.call("app", SimulatedMachine("m", "A10"), range(8), random.Random(0))
    2.0
    """

    item_seconds: Mapping[str, float]
    item_spread: float = 0.0
    call_overhead: Drawn = Drawn()
    dispatched: Drawn = Drawn()
    loading: Drawn = Drawn()
    matching: Drawn = Drawn()

    def item(self, machine: SimulatedMachine) -> float:
        """Return the mean seconds of an item on a machine.

        :raises ValueError: for a GPU model without a figure.
        """
        seconds = self.item_seconds.get(machine.gpu_model or "", self.item_seconds.get(""))
        if seconds is None:
            raise ValueError(f"item_seconds has no figure for {machine.gpu_model!r}: add one, or one for any under ''")
        return seconds

    def match(self, machine: SimulatedMachine, generator: random.Random) -> float:
        """Draw the seconds from requesting a worker until it has joined."""
        return self.matching.draw(generator)

    def load(self, context: str, machine: SimulatedMachine, generator: random.Random) -> float:
        """Draw the seconds of loading a context."""
        return self.loading.draw(generator)

    def dispatch(self, machine: SimulatedMachine, generator: random.Random) -> float:
        """Draw the seconds from sending a call until it begins."""
        return self.dispatched.draw(generator)

    def call(self, app: str, machine: SimulatedMachine, items: Sequence[int], generator: random.Random) -> float:
        """Draw the seconds of a batch: a sum of independent items, whose relative spread falls with their number."""
        mean, count = self.item(machine), len(items)
        seconds = mean * count
        if self.item_spread:
            # A gamma is the sum of gammas: never negative, and right for one item as for a thousand.
            shape = count / self.item_spread**2
            seconds = generator.gammavariate(shape, seconds / shape)
        return seconds + self.call_overhead.draw(generator)


Kind = tuple[str, str | None]
"""A tier and a GPU model: workers of one kind are alike."""


@dataclasses.dataclass(frozen=True)
class MixedTimes:
    """Times of several apps and contexts on workers of several kinds.

    :ivar items: app id -> kind -> mean seconds of an item, their spread, and what a call costs beside its items.
    :ivar loading: context id -> kind -> seconds of building it.
    :ivar matching: tier -> seconds from asking for a worker until it has joined; at once where it is not named.
    :ivar dispatched: seconds of a call's way to its worker and back.
    :ivar paces: machine name -> how many times longer its items take than those of its kind; 1 where it is not named.
    """

    items: Mapping[str, Mapping[Kind, GpuTimes]]
    loading: Mapping[str, Mapping[Kind, Drawn]] = dataclasses.field(default_factory=dict)
    matching: Mapping[str, Drawn] = dataclasses.field(default_factory=dict)
    dispatched: Drawn = Drawn()
    paces: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def match(self, machine: SimulatedMachine, generator: random.Random) -> float:
        """Draw the seconds from requesting a worker until it has joined."""
        drawn = self.matching.get(machine.tier)
        return 0.0 if drawn is None else drawn.draw(generator)

    def load(self, context: str, machine: SimulatedMachine, generator: random.Random) -> float:
        """Draw the seconds of loading a context."""
        kinds = self.loading.get(context)
        return 0.0 if kinds is None else kinds[machine.tier, machine.gpu_model].draw(generator)

    def dispatch(self, machine: SimulatedMachine, generator: random.Random) -> float:
        """Draw the seconds of a call's way to its worker and back."""
        return self.dispatched.draw(generator)

    def call(self, app: str, machine: SimulatedMachine, items: Sequence[int], generator: random.Random) -> float:
        """Draw the seconds of a batch."""
        times = self.items[app][machine.tier, machine.gpu_model]
        return self.paces.get(machine.name, 1.0) * times.call(app, machine, items, generator)

    def item(self, app: str, machine: SimulatedMachine) -> float:
        """Return the mean seconds of an app's item on a machine."""
        return self.paces.get(machine.name, 1.0) * self.items[app][machine.tier, machine.gpu_model].item(machine)
