"""What makes no sense as sessions or capacity is told in a sentence."""

import math

import pytest

from ctxflow.policies.turboserve.autoscaling import target_gpus


@pytest.mark.parametrize(("sessions", "capacity", "utilization"), [(3, 0, 0.8), (3, 5, 0.0), (math.nan, 5, 0.8)])
def test_a_target_without_a_capacity_is_refused(sessions, capacity, utilization):
    with pytest.raises(ValueError, match="a GPU carries some sessions"):
        target_gpus(sessions, capacity, utilization, most=16)


def test_more_sessions_than_can_be_are_all_gpus():
    assert target_gpus(math.inf, 5, 0.8, most=16) == 16
