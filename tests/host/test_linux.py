"""What is asked of Linux about processes, and which errors look like the machine's."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import time
import warnings

import pytest

from ctxflow.host.linux import (
    bury_orphans,
    descendants,
    ended_within,
    holds_gpu,
    kill_marked,
    kill_session,
    kill_tree,
    looks_like_the_machine,
    process_state,
    proportional_bytes,
    python_path,
    readable,
    readable_soon,
    resident_bytes,
    session_members,
    tree_bytes,
)
from waiting import FOREVER, eventually, nothing_left, patience


@pytest.fixture
def shell():
    processes = []

    def start(script, **options):
        processes.append(subprocess.Popen(["bash", "-c", script], **options))
        return processes[-1]

    yield start
    for process in processes:
        kill_tree(process.pid)
        process.communicate()


def test_a_tree_is_found_and_ended_with_what_left_the_session(shell):
    process = shell("sleep 600 & setsid bash -c 'sleep 600 & sleep 600' & read", stdin=subprocess.PIPE)
    eventually(lambda: len(descendants(process.pid)) == 4)
    pids = descendants(process.pid)
    kill_tree(process.pid)
    assert process.wait() == -9
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def test_a_tree_whose_top_is_dead_is_ended_by_its_group(shell):
    process = shell("sleep 600 & exec sleep 600", start_new_session=True)
    eventually(lambda: len(descendants(process.pid)) == 1)
    (child,) = descendants(process.pid)
    os.kill(process.pid, 9)
    nothing_left(lambda: descendants(process.pid))
    kill_tree(process.pid)
    eventually(lambda: not os.path.exists(f"/proc/{child}"))


def test_a_session_is_ended_when_its_leader_is_dead(shell):
    process = shell("set -m; sleep 600 & exec sleep 600", start_new_session=True)
    eventually(lambda: len(session_members(process.pid)) == 2)
    os.kill(process.pid, 9)
    process.wait()
    kill_session(process.pid)
    nothing_left(lambda: session_members(process.pid))


def test_orphans_are_buried_and_own_children_are_left_to_their_owner(shell):
    mine = shell("exit 3")
    orphan = os.fork()
    if orphan == 0:
        os._exit(0)
    eventually(lambda: process_state(mine.pid) == "Z" and process_state(orphan) == "Z")
    for _ in range(2):
        bury_orphans([mine.pid])
    assert mine.wait() == 3
    bury_orphans([])
    assert not os.path.exists(f"/proc/{orphan}")
    bury_orphans([])


def test_a_process_that_does_not_end_in_time_is_reaped_later_whoever_keeps_it():
    process = subprocess.Popen(["sleep", "600"])
    pid = process.pid
    assert not ended_within(process, 0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        del process
        gc.collect()
    assert not [each for each in told if str(pid) in str(each.message)]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: process_state(pid) == "Z")
    with subprocess.Popen(["true"]) as another:
        assert ended_within(another, patience())
    assert process_state(pid) == ""


def test_memory_is_measured_and_shared_pages_are_counted_once():
    block = bytearray(os.urandom(1 << 20) * 100)
    children = []
    for _ in range(3):
        if not (pid := os.fork()):
            time.sleep(FOREVER)
        children.append(pid)
    try:
        here = resident_bytes(os.getpid())
        assert here > len(block)
        assert tree_bytes([os.getpid()], 1 << 50) > 4 * len(block), "quickly"
        assert tree_bytes([os.getpid()]) < 2.5 * len(block) + here, "exactly"
        assert proportional_bytes(os.getpid()) <= here
    finally:
        for pid in children:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("opened", "holds"), [(["/dev/null", "/dev/nvidia1"], True), (["/dev/nvidiactl", "socket:[1]"], False), ([], False)]
)
def test_who_holds_a_gpu(tmp_path, opened, holds):
    folder = tmp_path / "7" / "fd"
    folder.mkdir(parents=True)
    for number, target in enumerate(opened):
        (folder / str(number)).symlink_to(target)
    assert holds_gpu(7, str(tmp_path)) is holds
    assert not holds_gpu(8, str(tmp_path))
    assert not holds_gpu(os.getpid())


def test_a_machine_that_stood_still_is_given_time_after_that(monkeypatch):
    """Timeouts have passed then, although nothing could come."""
    read_end, write_end = os.pipe()
    looks = []

    def stands_still(descriptor, seconds):
        looks.append(seconds)
        if len(looks) == 10:
            os.write(write_end, b".")
        return readable(descriptor, 0)

    monkeypatch.setattr("ctxflow.host.linux.readable", stands_still)
    assert readable_soon(read_end) and len(looks) == 10
    os.read(read_end, 1)
    assert not readable_soon(read_end) and sum(looks) == 20.0
    os.close(write_end)
    os.close(read_end)


def test_processes_that_are_gone_have_nothing(shell):
    process = shell("exit 0")
    process.wait()
    assert (resident_bytes(process.pid), proportional_bytes(process.pid), descendants(process.pid)) == (
        0,
        0,
        [],
    )
    kill_tree(process.pid)
    kill_session(process.pid)


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class OutOfMemoryError(RuntimeError):
    """As torch has it."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled system error"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("Found no NVIDIA driver on your system: the driver is not loaded"),
        RuntimeError("GPU has fallen off the bus (Xid 79)"),
        ValueError("write failed: No space left on device"),
        OSError(errno.EIO, "Input/output error"),
        ConnectionResetError("peer"),
        ModuleNotFoundError("No module named 'torch'"),
        ImportError("libcudart.so.12: cannot open shared object file"),
    ],
    ids=str,
)
def test_what_bad_machines_raise(error: Exception) -> None:
    assert looks_like_the_machine(error)
    try:
        raise KeyError("model") from error
    except KeyError as wrapped:
        assert looks_like_the_machine(wrapped), "what it was raised from counts"


@pytest.mark.parametrize(
    "error",
    [
        KeyError("claim"),
        ValueError("no such device in the row"),
        json.JSONDecodeError("Expecting value", "x", 0),
        OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        MemoryError(),
        AssertionError("the driver licence has expired: secCURE"),
        Silent(),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_what_rows_and_apps_raise(error: BaseException) -> None:
    assert not looks_like_the_machine(error)


def test_a_circle_of_causes_ends() -> None:
    one, other = KeyError("one"), KeyError("other")
    one.__cause__, other.__cause__ = other, one
    assert not looks_like_the_machine(one)


_WAITS_FOR_A_SIGNAL = """
import signal, time
from ctxflow.host.linux import next_signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGALRM])
while True:
    print(time.monotonic() + 0.3, flush=True)
    print(next_signal([signal.SIGUSR1], 0.3), flush=True)
"""


@pytest.mark.parametrize("meanwhile", [None, signal.SIGUSR1])
def test_a_process_that_was_stopped_beyond_its_time_waits_for_true_signals(meanwhile):
    words = [sys.executable, "-c", _WAITS_FOR_A_SIGNAL]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, **python_path()}) as process:
        was_stopped = False
        while not was_stopped:  # Before its time was over, that is.
            until = float(process.stdout.readline())
            eventually(lambda: process_state(process.pid) == "S")
            process.send_signal(signal.SIGSTOP)
            eventually(lambda: process_state(process.pid) == "T")
            was_stopped = time.monotonic() < until
            eventually(lambda until=until: time.monotonic() > until)
            if was_stopped and meanwhile:
                process.send_signal(meanwhile)
            process.send_signal(signal.SIGCONT)
            found = process.stdout.readline().strip()
        if meanwhile and found == "None":  # Its time was over first; then it has the signal the next time.
            process.stdout.readline()
            found = process.stdout.readline().strip()
        process.kill()
    assert found == (str(int(meanwhile)) if meanwhile else "None")


_FLEEING = {  # They end when nobody reads what they print.
    "forks": "import os\nwhile True:\n    if os.fork(): os._exit(0)\n    os.write(1, b'.')",
    "executes": "import os\nos.execvp('sh', ['sh', '-c', os.environ['RUN']])",
}


@pytest.mark.parametrize("how", _FLEEING)
def test_a_marked_process_is_found_though_it_goes_on_as_another(how):
    for attempt in range(10):
        mark = f"{os.getpid()}-{how}-{attempt}"
        environment = {**os.environ, "MARK": mark, "RUN": 'echo || exit; exec sh -c "$RUN"'}
        words = [sys.executable, "-c", _FLEEING[how]]
        with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, start_new_session=True) as first:
            first.stdout.read(1)
            kill_marked("MARK", mark, patience())
            first.communicate(timeout=patience())  # Its end: nobody has it open any more.
