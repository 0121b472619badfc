"""One library process as its host sees it: when to look at it, whether it moves, how much of its output is kept."""

import pickle
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from ctxflow.host import library_process
from ctxflow.host.library_process import HostPatience, LibraryProcess, Standstill
from waiting import eventually


def a_process(calls, items):
    process = LibraryProcess.__new__(LibraryProcess)  # None is spawned.
    process.load_deadline, process.look_at, process.remind_at, process.standstill_at = inf, 50.0, inf, inf
    process.interrupted = {9: 40.0}
    process.calls, process.items = calls, items
    return process


class Unread(dict):
    def values(self):
        raise AssertionError("each call in flight is looked at")


def test_calls_in_flight_are_not_looked_at_one_by_one():
    assert a_process(Unread({1: inf, 2: inf}), {1: 20.0, 2: 30.0}).deadline == 40.0


def test_a_call_beside_them_has_its_own():
    assert a_process({1: inf, 2: inf, 3: 10.0}, {1: 20.0, 2: 30.0}).deadline == 10.0


def test_it_is_looked_at_sooner_while_an_interrupted_call_goes_on():
    process = a_process({1: inf}, {})
    process.remind_at = 39.1
    assert process.deadline == 39.1


def test_however_much_it_and_what_it_starts_print_the_log_ends_at_its_limit(driven, tmp_path, monkeypatch):
    monkeypatch.setattr(library_process, "_LOG_BYTES", 100_000)
    driven.load(lambda: 10)
    driven.next("ready")

    def loud(ten, items):
        import subprocess
        import sys

        words = [sys.executable, "-c", "print('x' * 150_000)"]
        children = [subprocess.Popen(words) for _ in range(3)]
        print("y" * 150_000)
        return [[child.wait() for child in children]]

    driven.call(loud, [1])
    assert pickle.loads(driven.next("finished")[1]) == [[0, 0, 0]]
    [log] = (tmp_path / "logs").iterdir()

    def whole():
        driven.step(0.01)
        return b"is not kept" in log.read_bytes()

    eventually(whole)
    driven.call(lambda ten, items: print("z" * 150_000) or [1], [1])
    driven.next("finished")
    note = b"\n[ctxflow: what was printed after the first 10 MB is not kept]\n"
    assert log.read_bytes()[100_000:] == note


PATIENCE = HostPatience(stopped=8.0, waiting=40.0, loop=20.0)
WAYS = {"stopped": "SIGSTOP", "waiting": "in the kernel", "loop": "event loop"}


@given(
    way=st.sampled_from(sorted(WAYS)),
    gaps=st.lists(st.floats(0.0, 1e5), max_size=60),
    signs=st.lists(st.integers(0, 1), min_size=60, max_size=60),
)
def test_only_time_counts_in_which_somebody_looked_and_nothing_moved(way, gaps, signs):
    still, limit = Standstill(PATIENCE), getattr(PATIENCE, way)
    now = counted = 0.0
    before = None
    for gap, sign in zip(gaps, signs, strict=False):
        now += gap
        counted = counted + min(gap, 2 * still.every) if sign == before else 0.0
        before = sign
        assert bool(still.look(now, {way: sign})) == (counted >= limit)


@given(way=st.sampled_from(sorted(WAYS)), late=st.floats(0.0, 1.0))
def test_what_stands_still_is_told_by_whoever_looks_when_it_is_time_to(way, late):
    still, now, limit = Standstill(PATIENCE), 0.0, getattr(PATIENCE, way)
    assert not still.look(now, {})
    while not (found := still.look(now, {way: 7})):
        now += still.every + late
        assert now <= limit + 2 * still.every + 2 * late, "a late look costs no more than itself"
    assert WAYS[way] in found.message and now >= limit


def test_ways_that_take_turns_do_not_add_up():
    still = Standstill(PATIENCE)
    for number in range(200):
        seen = {"stopped": 1} if number % 2 else {"loop": 1}
        assert not still.look(float(number), seen)
