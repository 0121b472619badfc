"""How many GPUs a load of sessions wants: TurboServe's autoscaling controller, as functions on numbers.

The rule for the target; the parameters by volatility (Appendix A); the sessions to expect when a GPU that is requested
now will be ready (not the paper's); the offline profiler that finds the parameters. `rebalancing` says which GPUs go.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from ctxflow.policies.turboserve.rises import RESERVE, Rises

_TRIFLE = 1e-9


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The controller's parameters.

    :ivar utilization: rho*, the share of a GPU's capacity that is to be used.
    :ivar tolerance: delta, how far the load may be from it before the number of GPUs changes.
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
    rho: float, sessions: float, gpus: int, capacity: int, parameters: Parameters, most: int, least: int = 1
) -> int:
    """Return the GPUs to hold from now on, those that boot included.

    More only if rho is over utilization + tolerance, fewer only if it is under utilization - tolerance; then as many
    as `target_gpus` says.

    :param rho: the fullest GPU's sessions over the capacity K, after rebalancing, on the GPUs that are ready.
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
    expected: float,
    gpus: int,
    capacity: int,
    utilization: float,
    most: int,
    least: int = 1,
    spare: float = 0.0,
    reserved: float = 0.0,
) -> int:
    """Return the GPUs to hold from now on, given the sessions expected when they are ready (not the paper's).

    More as soon as those want them; fewer only if these would suffice for `spare` sessions more. The paper's tolerance
    is a share of the load, which is several GPUs of a large fleet and too little of a small one.

    :param expected: sessions a boot from now (`anticipated`).
    :param gpus: held now, those that boot included.
    :param spare: sessions that there must be room for beyond those before a GPU is released.
    :param reserved: sessions that there must be room for at full use.

    >>> [decide_ahead(19, gpus, 5, 0.8, most=16) for gpus in (4, 5, 6)], decide_ahead(19, 6, 5, 0.8, 16, spare=2.0)
    ([5, 5, 5], 6)
    """
    least = target_gpus(reserved, capacity, max(1.0, utilization), most, least)
    out = target_gpus(expected, capacity, utilization, most, least)
    back = target_gpus(expected + spare, capacity, utilization, most, least)
    return max(out, min(gpus, back))


EPOCH, EPOCHS = 10.0, 20
"""Seconds of an epoch, and how many of them volatility looks back: these reproduce Table 5."""


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
    """The activations of the last epochs.

    >>> epochs = Epochs()
    >>> epochs.add(0.0, 3.0), epochs.add(25.0, 1.0), list(epochs.activated)[-4:]
    (None, None, [0.0, 3.0, 0.0, 1.0])
    """

    def __init__(self) -> None:
        self.activated: deque[float] = deque([0.0] * EPOCHS, EPOCHS)
        self._number: int | None = None

    def add(self, now: float, activations: float) -> None:
        """Count activations in the epoch of a time; times do not go back."""
        number = int(now // EPOCH)
        for _ in range(min(EPOCHS, number - (number if self._number is None else self._number))):
            self.activated.append(0.0)
        self._number = number
        self.activated[-1] += activations

    @property
    def volatility(self) -> float:
        """Compute (6) over these epochs."""
        return volatility(self.activated)


@dataclasses.dataclass(frozen=True)
class Levels:
    """Parameters by level of volatility.

    :ivar bounds: where a level ends and the next begins, ascending: one fewer than there are parameters.

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
        return dataclasses.replace(self, parameters=tuple(found))


PAPER = Levels((1.62, 3.46, 5.325), tuple(Parameters(rho) for rho in (0.80, 0.65, 0.50, 0.25)))
"""Table 6, with bounds half-way between the volatilities of neighbouring levels."""


def constant(parameters: Parameters) -> Levels:
    """Return one level: target tracking without volatility."""
    return Levels((), (parameters,))


WINDOW = EPOCH * EPOCHS  # Seconds looked back at.
DEVIATIONS = 1.25  # Standard deviations added to what is expected.
SPARE = 0.8  # How many more of them there must be room for before a GPU is released.
STEEP = 0.5  # Boots looked back at for a rise that is too new to show in the window.
BY_CHANCE = 2.0  # Standard deviations of what came and went in that time that are not taken for a rise.


@dataclasses.dataclass(frozen=True)
class Anticipated:
    """The sessions to be ready for a boot from now, and one standard deviation of what comes and goes by chance.

    :ivar reserved: how many there has to be room for, at most K on a GPU, since rises came that were faster than a boot
        (`Rises`). What is left free for chance may be full then, so that this is not on top of it.
    """

    sessions: float
    deviation: float = 0.0
    reserved: float = 0.0


def anticipated(
    sessions: float, came: float, went: float, share: float = 1.0, deviations: float = DEVIATIONS, idle: float = 0.0
) -> Anticipated:
    """Return the sessions to expect a boot from now, and some standard deviations of what may come beyond by chance.

    The growth of the time looked back at is expected to continue, a decline is not; or, if that is more, idle sessions
    are expected to return as often as active ones cease. So many arrivals and departures have a standard deviation of
    the root of their number (Poisson), at most of twice the sessions expected, as where they come and go several times.

    :param came: sessions that became active in the time looked back at. :param went: that ceased to be.
    :param share: of the time looked back at that is looked ahead.
    :param deviations: how many standard deviations to add.
    :param idle: sessions without work now.

    >>> anticipated(40, 10, 6, deviations=1.0).sessions, anticipated(40, 50, 50, 0.25, 2.0).sessions
    (48.0, 50.0)
    >>> anticipated(8, 400, 400, 1.0, 1.0).sessions, anticipated(20, 2, 2, 1.0, 1.0, idle=40).sessions
    (12.0, 24.0)
    """
    part = min(1.0, went * share / max(1.0, sessions))  # Of the active, that cease to be.
    expected = sessions + max(0.0, (came - went) * share, part * (idle - sessions))
    deviation = math.sqrt(min((came + went) * share, 2.0 * max(1.0, expected)))
    return Anticipated(expected + deviations * deviation, deviation)


class Turnover:
    """The sessions that came and went in the last window, or since `start` while that is less.

    A rise that is too new to show in the window is seen in the last half of a boot, if it is more than chance, and
    expected to go on; what comes faster than that is reserved for once it came twice (`Rises`).

    :param reserve: for how many boots such rises are remembered; 0 to keep no room for them.

    >>> turnover = Turnover(0.0)
    >>> turnover.add(35.0, 8, 0)
    >>> [turnover.anticipated(now, sessions=20, ahead=5.0).sessions for now in (40.0, 400.0)]
    [22.25, 20.0]
    >>> turnover.add(400.0, 9, 0)
    >>> turnover.anticipated(401.0, sessions=29, ahead=5.0).sessions > 29 + 2 * (9 - 2 * 9**0.5)
    True
    """

    def __init__(self, start: float, reserve: float = RESERVE) -> None:
        self._start = start
        self._rises = Rises(reserve)
        self._changes: deque[tuple[float, int, int]] = deque()
        self._came = self._went = 0

    def add(self, now: float, came: int, went: int) -> None:
        """Count sessions that became active and that ceased to be; times do not go back."""
        if came or went:
            self._changes.append((now, came, went))
            self._came += came
            self._went += went

    def anticipated(self, now: float, sessions: int, ahead: float, idle: int = 0) -> Anticipated:
        """Return what to be ready for so many seconds from now, the seconds of a boot.

        The window is projected no further than it was seen.
        """
        while self._changes and self._changes[0][0] <= now - WINDOW:
            _, came, went = self._changes.popleft()
            self._came -= came
            self._went -= went
        seen = min(WINDOW, now - self._start)
        share = ahead / max(ahead, seen) if ahead else 0.0
        found = anticipated(sessions, self._came, self._went, share, idle=idle)
        if not ahead:
            return found
        chance = DEVIATIONS * found.deviation
        expected = max(found.sessions - chance, sessions + self._rising(now, ahead))
        reserved = self._rises.room(now, sessions, expected, found.deviation, ahead)
        return Anticipated(expected + chance, found.deviation, reserved)

    def _rising(self, now: float, ahead: float) -> float:
        """Return the sessions that come until then if a rise that is new goes on, 0 without one."""
        begin = now - STEEP * ahead
        if begin < self._start:
            return 0.0
        came = went = 0
        for time, more, less in reversed(self._changes):
            if time <= begin:
                break
            came, went = came + more, went + less
        return max(0.0, came - went - BY_CHANCE * math.sqrt(came + went)) / STEEP


Segment = TypeVar("Segment")


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What the GPUs cost, in any unit, the longest chunk in seconds, and by how much chunks exceeded the target.

    :ivar over: seconds beyond the target, summed over items, or weighted with the time for which sessions had them.
    """

    cost: float
    worst: float
    over: float = 0.0


@dataclasses.dataclass(frozen=True)
class Profiled:
    """A row of Table 6; not `valid` if no candidate keeps the target, and it has the one that exceeds it least."""

    volatility: float
    parameters: Parameters
    replayed: Replayed
    valid: bool


def cheapest(
    candidates: Sequence[Parameters], replay: Callable[[Parameters], Replayed], target: float
) -> tuple[Parameters, Replayed, bool]:
    """Return the cheapest candidate whose longest chunk keeps the target, or else the one that exceeds it least.

    That has the shortest longest chunk; of several with the same, as where all begin on too few GPUs, the least `over`,
    and only then the lowest cost.

    :raises ValueError: without candidates.

    >>> rows = {0.5: Replayed(9.0, 0.4), 0.8: Replayed(5.0, 0.7)}
    >>> cheapest([Parameters(0.5), Parameters(0.8)], lambda each: rows[each.utilization], 0.6)[0].utilization
    0.5
    >>> rows = {0.5: Replayed(9.0, 2.4, over=80.0), 0.8: Replayed(5.0, 2.4, over=300.0)}
    >>> cheapest([Parameters(0.5), Parameters(0.8)], lambda each: rows[each.utilization], 0.6)[0].utilization
    0.5
    """
    if not candidates:
        raise ValueError("there is nothing to choose from: give one candidate or more")
    found = [(each, replay(each)) for each in candidates]
    valid = [row for row in found if row[1].worst <= target]
    if valid:
        return (*min(valid, key=lambda row: row[1].cost), True)
    return (*min(found, key=lambda row: (row[1].worst, row[1].over, row[1].cost)), False)


def profile(
    segments: Sequence[tuple[float, Segment]],
    candidates: Sequence[Parameters],
    replay: Callable[[Segment, Parameters], Replayed],
    target: float,
) -> list[Profiled]:
    """Return the cheapest parameters of each segment, by ascending volatility.

    :param segments: the volatility of each, and what `replay` takes.
    :param target: the longest that a chunk may take, in seconds.
    """
    return [
        Profiled(volatility, *cheapest(candidates, functools.partial(replay, segment), target))
        for volatility, segment in sorted(segments, key=lambda each: each[0])
    ]


def levels(rows: Sequence[Profiled]) -> Levels:
    """Return the table that the controller reads: neighbours with the same parameters are one level.

    >>> rows = [Profiled(v, Parameters(rho), Replayed(1, 1), True) for v, rho in ((1, 0.8), (2, 0.8), (4, 0.5))]
    >>> levels(rows).bounds
    (3.0,)
    """
    bounds, found = [], [rows[0].parameters]
    for before, row in itertools.pairwise(rows):
        if row.parameters != found[-1]:
            bounds.append((before.volatility + row.volatility) / 2)
            found.append(row.parameters)
    return Levels(tuple(bounds), tuple(found))
