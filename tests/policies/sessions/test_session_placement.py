"""Which worker carries which session, on a live scheduler's view."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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


def test_least_loaded_has_nobody_wait_for_a_context_that_another_worker_has():
    pool = Pool("least-loaded", workers=1)
    pool.open(0, 1, 2)
    pool.go(2)
    pool.slow = {"new"}
    pool.join("new")
    pool.open(3)
    pool.go(3)
    assert pool.loading == {"new": "model"} and pool.sessions[3].chunks == 2, (
        "it makes chunks while the model is loaded"
    )
    pool.built("new")
    pool.go(4)
    assert [session.worker for session in pool.sessions.values()] == ["w0", "w0", "w0", "new"]
    pool.open(4, 5)
    pool.go(2)
    assert pool.counts() == [3, 3] and pool.carries == 1


@given(st.lists(st.sampled_from(["join", "open", "close", "built", "go", "lose"]), max_size=30), st.randoms())
@settings(max_examples=60)
def test_least_loaded_places_on_a_ready_worker_while_there_is_one(happenings, chance):
    pool = Pool("least-loaded", workers=1)
    workers, opened = pool.scheduler.state.workers, 0
    for number, happens in enumerate(happenings):
        if happens == "join":
            pool.slow.add(f"s{number}")
            pool.join(f"s{number}")
        elif happens == "open":
            ready = {name for name, worker in workers.items() if _ready(worker)}
            pool.open(opened)
            assert not ready or pool.sessions[opened].worker in ready
            opened += 1
        elif happens == "close" and pool.sessions:
            pool.tell(ev.SessionClosed, chance.choice(list(pool.sessions)))
        elif happens == "built" and pool.loading:
            pool.built(chance.choice(list(pool.loading)))
        elif happens == "lose" and len(workers) > 1:
            gone = chance.choice(list(workers))
            pool.loading.pop(gone, None)
            pool.steps = [step for step in pool.steps if step.worker != gone]
            pool.tell(ev.WorkerLost, gone, evicted=True)
        elif happens == "go":
            pool.go(1)
    for name in list(pool.loading):
        pool.built(name)
    before = {number: session.chunks for number, session in pool.sessions.items()}
    pool.go(6)
    assert all(session.chunks > before[number] for number, session in pool.sessions.items())
    assert all(session.target is None or session.target in pool.loading for session in pool.sessions.values())


def _ready(worker):
    held = worker.contexts.get("model")
    return held is not None and held.state == "ready"


def test_those_who_have_nothing_to_do_do_not_count():
    pool = Pool("least-loaded")
    pool.open(*range(4))
    pool.go(2)
    for session in range(4):
        pool.tell(ev.SessionSuspended, session)
    pool.go(2)
    pool.open(4, 5)
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


def test_each_worker_has_places_by_its_own_pace():
    pool = Pool("turboserve", chunk_target=0.65, models=("fast", "slow"))
    pool.paces = {"slow": 3.0}
    pool.open(*range(8))
    pool.go(12)
    there = {name: len(worker.sessions) for name, worker in pool.scheduler.state.workers.items()}
    assert there == {"w0": 6, "w1": 2}, "nobody waits, though the slow one has two places"
    pool.open(8)
    pool.go(4)
    assert [session.state for session in pool.sessions.values()].count("waiting") == 1, "there are eight places"


def test_turboserve_places_a_session_anew_that_was_idle_for_long():
    pool = Pool("turboserve")
    pool.open(*range(4))
    pool.go()
    quiet = [number for number, session in pool.sessions.items() if session.worker == "w0"]
    pool.silent = set(quiet)
    pool.go(10)
    assert {pool.sessions[number].worker for number in quiet} == {"w0"}, "it may have something to do at any moment"
    pool.go(40)
    assert {pool.sessions[number].state for number in quiet} == {"suspended"}
    pool.open(*range(4, 8))
    pool.go()
    assert pool.counts() == [3, 3]
    pool.silent = set()
    for number in quiet:
        pool.tell(ev.SessionPrompted, number)
    pool.go()
    assert pool.counts() == [4, 4] and all(pool.sessions[number].chunks > 6 for number in quiet)


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
