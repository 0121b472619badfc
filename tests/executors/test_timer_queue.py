"""The simulated engine's timers, beside a sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from ctxflow.executors.simulated.timer_queue import TimerQueue

TIMES = st.one_of(st.floats(0, 20), st.sampled_from([0.0, 0.25, 1e3, 1e300, float("inf")]))


@given(st.lists(st.tuples(st.booleans(), TIMES), max_size=60))
def test_timers_are_due_in_order_of_time_and_then_as_they_were_set(steps):
    timers, known = TimerQueue(), []
    for number, (sets, time) in enumerate(steps):
        if sets:
            timers.set(time, print, number)
            known.append((time, number))
            continue
        known.sort()
        taken = timers.due(time)
        expected = known.pop(0) if known and known[0][0] <= time else None
        assert (None if taken is None else (taken[0], *taken[3])) == expected
        assert bool(timers) == bool(known)
    timers.clear()
    assert not timers and timers.due(float("inf")) is None
