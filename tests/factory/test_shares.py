"""Shares: nobody starves, nothing is wasted, and the maximum holds whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.factory.sharing import grants, shares, to_give

RUNS = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 30))
MAXIMUM = st.integers(0, 60)


@given(RUNS, MAXIMUM)
def test_shares_are_fair(wants, maximum):
    got = shares(wants, maximum)
    assert got.keys() == wants.keys()
    assert all(0 <= got[run] <= wants[run] for run in wants)
    assert sum(got.values()) == min(maximum, sum(wants.values()))  # Never above; leftovers are given out.
    for run, want in wants.items():
        if got[run] < want:  # It lacks some: nobody has more than it, but for one that cannot be halved.
            assert max(got.values()) <= got[run] + 1


@given(RUNS, RUNS, MAXIMUM)
def test_what_is_granted_never_adds_up_to_more_than_the_maximum(wants, held, maximum):
    allowed = grants(wants, held, maximum)
    most = sum(max(held.get(run, 0), allowed.get(run, 0)) for run in {*held, *wants})
    assert most <= max(maximum, sum(held.values()))
    share = shares(wants, maximum)
    assert all(allowed[run] <= share[run] for run in wants)


@given(RUNS, RUNS, MAXIMUM, st.data())
def test_shares_are_reached_step_by_step(wants, held, maximum, data):
    """Jobs that wait are taken back, those that run given up where `to_give` says so: in the end each has its share."""
    held = {run: held.get(run, 0) for run in wants}
    running = {run: data.draw(st.integers(0, count)) for run, count in held.items()}
    for run, want in wants.items():  # What a run does not want, it releases by itself.
        running[run] = min(running[run], want)
        held[run] = min(held[run], want)
    share = shares(wants, maximum)
    for _ in range(20):
        allowed = grants(wants, held, maximum)
        give = to_give(wants, held, running, maximum)
        for run in wants:
            assert 0 <= give[run] <= running[run]
            assert running[run] - give[run] >= min(running[run], share[run])  # Nobody falls below its share.
            running[run] -= give[run]
            held[run] = max(running[run], min(held[run] - give[run], allowed[run]))  # Those that wait go.
        total = sum(held.values())
        for run, count in allowed.items():
            more = max(0, min(count - held[run], maximum - total))
            held[run], running[run], total = held[run] + more, running[run] + more, total + more
    assert all(held[run] >= share[run] for run in wants)


@pytest.mark.parametrize("maximum", [0, 3, 8])
def test_a_lowered_maximum_costs_no_worker(maximum):
    assert to_give({"a": 8}, {"a": 8}, {"a": 8}, maximum) == {"a": 0}
