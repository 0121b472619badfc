"""Which worker carries which session, on a live scheduler's view."""

import pytest
from session_pool import Pool

from ctxflow.policies.registry import make
from ctxflow.policies.simple import measured
from ctxflow.scheduler import events as ev


@pytest.mark.parametrize("placement", ["least-loaded", "turboserve"])
def test_sessions_are_shared_out(placement):
    pool = Pool(placement, workers=3)
    pool.open(*range(9))
    pool.go()
    assert pool.counts() == [3, 3, 3]
    assert pool.carries == 0


def test_least_loaded_moves_nobody_to_a_new_worker_and_turboserve_does():
    for placement, counts in (("least-loaded", [0, 3, 3]), ("turboserve", [2, 2, 2])):
        pool = Pool(placement)
        pool.open(*range(6))
        pool.go()
        pool.join("new")
        pool.go()
        assert pool.counts() == counts


def test_those_who_have_nothing_to_do_do_not_count():
    pool = Pool("least-loaded")
    pool.open(0, 1)
    for session in (0, 1):
        pool.tell(ev.SessionSuspended, session)
    pool.go(2)
    pool.open(2, 3)
    assert pool.counts() == [1, 1]


@pytest.mark.parametrize("placement", ["least-loaded", "turboserve"])
def test_sessions_leave_a_worker_that_is_about_to_go(placement):
    pool = Pool(placement)
    pool.open(*range(4))
    pool.go(3)
    pool.tell(ev.EvictionNotice, "w0")
    pool.go(3)
    assert {session.worker for session in pool.sessions.values()} == {"w1"}


def test_turboserve_keeps_no_more_than_k_on_a_worker():
    pool = Pool("turboserve", chunk_target=0.35)  # Three sessions.
    pool.open(*range(10))
    pool.go(12)
    assert pool.counts() == [3, 3]
    assert [session.state for session in pool.sessions.values()].count("waiting") == 4
    pool.join("new")
    pool.go(4)
    assert pool.counts()[0] > 0


def test_a_dear_migration_is_not_worth_it():
    pool = Pool({"policy": "turboserve", "weight": 1e9})
    pool.open(*range(4))
    pool.go()
    pool.join("new")
    pool.go()
    assert pool.carries == 0 and pool.counts() == [0, 2, 2]


def test_a_step_that_missed_the_target_is_not_made_larger():
    assert measured({4: 0.1, 8: 0.3}, 0.2) == 7  # Its time promises 8.
    assert measured({7: 0.19, 8: 0.3}, 0.2) == 7
    assert measured({1: 0.01, 64: 0.02}, 0.2) == 128


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="there is no rule 'best'"):
        make("sessions", {"policy": "turboserve", "rule": "best"})
    with pytest.raises(ValueError, match="weight, alpha and every are numbers of 0 or more"):
        make("sessions", {"policy": "turboserve", "every": -1.0})
    with pytest.raises(ValueError, match="most is the number of sessions"):
        make("batching", {"policy": "coalescing", "most": 0})
