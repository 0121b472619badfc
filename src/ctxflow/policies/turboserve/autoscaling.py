"""How many GPUs a load of sessions wants: TurboServe's autoscaling controller, as functions on numbers.

First the rule for the target; then the parameters by the load's volatility (Appendix A), which the offline profiler
finds (`profiling`); and last, which is not the paper's, the sessions to expect when a GPU that is asked for now will be
there. What sessions do within a boot is nearly a random walk: what they grew by in the last boot says nothing about the
next, what they grew by in the last minutes a little, and the spread is that of sessions which come and go independently
of each other. Where most sessions are idle, more can come back than go. Which GPUs go is decided in `rebalancing`.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Sequence

_TRIFLE = 1e-9


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What steers the controller.

    :ivar utilization: rho*, the share of a GPU's capacity that is to be used.
    :ivar tolerance: delta: the load may be so far from it before anything is done.
    :ivar latency_weight: the lambda of (1). The rule for the target does not read it, as in the paper.
    """

    utilization: float = 0.8
    tolerance: float = 0.1
    latency_weight: float = 0.2

    def __post_init__(self) -> None:
        if not self.utilization > 0:
            raise ValueError("utilization is the share of a GPU to be used: give more than 0")
        if not self.tolerance >= 0:
            raise ValueError("tolerance is how far the load may be off: give 0 or more")


def load(counts: Iterable[int], capacity: int) -> float:
    """Compute rho_e: the fullest GPU's sessions over the capacity K.

    >>> load([3, 4, 1], 5)
    0.8
    """
    if capacity < 1:
        raise ValueError("a GPU has room for 1 session or more")
    return max(counts, default=0) / capacity


def target_gpus(sessions: float, capacity: int, utilization: float, most: int, least: int = 1) -> int:
    """Compute m*: the GPUs on which so many sessions make the utilization wanted, within bounds.

    >>> target_gpus(38, 5, 0.6, most=16)
    13
    """
    carried = capacity * utilization
    if not carried > 0 or math.isnan(sessions):
        raise ValueError(
            "a GPU carries some sessions: give a capacity and a utilization above 0, and a number of sessions"
        )
    wish = math.ceil(min(sessions / carried, most) - _TRIFLE)
    return max(least, min(most, wish))


def decide(
    rho: float,
    sessions: float,
    gpus: int,
    capacity: int,
    parameters: Parameters,
    most: int,
    least: int = 1,
) -> int:
    """Return the GPUs to hold from now on, those that boot included.

    More only if rho is over utilization + tolerance, fewer only if it is under utilization - tolerance; then as many
    as `target_gpus` says.

    :param rho: `load` after rebalancing, on the GPUs that are ready.
    :param gpus: held now, those that boot included.

    >>> decide(0.95, 19, 4, 5, Parameters(0.8), most=16), decide(0.85, 17, 4, 5, Parameters(0.8), most=16)
    (5, 4)
    """
    wish = target_gpus(sessions, capacity, parameters.utilization, most, least)
    if rho > parameters.utilization + parameters.tolerance + _TRIFLE:
        return max(gpus, wish)
    if rho < parameters.utilization - parameters.tolerance - _TRIFLE:
        return min(gpus, wish)
    return gpus


def decide_ahead(
    expected: float, gpus: int, capacity: int, utilization: float, most: int, least: int = 1, spare: float = 0.0
) -> int:
    """Return the GPUs to hold from now on, where it is known what to expect of the time when they are ready.

    This is not the paper's.

    More as soon as the sessions expected want them; fewer only if these would suffice for some sessions more. The
    paper's tolerance is a share of the load, which is several GPUs of a large fleet and too little of a small one.

    :param expected: sessions a boot from now (`anticipated`).
    :param gpus: held now, those that boot included.
    :param spare: sessions that there is to be room for beyond those before a GPU is given back.

    >>> [decide_ahead(19, gpus, 5, 0.8, most=16) for gpus in (4, 5, 6)], decide_ahead(19, 6, 5, 0.8, 16, spare=2.0)
    ([5, 5, 5], 6)
    """
    out = target_gpus(expected, capacity, utilization, most, least)
    back = target_gpus(expected + spare, capacity, utilization, most, least)
    return max(out, min(gpus, back))


def settled(wish: int, gpus: int, since_out: float, boot_seconds: float) -> int:
    """Return the wish; none is given back sooner after asking for more than a boot takes, more is asked for at once.

    :param since_out: seconds since more were last asked for.

    >>> settled(3, 5, 20.0, 30.0), settled(3, 5, 30.0, 30.0), settled(7, 5, 0.0, 30.0)
    (5, 3, 7)
    """
    return gpus if wish < gpus and since_out < boot_seconds else wish


EPOCH, EPOCHS = 10.0, 20
"""Seconds of an epoch, and how many of them volatility looks back: with these Table 5 is found again."""


def volatility(activations: Sequence[float]) -> float:
    """Compute (6): the standard deviation, over a sliding window of events, of the sessions newly activated at each.

    >>> volatility([0, 0, 0, 4])
    1.7320508075688772
    """
    if not activations:
        return 0.0
    mean = sum(activations) / len(activations)
    return math.sqrt(sum((each - mean) ** 2 for each in activations) / len(activations))


class Epochs:
    """What was activated in the last epochs, as time goes on.

    >>> epochs = Epochs()
    >>> epochs.add(0.0, 3.0), epochs.add(25.0, 1.0), list(epochs.activated)[-4:]
    (None, None, [0.0, 3.0, 0.0, 1.0])
    """

    def __init__(self) -> None:
        self.activated: deque[float] = deque([0.0] * EPOCHS, EPOCHS)
        self._number: int | None = None

    def add(self, now: float, activations: float) -> None:
        """Count activations, of which there may be none, in the epoch of a time; times do not go back."""
        number = int(now // EPOCH)
        for _ in range(min(EPOCHS, number - (number if self._number is None else self._number))):
            self.activated.append(0.0)
        self._number = number
        self.activated[-1] += activations

    @property
    def volatility(self) -> float:
        """Compute (6) over the epochs that are looked back at."""
        return volatility(self.activated)


@dataclasses.dataclass(frozen=True)
class Levels:
    """Parameters by level of volatility.

    :ivar bounds: where a level ends and the next begins, ascending: one fewer than there are levels.
    :ivar parameters: of each level.

    >>> PAPER.at(1.0).utilization, PAPER.at(4.4).utilization
    (0.8, 0.5)
    """

    bounds: tuple[float, ...]
    parameters: tuple[Parameters, ...]

    def __post_init__(self) -> None:
        if len(self.parameters) != len(self.bounds) + 1 or list(self.bounds) != sorted(self.bounds):
            raise ValueError("levels need ascending bounds, and parameters for one level more than there are bounds")

    def at(self, value: float) -> Parameters:
        """Return the parameters of the level that a volatility is in: measure, quantize, look up."""
        return self.parameters[bisect.bisect_right(self.bounds, value)]

    def scaled(self, factor: float) -> Levels:
        """Return the same with every utilization times a factor."""
        found = (dataclasses.replace(each, utilization=each.utilization * factor) for each in self.parameters)
        return Levels(self.bounds, tuple(found))


PAPER = Levels((1.62, 3.46, 5.325), tuple(Parameters(rho) for rho in (0.80, 0.65, 0.50, 0.25)))
"""Table 6, with bounds half-way between the volatilities of neighbouring levels."""


def constant(parameters: Parameters) -> Levels:
    """Return one level: target tracking without volatility."""
    return Levels((), (parameters,))


WINDOW = EPOCH * EPOCHS
"""Seconds that are looked back at: as many as volatility does."""
DEVIATIONS = 1.25
"""How many standard deviations are added to what is expected."""
SPARE = 0.8
"""How many more of them there is to be room for before a GPU is given back."""


@dataclasses.dataclass(frozen=True)
class Anticipated:
    """A boot from now.

    :ivar sessions: to be ready for: those expected, and some standard deviations.
    :ivar deviation: one standard deviation of what comes and goes by chance.
    """

    sessions: float
    deviation: float = 0.0


def anticipated(
    sessions: float, came: float, went: float, share: float = 1.0, deviations: float = DEVIATIONS, idle: float = 0.0
) -> Anticipated:
    """Return the sessions to expect, and some standard deviations of what may come beyond that by chance.

    A GPU that is asked for now is ready a boot from now, so a controller that looks at the present is late by what
    arrives until then. The growth of the time looked back at is expected to go on, a decline is not; or, if
    that is more, idle sessions are expected to come back as often as active ones cease to be. So many comings and
    goings have a standard deviation of the root of their number (Poisson), so that small fleets hold more in reserve
    for each session than large ones. Where sessions come and go several times meanwhile, that is bounded: by the root
    of twice their number, at which what is there then has nothing to do with what is there now.

    :param came: sessions that became active in the time looked back at. :param went: that ceased to be.
    :param share: of the time looked back at that is looked ahead.
    :param deviations: how many standard deviations to add.
    :param idle: sessions that have nothing to do now, and may at any time.

    >>> anticipated(40, 10, 6, deviations=1.0), anticipated(40, 50, 50, 0.25, 2.0)
    (Anticipated(sessions=48.0, deviation=4.0), Anticipated(sessions=50.0, deviation=5.0))
    >>> anticipated(8, 400, 400, 1.0, 1.0), anticipated(20, 2, 2, 1.0, 1.0, idle=40)
    (Anticipated(sessions=12.0, deviation=4.0), Anticipated(sessions=24.0, deviation=2.0))
    """
    part = min(1.0, went * share / max(1.0, sessions))  # Of the active, that cease to be.
    expected = sessions + max(0.0, (came - went) * share, part * (idle - sessions))
    deviation = math.sqrt(min((came + went) * share, 2.0 * max(1.0, expected)))
    return Anticipated(expected + deviations * deviation, deviation)


class Turnover:
    """The sessions that came and went in the last minutes, as time goes on.

    :param start: when counting begins. Until the whole window has passed, what was seen is all that is looked back at.

    >>> turnover = Turnover(0.0)
    >>> turnover.add(40.0, 8, 0)
    >>> turnover.anticipated(40.0, sessions=20, ahead=5.0), turnover.anticipated(400.0, sessions=20, ahead=5.0)
    (Anticipated(sessions=22.25, deviation=1.0), Anticipated(sessions=20.0, deviation=0.0))
    """

    def __init__(self, start: float) -> None:
        self._start = start
        self._changes: deque[tuple[float, int, int]] = deque()
        self._came = self._went = 0

    def add(self, now: float, came: int, went: int) -> None:
        """Count sessions that became active and that ceased to be; times do not go back."""
        if came or went:
            self._changes.append((now, came, went))
            self._came += came
            self._went += went

    def anticipated(self, now: float, sessions: int, ahead: float, idle: int = 0) -> Anticipated:
        """Return what to be ready for so many seconds from now; nothing is projected further than it was seen."""
        while self._changes and self._changes[0][0] <= now - WINDOW:
            _, came, went = self._changes.popleft()
            self._came -= came
            self._went -= went
        seen = min(WINDOW, now - self._start)
        share = ahead / max(ahead, seen) if ahead else 0.0
        return anticipated(sessions, self._came, self._went, share, idle=idle)
