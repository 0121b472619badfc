"""What sessions add to steps, learnt from steps of changing company."""

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.scheduler.step_shares import StepShares


def company(seed, own, shared, noise=0.05, steps=600, paces=(1.0,)):
    """Learn from steps of random sessions on random GPU models; return what is known."""
    chance, shares, known = random.Random(seed), StepShares(), {}
    for _ in range(steps):
        there = [n for n in range(len(own)) if chance.random() < 0.4] or [0]
        pace = chance.choice(paces)
        seconds = pace * (shared + sum(own[n] for n in there)) * math.exp(chance.gauss(0.0, noise))
        for n in there:
            if n not in known:
                known[n] = shares.newcomer(seconds, len(there))
        shares.learn([known[n] for n in there], seconds, str(pace))
    return shares, [known[n].mean for n in range(len(own))]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([0.02, 0.04, 0.1]), min_size=4, max_size=10), st.floats(0.0, 0.2), st.integers(0, 99))
def test_each_session_s_own_is_learnt(own, shared, seed):
    shares, found = company(seed, own, shared)
    off = 0.3 * statistics.fmean([shared, *own]) + 0.3 * statistics.fmean(own)
    assert all(abs(a - b) < off for a, b in zip(found, own, strict=True))
    assert abs(shares.shared.mean - shared) < 2 * off


def test_a_gpu_model_s_pace_is_learnt_and_not_put_down_to_sessions():
    shares, found = company(3, [0.05] * 8, 0.05, paces=(1.0, 2.5))
    ratio = shares.pace("2.5") / shares.pace("1.0")
    assert ratio == pytest.approx(2.5, rel=0.1)
    assert max(found) < 1.4 * min(found)
    assert shares.pace("unheard of") == 1.0


def test_one_step_that_takes_very_long_changes_little():
    shares, found = company(1, [0.05] * 6, 0.02)
    sessions = [shares.newcomer(0.3, 6) for _ in range(6)]
    for each, mean in zip(sessions, found, strict=True):
        each.mean, each.variance = mean, (0.1 * shares.average) ** 2
    shares.learn(sessions, 60.0, "1.0")
    assert max(each.mean for each in sessions) < 60.0 / 6 / 2
    before = [each.mean for each in sessions]
    shares.learn(sessions, 0.0, "1.0")
    assert [each.mean for each in sessions] == before, "a step without a time tells nothing"
