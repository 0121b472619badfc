"""Status files: written whole, and read as of a live or a dead owner."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from ctxflow.observe.progress import VERSION, StatusReader, condition, load_status, owner, write_status
from ctxflow.ownership import birth_of


def running(**changes):
    return {"version": VERSION, "state": "running", "updated": time.time(), **owner(), **changes}


@pytest.mark.parametrize(
    ("age", "changes", "expected"),
    [
        (0, {}, "running"),
        (0, {"state": "starting"}, "starting"),
        (0, {"pid": 2**22 + 1}, "running"),  # It wrote this moment: its number means something elsewhere.
        (3600, {"state": "failed", "pid": 0}, "failed"),
        (3600, {}, "silent"),
        (3600, {"host": "another.example"}, "silent"),
        (10, {"host": "another.example", "pid": -1}, "running"),
        (3600, {"born": "17@an-earlier-boot"}, "died"),  # Its number is another's now.
        (3600, {"pid": "?"}, "died"),
        (0, {"updated": None, "pid": None}, "died"),
    ],
)
def test_the_condition_tells_live_from_dead(age, changes, expected):
    now = 2e9
    assert condition(running(**{"updated": now - age, **changes}), now) == expected


def test_a_killed_owner_is_dead_also_while_nobody_has_asked_for_its_end():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        status = running(pid=process.pid, born=birth_of(process.pid), updated=time.time() - 10)
        assert condition(status) == "running"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # A zombie is dead.
        assert condition(status) == "died"


def test_a_clock_that_is_set_kills_nobody(clock_steps):
    now = time.time()
    status = running(updated=now - 10)
    with clock_steps(3600):
        assert condition(status, now) == "running"
    with subprocess.Popen(["true"]) as process:
        status = running(pid=process.pid, born=birth_of(process.pid))
    assert condition(status, status["updated"] - 3600) == "died", "the clock was an hour ahead when it wrote"


def test_a_file_that_is_rewritten_has_a_live_owner_whatever_its_clock_says(tmp_path):
    path = tmp_path / "status.json"

    def write(updated):
        write_status(path, running(host="another.example", updated=updated))
        return load_status(path)

    for off in (-3600, 3600):
        written = write(time.time() + off)
        watched = StatusReader(path, written)
        write(time.time() + off + 1)
        assert condition(watched.settle(0)) == "running" == condition(watched.look())
    silent = StatusReader(path, write(time.time() - 3600))
    assert condition(silent.settle(0)) == "silent" == condition(silent.look())


def test_a_link_in_the_place_of_what_is_unfinished_is_not_followed(tmp_path):
    path, other = tmp_path / "out.status.json", tmp_path / "precious"
    other.write_text("mine")
    (tmp_path / "out.status.json.part").symlink_to(other)
    write_status(path, {"a": 1})
    assert other.read_text() == "mine" and not path.is_symlink() and json.loads(path.read_text()) == {"a": 1}


def test_a_reader_never_sees_half_a_file(tmp_path):
    path, ended = tmp_path / "status.json", threading.Event()

    def write():
        number = 0
        while not ended.is_set():
            number += 1
            write_status(path, {"version": VERSION, "number": number, "padding": "x" * (number % 7 * 10_000)})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while not path.exists():
            time.sleep(0.001)
        seen = [load_status(path) for _ in range(300)]
    finally:
        ended.set()
        writer.join()
    numbers = [status["number"] for status in seen]
    assert numbers == sorted(numbers)
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"version": 99}', "\xff"])
def test_what_is_no_status_file_says_nothing(tmp_path, text):
    (tmp_path / "status.json").write_text(text, encoding="latin-1")
    assert load_status(tmp_path / "status.json") is None


def test_a_file_that_cannot_be_written_leaves_nothing_half_written(tmp_path):
    target = tmp_path / "status.json"
    target.mkdir()
    with pytest.raises(OSError):
        write_status(target, {"a": 1})
    assert list(tmp_path.iterdir()) == [target]
    target.rmdir()
    write_status(target, {"a": 1})
    assert json.loads(target.read_text()) == {"a": 1}
