"""One library process as its host sees it: when to look at it again, and how much of what it prints is kept."""

import pickle
from math import inf

from ctxflow.host import library_process
from ctxflow.host.library_process import LibraryProcess
from waiting import eventually


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
