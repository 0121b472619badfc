"""Ctrl-C, a driver that is killed, evictions, and how often a context is built: with whole programs."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import pytest
from executor_helpers import mapped_tenfold, marked, started

import ctxflow
import forked
from ctxflow import batch_app, context, ownership
from ctxflow.executors.contract import EngineFailed
from ctxflow.scheduler.core import Scheduler
from ctxflow.testing import Evictions
from waiting import eventually, exited, line, nothing_left, output

PROGRAM = """
    import subprocess, sys, time, warnings
    warnings.simplefilter("always", ResourceWarning)
    from ctxflow import ContextExecutor, batch_app

    @batch_app(batch_size=4)
    def app(numbers):
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        time.sleep(0.1)
        return numbers

    def main():
        {load}:
            for n in app.map(range(100_000)):
                if n == 8:
                    print("running", flush=True)

    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        {after}
"""
SOURCE = str(Path(ctxflow.__file__).parent.parent)
LOADS = {
    "alone": "with ContextExecutor(workers=2)",
    "parsl": "import parsl\n    with parsl.load(ContextExecutor.config(workers=2))",
}


class Program:
    """A driver in a process group of its own, found with all that it starts by a variable.

    :param executed: whether an interpreter is started for it, as a person does.
    """

    def __init__(self, directory, load="alone", after="pass", program=PROGRAM, executed=False):
        self.mark = uuid.uuid4().hex
        (directory / "program.py").write_text(textwrap.dedent(program).format(load=LOADS[load], after=after))
        self.process = (subprocess if executed else forked).Popen(
            [sys.executable, "program.py"],
            cwd=directory,
            env={**os.environ, "MARK": self.mark, "TMPDIR": str(directory), "PYTHONPATH": SOURCE},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def until(self, text):
        assert line(self.process.stdout).strip() == text

    def signal(self, number):
        self.process.send_signal(number)

    def end(self):
        out, err = output(self.process, within=200)
        return self.process.returncode, out.split(), err

    @property
    def left(self):
        return marked(self.mark)


@pytest.fixture
def program(tmp_path):
    programs = []

    def start(**options):
        programs.append(Program(tmp_path, **options))
        return programs[-1]

    yield start
    for each in programs:
        for pid in each.left:
            os.kill(pid, signal.SIGKILL)
        each.process.communicate()


@pytest.mark.parametrize("load", LOADS)
def test_an_interrupt_ends_a_map_cleanly(program, load, tmp_path):
    driver = program(load=load)
    driver.until("running")
    driver.signal(signal.SIGINT)
    status, out, err = driver.end()
    assert (status, out) == (0, ["interrupted"]), err
    assert err == ""
    nothing_left(lambda: driver.left)
    assert not list(tmp_path.glob("ctxflow-*")), "the workers' files are removed"


@pytest.mark.parametrize("load", LOADS)
def test_a_second_interrupt_stops_at_once(program, load, tmp_path):
    driver = program(load=load, executed=load == "alone")
    driver.until("running")
    driver.signal(signal.SIGINT)
    time.sleep(0.02)  # Signals that come together are one.
    eventually(lambda: driver.signal(signal.SIGINT) or driver.process.poll() is not None, pause=0.005)
    driver.end()
    nothing_left(lambda: driver.left)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_driver_that_is_killed(program, number, tmp_path):
    driver = program()
    driver.until("running")
    assert len(driver.left) >= 1 + 2 + 2 + 1, "driver, hosts, library processes, and what calls started"
    driver.signal(number)
    assert driver.end()[0] == -number
    nothing_left(lambda: driver.left)
    nothing_left(lambda: list(tmp_path.glob("ctxflow-*")), what="the workers' files are removed")


def test_nothing_outlives_a_killed_driver_whose_child_holds_its_connections(program):
    forked = """
        import os, time
        from ctxflow import ContextExecutor
        with ContextExecutor(workers=1) as executor:
            executor.submit(pow, {{}}, 2, 2).result()
            if os.fork() == 0:
                time.sleep(600)
            print("running", flush=True)
            time.sleep(600)
    """
    driver = program(program=forked)
    driver.until("running")
    driver.signal(signal.SIGKILL)
    exited(driver.process)
    eventually(lambda: len(driver.left) <= 1, what="only the driver's own child goes on")


def test_an_interrupted_program_can_go_on(program):
    """As in a notebook, whose cells are interrupted at any point; the scheduler's invariants hold after each."""
    on = """
        import os, random, signal, threading, time
        from ctxflow import ContextExecutor, batch_app

        @batch_app
        def app(numbers):
            return numbers

        armed, killing = threading.Event(), threading.Lock()

        def interrupt():
            times = random.Random(1)
            while armed.wait():
                time.sleep(times.uniform(0.002, 0.02))
                with killing:
                    if armed.is_set():
                        os.kill(os.getpid(), signal.SIGINT)

        def disarm():
            armed.clear()
            with killing:
                time.sleep(0)  # If another was on its way, it comes no later than here.

        def cell():
            try:
                armed.set()
                for n in app.map(range(100_000_000)):
                    pass
            except KeyboardInterrupt:
                armed.clear()

        threading.Thread(target=interrupt, daemon=True).start()
        with ContextExecutor(workers=2) as executor:
            for _ in range(50):
                try:
                    cell()
                    disarm()
                except KeyboardInterrupt:
                    disarm()
                executor.run.validate()
                assert list(app.map(range(100))) == list(range(100))
            print("done", flush=True)
    """
    status, out, err = program(program=on).end()
    assert (status, out) == (0, ["done"]), err


@pytest.fixture
def at_event(monkeypatch):
    """Call `action` once, when the main thread passes the scheduler its first event of a kind."""

    def do(kind, action):
        handle, met = Scheduler.handle, []

        def handled(scheduler, event):
            if type(event).__name__ == kind and not met and threading.current_thread() is threading.main_thread():
                met.append(event)
                action()
            return handle(scheduler, event)

        monkeypatch.setattr(Scheduler, "handle", handled)
        return met

    return do


def interrupted(seconds=0.0):
    """Interrupt this process, and again after `seconds` where any are given, as a person does who waits."""
    signal.raise_signal(signal.SIGINT)
    time.sleep(seconds)
    if seconds:
        signal.raise_signal(signal.SIGINT)


@context
def ten():
    return 10


@batch_app(ten())
def times_ten(ten, numbers):
    return [ten * n for n in numbers]


@pytest.mark.parametrize("kind", ["ContextDeclared", "AppDeclared", "ItemsSubmitted", "ItemsCancelled"])
@pytest.mark.parametrize("seconds", [0.0, 0.3], ids=["once", "twice"])
def test_an_interrupt_leaves_no_decision_half_made(tmp_path, monkeypatch, at_event, kind, seconds):
    monkeypatch.setattr(ownership, "_INTERRUPT_SECONDS", 0.1)
    with started(tmp_path / "run") as executor:
        met = at_event(kind, lambda: interrupted(seconds))
        with pytest.raises(KeyboardInterrupt):
            times_ten(1).cancel()
        assert met
        executor.run.validate()
        assert list(times_ten.map(range(100))) == [10 * n for n in range(100)]


def test_a_decision_that_no_interrupt_may_wait_for_ends_the_run(tmp_path, monkeypatch, at_event):
    monkeypatch.setattr(ownership, "_INTERRUPT_SECONDS", 0.1)
    monkeypatch.setattr(ownership, "_BROKEN_OFF_SECONDS", 0.1)
    with started(tmp_path / "run"):
        at_event("ItemsSubmitted", lambda: interrupted(0.3))
        with pytest.raises(KeyboardInterrupt):
            times_ten(1)
        with pytest.raises(EngineFailed, match="it was interrupted within a decision"):
            times_ten(1).result()


# --- how often a context is built


def counted(directory, seconds):
    place = str(directory)

    @context
    def built():
        import os
        import time

        with open(os.path.join(place, f"built-{os.getpid()}"), "a") as file:
            file.write("built\n")
        time.sleep(seconds)
        return 10

    @batch_app(built(), batch_size=50)
    def app(ten, numbers):
        time.sleep(0.02)
        return [ten * n for n in numbers]

    return app


def builds(directory):
    return sum(len(file.read_text().splitlines()) for file in directory.glob("built-*"))


def test_a_context_is_built_once_a_worker(tmp_path):
    app = counted(tmp_path, 0.5)
    with started(tmp_path / "run", workers=4) as executor:
        eventually(lambda: executor.connected_workers == 4)
        assert list(app.map(range(10_000))) == [10 * n for n in range(10_000)]
        eventually(lambda: builds(tmp_path) >= 4)
        assert builds(tmp_path) == executor.status().loads == 4


def test_every_eviction_costs_one_build_at_most_and_no_item(tmp_path):
    app = counted(tmp_path, 0.1)
    with started(tmp_path / "run", workers=4) as executor:
        with Evictions(executor, per_minute=400, seed=2, rejoin_seconds=0.1, at_most=30) as evictions:
            mapped = mapped_tenfold(app, 10_000, evictions)
        status = executor.status()
    assert evictions.count > 0
    assert status.loads <= builds(tmp_path) <= 4 + evictions.count
    assert (status.items_dead, status.items_done) == (0, mapped)
