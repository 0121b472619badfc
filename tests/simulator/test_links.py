import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator_data import Clock

from ctxflow.simulator.tree_staging import FairLink


def test_transfers_share_the_bandwidth_and_none_gets_more_than_its_own_end():
    clock, ends = Clock(), []
    link = FairLink(clock, bandwidth=100.0, per_transfer=60.0)
    for size in (60, 120):
        link.send(size, lambda size=size: ends.append((size, clock.now)))
    clock.run()
    # 50 each until 1.2 s; then 60 left of the second at its own 60.
    assert ends == [(60, pytest.approx(1.2)), (120, pytest.approx(2.2))]
    assert link.moved == pytest.approx(180)


def test_a_transfer_that_is_cancelled_leaves_its_share_to_the_others():
    clock, ends = Clock(), []
    link = FairLink(clock, bandwidth=10.0)
    first = link.send(100, lambda: ends.append("cancelled"))
    link.send(100, lambda: ends.append(clock.now))
    clock.run(until=10.0)
    link.cancel(first)
    link.cancel(first)
    clock.run()
    assert ends == [pytest.approx(15.0)]
    assert link.moved == pytest.approx(150)


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(1, 100)), min_size=1, max_size=20))
def test_every_byte_arrives_and_a_link_that_is_never_idle_takes_just_as_long_as_its_bytes(starts):
    clock, ends = Clock(), []
    link = FairLink(clock, bandwidth=1.0)
    for start, size in starts:
        clock.at(start, lambda size=size: link.send(size, lambda: ends.append(clock.now)))
    clock.run()
    assert len(ends) == len(starts)
    total = sum(size for _, size in starts)
    assert link.moved == pytest.approx(total)
    assert max(ends) <= max(start for start, _ in starts) + total + 1e-6
    assert max(ends) >= min(start for start, _ in starts) + total - 1e-6
