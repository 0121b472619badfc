"""Bad apps and inputs: each gets one clear error, and everything else goes on."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from ctxflow import CallCrashed, CallTimeout, batch_app, context_app
from ctxflow.errors import RemoteError, RemoteTraceback
from waiting import FOREVER, finished

pytestmark = pytest.mark.usefixtures("running")


def bad_one_of(bad, items=100, **options):
    """A map over many items, one of which is 66 and does `bad`; gives its answer, having checked the others'."""

    @batch_app(batch_size=4, **options)
    def app(numbers):
        return [bad(n) if n == 66 else n * n for n in numbers]

    answers = list(app.map(range(items), on_error="return"))
    assert [a for n, a in enumerate(answers) if n != 66] == [n * n for n in range(items) if n != 66]
    assert list(app.map(range(5))) == [0, 1, 4, 9, 16], "the next call must work"
    return answers[66]


def remote(error):
    """What the worker saw, as the person gets to read it."""
    assert isinstance(error.__cause__, RemoteTraceback)
    return str(error.__cause__)


# --- apps that raise


def test_one_item_in_a_hundred_raises():
    def bad(n):
        print("looking at", n)
        raise KeyError(f"no entry {n}")

    error = bad_one_of(bad)
    assert type(error) is KeyError
    assert error.args == ("no entry 66",)
    seen = remote(error)
    assert "test_bad_input.py" in seen
    assert "looking at 66" in seen.split("last lines that it printed:")[1]


def test_map_raises_the_first_error_and_the_next_map_works():
    @batch_app
    def app(numbers):
        return [1 // n for n in numbers]

    with pytest.raises(ZeroDivisionError) as caught:
        list(app.map([1, 0, 1]))
    assert "1 // n" in remote(caught.value)
    assert list(app.map([1])) == [1]


class Unpicklable(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


class OpensNowhere(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (lambda: Unpicklable("it broke"), "Unpicklable: it broke"),
        (lambda: OpensNowhere(1, 2), "OpensNowhere: 1 and 2"),
    ],
)
def test_exceptions_that_cannot_be_pickled_arrive_as_text(error, said):
    def bad(n):
        raise error()

    got = bad_one_of(bad)
    assert isinstance(got, RemoteError)
    assert str(got) == said
    assert "raise error()" in got.remote_traceback


def test_an_exception_that_cannot_even_be_printed():
    def bad(n):
        raise Unprintable

    assert isinstance(bad_one_of(bad), (RemoteError, Unprintable))


def test_sys_exit_ends_neither_worker_nor_driver():
    error = bad_one_of(lambda n: sys.exit(3))
    assert isinstance(error, RemoteError)
    assert str(error) == "SystemExit: exit(3) was called: raise an exception instead"


def test_a_missing_package_is_named():
    def bad(n):
        import surely_not_installed

        return surely_not_installed.f(n)

    error = bad_one_of(bad)
    assert isinstance(error, ModuleNotFoundError)
    assert "surely_not_installed" in str(error)


# --- apps that take their process down


def test_os_exit():
    error = bad_one_of(lambda n: os._exit(5))
    assert isinstance(error, CallCrashed)
    assert "exit status 5: raise an exception instead of calling os._exit" in str(error)


def test_segfault_shows_where():
    error = bad_one_of(lambda n: ctypes.string_at(0))
    assert isinstance(error, CallCrashed)
    assert "killed by SIGSEGV: compiled code that it uses has crashed" in str(error)
    assert "string_at" in remote(error)


def test_sigkill():
    error = bad_one_of(lambda n: os.kill(os.getpid(), signal.SIGKILL))
    assert isinstance(error, CallCrashed)
    assert "killed by SIGKILL: the machine's memory may be exhausted" in str(error)


def test_descriptors_closed_behind_our_back():
    error = bad_one_of(lambda n: os.closerange(3, 64))
    assert isinstance(error, (CallCrashed, RemoteError))


def test_a_call_past_its_timeout_is_ended_and_says_where_it_was():
    def bad(n):
        print("going to sleep")
        time.sleep(FOREVER)

    error = bad_one_of(bad, timeout=2)
    assert isinstance(error, CallTimeout)
    assert "its timeout of 2 s: raise that, make batches smaller" in str(error)
    assert "going to sleep" in remote(error)
    assert "in bad" in remote(error)


# --- apps that make a mess


def test_a_hundred_megabytes_of_output():
    def bad(n):
        for _ in range(100):
            sys.stdout.write("x" * 999_999 + "\n")
        print("the end")
        raise ValueError("loud")

    error = bad_one_of(bad)
    assert str(error) == "loud"
    assert "x\nthe end" in remote(error)
    assert len(remote(error)) < 10_000


def test_a_result_that_cannot_be_pickled_is_named():
    error = bad_one_of(lambda n: {"lock": threading.Lock()})
    assert isinstance(error, TypeError)
    assert "the _thread.lock object at [0]['lock'] cannot be pickled" in str(error)
    assert str(error).endswith("return plain data instead")


class OpensOnWorkersOnly:
    def __reduce__(self):
        return _open, (os.getpid(),)


def _open(pid):
    if os.getpid() == DRIVER:
        raise RuntimeError("not here")
    return OpensOnWorkersOnly()


DRIVER = os.getpid()


class OpensWithExit:
    def __reduce__(self):
        return sys.exit, (1,)


def test_a_result_that_cannot_be_opened_in_the_driver():
    driver = os.getpid()

    def reopen():
        if os.getpid() == driver:
            raise RuntimeError("not here")

    class Result:
        def __reduce__(self):
            return reopen, ()

    error = bad_one_of(lambda n: Result())
    assert isinstance(error, RemoteError)
    assert "RuntimeError: the app's result cannot be opened here (not here): return plain data" in str(error)


def test_a_result_that_exits_when_opened():
    assert isinstance(bad_one_of(lambda n: OpensWithExit()), RemoteError)


def test_children_that_outlive_their_call_do_no_harm(running):
    def bad(n):
        subprocess.Popen(["sleep", "600"])
        if os.fork() == 0:
            time.sleep(FOREVER)
        return -n

    assert bad_one_of(bad) == -66


def test_a_fork_that_returns_into_the_call():
    def bad(n):
        os.fork()
        return -n

    assert bad_one_of(bad) == -66


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing_inside_a_call(method):
    @context_app
    def app(count):
        import multiprocessing

        with multiprocessing.get_context(method).Pool(2) as pool:
            return pool.map(abs, range(-count, 0))

    assert finished(app(3)).result() == [3, 2, 1]


@pytest.mark.parametrize(
    "mess",
    [
        lambda: os.chdir("/"),
        lambda: print(end="", flush=True) or sys.stdout.close(),
        lambda: os.close(1),
        lambda: os.close(2),
        lambda: setattr(sys, "stdout", None),
        lambda: [signal.signal(each, signal.SIG_IGN) for each in (signal.SIGTERM, signal.SIGUSR1)],
    ],
    ids=["cd", "close", "close-1", "close-2", "none", "signal"],
)
def test_the_next_call_finds_everything_in_place(mess):
    def bad(n):
        mess()
        return -n

    assert bad_one_of(bad) == -66

    @context_app
    def look():
        print("still heard", flush=True)
        sys.stderr.write("here too\n")
        return os.getcwd(), [signal.getsignal(each) is signal.SIG_IGN for each in (signal.SIGTERM, signal.SIGUSR1)]

    assert [finished(look()).result() for _ in range(4)] == [(os.getcwd(), [False, False])] * 4
