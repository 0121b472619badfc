"""Ranks and their intervals: order, ties, failures, and what must not matter."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.league.ranking import standings

SEEDS = range(8)


def drawn(means, spread, seed=0, seeds=SEEDS, workloads=("w1", "w2", "w3"), shared=0.0):
    """Ratios about a mean for each policy; `shared`: of what chance does, how much it does to all alike."""
    chance = random.Random(seed)
    games = [(workload, number) for workload in workloads for number in seeds]
    common = {game: chance.gauss(0, shared) for game in games}
    return {
        name: {game: mean * math.exp(common[game] + chance.gauss(0, spread)) for game in games}
        for name, mean in means.items()
    }


def test_the_least_ratio_is_first_and_what_is_clear_is_no_tie():
    found = standings(drawn({"b": 2.0, "a": 1.5, "c": 4.0}, 0.02), {})
    assert [(each.policy, each.rank, each.ranks) for each in found] == [
        ("a", 1, (1, 1)), ("b", 2, (2, 2)), ("c", 3, (3, 3)),
    ]  # fmt: skip
    assert found[0].ratio.value == pytest.approx(1.5, rel=0.02) and found[0].behind.value == 1.0
    assert found[2].behind.low < 4.0 / 1.5 < found[2].behind.high


def test_what_chance_does_to_all_alike_does_not_hide_a_difference():
    """Intervals of the ratios overlap by far, those of the paired difference do not reach 1."""
    first, second = standings(drawn({"a": 2.0, "b": 2.1}, 0.005, shared=1.0), {})
    assert first.ratio.high > second.ratio.value and second.behind.low > 1.03
    assert (first.rank, second.rank) == (1, 2)


def test_who_cannot_be_told_apart_is_tied():
    ratios = drawn({"a": 2.0, "b": 2.02, "c": 5.0}, 0.5)
    first, second, third = standings(ratios, {})
    assert (first.rank, second.rank, third.rank) == (1, 1, 3)
    same = {"a": ratios["a"], "twin": ratios["a"]}
    assert [each.rank for each in standings(same, {})] == [1, 1]
    assert standings(same, {})[1].behind.high == 1.0


def test_who_failed_is_last_with_the_reason_and_counts_in_no_comparison():
    ratios = drawn({"a": 1.5, "b": 3.0}, 0.02)
    found = standings({**ratios, "best": {("w1", 0): 1.0}}, {"best": "it raised ValueError", "other": "it died"})
    assert [(each.policy, each.rank) for each in found] == [("a", 1), ("b", 2), ("best", 3), ("other", 3)]
    assert found[2].failure == "it raised ValueError" and found[2].ratio is None
    assert found[:2] == standings(ratios, {})
    assert [each.rank for each in standings({}, {"a": "it died", "b": "it died"})] == [1, 1]


def test_only_games_that_all_have_played_count():
    ratios = drawn({"a": 1.5, "b": 3.0}, 0.02)
    more = {**ratios, "a": {**ratios["a"], ("w9", 0): 1000.0}}
    assert standings(more, {}) == standings(ratios, {})
    with pytest.raises(ValueError, match="no game"):
        standings({"a": {("w1", 0): 1.0}, "b": {("w1", 1): 1.0}}, {})


def test_each_workload_counts_alike_however_many_seeds_it_has():
    few = {("w1", 0): 4.0, ("w1", 1): 4.0, **{("w2", n): 1.0 for n in range(20)}}
    (found,) = standings({"a": few}, {})
    assert found.ratio.value == pytest.approx(2.0) and found.workloads == pytest.approx({"w1": 4.0, "w2": 1.0})


def test_one_seed_is_not_taken_for_certainty():
    """The workloads disagree, and nothing else is known."""
    a = {(f"w{n}", 0): 1.0 for n in range(5)}
    b = {(f"w{n}", 0): (0.8, 1.3, 0.9, 1.2, 1.1)[n] for n in range(5)}
    assert [each.rank for each in standings({"a": a, "b": b}, {})] == [1, 1]


def test_an_interval_has_what_it_says_in_about_as_many_of_a_hundred_draws():
    held = 0
    for seed in range(200):
        low = standings(drawn({"a": 1.0, "b": 1.2}, 0.1, seed, range(6), ("w1", "w2")), {})[-1]
        held += low.policy == "b" and low.behind.low <= 1.2 <= low.behind.high
    assert 172 <= held <= 198  # 190, but for the few games that there are.


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.1, 10.0), st.permutations(["a", "b", "c", "d"]))
def test_neither_the_unit_nor_the_order_matters(seed, unit, order):
    means = dict(zip("abcd", (1.0, 1.1, 1.2, 2.0), strict=True))
    ratios = drawn(means, 0.2, seed)
    found = standings(ratios, {})
    scaled = {name: {game: unit * ratio for game, ratio in ratios[name].items()} for name in order}
    again = standings(scaled, {})
    assert [(each.policy, each.rank) for each in again] == [(each.policy, each.rank) for each in found]
    for each, other in zip(found, again, strict=True):
        assert each.ratio.low <= each.ratio.value <= each.ratio.high
        assert each.ranks[0] <= each.ranks[1]
        assert other.ratio.value == pytest.approx(unit * each.ratio.value)
        assert other.behind.value == pytest.approx(each.behind.value)
    values = [each.ratio.value for each in found]
    assert values == sorted(values)
