"""A library process that does not end though it was killed: what waits for it is told, and the host goes on."""

import os
import pickle
import time

import pytest

from ctxflow.host.library_process import HostPatience
from ctxflow.host.linux import activity, kill_tree, process_state
from unkillable import stopped, unkillable
from waiting import FOREVER, eventually


def library_pid(driven, context="c"):
    driven.call(lambda value, items: [os.getpid()], [1], context=context)
    return pickle.loads(driven.next("finished")[1])[0]


def test_a_call_that_times_out_there_is_answered_and_others_go_on(driven):
    for context in ("c", "other"):
        driven.load(context=context)
        driven.next("ready")
    pid = library_pid(driven)
    with unkillable(pid):
        driven.call(lambda value, items: [time.sleep(FOREVER)], [1], timeout=0.3)
        head, _ = driven.next("died")
        assert (head["calls"], head["failure"]["kind"]) == ([driven.calls], "timeout")
        assert process_state(pid) == "t", "the stand-in lives"
        driven.call(lambda value, items: items, [7], context="other")
        assert pickle.loads(driven.next("finished")[1]) == [7]
        driven.tell("ping")
        driven.next("pong")


def test_a_load_waits_until_what_was_killed_has_made_room(driven):
    driven.load()
    driven.next("ready")
    pid = library_pid(driven)
    with unkillable(pid):
        driven.tell("unload", context="c")
        driven.next("unloaded")
        driven.load(lambda: 10)
        driven.load(lambda: 11, context="taken back")
        driven.tell("unload", context="taken back")
        assert driven.next("unloaded")[0]["context"] == "taken back"
        driven.reports_nothing(1.5)
    driven.next("ready")
    driven.call(lambda ten, items: [ten * i for i in items], [2])
    assert pickle.loads(driven.next("finished")[1]) == [20]
    driven.tell("unload", context="taken back")
    driven.tell("ping")
    driven.next("pong")


@pytest.mark.parametrize("driven", [HostPatience(stuck=2.0)], indirect=True)
def test_one_in_which_nothing_moves_any_more_is_told_once(driven):
    driven.load()
    driven.next("ready")
    pid = library_pid(driven)
    with unkillable(pid):
        driven.tell("unload", context="c")
        driven.next("unloaded")
        head, _ = driven.next("stuck")
        assert f"process {pid} was killed and does not end" in head["reason"]
        driven.reports_nothing(1.5)


def test_the_end_of_a_host_does_not_wait_for_it(driven):
    for context in ("c", "other"):
        driven.load(context=context)
        driven.next("ready")
    pids = [library_pid(driven), library_pid(driven, "other")]
    with unkillable(pids[0]), unkillable(pids[1]):
        driven.host.stop()
        assert [process_state(pid) for pid in pids] == ["t", "t"], "it came back while they were there"


def test_a_library_process_that_is_stopped_misses_its_timeout(driven):
    driven.load()
    driven.next("ready")
    stopped(library_pid(driven))
    driven.call(lambda value, items: items, [1], timeout=0.3)
    assert driven.next("died")[0]["failure"]["kind"] == "timeout"


def test_what_a_process_does_is_seen_and_of_one_that_is_stopped_nothing(driven):
    pid = os.fork()
    if not pid:
        while True:
            time.sleep(0.001)
    try:
        seen = activity(pid)
        eventually(lambda: activity(pid) != seen)
        stopped(pid)
        eventually(lambda: process_state(pid) == "T")
        seen = activity(pid)
        time.sleep(0.3)  # In which it did something 300 times before.
        assert activity(pid) == seen
    finally:
        kill_tree(pid)
        os.waitpid(pid, 0)
    assert activity(pid) == ()
