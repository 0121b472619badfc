"""How an engine's pace depends on what is in flight, fitted to the calls of a recorded run that overlapped.

With n in flight each gets tokens at a pace of 1 / (1 + (n / knee)^bend)^(1 / bend), times that of one alone. So the
tokens of a call follow from how long it was in flight with how many. Knee and bend are those of a grid that leave the
least squares of what each call got to its tokens; each kind of worker's seconds of a token are what fits its calls.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

KNEES = tuple(2.0 ** (n / 4) for n in range(-8, 45))
BENDS = (0.5, 0.7, 1.0, 1.5, 2.5, 6.0, 30.0)
USUAL, DOUBT = 1.5, 0.02  # Where several bends explain the calls nearly as well, one nearer to the usual is taken.
PARTS = 4  # Numbers in flight are told apart as far as a fourth of a doubling.
FLYING = 2.0 ** (np.arange(12 * PARTS) / PARTS)
MOST_CALLS = 20_000  # Those that are fitted to, evenly spread over the run.
VARIED = 2.0  # How many times more must have been in flight at times than at others, for a curve to be known.
Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True)
class OverlappedCall:
    """One call that was answered: where, its tokens (1 where nobody counted), and its seconds by `FLYING`."""

    kind: str
    tokens: float
    seconds: Floats


class FlightLog:
    """For how long each call was in flight with how many others, on its worker's context."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], tuple[int, float]] = {}  # How many are in flight, and since when.
        self._seconds: dict[tuple[str, str], Floats] = {}
        self._calls: dict[tuple[str, int], tuple[str, Floats]] = {}

    def begin(self, worker: str, context: str, attempt: int, time: float) -> None:
        """Note that a call begins."""
        self._calls[worker, attempt] = context, self._change(worker, context, 1, time).copy()

    def end(self, worker: str, attempt: int, time: float) -> Floats | None:
        """Note that a call ends, and return its seconds by how many were in flight; None if it did not overlap."""
        found = self._calls.pop((worker, attempt), None)
        if found is None:
            return None
        context, before = found
        return np.asarray(self._change(worker, context, -1, time) - before)

    def _change(self, worker: str, context: str, by: int, time: float) -> Floats:
        key = worker, context
        count, since = self._counts.get(key, (0, time))
        seconds = self._seconds.setdefault(key, np.zeros(len(FLYING)))
        if count:
            seconds[min(len(FLYING) - 1, round(PARTS * math.log2(count)))] += time - since
        self._counts[key] = count + by, time
        return seconds


@dataclasses.dataclass(frozen=True)
class FittedPace:
    """What was fitted.

    :ivar best: kind -> tokens a second at best.
    :ivar knee, bend: as in `ctxflow.executors.simulated.SharedPace`.
    :ivar tokens: of an item, the mean, and `spread`: their deviation as a share of it.
    :ivar flying: the least and the most that was in flight, but for a hundredth of all seconds at each end.
    """

    best: Mapping[str, float]
    knee: float
    bend: float
    tokens: float
    spread: float
    flying: tuple[float, float]

    @property
    def known(self) -> bool:
        """Whether enough different numbers were in flight for a curve to be known."""
        return self.flying[1] >= VARIED * self.flying[0]


def fit_pace(calls: Sequence[OverlappedCall]) -> FittedPace:
    """Fit the pace of an app's calls, of which there is one at least."""
    calls = calls[:: 1 + len(calls) // MOST_CALLS]
    kinds = sorted({call.kind for call in calls})
    which = np.array([kinds.index(call.kind) for call in calls])
    tokens = np.array([call.tokens for call in calls])
    seconds = np.array([call.seconds for call in calls])
    totals = np.bincount(which, tokens, len(kinds))
    least, knee, bend, each, got = math.inf, KNEES[0], BENDS[0], np.ones(len(kinds)), tokens
    for tried_bend in BENDS:
        for tried_knee in KNEES:
            # As logarithms, since x^p is beyond all numbers where x is large and the bend sharp.
            paces = np.exp(-np.logaddexp(0.0, tried_bend * np.log(FLYING / tried_knee)) / tried_bend)
            alone = seconds @ paces  # Seconds in which it would have been done alone.
            own = np.bincount(which, alone, len(kinds)) / totals
            found = alone / own[which]
            left = float(((found - tokens) ** 2 / tokens).sum())
            left *= 1 + DOUBT * abs(math.log(tried_bend / USUAL))
            if left < least:
                least, knee, bend, each, got = left, tried_knee, tried_bend, own, found
    # Where nobody counted, that items took different times is all that shows how long they are.
    spread = tokens.std() / tokens.mean() if tokens.std() > 0 else got.std() / got.mean()
    shares = np.cumsum(seconds.sum(axis=0))
    low, high = (float(FLYING[np.searchsorted(shares, share * shares[-1])]) for share in (0.01, 0.99))
    best = {kind: float(knee / each[number]) for number, kind in enumerate(kinds)}
    return FittedPace(best, knee, bend, float(tokens.mean()), float(spread), (low, high))
