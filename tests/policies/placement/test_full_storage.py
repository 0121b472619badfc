"""Storage that does not hold everything: fillings are the best there are, packings keep the limit and never lose."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from ctxflow.policies.agh.draft import PAIRS, filled, packed

DOLLARS = st.floats(-5, 20)
GIGABYTES = st.integers(0, 10_000).map(lambda megabytes: megabytes / 1000)  # linprog takes 1e-9 for nothing.
ITEMS = st.lists(st.tuples(DOLLARS, GIGABYTES), min_size=1, max_size=6)


@given(items=ITEMS, room=GIGABYTES)
def test_no_filling_is_worth_more(items, room):
    value, size = np.array(items).T
    part = filled(value[None], size[None], np.array([room]))[0]
    assert ((part >= 0) & (part <= 1)).all() and part @ size <= room + 1e-9
    best = linprog(-value, A_ub=size[None], b_ub=[room], bounds=[(0, 1)] * len(items))
    assert part @ value == pytest.approx(-best.fun, abs=1e-6)


@st.composite
def storages(draw):
    """Types, ways, and a storage; way 0 serves nothing and needs nothing."""
    types, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    table = st.lists(st.floats(0, 1), min_size=types * width, max_size=types * width)
    most = np.array(draw(table)).reshape(types, width)
    saved = 20 * np.array(draw(table)).reshape(types, width)
    data, fixed, weights = (
        np.array(draw(st.lists(st.floats(0, most), min_size=n, max_size=n)))
        for n, most in ((types, 9), (width, 3), (width, 9))
    )
    most[:, 0] = saved[:, 0] = 0.0
    fixed[0] = weights[0] = 0.0
    return most, saved, data, fixed, weights, draw(st.floats(0, 20))


def worth(taken, shares, saved, fixed):
    return float(shares @ saved[np.arange(len(taken)), taken] - fixed[taken].sum())


@given(problem=storages())
def test_a_packing_keeps_the_limits_and_no_change_of_one_type_improves_it(problem):
    most, saved, data, fixed, weights, storage = problem
    taken, shares = packed(np.zeros(len(data), dtype=np.int64), most, saved, data, fixed, weights, storage)
    assert (shares <= most[np.arange(len(data)), taken] + 1e-12).all() and (shares >= 0).all()
    assert weights[taken].sum() + shares @ data <= storage + 1e-9
    found = worth(taken, shares, saved, fixed)
    assert found >= -1e-9
    for type_, way in itertools.product(range(len(data)), range(len(fixed))):
        other = taken.copy()
        other[type_] = way
        room = storage - weights[other].sum()
        if room < 0:
            continue
        every = np.arange(len(data))
        value, size = (most * saved)[every, other], (most * data[:, None])[every, other]
        part = filled(value[None], size[None], np.array([room]))[0]
        assert part @ value - fixed[other].sum() <= found + 1e-6


def test_two_types_change_places_where_neither_alone_would():
    # The first fills the storage; the second is worth more, and fits only once the first is out.
    most, data = np.array([[0, 1.0, 0.0], [0, 0.0, 1.0]]), np.array([1.0, 1.0])
    saved = np.array([[0, 5.0, 0.0], [0, 0.0, 9.0]])
    fixed, weights = np.zeros(3), np.array([0.0, 4.0, 4.0])
    assert PAIRS >= (2 * 3) ** 2
    taken, shares = packed(np.array([1, 0]), most, saved, data, fixed, weights, 5.0)
    assert (taken.tolist(), shares.tolist()) == ([0, 2], [0.0, 1.0])
