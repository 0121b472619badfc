"""Who lives: told by what the kernel says of a process, by no clock."""

import os
import subprocess

import pytest

from ctxflow.ownership import birth_of, lives


def test_a_process_lives_until_it_ends():
    with subprocess.Popen(["sleep", "60"]) as process:
        born = birth_of(process.pid)
        assert born and lives(process.pid, born) and lives(process.pid, "") and lives(process.pid, None)
        assert not lives(process.pid, "1@an-earlier-boot"), "its number is another's now"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not lives(process.pid, born), "a zombie is dead"
    assert not lives(process.pid, born) and birth_of(process.pid) is None


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
