"""Sessions of unlike weight beside the exhaustive optimum: the longest chunk, the moves, and what memory allows."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.policies.turboserve.rebalancing import MoveCosts, PowerCurve, assign, rebalance
from ctxflow.policies.turboserve.session_weights import assign_by_weight, rebalance_by_weight
from ctxflow.policies.turboserve.weighed_fleet import SessionWeights

LINEAR = PowerCurve(0.1, 1.0)
TRIFLE = 1e-6


def chunk(there, gpu, curve, speeds, weights):
    return curve(sum(weights.load.get(each, 1.0) for each in there)) / speeds.get(gpu, 1.0) if there else 0.0


def longest(placed, curve, speeds, weights):
    return max(chunk(there, gpu, curve, speeds, weights) for gpu, there in placed.items())


def after(before, moves):
    found = {gpu: list(sessions) for gpu, sessions in before.items()}
    for move in moves:
        found[move.source].remove(move.session)
        found[move.target].append(move.session)
    return found


def memory(there, weights):
    return sum(weights.state_bytes.get(each, 0.0) for each in there)


def placements(sessions, before, capacity, weights):
    """All placements of the sessions, the others of `before` staying, that fit."""
    kept = {gpu: [each for each in there if each not in sessions] for gpu, there in before.items()}
    for places in itertools.product(before, repeat=len(sessions)):
        found = {gpu: list(there) for gpu, there in kept.items()}
        for session, gpu in zip(sessions, places, strict=True):
            found[gpu].append(session)
        fits = all(
            memory(there, weights) <= weights.room.get(gpu, math.inf) and len(there) <= capacity
            for gpu, there in found.items()
        )
        if fits:
            yield found


@st.composite
def fleets(draw, most=6):
    """A fleet with sessions of unlike load and state, GPUs of unlike speed and memory; what is there fits."""
    gpus = list(range(draw(st.integers(2, 4))))
    sessions = [f"s{n}" for n in range(draw(st.integers(1, most)))]
    load = {each: draw(st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 4.7])) for each in sessions}
    size = {each: draw(st.sampled_from([0, 1, 2, 5])) for each in sessions}
    speeds = {gpu: draw(st.sampled_from([1.0, 1.0, 2.0])) for gpu in gpus}
    before = {gpu: [] for gpu in gpus}
    for each in sessions:
        before[draw(st.sampled_from(gpus))].append(each)
    capacity = draw(st.integers(max(len(there) for there in before.values()), 6))
    room = {}
    if draw(st.booleans()):
        room = {gpu: sum(size[each] for each in there) + draw(st.integers(0, 6)) for gpu, there in before.items()}
    curve = draw(st.sampled_from([PowerCurve(0.0, 1.0), LINEAR, PowerCurve(0.2, 0.5, 1.4)]))
    return before, curve, capacity, speeds, SessionWeights(load, size, room)


@settings(max_examples=200, deadline=None)
@given(fleets())
def test_rebalancing_by_weight_is_the_exhaustive_optimum_with_the_fewest_moves(fleet):
    before, curve, capacity, speeds, weights = fleet
    home = {each: gpu for gpu, there in before.items() for each in there}
    moves = rebalance_by_weight(before, curve, capacity=capacity, speeds=speeds, weights=weights)
    found = after(before, moves)
    all_of_them = list(placements(list(home), before, capacity, weights))
    best = min(longest(each, curve, speeds, weights) for each in all_of_them)
    assert longest(found, curve, speeds, weights) <= best + TRIFLE
    assert all(memory(there, weights) <= weights.room.get(gpu, math.inf) for gpu, there in found.items())
    assert max(len(there) for there in found.values()) <= capacity
    fewest = min(
        sum(home[session] != gpu for gpu, there in each.items() for session in there)
        for each in all_of_them
        if longest(each, curve, speeds, weights) <= longest(found, curve, speeds, weights) + TRIFLE
    )
    assert len(moves) == len({move.session for move in moves}) == fewest


@settings(max_examples=200, deadline=None)
@given(fleets(), st.data())
def test_placing_by_weight_is_the_exhaustive_optimum_of_who_finds_room(fleet, data):
    before, curve, capacity, speeds, weights = fleet
    everybody = [each for there in before.values() for each in there]
    new = data.draw(st.lists(st.sampled_from(everybody), min_size=1, unique=True))
    residents = {gpu: [each for each in there if each not in new] for gpu, there in before.items()}
    found = assign_by_weight(new, residents, curve, capacity, speeds, weights)
    assert sorted([*found.placed, *found.waiting]) == sorted(new)
    made = {gpu: [*there, *(s for s, g in found.placed.items() if g == gpu)] for gpu, there in residents.items()}
    for gpu, there in made.items():
        assert memory(there, weights) <= weights.room.get(gpu, math.inf) and len(there) <= capacity
    best = min(
        longest(each, curve, speeds, weights) for each in placements(list(found.placed), made, capacity, weights)
    )
    assert longest(made, curve, speeds, weights) <= best + TRIFLE
    for waits in found.waiting:
        size = weights.state_bytes.get(waits, 0)
        rooms = {gpu: weights.room.get(gpu, math.inf) - memory(there, weights) for gpu, there in made.items()}
        assert all(len(made[gpu]) == capacity or (size and size > room) for gpu, room in rooms.items())


@settings(max_examples=100, deadline=None)
@given(fleets(), st.floats(0.5, 6.0))
def test_no_gpu_that_is_given_a_session_gets_longer_chunks_than_it_may(fleet, target):
    before, curve, capacity, speeds, weights = fleet
    new = [f"n{n}" for n in range(4)]
    limited = SessionWeights({**weights.load, "n0": 2.0, "n1": 0.7}, weights.state_bytes, weights.room, target)
    found = assign_by_weight(new, before, curve, capacity, speeds, limited)
    for gpu in set(found.placed.values()):
        there = [*before[gpu], *(each for each, place in found.placed.items() if place == gpu)]
        assert len(there) == 1 or chunk(there, gpu, curve, speeds, limited) <= target + TRIFLE
    if found.waiting:
        assert all(before[gpu] or gpu in found.placed.values() for gpu in before), "an empty GPU may be given anybody"


def test_an_empty_gpu_is_given_a_session_though_chunks_are_shorter_where_they_would_be_too_long():
    weights = SessionWeights({"new": 2.0, "s": 0.5}, longest=0.5)
    found = assign_by_weight(
        ["new"], {"fast": ["s"], "slow": []}, PowerCurve(0.0, 1.0), speeds={"fast": 2.0}, weights=weights
    )
    assert found.placed == {"new": "slow"}


@settings(max_examples=100, deadline=None)
@given(fleets(), st.sampled_from([0.1, 0.5, 2.0]), st.sets(st.integers(0, 5), max_size=3))
def test_what_moves_cost_bounds_what_is_lost_and_who_is_fixed_stays(fleet, weight, stay):
    before, curve, capacity, speeds, weights = fleet
    everybody = [each for there in before.values() for each in there]
    fixed = [each for n, each in enumerate(everybody) if n in stay]
    costs = MoveCosts({each: 0.1 * n for n, each in enumerate(everybody)}, weight)
    moves = rebalance_by_weight(before, curve, costs, capacity, speeds, fixed, weights)
    assert not {move.session for move in moves} & set(fixed)
    free = [each for each in everybody if each not in fixed]
    possible = placements(free, before, capacity, weights)
    best = min(longest(each, curve, speeds, weights) for each in possible)
    slack = weight * max((costs.seconds[each] for each in free), default=0.0)
    assert longest(after(before, moves), curve, speeds, weights) <= best + slack + TRIFLE


@settings(deadline=None)
@given(fleets(), st.sampled_from([1.0, 2.5]))
def test_sessions_of_the_same_weight_are_placed_as_those_that_weigh_alike(fleet, each):
    before, curve, capacity, speeds, _ = fleet
    weights = SessionWeights(
        {session: each for there in before.values() for session in there} | dict.fromkeys("xyz", each)
    )

    def counted(count):
        return curve(count * each)

    alike = rebalance(before, counted, capacity=capacity, speeds=speeds)
    assert rebalance_by_weight(before, curve, capacity=capacity, speeds=speeds, weights=weights) == alike
    placed = assign_by_weight("xyz", before, curve, capacity, speeds, weights)
    assert placed == assign("xyz", before, counted, capacity, speeds)


def draw_fleet(chance, gpus, sessions):
    before = {gpu: [] for gpu in range(gpus)}
    for n in range(sessions):
        before[chance.randrange(gpus)].append(n)
    return before, SessionWeights(
        {n: chance.choice([0.5, 1.0, 2.0, 4.0]) * chance.uniform(0.8, 1.25) for n in range(sessions)}
    )


def test_many_sessions_are_within_a_few_per_cent_of_what_nobody_can_beat():
    """The bound: all loads divided evenly, or the heaviest session alone."""
    ratios, counted = [], []
    for case in range(20):
        chance = random.Random(case)
        before, weights = draw_fleet(chance, 16, 96)
        bound = max(sum(weights.load.values()) / 16, *weights.load.values()) + 0.1
        by_weight = after(before, rebalance_by_weight(before, LINEAR, weights=weights))
        by_count = after(before, rebalance(before, LINEAR))
        ratios.append(longest(by_weight, LINEAR, {}, weights) / bound)
        counted.append(longest(by_count, LINEAR, {}, weights) / bound)
    assert max(ratios) < 1.03
    assert statistics.fmean(counted) > 1.3, "who counts all alike is far off"


def test_memory_that_is_exceeded_is_relieved_as_far_as_others_have_room():
    sizes = {"a": 4, "b": 3, "c": 2, "d": 1}
    weights = SessionWeights({}, sizes, {0: 5, 1: 5, 2: 5})
    moves = rebalance_by_weight({0: ["a", "b", "c", "d"], 1: [], 2: []}, LINEAR, weights=weights)
    found = after({0: ["a", "b", "c", "d"], 1: [], 2: []}, moves)
    assert all(memory(there, weights) <= 5 for there in found.values())
    full = SessionWeights({}, sizes, {0: 5, 1: 0, 2: 0})
    assert rebalance_by_weight({0: ["a", "b", "c", "d"], 1: [], 2: []}, LINEAR, weights=full) == []


@pytest.mark.parametrize("gpus", [0, 1])
def test_nobody_moves_where_there_is_nowhere_to_go(gpus):
    before = {gpu: ["a", "b"] for gpu in range(gpus)}
    weights = SessionWeights({"a": 2.0, "b": 1.0})
    assert rebalance_by_weight(before, LINEAR, weights=weights) == []
    found = assign_by_weight("c", before, LINEAR, weights=weights)
    assert (found.placed, found.waiting) == (({"c": 0}, ()) if gpus else ({}, ("c",)))
