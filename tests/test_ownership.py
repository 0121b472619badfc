"""What one process owns: files that it adds to; and who lives, by what the kernel says of a process, by no clock."""

import dis
import functools
import itertools
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from ctxflow.ownership import AppendFile, InterruptibleCondition, birth_of, lives
from waiting import joined, patience


@pytest.fixture
def file(tmp_path):
    file = AppendFile(tmp_path / "deep" / "lines")
    yield file
    file.close()


def test_what_is_added_is_there_and_can_be_cut_off(file):
    file.append(b"one\n")
    file.append(b"two\nthr")
    assert (file.size, file.actual_size(), file.path.read_bytes()) == (11, 11, b"one\ntwo\nthr")
    assert list(file.lines(0)) == [(0, b"one\n"), (4, b"two\n")]
    assert list(file.lines(4)) == [(4, b"two\n")]
    assert not file.cut(11) and file.cut(8)
    file.append(b"more\n")
    assert file.path.read_bytes() == b"one\ntwo\nmore\n"
    assert file.cut(0) and file.path.read_bytes() == b""


def test_what_a_full_disk_left_half_is_cut_off(file, monkeypatch):
    write = os.pwrite
    file.append(b"one\n")

    def half(descriptor, data, offset):
        write(descriptor, data[:3], offset)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "pwrite", half)
        file.append(b"twelve\n")
    assert (file.size, file.actual_size()) == (4, 4)
    file.append(b"2\n")
    assert file.cut(file.size) and file.path.read_bytes() == b"one\n2\n"


def test_writes_that_take_part_of_the_data_are_gone_on_with(file, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: write(descriptor, data[:2], offset))
    file.append(b"a longer line\n")
    assert file.path.read_bytes() == b"a longer line\n"


def test_a_lock_keeps_others_out_until_its_process_is_gone(file):
    program = (
        "import sys, pathlib, time; from ctxflow.ownership import AppendFile\n"
        "file = AppendFile(pathlib.Path(sys.argv[1])); file.lock(file.path); print('locked', flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(file.path)], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(ValueError, match="out is being written by another driver: wait for it, or name another"):
            file.lock(file.path.with_name("out"))
        other.kill()
    file.lock(file.path)


def test_private_files_are_for_their_user_alone(tmp_path, monkeypatch):
    AppendFile(tmp_path / "mine", private=True).close()
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o600
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(ValueError, match="belongs to another user"):
        AppendFile(tmp_path / "mine", private=True)
    AppendFile(tmp_path / "mine").close()


@pytest.mark.parametrize("name", [".", "file/below"])
def test_what_cannot_be_written_is_named(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written: "):
        AppendFile(tmp_path / name)


def test_a_full_disk_is_told_with_the_files_name():
    file = AppendFile(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        file.append(b"line\n")
    assert file.size == 0
    file.close()


def test_a_link_is_not_followed(tmp_path):
    precious, link = tmp_path / "precious", tmp_path / "out.jsonl.errors.jsonl"
    precious.write_text("mine")
    link.symlink_to(precious)
    with pytest.raises(ValueError, match="is a link, which is not followed"):
        AppendFile(link)
    assert precious.read_text() == "mine"


def test_a_process_lives_until_it_ends():
    with subprocess.Popen(["sleep", "60"]) as process:
        born = birth_of(process.pid)
        assert born and lives(process.pid, born) and lives(process.pid, "") and lives(process.pid, None)
        assert not lives(process.pid, "1@an-earlier-boot"), "its number is another's now"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not lives(process.pid, born), "a zombie is dead"
    assert not lives(process.pid, born) and birth_of(process.pid) is None


def test_a_process_of_another_pid_namespace_is_neither_alive_nor_dead():
    born = birth_of(os.getpid())
    start, boot, namespace = born.split("@")
    assert lives(os.getpid(), f"{start}@{boot}@1") is None and lives(2**22 + 1, f"{start}@{boot}@1") is None
    assert lives(os.getpid(), f"1@{boot}@{namespace}") is False
    assert lives(os.getpid(), f"{start}@{boot}") is True, "as earlier versions wrote it"
    assert lives(os.getpid(), f"1@{boot}") is False


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a PID namespace")
def test_who_is_in_a_container_of_this_machine_is_not_seen_from_here():
    program = "import os; from ctxflow.ownership import birth_of, lives; born = birth_of(os.getpid())"
    program += "; print(os.getpid(), born, lives(os.getpid(), born))"
    words = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"there are no PID namespaces: {done.stderr}")
    pid, born, alive = done.stdout.split()
    assert alive == "True" and lives(int(pid), born) is None


def test_a_name_may_hold_anything(tmp_path):
    program = tmp_path / "a) Z 1 (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as process:
        assert lives(process.pid, birth_of(process.pid))
        process.kill()


@pytest.mark.parametrize("pid", [0, -1, 2**22 + 1, 2**70])
def test_there_is_no_process_of_such_a_number(pid):
    assert not lives(pid, "")


def test_what_this_user_may_not_see_is_taken_for_alive(monkeypatch):
    def hidden(path, *_):
        raise FileNotFoundError(2, "No such file", path)

    def not_ours(pid, signal):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("builtins.open", hidden)
    monkeypatch.setattr(os, "kill", not_ours)
    assert birth_of(1) == "" and lives(1, "17@boot")


def test_the_clock_says_nothing_of_it(clock_steps):
    born = birth_of(os.getpid())
    with clock_steps(86_400):
        assert birth_of(os.getpid()) == born


def test_who_waits_for_a_condition_is_woken():
    condition, there = InterruptibleCondition(), []
    waiting = [threading.Thread(target=condition.wait_for, args=(lambda: there,), daemon=True) for _ in range(3)]
    for each in waiting:
        each.start()
    with condition.lock:
        there.append(1)
        condition.notify_all()
    for each in waiting:
        joined(each)
    assert condition.wait_for(lambda: there) and not condition.wait_for(lambda: False, 0.01)


# After these Python looks whether there was a signal.
LOOKING = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME"}


def interrupted_at(place, function):
    """Call a function, with an interrupt at one of the places where one can come; whether it has so many."""
    before: dict[types.FrameType, int] = {}
    found = itertools.count()

    def trace(frame, event, _):
        frame.f_trace_opcodes = True
        if event == "opcode":
            last, before[frame] = before.get(frame), frame.f_lasti
            if last is not None and dis.opname[frame.f_code.co_code[last]] in LOOKING and next(found) == place:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("outcome", [True, False])
def test_an_interrupt_leaves_a_condition_s_lock_free_wherever_it_comes(outcome):
    hits, misses = 0, 0
    for place in itertools.count():
        condition = InterruptibleCondition()
        hit = interrupted_at(place, functools.partial(condition.wait_for, lambda: outcome, 0.02))
        assert not condition.lock.locked(), place
        with condition.lock:
            condition.notify_all()
        assert condition.wait_for(lambda: True, patience())
        hits, misses = (hits + 1, 0) if hit else (hits, misses + 1)
        if misses == 5:  # One may be because the time was over sooner.
            break
    assert hits > (2 if outcome else 8)
