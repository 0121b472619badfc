"""Measures in fixed memory, against the same measured in full."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.observe.measures import Histogram, SeenItems, Timeline

durations = st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=200)


@given(durations, st.sampled_from([0, 1, 50, 90, 99, 100]))
def test_percentiles_are_near_the_true_ones(values, percent):
    times = Histogram()
    for value in values:
        times.add(value)
    true = float(np.percentile(values, percent, method="inverted_cdf"))
    assert times.percentile(percent) == pytest.approx(true, rel=0.006)
    assert (times.least, times.most, times.count) == (min(values), max(values), len(values))
    assert times.mean == pytest.approx(np.mean(values))


@given(durations, st.integers(1, 50))
def test_rebinning_loses_none(values, bins):
    times = Histogram()
    for value in values:
        times.add(value)
    counts = times.rebinned(np.geomspace(1e-6, 1e6, bins + 1))
    assert sum(counts) == pytest.approx(len(values))
    assert min(counts) >= 0


def test_nothing_was_measured():
    assert Histogram().summary() == dict.fromkeys(
        ("count", "mean", "deviation", "least", "p50", "p90", "p95", "p99", "most"), 0.0
    )


def test_durations_beyond_the_bins_are_counted():
    times = Histogram()
    for value in (0.0, 1e-9, 1e12):
        times.add(value)
    assert times.count == 3
    assert times.percentile(100) == pytest.approx(1e12) or times.percentile(100) <= 1e12


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 10)), max_size=100))
def test_a_timeline_counts_what_was_until_each_bin(additions):
    timeline = Timeline(bins=16, width=0.5)
    for time, count in additions:
        timeline.add(time, count)
    points = timeline.cumulated()
    assert len(points) <= 17
    for end, total in points:
        assert total == sum(count for time, count in additions if int(time / timeline.width) * timeline.width < end)
    assert points[-1][1] == sum(count for _, count in additions)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 50))))
def test_what_was_seen_is_known(ranges):
    seen, true = SeenItems(), set()
    for first, length in ranges:
        items = set(range(first, first + length))
        assert seen.add(first, first + length) == len(items - true)
        true |= items
