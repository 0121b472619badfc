"""Rates and the time left; and status files: written whole, and read as of a live or a dead owner."""

import json
import os
import random
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.observe.progress import VERSION, Rates, StatusReader, condition, load_status, owner, write_status
from ctxflow.ownership import birth_of
from waiting import eventually


def paced(counts, rest, seconds=None, tokens=None):
    """The pace after the items counted at each second."""
    rates, total = Rates(), 0
    for second, count in enumerate(counts):
        total += count
        rates.note(float(second), total, tokens)
    return rates.pace(float(len(counts) - 1 if seconds is None else seconds), total, tokens, rest)


def test_a_change_of_speed_is_seen_at_once_and_not_overall():
    pace = paced([100] * 60 + [10] * 20, rest=1000)
    assert pace.rate == pytest.approx(10, rel=0.05)
    assert pace.rate_overall == pytest.approx(6200 / 79)


def test_the_load_of_a_context_does_not_count_for_the_time_left():
    pace = paced([0] * 60 + [20] * 30, rest=200)
    assert pace.left == pytest.approx(10)
    assert pace.rate_overall < 10


def test_large_batches_that_come_seldom_make_no_spikes():
    lumps = [640 if second % 40 == 0 else 0 for second in range(401)]
    for more in (0, 10, 39):
        pace = paced(lumps + [0] * more, rest=6400)
        assert 640 / 40 * 0.7 < pace.rate <= 640 / 40 * 1.3
        assert (pace.left_high or 1e9) >= 400 >= pace.left_low


def test_what_stopped_slows_down():
    counts = [50] * 30
    rates = [paced(counts, 100, seconds=29 + later).rate for later in (0, 20, 60, 600)]
    assert rates == sorted(rates, reverse=True) and rates[-1] < 1


def test_nothing_is_told_of_what_is_not_known():
    assert paced([0, 0, 0], rest=10).left is None
    pace = paced([5] * 20, rest=None)
    assert (pace.left, pace.left_low, pace.left_high, pace.tokens_per_s) == (None,) * 4
    few = paced([5] * 4, rest=100)
    assert few.left is not None and few.left_low is None
    assert paced([5] * 20, rest=0).left == 0


def test_tokens_go_their_own_way():
    rates = Rates()
    for second in range(1, 31):
        rates.note(second, 10 * second, 1000 * second)
    pace = rates.pace(30, 300, 30_000, 10)
    assert pace.tokens_per_s == pytest.approx(1000) and pace.tokens_per_s_overall == pytest.approx(1000)


def test_the_bounds_hold_what_came_in_most_runs():
    """Of jobs whose seconds differ at random, some nineteen in twenty end between the bounds."""
    chance, held = random.Random(5), 0
    for _ in range(200):
        speeds = [chance.choice((5, 10, 30)) for _ in range(400)]
        pace = paced(speeds[:120], rest=sum(speeds[120:320]))
        held += pace.left_low <= 200 <= pace.left_high
    assert 0.85 <= held / 200 <= 1.0


@given(st.lists(st.integers(0, 10_000), max_size=400), st.integers(0, 10**9), st.floats(0, 1e6))
def test_figures_are_never_absurd(counts, rest, later):
    pace = paced(counts or [0], rest, seconds=len(counts) + later)
    assert pace.rate >= 0 and pace.rate_overall >= 0
    if pace.left is not None:
        assert pace.left >= 0
        assert pace.left_low is None or 0 <= pace.left_low <= pace.left * (1 + 1e-9)
        assert pace.left_high is None or pace.left_high >= pace.left * (1 - 1e-9)


# Of a process in a container, which has its number in another PID namespace.
CONTAINED = {"pid": 2**22 + 1, "born": birth_of(os.getpid()).rpartition("@")[0] + "@1"}


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
        (10, CONTAINED, "running"),
        (3600, CONTAINED, "silent"),  # Nobody here knows, and nothing of it is removed.
        (3600, {"born": "17@an-earlier-boot"}, "died"),  # Its number is another's now.
        (3600, {"born": 17}, "died"),
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


@pytest.mark.parametrize(
    "cause",
    [
        {},
        {"kind": "queue"},
        {"kind": "queue", "text": 3},
        {"kind": "queue", "text": "", "why": ["no"]},
        {"kind": "back-off", "text": "it waits", "until": "soon"},
        {"kind": "back-off", "text": "it waits", "until": 10**400},
    ],
)
def test_causes_that_cannot_be_shown_make_no_status(cause, tmp_path):
    known = {"kind": "queue", "text": "1 job waits", "since": "of a later version"}
    path = tmp_path / "status.json"
    write_status(path, running(causes=[known]))
    assert load_status(path)["causes"] == [known]
    write_status(path, running(causes=[known, cause]))
    assert load_status(path) is None


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
        eventually(path.exists)
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
