"""Traces of sessions generated to the paper's statistics: when each session is active, and when it is not.

T1 to T6 and the trace of section 3.2 have exactly the arrivals and departures of Appendix B in each of five windows,
and its average of active sessions as closely as they allow. What Appendix B does not say is chosen here: windows of 12
minutes (2 in section 3.2), arrivals at random times, departures of random sessions, of whom some are likelier to stay
than others, and users who choose six times a window, on average, whether to be active. Those that arrive are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ctxflow.simulator.session_serving import SessionTrace

MINDS = 6
"""How often in a window, on average, a user chooses anew whether to be active."""
STAYING = 1.0
"""Sigma of the log-normal weight with which a session is chosen to depart."""


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What a trace is generated to, by window."""

    name: str
    arrivals: tuple[int, ...]
    departures: tuple[int, ...]
    active: tuple[float, ...]
    window: float = 720.0


def generate(wanted: Statistics, seed: int) -> SessionTrace:
    """A trace with these statistics."""
    random = np.random.default_rng([seed, *wanted.name.encode()])
    lives = _lives(wanted, random)
    minds = _minds(lives, wanted.window, random)
    active = _choose(minds, wanted)
    sizes = 1e9 * random.lognormal(0.0, 0.5, len(lives))
    events = _events(minds, active)
    total = wanted.window * len(wanted.arrivals)
    name, arrivals, departures = wanted.name, wanted.arrivals, wanted.departures
    return SessionTrace(name, total, len(arrivals), events, sizes.tolist(), arrivals, departures, lives[:, 1].tolist())


def _lives(wanted: Statistics, random: np.random.Generator) -> NDArray[np.float64]:
    """(sessions, 2) when each arrives and departs; those that stay depart at the end."""
    happenings: list[tuple[float, bool]] = []
    alive = 0
    for number, (come, go) in enumerate(zip(wanted.arrivals, wanted.departures, strict=True)):
        # The sessions that are alive have to suffice for those that are active: else they arrive early.
        crowded = (alive + (come - go) / 2) < 1.15 * wanted.active[number]
        arrive = random.random(come) ** (3.0 if crowded else 1.0)
        leave = random.random(go) ** (0.5 if crowded else 1.0)
        start = number * wanted.window
        happenings += [(start + wanted.window * float(at), True) for at in arrive]
        happenings += [(start + wanted.window * float(at), False) for at in leave]
        alive += come - go
    lives: list[list[float]] = []
    weights: list[float] = []
    there: list[int] = []
    late = 0
    end = wanted.window * len(wanted.arrivals)
    for time, comes in sorted(happenings):
        if comes:
            there.append(len(lives))
            lives.append([time, end])
            weights.append(float(random.lognormal(0.0, STAYING)))
        late += not comes
        while late and there:  # A departure with nobody there waits for the next arrival.
            share = np.array([weights[each] for each in there])
            gone = there.pop(int(random.choice(len(there), p=share / share.sum())))
            lives[gone][1] = time
            late -= 1
    return np.array(lives)


@dataclasses.dataclass(frozen=True)
class _Minds:
    """Stretches of time for which users keep to one choice: arrays of equal length, by session and time."""

    session: NDArray[np.int_]
    start: NDArray[np.float64]
    end: NDArray[np.float64]
    draw: NDArray[np.float64]
    window: NDArray[np.int_]


def _minds(lives: NDArray[np.float64], window: float, random: np.random.Generator) -> _Minds:
    sessions, starts, ends, draws = [], [], [], []
    for session, (come, go) in enumerate(lives):
        time, first = float(come), True
        while time < go:
            until = min(float(go), time + float(random.exponential(window / MINDS)))
            draws.append(0.0 if first else float(random.random()))
            sessions.append(session)
            starts.append(time)
            ends.append(until)
            time, first = until, False
    begin = np.array(starts)
    return _Minds(np.array(sessions), begin, np.array(ends), np.array(draws), (begin // window).astype(int))


def _choose(minds: _Minds, wanted: Statistics) -> NDArray[np.bool_]:
    """Which stretches are active: in each window those under a share, found by bisection, that fits its average."""
    active = minds.draw <= 0.0
    for number, average in enumerate(wanted.active):
        a, b = number * wanted.window, (number + 1) * wanted.window
        held = np.clip(np.minimum(minds.end, b) - np.maximum(minds.start, a), 0.0, None)
        here = minds.window == number
        before = float(held[active & ~here].sum())
        low, high = 0.0, 1.0
        for _ in range(40):
            share = (low + high) / 2
            found = (before + float(held[here & (minds.draw <= share)].sum())) / wanted.window
            low, high = (share, high) if found < average else (low, share)
        active = np.where(here, minds.draw <= (low + high) / 2, active)
    return active


def _events(minds: _Minds, active: NDArray[np.bool_]) -> list[tuple[float, int, bool]]:
    """Stretches of one session that follow each other are one."""
    events: list[tuple[float, int, bool]] = []
    last, until = -1, 0.0
    for session, start, end in zip(
        minds.session[active].tolist(), minds.start[active].tolist(), minds.end[active].tolist(), strict=True
    ):
        if session == last and start == until:
            events[-1] = (end, session, False)
        else:
            events += [(start, session, True), (end, session, False)]
        last, until = session, end
    return sorted(events)


def of_counts(name: str, counts: Sequence[int], step: float, windows: int) -> SessionTrace:
    """A trace in which so many sessions are active in each step; the one that is active longest ceases first."""
    events: list[tuple[float, int, bool]] = []
    there: list[int] = []
    sessions = 0
    come, gone = [0] * windows, [0] * windows
    for at, count in enumerate(counts):
        number = at * windows // len(counts)
        while len(there) < count:
            events.append((at * step, sessions, True))
            there.append(sessions)
            sessions += 1
            come[number] += 1
        while len(there) > count:
            events.append((at * step, there.pop(0), False))
            gone[number] += 1
    return SessionTrace(name, len(counts) * step, windows, events, [1e9] * sessions, come, gone)


def burst(level: int, epochs: int = 40, epoch: float = 10.0) -> SessionTrace:
    """A segment of Table 5's family: 16 sessions are active, and 4 * level + 3 more arrive within three epochs."""
    arrivals = 4 * level + 3
    shares = (round(0.6 * arrivals), round(0.3 * arrivals))
    steps = (*shares, arrivals - sum(shares))
    counts = [16] * epochs
    for number, more in enumerate(steps):
        for at in range(epochs // 2 + number, epochs - epochs // 8):
            counts[at] += more
    return of_counts(f"level {level}", counts, epoch, 1)


TEN_AVERAGE = (32.00, 17.17, 7.67, 23.47, 51.23, 72.43, 12.43, 56.90, 22.30, 53.17)
TEN_MOST = (38, 18, 8, 28, 58, 77, 13, 68, 23, 73)
"""Table 7."""


def ten_windows(seed: int, step: float = 5.0, window: float = 120.0) -> SessionTrace:
    """The trace of Table 7: each window's average and most active sessions; a rise takes up to half a minute."""
    random = np.random.default_rng([seed, 10])
    steps = round(window / step)
    counts: list[int] = []
    for average, most in zip(TEN_AVERAGE, TEN_MOST, strict=True):
        counts += _window(counts[-1] if counts else 0, average, most, steps, random)
    return of_counts("ten windows", counts, step, 10)


def _window(before: int, average: float, most: int, steps: int, random: np.random.Generator) -> list[int]:
    """Up to six steps of rise, a level that makes the average right, and a peak of two steps somewhere in it."""
    total, rise = round(average * steps), 6 if before < average else 0
    while True:
        level = (total - 2 * most - rise * before / 2) / (steps - 2 - rise / 2)
        if level <= most or not rise:
            break
        rise -= 1
    found = [round(before + (level - before) * (n + 0.5) / rise) for n in range(rise)]
    at = int(random.integers(rise, steps - 2))
    found += [most if at <= n < at + 2 else int(level) for n in range(rise, steps)]
    plain = [n for n in range(rise, steps) if not at <= n < at + 2]
    for n in random.permutation(plain)[: max(0, total - sum(found))]:
        found[n] += found[n] < most
    return found
