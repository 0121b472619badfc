"""Rises of sessions that come faster than a worker boots: seen coming if they last, reserved for if they recur."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.policies.turboserve.autoscaling import Parameters, Turnover, constant
from ctxflow.policies.turboserve.rebalancing import PowerCurve
from ctxflow.policies.turboserve.rises import Rises
from ctxflow.simulator.session_serving import Cluster, SessionTrace, serve
from ctxflow_papers.turboserve import printed
from ctxflow_papers.turboserve.traces import generate
from suite.depth import for_release, some

BOOT = 30.0
CLUSTER = Cluster(48, 2, 12, PowerCurve(0.0, 0.1336), BOOT)
OURS = CLUSTER.closed_loop(constant(Parameters(0.8)))
UNRESERVED = {**OURS, "reserve": 0.0}


def trace(lives, seconds):
    """Sessions that are active once, from and until."""
    edges = [(begin, n, True) for n, (begin, _) in enumerate(lives)]
    edges += [(end, n, False) for n, (_, end) in enumerate(lives) if end < seconds]
    events = sorted(edges, key=lambda each: (each[0], each[2]))
    return SessionTrace("rises", seconds, 1, events, [1e9] * len(lives), [len(lives)], [0])


def steady(chance, seconds, mean=40, life=240.0):
    lives = [(0.0, chance.exponential(life)) for _ in range(mean)]
    begins = np.cumsum(chance.exponential(life / mean, int(2 * mean * seconds / life)))
    return lives + [(begin, begin + chance.exponential(life)) for begin in begins if begin < seconds]


def crowds(seed, starts, seconds=3600.0, size=40, width=10.0, life=180.0, mean=40):
    """Sessions that come and go at random, and crowds that come within some seconds."""
    chance = np.random.default_rng(seed)
    lives = steady(chance, seconds, mean)
    for start in starts:
        begins = start + width * chance.random(size)
        lives += [(begin, begin + chance.exponential(life)) for begin in begins]
    return trace(lives, seconds)


def over(scaling, given_trace):
    return serve(given_trace, CLUSTER, scaling, target=CLUSTER.curve(12))


def test_a_crowd_that_came_twice_finds_room_the_third_time():
    mean, first, gap = some((10, 200.0, 300.0), deeply=(40, 300.0, 600.0))
    starts, seconds = [first + gap * n for n in range(4)], 2 * first + 3 * gap
    whole = crowds(0, starts, seconds, mean=mean)
    reserved, without = over(OURS, whole), over(UNRESERVED, whole)
    twice = dataclasses.replace(crowds(0, starts[:2], seconds, mean=mean), seconds=starts[2])
    before = over(OURS, twice), over(UNRESERVED, twice)
    assert before[0].over <= 1.05 * before[1].over
    # What the third and the fourth cost, and what is there beside them, beyond the first two.
    late = reserved.over - before[0].over, without.over - before[1].over
    assert late[1] > 500 and late[0] < 0.35 * late[1]


@pytest.mark.parametrize("seed", range(6))
def test_a_rise_that_lasts_longer_than_a_boot_is_seen_coming(seed):
    """100 sessions in a minute and a half: half of what comes in a boot is expected before the first boot is over."""
    came = crowds(seed, [900.0], size=100, width=90.0, life=400.0)
    turnover, active, first = Turnover(0.0, reserve=0.0), 0, None
    for time, _, on in came.events:
        turnover.add(time, int(on), int(not on))
        active += 1 if on else -1
        expected = turnover.anticipated(time, active, BOOT).sessions
        if first is None and time > 900.0 and expected > active + 17:
            first = time
    assert first is not None and first < 900.0 + BOOT


@pytest.mark.parametrize("seed", [2001, *for_release(2002)])
def test_ordinary_traces_cost_what_they_did(seed):
    traced = printed.TRACES[0]
    traced = dataclasses.replace(traced, window=some(0.15, deeply=1.0) * traced.window)
    cluster, ordinary = Cluster(16, 2, 12, PowerCurve(0.0, 0.1336), BOOT), generate(traced, seed)
    reserved, without = serve(ordinary, cluster, OURS), serve(ordinary, cluster, UNRESERVED)
    assert reserved.gpu_seconds <= 1.003 * without.gpu_seconds
    assert reserved.worst <= without.worst


counts = st.lists(st.tuples(st.floats(0.5, 20), st.integers(0, 60)), min_size=1, max_size=80)


def rooms(steps, boots, deviation=1.0):
    """The room after each step, where what is there is expected to stay."""
    rises, now, found = Rises(boots), 0.0, []
    for wait, sessions in steps:
        now += wait
        found.append((now, sessions, rises.room(now, sessions, sessions, deviation, BOOT)))
    return found


@given(counts, st.sampled_from([0.0, 4.0, 20.0]))
def test_room_is_for_what_was_seen_and_no_more(steps, boots):
    found = rooms(steps, boots)
    for n, (now, _, room) in enumerate(found):
        span = [each for time, each, _ in found[: n + 1] if time > now - (boots + 2) * BOOT]
        assert room <= 2 * max(each for _, each, _ in found[: n + 1])
        if not boots or max(span) <= min(span) + 4:
            assert room == 0


@given(st.integers(5, 60), st.integers(0, 40), st.integers(1, 3))
def test_room_wants_two_rises_and_is_given_up_when_they_are_long_ago(size, base, often):
    once = [(5.0, base)] * 40 + [(5.0, base + size)] * 10 + [(5.0, base)] * 40
    found = rooms(once * often, boots=60.0)
    room = found[-1][2]
    if often == 1:
        assert room == 0
    else:
        assert base + size <= room <= base + 2 * size
    quiet = rooms(once * often + [(5.0, base)] * 400, boots=60.0)
    assert quiet[-1][2] == 0


def test_a_rise_that_falls_back_for_a_moment_is_one():
    steps = [(5.0, 10)] * 40 + [(5.0, 30), (5.0, 13), (5.0, 30), (5.0, 12), (5.0, 30)] + [(5.0, 10)] * 40
    assert rooms(steps, boots=60.0)[-1][2] == 0


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="give 0 or more"):
        Rises(-1.0)
