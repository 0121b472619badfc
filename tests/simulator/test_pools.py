import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.executors.simulated import SimulatedMachine
from ctxflow.simulator import fluid_seconds, pools


def up(machine, time):
    return any(a <= time < b for a, b in machine.available(random.Random(0)))


def count(machines, time):
    return sum(up(machine, time) for machine in machines)


MACHINES = [SimulatedMachine(f"m{n}") for n in range(16)]


@given(st.lists(st.integers(0, 16), min_size=1, max_size=30))
def test_as_many_machines_are_there_as_the_steps_say(counts):
    machines = pools.with_counts(MACHINES, [(10.0 * n, each) for n, each in enumerate(counts)])
    assert [count(machines, 10.0 * n + 5) for n in range(len(counts))] == counts


def test_more_machines_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="17 machines"):
        pools.with_counts(MACHINES, [(0.0, 17)])


def test_a_spot_trace_becomes_steps(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"metadata": {"gap_seconds": 300}, "data": [4, 0, 3]}')
    machines = pools.with_counts(MACHINES, pools.spot_steps(path))
    assert [count(machines, time) for time in (0, 299, 300, 600, 899, 900)] == [4, 4, 0, 3, 3, 0]
    path.write_text("[]")
    with pytest.raises(ValueError, match="no spot trace"):
        pools.spot_steps(path)


def test_a_drain_takes_one_after_the_other():
    machines = pools.drained(MACHINES, 900.0, 60.0)
    assert [count(machines, time) for time in (0, 899, 900, 960, 900 + 15 * 60)] == [16, 16, 15, 14, 0]


def test_a_drained_machine_is_not_there_before_it_could_be():
    machine = dataclasses.replace(MACHINES[0], available=pools.intervals([(10.0, 20.0), (30.0, 50.0), (60.0, 70.0)]))
    (drained,) = pools.drained([machine], 40.0, 60.0)
    assert list(drained.available(random.Random(0))) == [(10.0, 20.0), (30.0, 40.0)]


def test_a_join_curve_is_followed_up_and_down():
    machines = pools.joining(MACHINES, [(0, 0), (100, 10), (200, 10), (300, 4)])
    assert [count(machines, time) for time in (0, 50.1, 150, 250.1, 1000)] == [0, 5, 10, 7, 4]


def test_evictions_have_the_given_rates_and_the_same_for_the_same_generator():
    available = pools.evicted(120.0, 30.0)

    def first(seed):
        periods = available(random.Random(seed))
        return [next(periods) for _ in range(2000)]

    assert first(1) == first(1) != first(2)
    lengths = [end - begin for begin, end in first(1)]
    assert sum(lengths) / 2000 == pytest.approx(120, rel=0.1)
    assert first(1)[-1][0] / 1999 == pytest.approx(150, rel=0.1)


def test_the_fluid_bound_counts_who_was_there():
    a, b = SimulatedMachine("a"), SimulatedMachine("b")
    seconds = {a: 1.0, b: 2.0}
    presence = [(0.0, a, 1), (10.0, b, 1), (20.0, a, -1)]
    # 10 items until 10 s, 15 until 20 s, then one every 2 s.
    assert fluid_seconds(presence, seconds.__getitem__, 25) == pytest.approx(20)
    assert fluid_seconds(presence, seconds.__getitem__, 10) == pytest.approx(10)
    assert fluid_seconds(presence, seconds.__getitem__, 30) == pytest.approx(30)
    assert fluid_seconds([*presence[:1], (5.0, a, -1)], seconds.__getitem__, 6) == math.inf
