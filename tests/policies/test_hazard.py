"""How likely an eviction is at an age: constant where nothing speaks against it, falling where rates differ."""

import itertools
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ctxflow.policies.opportunistic import PRIOR_EVICTIONS, PRIOR_SECONDS, fit

SECONDS = st.lists(st.floats(0.0, 1e6), max_size=30)


@given(lifetimes=SECONDS, ages=SECONDS)
@example(lifetimes=[5e-324], ages=[])
def test_it_is_a_rate_that_never_rises_with_age(lifetimes, ages):
    found = fit(lifetimes, ages)
    rates = [found.at(age) for age in (0.0, 10.0, 1e3, 1e5)]
    assert all(0 < later <= sooner for sooner, later in itertools.pairwise(rates))
    total = PRIOR_SECONDS + sum(lifetimes) + sum(ages)
    assert found.rate == pytest.approx((PRIOR_EVICTIONS + len(lifetimes)) / total)


@pytest.mark.parametrize("seed", range(10))
def test_one_rate_for_all_is_found_to_be_one(seed):
    drawn = random.Random(seed)
    lifetimes = [drawn.expovariate(1 / 3600) for _ in range(200)]
    for age in (0.0, 3600.0):
        assert fit(lifetimes, []).at(age) == pytest.approx(1 / 3600, rel=0.5)


@pytest.mark.parametrize("seed", range(10))
def test_rates_that_differ_are_told_from_how_long_workers_live(seed):
    """Rates from a gamma distribution of shape 0.7 and scale 1/600: at an age of t they are 0.7 / (600 + t)."""
    drawn = random.Random(seed)
    lifetimes = [drawn.expovariate(drawn.gammavariate(0.7, 1 / 600)) for _ in range(500)]
    found = fit([t for t in lifetimes if t < 50_000], [50_000.0 for t in lifetimes if t >= 50_000])
    for age in (0.0, 600.0, 6000.0, 30_000.0):
        assert found.at(age) == pytest.approx(0.7 / (600 + age), rel=0.6)


def test_those_who_are_still_there_count():
    assert fit([100.0], [10_000.0] * 50).at(0.0) < fit([100.0], []).at(0.0)
