"""Calls that overlap on threads of one library process, driven as an engine without lines does."""

import contextlib
import os
import pickle
import random
import sys
import threading
import time

import pytest
from test_library_loop import Items

import forked
from ctxflow.host.call_flights import ThreadCall
from ctxflow.host.library_process import HostPatience
from ctxflow.host.running_calls import CallInterrupted
from waiting import FOREVER, patience

THREADS = 8


class Shared:
    def __init__(self):
        self.barrier = threading.Barrier(THREADS)
        self.go = threading.Event()


@pytest.fixture
def loaded(tmp_path, request):
    (tmp_path / "logs").mkdir()
    driven = Items(tmp_path, patience=getattr(request, "param", HostPatience()))
    driven.load(Shared)
    driven.next("ready")
    yield driven
    driven.close()


def beside(driven, function, *columns, **head):
    return driven.call(function, *columns, threads=THREADS, **head)


def until_go(shared, items):
    while not shared.go.wait(0.02):  # A thread that waits without an end hears of no interrupt.
        pass
    return items


def spin(shared, seconds):
    until = time.monotonic() + seconds[0]
    while time.monotonic() < until:
        sum(range(50))
    return seconds


@pytest.mark.parametrize("loaded", [HostPatience(interrupt=120)], indirect=True)
def test_an_interrupt_hits_its_own_call_or_none_and_no_thread_ends_by_it(loaded, tmp_path):
    go = tmp_path / "go"

    def spin_then(shared, seconds):
        while not go.exists():
            time.sleep(0.001)
        return spin(shared, seconds)

    chance = random.Random(5)
    calls = [beside(loaded, spin_then, [chance.uniform(0.0, 0.004)]) for _ in range(400)]
    loaded.tell("interrupt", context="c", call=calls[0])
    found = {calls[0]: loaded.failure(calls[0])["kind"]}
    unwanted, interrupted = chance.sample(calls[1:], 200), {calls[0]}
    go.touch()
    while len(found) < len(calls):
        for call in [unwanted.pop() for _ in unwanted[:5]]:
            interrupted.add(call)
            loaded.tell("interrupt", context="c", call=call)
        for head, _ in loaded.reports():
            assert head["call"] not in found
            found[head["call"]] = "finished" if head["is"] == "finished" else head["failure"]["kind"]
    assert set(found.values()) == {"finished", "cancelled"}
    assert {call for call, kind in found.items() if kind == "cancelled"} <= interrupted

    def meet(shared, items):
        shared.barrier.wait(FOREVER)
        return items

    answers = loaded.answers(*[beside(loaded, meet, [1]) for _ in range(THREADS)])
    assert {head["is"] for head, _ in answers} == {"finished"}, "all threads are there"


class Library:
    """Interrupts a call when it is over but for its thread's word that it hears no more."""

    def run(self, call, notes):
        def trace(frame, event, argument):
            if frame.f_code is ThreadCall._go_deaf.__code__:
                sys.settrace(None)
                self.call.interrupt()

        sys.settrace(trace)
        return {}, b""

    def end_fork(self):
        pass


def test_a_call_that_is_interrupted_at_its_last_moment_is_not_sought_on_its_thread_later(capfd):
    library, outcomes = Library(), []
    call = library.call = ThreadCall(library, None, None)

    def work():
        outcomes.append(call.run())
        call.show_where()  # While the thread does something else.

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [type(outcome) for outcome in outcomes] == [CallInterrupted]
    assert capfd.readouterr().err == ""


PROFILED = """
import sys, threading
from ctxflow.host.call_flights import ThreadCall
class Library:
    def run(self, call, notes): return {}, b""
    def end_fork(self): WHEN and self.call.interrupt()
library = Library()
library.call = ThreadCall(library, None, None)
outcomes = []
thread = threading.Thread(target=lambda: outcomes.append(library.call.run()))
thread.start()
thread.join()
sys.setprofile(lambda *given: None)
print((lambda: len(outcomes))())
"""


@pytest.mark.parametrize("interrupted", [False, True])
def test_functions_are_profiled_where_calls_on_threads_have_ended(interrupted):
    program = PROFILED.replace("WHEN", str(interrupted))
    ended = forked.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(), check=True)
    assert ended.stdout == "1\n"


def test_a_call_that_overlaps_none_has_the_process_to_itself_and_those_after_it_wait(loaded):
    def note(shared, items):
        shared.__dict__.setdefault("ran", []).append(items[0])
        return items

    def look(shared, items):
        return [(list(shared.ran), threading.active_count() > 1)]

    waits = beside(loaded, until_go, [1])
    first = beside(loaded, note, ["before"])
    loaded.answers(first)
    by_itself, after = loaded.call(look, [1]), beside(loaded, note, ["after"])
    loaded.reports_nothing(0.3)
    loaded.host._libraries["c"]  # It is there, and waits.
    loaded.tell("interrupt", context="c", call=waits)
    (ended, _), (_, body), _ = loaded.answers(waits, by_itself, after)
    assert ended["failure"]["kind"] == "cancelled"
    [(ran, _)] = pickle.loads(body)
    assert ran == ["before"]


def test_async_functions_are_awaited_on_the_loop(loaded):
    async def where(shared, items):
        return [threading.current_thread() is threading.main_thread() for _ in items]

    async def forever(shared, items):
        import asyncio

        await asyncio.sleep(FOREVER)

    ((_, body),) = loaded.answers(beside(loaded, where, [1, 2]))
    assert pickle.loads(body) == [True, True]
    late = beside(loaded, forever, [1], timeout=0.2)
    assert loaded.failure(late)["kind"] == "timeout"


def test_the_folder_is_common_and_emptied_after_the_last(loaded, tmp_path):
    answered = tmp_path / "answered"

    def leave(shared, names):
        with open(names[0], "w"):
            pass
        return [os.getcwd()]

    waits = beside(loaded, until_go, [1])
    ((head, body),) = loaded.answers(beside(loaded, leave, ["left"]))
    [folder] = pickle.loads(body)
    assert not head["rest"] and os.listdir(folder) == ["left"]

    def go(shared, items):
        shared.go.set()
        while not answered.exists():
            time.sleep(0.01)
        return [os.listdir()]

    last = beside(loaded, go, [1])
    loaded.answers(waits)
    answered.touch()
    ((head, body),) = loaded.answers(last)
    assert pickle.loads(body) == [["left"]]
    assert head["rest"] == ["left"]
    assert not os.path.exists(folder) or not os.listdir(folder)


@pytest.mark.parametrize("loaded", [HostPatience(interrupt=0.5, trace=FOREVER)], indirect=True)
def test_a_call_that_goes_on_is_named_with_where_it_was(loaded):
    def ignore(shared, items):
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(FOREVER)

    waits, ignores = beside(loaded, until_go, [1]), beside(loaded, ignore, [1], timeout=0.3)
    [(head, _), _] = loaded.answers(waits, ignores)
    assert (head["calls"], head["blamed"], head["failure"]["kind"]) == ([ignores, waits], [ignores], "timeout")
    assert "in ignore" in head["failure"]["output"]
