"""The context host driven directly, as an engine without lines to the library processes does."""

import ctypes
import os
import pickle
import random
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest
from message_heads import instruction, report

from ctxflow.host.context_host import Host
from ctxflow.host.library_process import HostPatience, LibraryProcess
from ctxflow.host.linux import adopt_orphans
from ctxflow.host.messages import FROM_HOST
from ctxflow.host.wire import Channel, pack
from ctxflow.recipe import Context
from waiting import FOREVER, eventually


class Driven:
    """A host in this process, and what it reported."""

    def __init__(self, directory, artifacts=None, patience=HostPatience()):  # noqa: B008
        import socket

        adopt_orphans()
        self.selector = selectors.DefaultSelector()
        near, far = socket.socketpair()
        self._near, self._far = near, Channel(far)
        self.host = Host(
            lambda message: near.sendall(pack(message)),
            self.selector,
            str(directory / "scratch"),
            str(directory / "logs"),
            artifacts=artifacts,
            patience=patience,
        )
        self.calls = 0

    def tell(self, do, body=b"", **head):
        self.host.handle(instruction({"do": do, **head}, body))

    def load(self, function=None, *args, context="c", files=None, **head):
        recipe = Context("made", function, args, files=files or {}).dumps() if function else b""
        given = {
            "name": "made",
            "files": files or {},
            "environment": {},
            "timeout": None,
            "memory": None,
            "path": [],
        }
        self.tell("load", recipe, **{**given, "context": context, **head})

    def call(self, function, *columns, context="c", **head):
        self.calls += 1
        self.tell("function", cloudpickle.dumps(function), function=f"f{self.calls}")
        given = {
            "call": self.calls,
            "context": context,
            "function": f"f{self.calls}",
            "style": "batch",
            "insert": False,
        }
        self.tell("call", cloudpickle.dumps(columns), **{**given, **head})
        return self.calls

    def step(self, seconds=0.1):
        """Have the host do what is to be done, or wait for so long."""
        for key, _ in self.selector.select(min(seconds, self.host.timeout() or seconds)):
            if key.fd in self.selector.get_map():
                key.data()
        self.host.check()

    def _reports(self):
        self.step()
        return [report(FROM_HOST.open(head, body)) for head, body in self._far.receive()]

    def reports(self):
        """The reports of one round."""
        return eventually(self._reports, what="a report of the host", pause=0.001)

    def reports_nothing(self, seconds):
        """Let so much time pass, in which nothing is reported."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert not self._reports()

    def next(self, kind):
        ((head, body),) = self.reports()
        assert head["is"] == kind, head
        return head, body

    def close(self):
        self.host.stop()
        self.selector.close()
        self._near.close()
        self._far.close()
        self.host.close()
        ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans of other tests are not its.


def test_a_context_is_built_and_calls_run_against_it(driven, tmp_path):
    driven.load(lambda: 10)
    head, _ = driven.next("ready")
    assert head["context"] == "c"
    assert head["seconds"] >= 0
    assert head["memory"] > 1_000_000
    number = driven.call(lambda ten, items: [ten * i for i in items], [1, 2])
    head, body = driven.next("finished")
    assert (head["call"], pickle.loads(body)) == (number, [10, 20])
    driven.call(lambda ten, items: print("hello") or [os.getcwd()], [1])
    place = pickle.loads(driven.next("finished")[1])[0]
    assert place.startswith(str(tmp_path / "scratch"))
    assert "hello" in next((tmp_path / "logs").iterdir()).read_text()


BLOCK = 100_000_000


def start_holder():
    """Start a process that shares nothing with this one and holds a block."""
    program = f"import os, time; block = os.urandom({BLOCK}); print(flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"\n"
    return child


def fork_twice():
    """Hold a block, and fork two processes that share it."""
    block = os.urandom(BLOCK)
    for _ in range(2):
        if not os.fork():
            time.sleep(FOREVER)
    return block


def test_the_memory_of_a_context_is_with_the_processes_that_it_started_and_shared_pages_count_once(driven):
    def measured(build):
        driven.load(build, context=build.__name__)
        return driven.next("ready")[0]["memory"]

    def end_holder():
        child = start_holder()
        child.kill()
        child.wait()

    least = measured(end_holder)
    assert 1_000_000 < least < BLOCK / 2, "of what is still there"
    assert BLOCK < measured(start_holder) < 1.5 * BLOCK
    assert BLOCK < measured(fork_twice) < 1.5 * BLOCK


def test_a_process_that_left_its_library_process_counts_for_the_memory_that_this_may_use(driven):
    def leave(value, items):
        if not os.fork():
            os.setsid()
            if os.fork():
                os._exit(0)
            block = os.urandom(3 * BLOCK)  # noqa: F841 - it is held
        time.sleep(FOREVER)

    driven.load(lambda: 1, memory=2 * BLOCK)
    driven.next("ready")
    driven.call(leave, [1])
    assert "more than the 0.20 GB that its context asks for" in driven.next("died")[0]["failure"]["message"]


def test_pages_that_it_shares_with_such_a_process_count_once(driven):
    def held(value, items):
        block = os.urandom(BLOCK)
        if not os.fork():
            os.setsid()
            if not os.fork():
                time.sleep(FOREVER)
            os._exit(0)
        os.wait()
        time.sleep(2.0)  # The limit is looked at twice a second.
        return [len(block)]

    driven.load(lambda: 1, memory=int(1.8 * BLOCK))
    driven.next("ready")
    driven.call(held, [1])
    assert pickle.loads(driven.next("finished")[1]) == [BLOCK]


@pytest.mark.parametrize(
    "mess",
    [
        lambda: os.chdir("/"),
        lambda: os.rmdir(os.getcwd()),
        lambda: __import__("shutil").rmtree(os.path.dirname(os.getcwd())),
        lambda: open("left-behind", "w").close(),
    ],
    ids=["cd", "rmdir", "rmtree", "file"],
)
def test_a_call_in_a_folder_of_its_own_finds_it_empty_whatever_the_one_before_did(driven, tmp_path, mess):
    driven.load()
    driven.next("ready")
    driven.call(lambda value, items: [mess()], [1])
    driven.next("finished")
    for _ in range(3):
        driven.call(lambda value, items: [(os.listdir("."), os.getcwd())], [1])
        [(found, place)] = pickle.loads(driven.next("finished")[1])
        assert found == []
        assert place.startswith(str(tmp_path / "scratch" / "library-1" / "call-"))


def test_calls_and_builds_in_one_directory(driven, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "weights").write_text("seven..")
    driven.load(lambda: os.path.getsize("weights"), directory=str(home))
    driven.next("ready")
    for _ in range(2):
        driven.call(lambda value, items: [(value, os.getcwd(), os.chdir("/"))], [1])
        assert pickle.loads(driven.next("finished")[1]) == [(7, str(home), None)]
    home.rename(tmp_path / "moved")
    driven.call(lambda value, items: items, [1])
    message = driven.next("raised")[0]["failure"]["message"]
    assert f"calls run in the directory where the executor was started, {home}, and that cannot be entered" in message
    assert "put it back" in message
    (tmp_path / "moved").rename(home)
    driven.call(lambda value, items: [os.getcwd()], [1])
    assert pickle.loads(driven.next("finished")[1]) == [str(home)]


def test_several_contexts_at_once(driven):
    for name in ("a", "b"):
        driven.load(lambda name=name: name, context=name)
        driven.next("ready")
    for name in ("b", "a"):
        driven.call(lambda value, items: [value], [1], context=name)
        assert pickle.loads(driven.next("finished")[1]) == [name]
    driven.tell("unload", context="a")
    assert driven.next("unloaded")[0]["context"] == "a"
    driven.call(lambda value, items: [value], [1], context="b")
    assert pickle.loads(driven.next("finished")[1]) == ["b"]


def test_an_exception_is_data(driven):
    driven.load()
    driven.next("ready")
    number = driven.call(lambda state, items: print("so far") or [1 // 0], [1], context="c")
    head, body = driven.next("raised")
    assert head["call"] == number
    assert head["failure"]["kind"] == "exception"
    assert head["failure"]["output"] == "so far"
    assert isinstance(pickle.loads(body), ZeroDivisionError)


def test_a_failure_says_whether_it_looks_like_the_machine(driven):
    driven.load()
    driven.next("ready")

    def ecc(state, items):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    def full(state, items):
        raise ValueError("the row cannot be written") from OSError(28, "No space left on device")

    def too_much(state, items):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    calls = [ecc, full, too_much, lambda state, items: __import__("no_such_module"), lambda state, items: [1 // 0]]
    found = []
    for call in calls:
        driven.call(call, [1], context="c")
        found.append(driven.next("raised")[0]["failure"]["machine"])
    assert found == [True, True, False, True, False]
    driven.load(lambda: os.stat("/no/such/weights"), context="d")
    assert driven.next("failed")[0]["failure"]["machine"]


def test_a_crash_names_the_calls_that_it_cost(driven):
    driven.load(key="k1")
    assert driven.next("ready")[0]["key"] == "k1"
    number = driven.call(lambda state, items: ctypes.string_at(0), [1])
    head, _ = driven.next("died")
    assert (head["calls"], head["key"], head["failure"]["kind"]) == ([number], "k1", "crash")
    assert "SIGSEGV" in head["failure"]["message"]
    late = driven.call(lambda state, items: items, [1])
    head, _ = driven.next("died")
    assert head["calls"] == [late]
    assert head["failure"]["message"] == "the library process ended before the call"
    driven.load(key="k2")
    assert driven.next("ready")[0]["key"] == "k2"


def test_timeouts(driven):
    driven.load(time.sleep, FOREVER, timeout=0.3)
    head, _ = driven.next("failed")
    assert head["failure"]["kind"] == "timeout"
    assert "load_timeout of 0.3 s" in head["failure"]["message"]
    driven.load()
    driven.next("ready")
    number = driven.call(lambda state, items: time.sleep(FOREVER), [1], timeout=0.3)
    head, _ = driven.next("died")
    assert (head["calls"], head["failure"]["kind"]) == ([number], "timeout")


def test_a_timeout_of_a_batch_is_not_charged_to_the_items_beside_it(driven):
    async def wait(*given):
        import asyncio

        await asyncio.sleep(FOREVER)

    def spin(*given):
        import time

        time.sleep(FOREVER)

    driven.load()
    driven.next("ready")
    item = driven.call(wait, 1, style="item", timeout=FOREVER)
    batch = driven.call(spin, [1], timeout=1.0)
    died, _ = driven.next("died")
    assert (died["blamed"], died["calls"]) == ([batch], [batch, item])


@pytest.mark.parametrize("driven", [HostPatience(interrupt=30.0)], indirect=True)
def test_interrupts_hit_the_call_that_they_are_for_and_its_context_stays(driven):
    """In any order with the calls, again and again; the process goes on as it was."""
    driven.load()
    driven.next("ready")
    times = random.Random(3)
    for _ in range(25):
        done = driven.call(lambda state, items: items, [1])
        driven.next("finished")
        driven.tell("interrupt", context="c", call=done)
        number = driven.call(lambda state, items: time.sleep(FOREVER), [1])
        waiting = driven.call(lambda state, items: time.sleep(FOREVER), [1])
        for call in times.sample([number, waiting], 2):
            driven.tell("interrupt", context="c", call=call)
            time.sleep(times.choice([0, 0.01]))
        ends = []
        while len(ends) < 2:
            ends += [head for head, _ in driven.reports()]
        assert [(end["call"], end["failure"]["kind"]) for end in ends] == [
            (number, "cancelled"),
            (waiting, "cancelled"),
        ]
    driven.tell("interrupt", context="nowhere", call=7)
    driven.call(lambda state, items: [os.getpid()], [1])
    assert pickle.loads(driven.next("finished")[1]) == [driven.host._libraries["c"].process.pid]


@pytest.mark.parametrize("driven", [HostPatience(interrupt=0.2)], indirect=True)
def test_a_machine_that_stood_still_costs_no_context(driven, tmp_path):
    """The host did not run either, as where a batch system suspends a job; it may be the first that goes on."""
    driven.load()
    driven.next("ready")
    begun = tmp_path / "begun"
    call = driven.call(lambda state, items: (begun.touch(), time.sleep(FOREVER)), [1])
    eventually(begun.exists)
    process = driven.host._libraries["c"].process.pid
    os.kill(process, signal.SIGSTOP)
    driven.tell("interrupt", context="c", call=call)
    time.sleep(2.0)
    driven.host.check()
    os.kill(process, signal.SIGCONT)
    eventually(lambda: driven.selector.select(0), what="its answer")  # However long it takes to get a core.
    assert driven.next("raised")[0]["failure"]["kind"] == "cancelled"
    driven.call(lambda state, items: [os.getpid()], [1])
    assert pickle.loads(driven.next("finished")[1]) == [process]


@pytest.mark.parametrize("driven", [HostPatience(interrupt=30.0)], indirect=True)
def test_what_an_interrupted_call_waits_for_is_given_up(driven, tmp_path):
    """Python's own waits, a subprocess, and code that turns the exception into another."""

    def waits(state, items):
        kind = items[0]
        (tmp_path / kind).touch()
        if kind == "subprocess":
            subprocess.run(["sleep", "600"], check=True)
        elif kind == "lock":
            threading.Lock().acquire() and threading.Event().wait(FOREVER)
        elif kind == "select":
            select.select([], [], [], FOREVER)
        elif kind == "computing":
            while True:
                pass
        try:
            time.sleep(FOREVER)
        except BaseException as error:
            raise ValueError("another") from error

    driven.load()
    driven.next("ready")
    for kind in ("subprocess", "lock", "select", "computing", "other"):
        number = driven.call(waits, [kind])
        eventually((tmp_path / kind).exists)
        driven.tell("interrupt", context="c", call=number)
        head, _ = driven.next("raised")
        assert head["call"] == number
        assert head["failure"]["kind"] == ("exception" if kind == "other" else "cancelled")


@pytest.mark.parametrize("driven", [HostPatience(interrupt=30.0)], indirect=True)
def test_a_call_that_missed_its_interrupt_is_told_again(driven, tmp_path):
    """As one does whose wait begins just after the signal came: that one is not woken by it."""

    def deaf_at_first(state, items):
        ours = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        (tmp_path / "deaf").touch()
        while not (tmp_path / "told").exists():
            time.sleep(0.01)
        signal.signal(signal.SIGUSR1, ours)
        time.sleep(FOREVER)

    driven.load()
    driven.next("ready")
    number = driven.call(deaf_at_first, [1])
    eventually((tmp_path / "deaf").exists)
    driven.tell("interrupt", context="c", call=number)
    (tmp_path / "told").touch()
    head, _ = driven.next("raised")
    assert (head["call"], head["failure"]["kind"]) == (number, "cancelled")


def test_a_machine_without_room_is_no_reason_to_die(driven, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LibraryProcess, "_begin", full)
    driven.load()
    head, _ = driven.next("failed")
    assert (
        "cannot load it: [Errno 28] No space left on device; see that the worker's machine"
        in head["failure"]["message"]
    )
    monkeypatch.undo()
    driven.load()
    driven.next("ready")


def test_an_instruction_that_makes_no_sense_fails_its_call_alone(driven):
    driven.load()
    driven.next("ready")
    driven.tell("call", b"", call=7, context="c", function="never-sent", style="batch", insert=False)
    assert driven.next("raised")[0]["call"] == 7
    driven.host.handle("dance")
    number = driven.call(lambda state, items: items, [1])
    assert driven.next("finished")[0]["call"] == number


def test_junk_from_a_library_process_ends_only_it(driven):
    driven.load()
    driven.next("ready")

    def scribble(state, items):
        import socket

        for fd in range(3, 500):
            try:
                with socket.socket(fileno=os.dup(fd)) as end:
                    end.send(b"\xff" * 4 + b"\0" * 8 + b"junk" * 100)
            except OSError:
                continue
        os.closerange(3, 500)
        time.sleep(FOREVER)

    driven.call(scribble, [1])
    assert driven.next("died")[0]["failure"]["kind"] == "crash"
    driven.load()
    driven.next("ready")


def test_files_are_staged(driven, tmp_path):
    (tmp_path / "weights").write_text("42")
    cache = str(tmp_path / "cache")
    driven.tell("stage", context="c", files={"weights": [str(tmp_path / "weights"), "d42"]}, cache=cache)
    driven.next("staged")
    driven.tell("stage", context="c", files={"weights": [str(tmp_path / "no-such"), "d43"]}, cache=cache)
    message = driven.next("failed")[0]["failure"]["message"]
    assert message.startswith(f"No such file or directory while staging {tmp_path}/no-such to {cache}: ")


def test_stop_ends_everything(driven):
    driven.load()
    driven.next("ready")
    driven.call(lambda state, items: [os.fork() or time.sleep(FOREVER)], [1])
    child = pickle.loads(driven.next("finished")[1])[0]
    pid = driven.host._libraries["c"].process.pid
    driven.host.stop()
    assert not os.path.exists(f"/proc/{pid}")
    eventually(lambda: driven.host.bury_orphans() or not os.path.exists(f"/proc/{child}"))


class SlowToPark:
    """Parks when the file is there."""

    def __init__(self, go=None):
        self.go = go

    def park(self):
        if self.go is not None:
            Path(self.go).with_name("parks").touch()
        while self.go is not None and not os.path.exists(self.go):
            time.sleep(0.01)

    def wake(self):
        pass


def test_a_wake_that_waits_for_another_to_be_parked_is_for_the_process_that_was_parked(driven, tmp_path):
    go = tmp_path / "go"
    driven.load(SlowToPark, context="a")
    driven.next("ready")
    driven.call(lambda value, items: [os.getpid()], [1], context="a")
    pid = pickle.loads(driven.next("finished")[1])[0]
    driven.load(SlowToPark, str(go), context="b")
    driven.next("ready")
    driven.tell("park", context="a")
    driven.next("asleep")
    driven.tell("park", context="b")
    driven.tell("wake", context="a")
    os.kill(pid, signal.SIGKILL)
    assert driven.next("died")[0]["calls"] == []
    driven.load(SlowToPark, context="a", key="again")  # It waits too.
    go.touch()
    assert driven.next("asleep")[0]["context"] == "b"
    assert driven.next("ready")[0]["context"] == "a"
    driven.call(lambda value, items: [7], [1], context="a")
    driven.next("finished")


@pytest.mark.parametrize("driven", [HostPatience(move=FOREVER, trace=FOREVER)], indirect=True)
def test_one_that_hangs_where_it_parks_is_ended_with_what_it_is_at(driven, tmp_path):
    driven.load(SlowToPark, str(tmp_path / "go"), context="a", memory=1 << 40)
    driven.next("ready")
    driven.tell("park", context="a")
    while not (tmp_path / "parks").exists():
        driven.step()
    driven.host._libraries["a"].load_deadline = 0.0  # It is over once it parks, however late that is.
    failed = driven.next("failed")[0]["failure"]
    assert (failed["kind"], failed["error"]) == ("timeout", "Timeout")
    assert "in park" in failed["output"], "the last lines show where it is"
