"""Scores, matching, local search, Eq. 6 and the baselines: what they guarantee for any servers and tasks."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.policies.baselines import spread
from ctxflow.policies.torta.micro import (
    MISMATCH,
    NOWHERE,
    Weights,
    by_urgency,
    fit,
    hardware,
    improve,
    load,
    locality,
    match,
    objective,
)
from ctxflow.policies.torta.quantities import Recent, Servers, Tasks
from ctxflow.policies.torta.scaling import for_buffer, target

SETTINGS = settings(max_examples=60, deadline=None)


def made(seed, tasks, servers, odd=False):
    """A region and tasks for it; odd ones hold what no number is, or nothing."""
    chance = np.random.default_rng(seed)

    def some(count):
        values = chance.uniform(0, 50, count)
        if odd:
            values = np.where(chance.random(count) < 0.3, chance.choice([0.0, np.nan, np.inf, -1.0], count), values)
        return values

    region = Servers(
        some(servers),
        some(servers),
        some(servers) / 5,
        some(servers) / 20,
        chance.integers(0, 4, servers).astype(float),
        chance.integers(-1 if odd else 0, 5, servers),
        chance.random((servers, 3)) < 0.5,
    )
    asked = Tasks(
        some(tasks),
        some(tasks),
        chance.integers(0, 3, tasks),
        chance.integers(0, 4, tasks),
        some(tasks),
        chance.uniform(0, 2, tasks),
        chance.normal(size=(tasks, 4)),
    )
    ran = Recent(
        chance.integers(0, servers, 2 * servers),
        chance.integers(0, 4, 2 * servers),
        some(2 * servers),
        chance.normal(size=(2 * servers, 4)),
    )
    return region, asked, ran, chance.random((tasks, servers)) < 0.7


def valid(where, region, allowed):
    placed = where[where != NOWHERE]
    counts = np.bincount(placed, minlength=len(region.places))
    return bool(
        (counts <= np.maximum(region.places, 0)).all() and allowed[np.flatnonzero(where != NOWHERE), placed].all()
    )


sizes = (st.integers(0, 10_000), st.integers(0, 12), st.integers(1, 6), st.booleans())


@SETTINGS
@given(*sizes)
def test_a_matching_respects_places_and_leaves_nobody_out_needlessly(seed, tasks, servers, odd):
    region, asked, ran, allowed = made(seed, tasks, servers, odd)
    score = fit(asked, region, ran, 50.0, Weights(similar_input=0.5))
    assert score.shape == (tasks, servers)
    assert np.isfinite(score).all()
    where = match(score, asked, region, allowed=allowed)
    assert valid(where, region, allowed)
    left = np.maximum(region.places, 0) - np.bincount(where[where != NOWHERE], minlength=servers)
    assert not (allowed[where == NOWHERE] & (left > 0)).any()


@SETTINGS
@given(*sizes)
def test_local_search_never_makes_a_matching_worse(seed, tasks, servers, odd):
    region, asked, ran, allowed = made(seed, tasks, servers, odd)
    score = fit(asked, region, ran, 50.0)
    first = match(score, asked, region, allowed=allowed)
    kept = first.copy()
    better = improve(score, first, asked, region, allowed=allowed, rounds=20)
    assert np.array_equal(first, kept)
    assert valid(better, region, allowed)
    assert np.array_equal(better == NOWHERE, first == NOWHERE)
    assert objective(score, better, asked, region) >= objective(score, first, asked, region) - 1e-9
    assert np.array_equal(improve(score, first, asked, region, rounds=0), first)


def test_the_greedy_matching_is_algorithm_1_step_by_step():
    region, asked, ran, allowed = made(7, 40, 8)
    weights = Weights(hardware=0.7, load=1.3, locality=0.2)
    score = fit(asked, region, ran, 60.0, weights)
    used, queue, places = region.used.copy(), region.queue.copy(), region.places.copy()
    expected = np.full(40, NOWHERE)
    for task in sorted(range(40), key=lambda i: (asked.deadline[i], -asked.compute[i])):
        best, best_score = NOWHERE, -math.inf
        for server in range(8):
            if not allowed[task, server] or places[server] <= 0:
                continue
            value = score[task, server] + 1.3 * math.exp(-(used[server] + queue[server]) / region.capacity[server])
            if value > best_score:
                best, best_score = server, value
        expected[task] = best
        if best != NOWHERE:
            used[best] += asked.work[task]
            queue[best] += 1
            places[best] -= 1
    assert (expected == NOWHERE).any()
    assert (expected != NOWHERE).any()
    assert np.array_equal(match(score, asked, region, 1.3, allowed), expected)


def test_local_search_mends_what_greedy_got_wrong():
    improved = 0
    for seed in range(10):
        region, asked, ran, allowed = made(seed, 60, 20)
        score = fit(asked, region, ran, 50.0)
        first = match(score, asked, region, allowed=allowed)
        better = improve(score, first, asked, region, allowed=allowed, rounds=50)
        improved += objective(score, better, asked, region) > objective(score, first, asked, region) + 1e-6
    assert improved >= 8


def test_scores_are_equations_8_to_10_pair_by_pair():
    region, asked, ran, _ = made(3, 9, 5)
    chosen = Weights(same_model=0.8, similar_input=0.3, forgetting=0.02)
    found, places = hardware(asked, region), locality(asked, ran, 5, 60.0, chosen)
    for i in range(9):
        for s in range(5):
            match_of_types = 1.0 if region.suits[s, asked.kind[i]] else MISMATCH
            ratio = min(1, region.compute[s] / asked.compute[i]) * min(1, region.memory[s] / asked.memory[i])
            assert found[i, s] == pytest.approx(ratio * match_of_types)
            total = 0.0
            for j in np.flatnonzero(ran.server == s):
                one, other = asked.embedding[i], ran.embedding[j]
                cosine = one @ other / (np.linalg.norm(one) * np.linalg.norm(other))
                similarity = 0.8 * (asked.model[i] == ran.model[j]) + 0.3 * cosine
                total += similarity / math.exp(0.02 * (60.0 - ran.time[j]))
            assert places[i, s] == pytest.approx(total)
    assert load(np.array([3.0]), np.array([2.0]))[0] == pytest.approx(math.exp(-1.5))


def test_urgency_comes_before_size_and_no_deadline_comes_last():
    deadline, compute = np.array([np.nan, 5, 5, np.inf]), np.array([9.0, 1, 2, 10])
    four = np.zeros(4, dtype=int)
    assert by_urgency(Tasks(compute, compute, four, four, deadline, compute)).tolist() == [2, 1, 3, 0]


odd_amounts = st.lists(
    st.one_of(st.sampled_from([0.0, float("nan"), float("inf"), -2.0]), st.floats(0, 500)), min_size=4, max_size=4
)


@SETTINGS
@given(odd_amounts, odd_amounts, odd_amounts, st.lists(st.integers(0, 30), min_size=4, max_size=4))
def test_the_target_is_between_one_server_and_all(queue, predicted, capacity, servers):
    wanted = target(queue, predicted, capacity, servers)
    assert (wanted <= servers).all()
    assert (wanted >= np.minimum(servers, 1)).all()


def test_the_target_is_equation_6():
    assert target([10], [100], [7], [99], safety=2.0).tolist() == [math.ceil((10 + 100 + 2 * 10) / 7)]
    assert target([10], [100], [0], [99]).tolist() == [99]


def test_a_buffer_asks_for_servers_only_when_it_is_nearly_full():
    assert for_buffer(0, 0, 4.0) == 0
    assert [for_buffer(n, 20, 4.0) for n in (15, 16, 40)] == [0, 4, 10]
    assert for_buffer(16, 20, float("nan")) == 1


@SETTINGS
@given(*sizes)
def test_sdib_respects_places_too(seed, tasks, servers, odd):
    region, asked, _, allowed = made(seed, tasks, servers, odd)
    evened = spread(1 + asked.work, region.used, region.capacity, region.places, region.queue, allowed=allowed)
    assert valid(evened, region, allowed)


def test_sdib_fills_the_least_occupied_server_first():
    capacity = np.array([4.0, 8.0])
    where = spread(np.ones(6), np.zeros(2), capacity, np.array([9, 9]), np.zeros(2))
    assert np.bincount(where).tolist() == [2, 4]
