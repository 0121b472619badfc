"""TurboServe's placement by what sessions were measured to weigh, on a live scheduler."""

import random
import statistics
import types

import pytest
from session_pool import BUILT, Pool

from ctxflow.policies.turboserve.rebalancing import FREE, PowerCurve
from ctxflow.policies.turboserve.session_placement import _Measured, _measured
from ctxflow.policies.turboserve.weighed_fleet import SessionWeights
from ctxflow.scheduler import events as ev


def longest(pool):
    """The longest step that all sessions of a worker would take now."""
    workers = pool.scheduler.state.workers
    paces = {name: pool.paces.get(pool.models.get(name), 1.0) for name in workers}
    return max(paces[name] * sum(pool.own.get(n, 0.1) for n in worker.sessions) for name, worker in workers.items())


def test_what_a_session_adds_to_a_step_is_learnt_from_steps_with_it_and_without_it():
    pool = Pool("turboserve")
    pool.own = dict.fromkeys(range(8), 0.1) | {0: 0.5, 1: 0.5}
    for number in range(8):  # Who comes to others of which more is known is what makes the step longer.
        pool.open(number)
        pool.go(2)
    own = [session.own_seconds for session in pool.scheduler.view.sessions.values()]
    assert min(own[:2]) > 1.7 * max(own[2:]) and max(own[2:]) < 0.14


def test_heavy_sessions_are_not_left_together():
    """By number 3 and 3 is even; the heavy ones of 0.5 s are opened so that they come together."""
    pool = Pool("turboserve")
    pool.own = dict.fromkeys(range(6), 0.1) | {0: 0.5, 2: 0.5}
    pool.open(*range(6))
    pool.go(2)
    assert longest(pool) >= 1.1
    pool.go(30)
    assert longest(pool) <= 0.75, "one heavy session and two light ones is the best: 0.7"


def division(seed, placement):
    """Sessions of random weight that come one by one: the longest step over the best, moves till then and later."""
    chance = random.Random(seed)
    workers, sessions = chance.randint(2, 4), chance.randint(4, 9)
    pool = Pool(placement, workers=workers)
    pool.own = {number: chance.choice([0.05, 0.1, 0.3, 0.6]) for number in range(sessions)}
    for number in range(sessions):
        pool.open(number)
        pool.go(chance.randrange(2))
    pool.go(30)
    moves, ratio = pool.carries, longest(pool) / min(_loads(sorted(pool.own.values(), reverse=True), [0.0] * workers))
    pool.go(20)
    return ratio, moves, pool.carries - moves


def test_the_longest_step_comes_close_to_the_best_and_sessions_settle():
    by_weight = [division(seed, "turboserve") for seed in range(12)]
    by_number = [division(seed, "least-loaded") for seed in range(12)]
    assert statistics.fmean(ratio for ratio, _, _ in by_number) > 1.15, "by number it is a fifth off"
    assert statistics.fmean(ratio for ratio, _, _ in by_weight) < 1.06
    assert max(ratio for ratio, _, _ in by_weight) < 1.3
    assert statistics.fmean(moves for _, moves, _ in by_weight) < 8
    assert max(later for _, _, later in by_weight) <= 3


def _loads(own, loads):
    """The longest load of each way to divide these."""
    if not own:
        yield max(loads)
        return
    for n in range(len(loads)):
        if loads[n] not in loads[:n]:
            yield from _loads(own[1:], [*loads[:n], loads[n] + own[0], *loads[n + 1 :]])


def test_sessions_that_weigh_alike_stay_where_they_are():
    pool = Pool("turboserve", workers=3)
    pool.open(*range(9))
    pool.go(20)
    assert (pool.counts(), pool.carries) == ([3, 3, 3], 0)


@pytest.mark.parametrize(("there", "fewer", "sure"), [((6, 2), 4, True), ((4, 4), 4, False)])
def test_moves_that_pay_by_number_need_not_be_sure_of_the_weights(there, fewer, sure):
    residents = {gpu: [f"{gpu}{n}" for n in range(count)] for gpu, count in zip("xy", there, strict=True)}
    weights = SessionWeights(dict.fromkeys(residents["x"][:2], 2.0))
    known = _Measured(PowerCurve(0.0, 0.1), None, {}, weights)
    moves, estimated = known.moves(residents, FREE, (), gain=0.9)
    assert (bool(moves), estimated) == (sure, False)
    assert len(residents["x"]) - len([move for move in moves if move.source == "x"]) <= fewer
    moves, estimated = known.moves(residents, FREE, (), gain=0.05)
    assert moves and estimated is not sure


def test_slow_gpus_carry_fewer():
    pool = Pool("turboserve", workers=2, models=("fast", "slow"))
    pool.paces = {"slow": 3.0}
    pool.open(*range(8))
    pool.go(20)
    there = {name: len(worker.sessions) for name, worker in pool.scheduler.state.workers.items()}
    assert there == {"w0": 6, "w1": 2}


def test_a_new_worker_carries_at_once_what_steps_of_others_promise():
    pool = Pool("turboserve", workers=1, chunk_target=0.45)
    pool.open(*range(4))
    pool.go(12)
    pool.join("new")
    pool.open(*range(4, 8))
    assert pool.counts() == [4, 4], "K of the new one is 4, too, though it made no step"


@pytest.mark.parametrize("heavy", [1, 3])
def test_no_worker_carries_more_states_than_it_has_memory_for(heavy):
    room = 30
    pool = Pool("turboserve", workers=3, memory=BUILT + room)
    pool.sizes = dict.fromkeys(range(9), 5) | dict.fromkeys(range(heavy), 20)
    pool.open(*range(6))
    pool.go(20)
    assert max(pool.bytes_on(worker) for worker in pool.scheduler.state.workers) <= room
    pool.open(*range(6, 9))
    for _ in range(10):
        pool.go(1)
        assert max(pool.bytes_on(worker) for worker in pool.scheduler.state.workers) <= room


def test_a_state_that_waits_leaves_its_worker_the_rest_of_the_room():
    pool = Pool("turboserve", memory=BUILT + 30)
    pool.silent = {0}
    for number in range(7):
        pool.open(number)
        pool.go(3)
    sessions = pool.scheduler.view.sessions.values()
    assert [session.id for session in sessions if session.idle] == [0]
    active = [session.worker for session in sessions if not session.idle]
    assert (active.count("w0"), active.count("w1")) == (3, 3), "w0 has room beside what waits there"


def test_a_session_that_is_too_heavy_for_the_target_is_carried_alone():
    pool = Pool("turboserve", workers=1, chunk_target=0.4)
    pool.own = {0: 0.1, 1: 0.1, 2: 0.9}
    pool.open(0, 1)
    pool.go(4)
    pool.join("new")
    pool.open(2)
    pool.go(6)
    assert {session.state for session in pool.sessions.values()} == {"placed"}
    pool.tell(ev.WorkerLost, pool.sessions[2].worker)
    pool.go(4)
    pool.join("another")
    pool.go(6)
    assert {session.state for session in pool.sessions.values()} == {"placed"}


def test_a_state_that_fits_nowhere_has_a_worker_to_itself():
    pool = Pool("turboserve", workers=2, memory=BUILT + 10)
    pool.sizes = {0: 50}
    pool.open(0, 1)
    pool.go(20)
    assert {session.state for session in pool.sessions.values()} == {"placed"}
    assert pool.counts() == [1, 1]


def test_estimates_that_are_a_step_off_do_not_make_sessions_unlike():
    def known(*seconds):
        sessions = {n: types.SimpleNamespace(id=n, app="a", own_seconds=each) for n, each in enumerate(seconds)}
        app = types.SimpleNamespace(id="a", shared_seconds=0.0, chunk_target=None, step_pace=lambda model: 1.0)
        view = types.SimpleNamespace(sessions=sessions, apps={"a": app})
        return _measured(view, "a", []).weights.common(list(sessions))

    assert known(0.1, 0.1, 0.1, 0.1, 0.078, 0.122) == 1.0
    assert known(0.1, 0.1, 0.1, 0.1, 0.1, 0.2) is None
