"""Rates and times left, from counts at moments."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.observe.progress import Rates


def paced(counts, rest, seconds=None, tokens=None):
    """The pace after the items counted at each second."""
    rates, total = Rates(), 0
    for second, count in enumerate(counts):
        total += count
        rates.note(float(second), total, tokens)
    return rates.pace(float(len(counts) - 1 if seconds is None else seconds), total, tokens, rest)


def test_a_change_of_speed_is_seen_at_once_and_not_overall():
    pace = paced([100] * 60 + [10] * 20, rest=1000)
    assert pace.rate == pytest.approx(10, rel=0.05)
    assert pace.rate_overall == pytest.approx(6200 / 79)


def test_the_load_of_a_context_does_not_count_for_the_time_left():
    pace = paced([0] * 60 + [20] * 30, rest=200)
    assert pace.left == pytest.approx(10)
    assert pace.rate_overall < 10


def test_large_batches_that_come_seldom_make_no_spikes():
    lumps = [640 if second % 40 == 0 else 0 for second in range(401)]
    for more in (0, 10, 39):
        pace = paced(lumps + [0] * more, rest=6400)
        assert 640 / 40 * 0.7 < pace.rate <= 640 / 40 * 1.3
        assert (pace.left_high or 1e9) >= 400 >= pace.left_low


def test_what_stopped_slows_down():
    counts = [50] * 30
    rates = [paced(counts, 100, seconds=29 + later).rate for later in (0, 20, 60, 600)]
    assert rates == sorted(rates, reverse=True) and rates[-1] < 1


def test_nothing_is_told_of_what_is_not_known():
    assert paced([0, 0, 0], rest=10).left is None
    pace = paced([5] * 20, rest=None)
    assert (pace.left, pace.left_low, pace.left_high, pace.tokens_per_s) == (None,) * 4
    few = paced([5] * 4, rest=100)
    assert few.left is not None and few.left_low is None
    assert paced([5] * 20, rest=0).left == 0


def test_tokens_go_their_own_way():
    rates = Rates()
    for second in range(1, 31):
        rates.note(second, 10 * second, 1000 * second)
    pace = rates.pace(30, 300, 30_000, 10)
    assert pace.tokens_per_s == pytest.approx(1000) and pace.tokens_per_s_overall == pytest.approx(1000)


def test_the_bounds_hold_what_came_in_most_runs():
    """Of jobs whose seconds differ at random, some nineteen in twenty end between the bounds."""
    chance, held = random.Random(5), 0
    for _ in range(200):
        speeds = [chance.choice((5, 10, 30)) for _ in range(400)]
        pace = paced(speeds[:120], rest=sum(speeds[120:320]))
        held += pace.left_low <= 200 <= pace.left_high
    assert 0.85 <= held / 200 <= 1.0


@given(st.lists(st.integers(0, 10_000), max_size=400), st.integers(0, 10**9), st.floats(0, 1e6))
def test_figures_are_never_absurd(counts, rest, later):
    pace = paced(counts or [0], rest, seconds=len(counts) + later)
    assert pace.rate >= 0 and pace.rate_overall >= 0
    if pace.left is not None:
        assert pace.left >= 0
        assert pace.left_low is None or 0 <= pace.left_low <= pace.left * (1 + 1e-9)
        assert pace.left_high is None or pace.left_high >= pace.left * (1 - 1e-9)
