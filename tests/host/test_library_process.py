"""One library process as its host sees it: when to look at it again."""

from math import inf

from ctxflow.host.library_process import LibraryProcess


def a_process(calls, items):
    process = LibraryProcess.__new__(LibraryProcess)  # None is spawned.
    process.load_deadline, process.look_at, process.remind_at = inf, 50.0, inf
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
