"""All ends of a driver, as whole programs: what is waited for, what is cancelled and told, and that nothing is left."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest
from executor_helpers import marked, started

import ctxflow
import forked
from ctxflow import RunEnded
from waiting import FOREVER, exited, line, nothing_left, output

SOURCE = str(Path(ctxflow.__file__).parent.parent)
HEAD = """
import os, signal, sys, threading, time, warnings
warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # From 3.12 on, of any fork beside threads.
import parsl
from ctxflow import ContextExecutor, batch_app

def slow(n, seconds=0.1):
    time.sleep(seconds)
    return n

@parsl.python_app
def slow_app(n, seconds):
    import time
    time.sleep(seconds)
    return n

@batch_app(batch_size=1)
def item(numbers):
    time.sleep(0.1)
    return numbers

def report(futures):
    for future in futures:
        error = future.exception() if future.done() else "open"
        print(type(error).__name__ if isinstance(error, BaseException) else error or future.result())
"""
LOADS = {"alone": "ContextExecutor(workers=1)", "parsl": "parsl.load(ContextExecutor.config(workers=1))"}
CALLS = {"alone": "executor.submit(slow, {}, n, @seconds@)", "parsl": "slow_app(n, @seconds@)"}


class Driver:
    """A program in a process group of its own, found with all that it starts by a variable.

    :param executed: whether an interpreter is started for it, as a person does.
    """

    def __init__(self, directory, body, executed=False, **values):
        self.mark = uuid.uuid4().hex
        self.directory = directory
        text = HEAD + textwrap.dedent(body)
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        (directory / "program.py").write_text(text)
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
        assert line(self.process.stdout).strip() == text, output(self.process)[1]

    def end(self):
        """Its exit status, the lines of its output, and its standard error; nothing of it is left then."""
        out, err = output(self.process)
        nothing_left(lambda: marked(self.mark))
        assert not list(self.directory.glob("ctxflow-*")), "the workers' files are removed"
        return self.process.returncode, out.split(), err


@pytest.fixture
def driver(tmp_path):
    drivers = []

    def start(body, load="alone", seconds=0.1, **more):
        drivers.append(Driver(tmp_path, body, load=LOADS[load], call=CALLS[load], seconds=str(seconds), **more))
        return drivers[-1]

    yield start
    for each in drivers:
        for pid in marked(each.mark):
            os.kill(pid, signal.SIGKILL)
        each.process.communicate()


BLOCK = """
def main():
    global futures
    with @load@ as executor:
        futures = [@call@ for n in range(1, 5)]
        @end@

try:
    main()
except (KeyboardInterrupt, ZeroDivisionError) as error:
    print(type(error).__name__)
finally:
    report(futures)
"""
DONE = ["1", "2", "3", "4"]
CANCELLED = ["RunEnded"] * 4


def told(why):
    return rf"\d\d:\d\d:\d\d ctxflow: 4 calls cancelled before an answer came: {why}\n"


@pytest.mark.parametrize(
    ("load", "executed", "end", "status", "out", "err"),
    [
        ("alone", False, "sys.exit(3)", 3, CANCELLED, told("the block ended with SystemExit")),
        ("parsl", True, "return", 0, DONE, ""),
        ("parsl", False, "1 / 0", 0, ["ZeroDivisionError", *CANCELLED], told("the block ended with ZeroDivisionError")),
        ("parsl", True, "sys.exit(3)", 3, CANCELLED, told("the block ended with SystemExit")),
    ],
)
def test_how_a_program_leaves_the_block(driver, load, executed, end, status, out, err):
    seconds = 0.1 if out == DONE else FOREVER
    got_status, got_out, got_err = driver(BLOCK, load, seconds, executed=executed, end=end).end()
    lines = [line for line in got_err.splitlines(keepends=True) if "waiting for" not in line]
    text = re.sub(r"\d calls?", "4 calls", "".join(lines))  # Parsl may have had others on their way.
    assert (got_status, got_out) == (status, out)
    assert re.fullmatch(err, text)


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_how_a_block_ends(tmp_path, capsys, error):
    with contextlib.suppress(BaseException if error else ()), started(tmp_path / "run", workers=1) as executor:
        futures = [executor.submit(time.sleep, {}, FOREVER if error else 0.1) for _ in range(4)]
        if error:
            raise error
    ends = [future.exception(timeout=0) for future in futures]
    err = capsys.readouterr().err
    if error is None:
        assert ends == [None] * 4
        assert "cancelled" not in err
    else:
        assert [type(end) for end in ends] == [RunEnded] * 4
        assert re.fullmatch(told(f"the block ended with {error.__name__}"), err)


@pytest.mark.parametrize("load", LOADS)
def test_a_wait_tells_for_what_and_ctrl_c_ends_it(driver, load):
    program = """
        import logging
        logging.basicConfig(filename="log")  # A line for the person goes to the terminal, wherever the log goes.
        try:
            with @load@ as executor:
                futures = [@call@ for n in range(1, 400)]
                futures[0].result()
                print("running", flush=True)
        except KeyboardInterrupt:
            print(type(futures[-1].exception()).__name__, flush=True)  # As in a notebook, which goes on.
    """
    running = driver(program, load, executed=load == "alone")
    running.until("running")
    line = running.process.stderr.readline()
    assert re.match(r"\d\d:\d\d:\d\d ctxflow: waiting for 3\d\d calls \(1 worker\); Ctrl-C cancels what is left", line)
    running.process.send_signal(signal.SIGINT)
    status, out, err = running.end()
    assert (status, out) == (0, ["RunEnded"])
    assert re.match(r"\d\d:\d\d:\d\d ctxflow: [23]\d\d calls cancelled before an answer came", err)


@pytest.mark.parametrize("load", LOADS)
def test_a_map_that_nobody_reads_on_is_closed_and_calls_are_waited_for(driver, load):
    program = """
        @ctxflow.batch_app(batch_size=1)
        def late(numbers):
            time.sleep(0.5)
            return numbers

        with @load@ as executor:
            results = late.map(range(1000), resume="kept.jsonl")
            print(next(results))
            future = item(7)
        print(future.result())
        try:
            print(*results)
        except ctxflow.RunEnded as error:
            print(type(error).__name__)
        print(len(open("kept.jsonl").readlines()) < 20)
    """
    status, out, err = driver("import ctxflow\n" + textwrap.dedent(program), load).end()
    assert (status, out) == (0, ["0", "7", "RunEnded", "True"]), err
    assert "cancelled" not in err


def test_a_map_that_another_thread_reads_is_waited_for(driver):
    program = """
        begun = threading.Event()

        def read():
            results = item.map(range(5))
            first = next(results)
            begun.set()
            print(first + sum(results))

        with @load@ as executor:
            thread = threading.Thread(target=read)
            thread.start()
            executor.submit(slow, {}, 0).result()
            begun.wait()
        thread.join()
    """
    assert driver(program).end()[:2] == (0, ["10"])


def test_calls_that_callbacks_make_are_waited_for(driver):
    program = """
        made = []
        with @load@ as executor:
            first = executor.submit(slow, {}, 1)
            first.add_done_callback(lambda future: made.append(executor.submit(slow, {}, future.result() + 1)))
        report([first, *made])
    """
    assert driver(program).end()[:2] == (0, ["1", "2"])


def test_a_program_that_never_leaves_its_executor_says_what_that_costs(driver):
    program = """
        executor = @load@
        executor.start()
        futures = [@call@ for n in range(3)]
    """
    status, _, err = driver(program, seconds=FOREVER, executed=True).end()
    assert status == 0
    assert err[9:].startswith("ctxflow: 3 calls cancelled before an answer came: the program ended")


@pytest.mark.parametrize(("load", "number"), [("parsl", signal.SIGKILL), ("alone", signal.SIGTERM)])
def test_a_driver_that_is_killed_leaves_nothing(driver, load, number):
    program = """
        with @load@ as executor:
            futures = [@call@ for n in range(100)]
            futures[0].result()
            print("running", flush=True)
    """
    running = driver(program, load, executed=load == "alone")
    running.until("running")
    running.process.send_signal(number)
    exited(running.process)
    nothing_left(lambda: list(running.directory.glob("ctxflow-*")))
    assert running.end()[0] == -number


# --- forks

FORKS = """
import gc, multiprocessing, subprocess
from ctxflow import CtxflowError, session_app

@session_app
def count(states, prompts):
    for state in states:
        yield (state or 0) + 1, (state or 0) + 1

def is_refused(use):
    try:
        use()
    except CtxflowError as error:
        return "which alone can use it" in str(error)
    except Exception as error:
        return type(error).__name__ == "NoDataFlowKernelError" or repr(error)  # What Parsl says.
    return "it may"

def child(executor, results, session, pending):
    uses = [
        lambda: item(1).result(5), lambda: list(item.map([1])), lambda: list(results), count.open,
        lambda: session.prompt(1), lambda: @call@.result(5),
    ]
    if isinstance(executor, ContextExecutor):
        uses += [pending.result, executor.status, lambda: executor.submit(slow, {}, 1).result(5)]
    found = [is_refused(use) for use in uses]
    if isinstance(executor, ContextExecutor):
        pending.cancel()
    if found != [True] * len(found):
        print("child", found, flush=True)
    results.close()
    session.close()
    del results
    gc.collect()

n, main, children = 5, os.getpid(), []
with @load@ as executor:
    results = item.map(range(40), resume="kept.jsonl", window=8)
    first = next(results)
    session = count.open()
    session.take()
    for end in ("", "sys.exit(0)", "os._exit(0)"):
        pending = @call@
        pid = os.fork()
        if not pid:
            child(executor, results, session, pending)
            exec(end)
            break
        children.append(pid)
    if os.getpid() == main:
        process = multiprocessing.get_context("fork").Process(target=gc.collect)
        process.start()
        process.join()
        status = subprocess.run(["true"], preexec_fn=gc.collect).returncode
        print(*[os.waitpid(pid, 0)[1] for pid in children], process.exitcode, status)
        print(session.take(), sum([first, *results]), pending.result())
if os.getpid() == main:
    print(len(open("kept.jsonl").readlines()))
"""


@pytest.mark.parametrize("load", LOADS)
def test_a_forked_child_owns_nothing(driver, load):
    """Whatever a child does, the parent's calls, map, files and processes are as if it had never been."""
    running = driver(FORKS, load)
    status, out, err = running.end()
    err = "".join(line for line in err.splitlines() if "waiting for" not in line)
    assert (status, out, err) == (0, ["0"] * 5 + ["2", "780", "5", "41"], "")
    (log,) = [path.read_text() for path in running.directory.rglob("events.jsonl")]
    assert log.count('{"run":') == 1, "the event log is written by one process"


def test_a_forked_child_may_have_an_executor_of_its_own(driver):
    program = """
        with @load@ as executor:
            pid = os.fork()
            if not pid:
                with ContextExecutor(workers=1) as own:
                    print(item(6).result(), own.submit(slow, {}, 7).result(), flush=True)
                os._exit(0)
            print(os.waitpid(pid, 0)[1], item(5).result())
    """
    assert driver(program).end()[:2] == (0, ["6", "7", "0", "5"])
