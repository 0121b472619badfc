"""Programs on HiGHS: answers, prices, effort and starts."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.policies.agh.linear_programs import Effort, Program, Solver


def program(cost, matrix, limit, integral, upper=None):
    matrix = np.asarray(matrix, dtype=float)
    rows, columns = np.nonzero(matrix)
    size = matrix.shape[1]
    return Program(
        cost=np.asarray(cost, dtype=float), rows=rows, columns=columns, values=matrix[rows, columns],
        limit=np.asarray(limit, dtype=float), lower=np.zeros(size),
        upper=np.ones(size) if upper is None else np.asarray(upper, dtype=float), integral=np.asarray(integral),
    )  # fmt: skip


def knapsack(values, sizes, room):
    return program([-v for v in values], [sizes], [room], [True] * len(values))


@settings(max_examples=30, deadline=None)
@given(
    values=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    data=st.data(),
)
def test_a_knapsack_is_filled_best(values, data):
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=len(values), max_size=len(values)))
    room = data.draw(st.integers(0, 60))
    found = Solver(presolve=True).solve(knapsack(values, sizes, room))
    every = range(2 ** len(values))
    picks = [[n for n in range(len(values)) if each >> n & 1] for each in every]
    best = max(sum(values[n] for n in pick) for pick in picks if sum(sizes[n] for n in pick) <= room)
    assert found.closed and found.cost == pytest.approx(-best) and found.bound == pytest.approx(-best)


def test_duals_are_what_a_little_more_room_is_worth():
    linear = program([-3, -2], [[1, 1], [2, 1]], [1, 1.5], [False, False])
    found = Solver(presolve=False).solve(linear)
    for row in range(2):
        limit = linear.limit.copy()
        limit[row] += 0.01
        more = Solver(presolve=False).solve(dataclasses.replace(linear, limit=limit))
        assert more.cost - found.cost == pytest.approx(0.01 * found.duals[row])


def test_what_cannot_be_is_said_to_be_infeasible():
    found = Solver(presolve=True).solve(program([1], [[-1]], [-2], [True]))
    assert found.values is None and found.infeasible and not found.closed


def test_a_start_is_kept_where_nothing_better_is_found_in_no_time():
    random = np.random.default_rng(0)
    hard = knapsack(random.integers(1000, 2000, 60), random.integers(1000, 2000, 60), 30_000.0)
    start = np.zeros(60)
    start[:15] = 1.0
    found = Solver(presolve=True).solve(hard, Effort(seconds=1e-3, nodes=0), start)
    assert found.values is not None and found.cost <= hard.cost @ start + 1e-9


def test_a_start_that_is_none_does_no_harm_and_effort_in_nodes_repeats():
    small = knapsack([5, 4, 3], [3, 2, 2], 4)
    assert Solver(presolve=True).solve(small, start=np.ones(3)).cost == -7
    runs = [Solver(presolve=True).solve(small, Effort(nodes=3)).values.tolist() for _ in range(2)]
    assert runs[0] == runs[1]


def test_only_answers_under_a_cost_are_looked_for():
    found = Solver(presolve=True).solve(knapsack([5, 4, 3], [3, 2, 2], 4), Effort(under=-8))
    assert found.values is None or found.cost <= -7
    assert not found.closed or found.cost == -7


def test_nothing_is_printed(capfd):
    Solver(presolve=True).solve(knapsack([5, 4, 3], [3, 2, 2], 4))
    assert capfd.readouterr() == ("", "")
