"""Calls of items that overlap in one library process, driven as an engine without lines does."""

import asyncio
import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_host import Driven

from ctxflow import on_worker
from ctxflow.errors import ContextLost, ItemRefused
from ctxflow.host.library_process import HostPatience
from ctxflow.host.linux import activity, process_state
from ctxflow.host.running_calls import RunningCalls
from unkillable import traced
from waiting import FOREVER, eventually, gone


class Items(Driven):
    """A host, and calls of items: the function gets the context and the item's values."""

    def give(self, function):
        """Give a function once; returns what begins a call of it."""
        name = f"shared{self.calls}-{id(function)}"
        self.tell("function", cloudpickle.dumps(function), function=name)

        def begin(*values, context="c", **head):
            self.calls += 1
            given = {"call": self.calls, "context": context, "function": name, "style": "item", "insert": False}
            self.tell("call", pickle.dumps(values), **{**given, **head})
            return self.calls

        return begin

    def item(self, function, *values, **head):
        return self.give(function)(*values, **head)

    def answers(self, *calls):
        """What came of each call, in their order; no other is answered, and none twice."""
        found = {}
        while set(calls) - set(found):
            for head, body in self.reports():
                for number in head["calls"] if head["is"] == "died" else [head["call"]]:
                    assert number not in found, "a call has one answer"
                    found[number] = head, body
        assert set(found) == set(calls)
        return [found[number] for number in calls]

    def value(self, call):
        [(head, body)] = self.answers(call)
        assert head["is"] == "finished", head
        [result] = pickle.loads(body)
        return result

    def failure(self, call):
        [(head, _)] = self.answers(call)
        return head["failure"]


@pytest.fixture
def driven(tmp_path, request):
    (tmp_path / "logs").mkdir()
    driven = Items(tmp_path, patience=getattr(request, "param", HostPatience()))
    yield driven
    driven.close()


@pytest.fixture
def loaded(driven):
    driven.load(dict)
    driven.next("ready")
    return driven


async def held(context, gate):
    while not gate.exists():
        await asyncio.sleep(0.01)
    return gate


async def nap(context, seconds=FOREVER):
    await asyncio.sleep(seconds)
    return seconds


def test_items_overlap_and_are_answered_as_they_end_in_any_order(loaded):
    async def meet(context, number):
        there, left = context.setdefault("there", []), context.setdefault("left", [])
        there.append(number)
        while len(there) < 8 or len(left) < 7 - number:
            await asyncio.sleep(0.001)
        left.append(number)
        return -number

    begin = loaded.give(meet)
    for number in range(8):
        begin(number)
    heads = []
    while len(heads) < 8:
        heads += loaded.reports()
    assert [pickle.loads(body) for _, body in heads] == [[-number] for number in range(7, -1, -1)]
    assert {head["is"] for head, _ in heads} == {"finished"}


def test_what_goes_wrong_with_an_item_is_its_own(loaded):
    async def wrong(context, kind):
        print("tried", kind)
        if kind == "raise":
            raise KeyError(kind)
        if kind == "refuse":
            raise ItemRefused("give fewer words")
        if kind == "exit":
            sys.exit(3)
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "give up":
            raise asyncio.CancelledError
        if kind == "task":
            await asyncio.create_task(wrong(context, "exit"))
        if kind == "stop":
            raise StopIteration
        if kind == "fork" and not os.fork():
            return None
        return threading.Lock() if kind == "odd" else kind

    good, begin = loaded.item(nap, 0.2), loaded.give(wrong)
    kinds = ["raise", "refuse", "exit", "interrupt", "give up", "task", "odd", "fork", "well"]
    answers = loaded.answers(*map(begin, kinds), good)
    told = [(head["failure"]["kind"], head["failure"]["error"]) for head, _ in answers if head["is"] == "raised"]
    assert told == [
        ("exception", "KeyError"),
        ("input", "ItemRefused"),
        ("exception", "SystemExit"),
        ("exception", "KeyboardInterrupt"),
        ("exception", "CancelledError"),
        ("exception", "SystemExit"),
        ("exception", "TypeError"),
    ]
    shown = answers[0][0]["failure"]["traceback"]
    assert "in wrong" in shown
    assert "ctxflow/host" not in shown
    assert isinstance(pickle.loads(answers[1][1]), ItemRefused)
    assert [pickle.loads(body) for _, body in answers[-3:]] == [["fork"], ["well"], [0.2]]
    assert "tried" in next(head["failure"]["output"] for head, _ in answers if "failure" in head)
    call = loaded.calls = loaded.calls + 1
    loaded.tell("call", b"no pickle", call=call, context="c", function=f"shared{0}", style="item", insert=False)
    assert loaded.next("raised")[0]["call"] == call


def test_an_item_that_takes_too_long_fails_alone(loaded, tmp_path):
    gate = tmp_path / "gate"
    stays = loaded.item(held, gate, timeout=FOREVER)
    late = [loaded.item(nap, timeout=0.2), loaded.item(stubborn, timeout=0.2)]
    assert [head["failure"]["kind"] for head, _ in loaded.answers(*late)] == ["timeout"] * 2
    gate.touch()
    assert loaded.value(stays) == gate


async def stubborn(context):
    """Answer all the same."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(FOREVER)
    return "here"


def test_items_that_nobody_waits_for_are_cancelled_and_others_are_not(loaded):
    async def tell(context, number):
        try:
            await asyncio.sleep(FOREVER)
        finally:
            context[number] = "cleaned up"

    async def look(context):
        return dict(context)

    begin = loaded.give(tell)
    calls = [begin(number) for number in range(20)]
    stays, pid = loaded.item(nap, 0.5), loaded.host._libraries["c"].process.pid
    unwanted = calls[::2]
    for call in unwanted:
        loaded.tell("interrupt", context="c", call=call)
    kinds = {head["failure"]["kind"] for head, _ in loaded.answers(*unwanted, stays) if head["is"] == "raised"}
    assert kinds == {"cancelled"}
    for call in (calls[0], 99_999):
        loaded.tell("interrupt", context="c", call=call)
    seen = loaded.value(loaded.item(look))
    assert set(seen) <= {0, 2, 4, 6, 8, 10, 12, 14, 16, 18}
    for call in calls[1::2]:
        loaded.tell("interrupt", context="c", call=call)
    loaded.answers(*calls[1::2])
    assert loaded.host._libraries["c"].process.pid == pid


def test_calls_of_other_kinds_run_one_after_the_other_beside_items(loaded, tmp_path):
    async def double(context, numbers):
        context["now"] = context.get("now", 0) + 1
        await asyncio.sleep(0.05)
        most = context["now"]
        context["now"] -= 1
        return [most for _ in numbers]

    def yields(context, numbers):
        for number in numbers:
            yield number, os.getcwd()

    item = loaded.item(held, tmp_path / "gate")
    batches = [loaded.call(double, [1, 2]) for _ in range(4)]
    kept = loaded.call(yields, [1], every=0.0)
    slow = loaded.call(lambda context, numbers: time.sleep(FOREVER), [1])
    *ends, (_, body) = loaded.answers(*batches, kept)
    assert [pickle.loads(body) for _, body in ends] == [[1, 1]] * 4
    assert pickle.loads(body)[0][0] == 1
    loaded.reports_nothing(0.3)
    loaded.tell("interrupt", context="c", call=slow)
    assert loaded.failure(slow)["kind"] == "cancelled"
    (tmp_path / "gate").touch()
    assert loaded.value(item) == tmp_path / "gate"


def test_a_lost_context_ends_its_process_with_all_that_it_started(loaded):
    async def start(context):
        context["child"] = subprocess.Popen(["sleep", "600"], start_new_session=True)
        return context["child"].pid

    async def lose(context):
        print("last words")
        raise ContextLost("the engine ended with status 1")

    child = loaded.value(loaded.item(start))
    calls = [loaded.item(nap), loaded.item(lose), loaded.item(nap)]
    answers = loaded.answers(*calls)
    [head] = {id(head): head for head, _ in answers}.values()
    assert head["calls"] == calls
    assert head["blamed"] == []
    failure = head["failure"]
    assert (failure["kind"], failure["error"], failure["message"]) == (
        "crash",
        "ContextLost",
        "the engine ended with status 1",
    )
    assert failure["output"] == "last words"
    gone(child)  # On a busy machine it is killed, and has not had its turn to end.


@pytest.mark.parametrize("style", ["batch", "item"])
def test_a_context_tells_that_it_is_lost_from_a_thread_of_its_own(driven, style):
    def build():
        begun = threading.Event()

        def fail():
            begun.wait()
            on_worker.context_lost("no heartbeat")

        threading.Thread(target=fail, daemon=True).start()
        return begun

    async def item(begun):
        begun.set()
        await asyncio.sleep(FOREVER)

    def batch(begun, items):
        begun.set()
        time.sleep(FOREVER)

    driven.load(build)
    driven.next("ready")
    call = driven.item(item) if style == "item" else driven.call(batch, [1])
    assert driven.failure(call)["message"] == "no heartbeat"


@pytest.mark.parametrize("driven", [HostPatience(interrupt=0.5, trace=FOREVER)], indirect=True)
def test_what_blocks_the_loop_is_found_and_named(loaded):
    async def wait(context):
        context["waits"] = True
        await asyncio.sleep(FOREVER)

    async def block(context):
        while "waits" not in context:
            await asyncio.sleep(0)
        print('  File "earlier.py", line 1 in _run_module_as_main', flush=True)  # As another trace ends.
        time.sleep(FOREVER)

    waits, blocks = loaded.item(nap, timeout=0.1), None
    assert loaded.failure(waits)["kind"] == "timeout"
    waits, blocks = loaded.item(wait, timeout=2.0), loaded.item(block)
    [(head, _), _] = loaded.answers(waits, blocks)
    assert (head["calls"], head["blamed"], head["failure"]["kind"]) == ([blocks, waits], [blocks], "timeout")
    assert "asyncio.to_thread" in head["failure"]["message"]
    assert "in block" in head["failure"]["output"]


SHORT = HostPatience(stopped=1.0, waiting=1.0)


def lock_for_ever():
    """Keep Python's lock, as a driver's call does that hangs."""
    import ctypes

    ctypes.PyDLL(None).sleep(1_000_000)


async def hang(context, how, path):
    if how == "blocked":
        time.sleep(FOREVER)
    elif how == "thread":
        await asyncio.to_thread(lock_for_ever)
    elif how == "lock":
        lock_for_ever()
    elif how == "kernel":  # A child that shares this process's memory waits for a file: so does this process.
        os.mkfifo(path)
        wait = (os.POSIX_SPAWN_OPEN, 0, str(path), os.O_RDONLY, 0)
        os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[wait])
    await asyncio.sleep(FOREVER)


@pytest.mark.parametrize(
    ("driven", "how"),
    [
        *((SHORT, how) for how in ("stopped", "kernel")),
        *((HostPatience(loop=5.0), how) for how in ("blocked", "thread", "lock")),
    ],
    indirect=["driven"],
)
def test_a_process_that_hangs_is_noticed_without_timeouts(loaded, how, tmp_path):
    async def pid(context):
        return os.getpid()

    calls = [loaded.item(nap), loaded.item(nap)]
    process = loaded.value(loaded.item(pid))
    if how == "stopped":
        os.kill(process, signal.SIGSTOP)
    else:
        calls.append(loaded.item(hang, how, tmp_path / "fifo"))
    [(head, _), *_] = loaded.answers(*calls)
    assert sorted(head["calls"]) == calls and not head["blamed"], "it is not known whose fault it is"
    kind = "lost" if how == "stopped" else "crash"
    assert (head["failure"]["kind"], head["failure"]["error"]) == (kind, "Unresponsive")
    assert head["failure"]["machine"] == (how in ("stopped", "kernel"))
    assert f"the library process, {process}, " in head["failure"]["message"]
    gone(process)


@pytest.mark.parametrize("driven", [SHORT], indirect=True)
@pytest.mark.parametrize("when", ["call", "build", "idle", "call kernel", "build kernel"])
def test_so_is_one_that_runs_plain_calls_or_is_built(driven, when, tmp_path):
    when, _, how = when.partition(" ")

    def stop():
        if how == "kernel":
            os.mkfifo(tmp_path / "fifo")
            wait = (os.POSIX_SPAWN_OPEN, 0, str(tmp_path / "fifo"), os.O_RDONLY, 0)
            os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[wait])
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
        return {}

    def stop_later():
        threading.Timer(0.1, stop).start()
        return {}

    driven.load({"call": dict, "build": stop, "idle": stop_later}[when])
    if when != "build":
        driven.next("ready")
    calls = [driven.call(lambda context, items: [stop()], [1])] if when == "call" else []
    head, _ = driven.next("failed" if when == "build" else "died")
    assert (head["failure"]["kind"], head["failure"]["error"]) == ("crash" if how else "lost", "Unresponsive")
    assert head.get("calls", []) == calls


@pytest.mark.parametrize("driven", [HostPatience(loop=2.0)], indirect=True)
@pytest.mark.parametrize("how", ["computes", "is traced", "is alone"])
def test_a_loop_that_stands_still_is_borne_with_while_it(loaded, how, tmp_path):
    """It is looked at more often than it takes to end one."""
    go = tmp_path / "go"

    async def block(context):
        while not go.exists():
            if how != "computes":
                time.sleep(0.01)

    async def pid(context):
        return os.getpid()

    process = loaded.value(loaded.item(pid))
    library = loaded.host._libraries["c"]
    if how != "is alone":
        loaded.item(nap)
    call = loaded.item(block)
    eventually(lambda: loaded.step(0.01) or call == library.running().running)
    with traced(process, holds=True) if how == "is traced" else contextlib.nullcontext():
        looks, before = 0, library.standstill_at
        while looks < 10:
            loaded.step(0.01)
            assert "c" in loaded.host._libraries, "it was ended"
            looks, before = looks + (library.standstill_at != before), library.standstill_at
    go.touch()
    assert loaded.answers(call)[0][0]["is"] == "finished"


@pytest.mark.parametrize("driven", [SHORT], indirect=True)
def test_one_that_is_stopped_whenever_it_is_looked_at_but_goes_on_between_is_not_stopped(loaded):
    """As under cpulimit."""
    library, now = loaded.host._libraries["c"], 0.0

    def look():
        nonlocal now
        os.kill(library.process.pid, signal.SIGSTOP)
        eventually(lambda: process_state(library.process.pid) == "T")
        now += 0.25
        return library.at_standstill(now)

    for _ in range(20):
        assert look() is None
        before = activity(library.process.pid)
        os.kill(library.process.pid, signal.SIGCONT)
        eventually(lambda before=before: activity(library.process.pid) != before)
    assert [look() is None for _ in range(6)].count(True) == 4


@pytest.mark.parametrize("how", ["plain", "beside items", "with a timeout", "thread", "build", "park"])
def test_what_may_take_hours_is_not_asked_whether_its_loop_turns(driven, how, tmp_path):
    go = tmp_path / "go"

    def wait():
        while not go.exists():
            time.sleep(0.01)
        return {}

    async def wait_here(context):
        return wait()

    class Parks(dict):
        def park(self):
            wait()

        def wake(self):
            pass

    async def build():
        return wait() if how == "build" else Parks()

    driven.load(build)
    library = eventually(lambda: driven.step() or driven.host._libraries.get("c"))
    if how != "build":
        driven.next("ready")
        eventually(lambda: driven.step() or library.may_be_asked)
    call = None
    if how in ("plain", "beside items"):
        beside = [driven.item(nap)] * (how == "beside items")
        eventually(lambda: driven.step() or set(beside) <= set(library.running().in_flight))
        assert library.may_be_asked
        call = driven.call(lambda context, items: [str(wait())], [1])
    elif how == "with a timeout":
        call = driven.item(wait_here, timeout=FOREVER)
    elif how == "thread":
        call = driven.call(lambda context, items: [str(wait())], [1], threads=2)
    elif how == "park":
        driven.tell("park", context="c")
    eventually(lambda: driven.step() or not library.may_be_asked)
    for _ in range(20):
        driven.step(0.01)
        assert not library.may_be_asked
    go.touch()
    if call is None:
        driven.next("ready" if how == "build" else "asleep")
    else:
        assert driven.answers(call)[0][0]["is"] == "finished"
    assert library.may_be_asked == (how != "thread"), "whose threads may keep Python's lock"


@pytest.mark.parametrize("driven", [HostPatience(interrupt=0.5)], indirect=True)
def test_an_interrupted_item_is_not_to_blame_where_another_holds_the_loop(loaded, tmp_path):
    async def begin(context):
        (tmp_path / "begun").touch()
        await asyncio.sleep(FOREVER)

    async def hold(context):
        (tmp_path / "held").touch()
        while not (tmp_path / "go").exists():
            time.sleep(0.01)  # As an import does, of what a call needs.

    unwanted = loaded.item(begin)
    eventually((tmp_path / "begun").exists)
    wanted = loaded.item(hold)
    eventually((tmp_path / "held").exists)
    loaded.tell("interrupt", context="c", call=unwanted)
    loaded.reports_nothing(1.0)  # It has been interrupted for longer than it may go on.
    (tmp_path / "go").touch()
    [(answered, _), (cancelled, _)] = loaded.answers(wanted, unwanted)
    assert (answered["is"], cancelled["failure"]["kind"]) == ("finished", "cancelled")


def test_an_interrupted_item_that_could_not_hear_of_it_is_given_time_once_the_loop_turns(loaded, monkeypatch):
    loaded.value(loaded.item(nap, 0.0))
    [library] = loaded.host._libraries.values()
    blocked, turns = RunningCalls(8, 1, {7: 0.0, 8: 0.0}), RunningCalls(0, 2, {7: 0.0})
    seen = iter([blocked, blocked, turns, turns])
    monkeypatch.setattr(library, "running", lambda: next(seen))
    library.interrupted = {7: 1.0}
    assert [library.ignores_interrupt(now) for now in (1.0, 3.0, 5.0, 9.9, 10.0)] == [[], [], [], [], [7]]


@pytest.mark.parametrize("driven", [HostPatience(interrupt=0.5)], indirect=True)
def test_an_item_that_ignores_its_end_is_named(loaded):
    async def ignore(context):
        context["ignores"] = True
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(FOREVER)

    async def look(context):
        return "ignores" in context

    waits, ignores = loaded.item(nap), loaded.item(ignore, timeout=0.1)
    [(head, _), _] = loaded.answers(waits, ignores)
    assert (head["calls"], head["blamed"], head["failure"]["kind"]) == ([ignores, waits], [ignores], "timeout")
    loaded.load(dict)
    loaded.next("ready")
    waits, ignores = loaded.item(nap), loaded.item(ignore)
    eventually(lambda: loaded.value(loaded.item(look)))
    loaded.tell("interrupt", context="c", call=ignores)
    [(head, _), _] = loaded.answers(waits, ignores)
    assert (head["blamed"], head["failure"]["kind"]) == ([ignores], "cancelled")


async def act(context, kind, seconds):
    """Do what an item may do."""
    if kind == "blocked":
        time.sleep(seconds)
    elif kind == "cancel twice":
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(seconds)
        await asyncio.sleep(seconds)
    else:
        await asyncio.sleep(seconds)
    if kind == "raise":
        raise ValueError(seconds)
    if kind == "refuse":
        raise ItemRefused(str(seconds))
    if kind == "lose":
        raise ContextLost(str(seconds))
    if kind == "die":
        os._exit(3)
    return threading.Lock() if kind == "odd" else seconds


KINDS = ["well", "well", "raise", "refuse", "odd", "blocked", "cancel twice", "lose", "die"]
FLIGHT = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from([0.0, 0.01, 0.05]),
    st.sampled_from([None, None, 0.005, 0.03, 5.0]),
    st.sampled_from([None, None, "at once", "later"]),
)
MAY = {
    "well": {"finished"},
    "blocked": {"finished"},
    "cancel twice": {"finished"},
    "raise": {"exception"},
    "refuse": {"input"},
    "odd": {"exception"},
    "lose": set(),
    "die": set(),
}


def test_each_call_has_one_answer_or_the_process_a_death_that_names_it(driven):
    """Whatever they do, however long they may, whoever cancels them."""

    @settings(max_examples=40)
    @given(st.lists(FLIGHT, max_size=12))
    def check(flights):
        driven.load(dict)
        driven.next("ready")
        begin = driven.give(act)
        calls = [begin(kind, seconds, timeout=timeout) for kind, seconds, timeout, _ in flights]
        for when in ("at once", "later"):
            for call, (*_, cancelled) in zip(calls, flights, strict=True):
                if cancelled == when:
                    driven.tell("interrupt", context="c", call=call)
            time.sleep(0.02)
        kinds = {kind for kind, *_ in flights}
        answers = driven.answers(*calls)
        for (head, _), (kind, _, timeout, cancelled) in zip(answers, flights, strict=True):
            if head["is"] == "died":
                assert kinds & {"lose", "die"}
                continue
            may = MAY[kind] | ({"timeout"} if timeout else set()) | ({"cancelled"} if cancelled else set())
            assert (head["failure"]["kind"] if head["is"] == "raised" else head["is"]) in may
        driven.tell("ping")
        driven.next("pong")

    check()


def build_async(log, ends=True):
    """An async context function that notes what happens to it."""

    async def open_engine():
        await asyncio.sleep(0)
        return {"loop": id(asyncio.get_running_loop())}

    async def generate():
        Path(log).write_text("built")
        yield await open_engine()
        if not ends:
            await asyncio.sleep(FOREVER)
        await asyncio.sleep(0.1)
        Path(log).write_text("closed")

    return generate


async def same_loop(context):
    return context["loop"] == id(asyncio.get_running_loop())


@pytest.mark.parametrize("driven", [HostPatience(close=120)], indirect=True)
def test_an_async_context_is_built_and_closed_on_the_loop_of_its_items(driven, tmp_path):
    log = tmp_path / "log"
    driven.load(build_async(log))
    driven.next("ready")
    assert driven.value(driven.item(same_loop))
    assert log.read_text() == "built"
    driven.tell("unload", context="c")
    driven.next("unloaded")
    assert log.read_text() == "closed"
    driven.load(build_async(log))
    driven.next("ready")
    driven.load(build_async(tmp_path / "another"))
    driven.next("ready")
    assert log.read_text() == "closed"
    driven.host.stop()
    assert (tmp_path / "another").read_text() == "closed"


@pytest.mark.parametrize("driven", [HostPatience(close=5.0)], indirect=True)
def test_what_does_not_close_in_time_is_killed_and_others_go_on_meanwhile(driven, tmp_path):
    driven.load(build_async(tmp_path / "log", ends=False))
    driven.next("ready")
    driven.load(dict, context="other")
    driven.next("ready")
    pid = driven.host._libraries["c"].process.pid
    driven.tell("unload", context="c")
    driven.load(dict, context="waits")
    assert driven.value(driven.item(nap, 0.0, context="other")) == 0.0
    assert Path(f"/proc/{pid}").exists()
    seen = [head["is"] for head, _ in driven.reports()]
    while len(seen) < 2:
        seen += [head["is"] for head, _ in driven.reports()]
    assert seen == ["unloaded", "ready"]
    assert not Path(f"/proc/{pid}").exists()


def test_an_async_context_that_fails_says_why(driven):
    async def broken():
        await asyncio.sleep(0)
        raise OSError("no weights")

    async def empty():
        return
        yield

    driven.load(broken)
    head, _ = driven.next("failed")
    assert (head["failure"]["error"], head["failure"]["message"]) == ("OSError", "no weights")
    driven.load(empty)
    assert "yielded nothing" in driven.next("failed")[0]["failure"]["message"]
    driven.load(nap, None, timeout=0.3)
    assert driven.next("failed")[0]["failure"]["kind"] == "timeout"
