"""`ctxflow batch` as a person meets it: started, interrupted, killed, and started again."""

import contextlib
import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from in_process import ctxflow

import forked
from ctxflow.batch.job_status import read_status
from waiting import eventually, output, patience

FUNCTIONS = """
import os
import time
from ctxflow import batch_app

@batch_app(batch_size=20)
def double(numbers):
    time.sleep(0.03)
    while 2999 in numbers and os.path.exists("FOLDER/hold"):
        time.sleep(0.01)
    if -1 in numbers:
        raise ValueError("a negative number")
    return [2 * number for number in numbers]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "batch_doubling.py").write_text(FUNCTIONS.replace("FOLDER", str(tmp_path)))
    return tmp_path


def write_numbers(folder, numbers):
    lines = "".join(json.dumps({"custom_id": f"id {n}", "n": n}) + "\n" for n in numbers)
    (folder / "in.jsonl").write_text(lines)


def started(folder, *options, output="out.jsonl", program=forked, **more):
    words = [sys.executable, "-m", "ctxflow", "batch", "in.jsonl", "-o", output, "--function", "batch_doubling:double"]
    words += ["--column", "n", "--id-column", "custom_id", "--workers", "2", *options]
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return program.Popen(words, cwd=folder, text=True, env=environment, **pipes, **more)


def run(folder, *options, **more):
    process = started(folder, *options, **more)
    out, err = output(process)
    return process.returncode, out, err


def lines(path):
    return path.read_bytes().splitlines() if path.exists() else []


def await_lines(path, count, process):
    eventually(lambda: len(lines(path)) >= count or process.poll() is not None, pause=0.005)


@pytest.mark.parametrize("order", ["completed", "input"])
def test_killed_again_and_again_the_output_is_that_of_an_undisturbed_run(folder, order):
    write_numbers(folder, range(3000))
    kills, chance = 0, random.Random(order)
    (folder / "hold").touch()
    for _ in range(3):
        process = started(folder, "--order", order)
        reached = len(lines(folder / "out.jsonl"))
        try:
            await_lines(folder / "out.jsonl", min(reached + chance.randrange(1, 600), 2900), process)
            time.sleep(chance.uniform(0, 0.05))
        finally:
            process.kill()
            process.communicate()
        kills += process.returncode == -signal.SIGKILL
    (folder / "hold").unlink()
    status, _, said = run(folder, "--order", order)
    assert (status, kills) == (0, 3), said
    found = [json.loads(line) for line in lines(folder / "out.jsonl")]
    expected = [{"row": n, "custom_id": f"id {n}", "result": 2 * n} for n in range(3000)]
    assert expected == (found if order == "input" else sorted(found, key=lambda each: each["row"]))


def test_exit_statuses_and_what_is_said(folder):
    write_numbers(folder, [1, 2, -1])
    status, out, said = run(folder)
    assert (status, out) == (3, "")
    assert "in.jsonl, line 3: ValueError: a negative number" in said
    assert "1 row failed, see out.jsonl.errors.jsonl; --retry-errors tries them again" in said
    status, out, said = run(folder, "--quiet", "--json")
    assert (status, said) == (3, "")
    assert json.loads(out) | {"seconds": 0} == {
        "done": 2, "dead": 1, "done_now": 0, "dead_now": 0, "seconds": 0, "already": True, "nulled": {}, "altered": {},
        "truncated_now": 0, "limited_now": 0,
        "summary": None,
    }  # fmt: skip
    status, _, said = run(folder, "--site", "nowhere.toml")
    assert status == 2 and said.startswith("ctxflow: there is no site") and said.count("\n") == 1


@pytest.mark.parametrize(("number", "program"), [(signal.SIGINT, subprocess), (signal.SIGTERM, forked)])
def test_an_interrupted_job_keeps_what_is_done(folder, number, program):
    write_numbers(folder, range(50_000))
    (folder / "hold").touch()
    process = started(folder, program=program)
    await_lines(folder / "out.jsonl", 40, process)
    refused = run(folder)
    assert refused[0] == 1 and "is being written by another driver" in refused[2]
    process.send_signal(number)
    _, said = output(process)
    assert process.returncode == 130
    assert re.search(r"^\d\d:\d\d:\d\d ctxflow: interrupted; what is done is kept", said, re.MULTILINE)
    found = [json.loads(line) for line in lines(folder / "out.jsonl")]
    assert 40 <= len(found) < 50_000
    assert len({each["row"] for each in found}) == len(found)


def test_help_teaches():
    process = ctxflow("batch", "--help")
    for word in ("--template", "--retry-errors", "Exit status", "ctxflow batch requests.jsonl -o results.jsonl"):
        assert word in process.stdout


def test_the_summary_is_said_and_kept_and_told_by_a_report(folder):
    write_numbers(folder, [*range(60), -1])
    status, out, said = run(folder)
    assert (status, out) == (3, "")
    assert "Ran on" in said
    assert "Efficiency" in said
    [kept] = folder.glob("runs/*/*/summary.json")
    summary = json.loads(kept.read_text())
    assert (summary["items"]["done"], summary["items"]["dead"]) == (60, 1)
    hours = summary["hours"]
    assert hours["useful"] > 0
    assert sum(hours[part] for part in hours if part != "connected") == pytest.approx(hours["connected"])
    told = json.loads(ctxflow("report", "--json", cwd=folder).stdout)
    assert told["summary"] == summary
    assert told["batch"]["job"]["function"] == "batch_doubling:double"
    [cause] = told["causes"]
    assert (cause["error"], cause["message"], cause["items"], cause["rows"]) == (
        "ValueError",
        "a negative number",
        1,
        1,
    )
    assert "row 60" in cause["place"] or "line 61" in cause["place"]
    assert "raise ValueError" in cause["traceback"]


def test_the_summary_in_json_and_in_quiet(folder):
    write_numbers(folder, range(20))
    _, out, said = run(folder, "--json", "--quiet")
    assert said == ""
    assert json.loads(out)["summary"]["items"]["done"] == 20
    _, out, _ = run(folder, "--json")
    assert json.loads(out)["summary"] is None  # Nothing ran.
    _, out, said = run(folder, "--quiet", "--fresh")
    assert (out, said) == ("", "")


@contextlib.contextmanager
def sighup(taken):
    """What a process does at SIGHUP, and those that it starts: the tests themselves may run under nohup."""
    before = signal.signal(signal.SIGHUP, taken)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_job_whose_terminal_goes_away_keeps_what_is_done(folder):
    """Its last words are in its status file, since nobody reads what it prints."""
    write_numbers(folder, range(50_000))
    (folder / "hold").touch()
    ours, terminal = pty.openpty()
    words = [sys.executable, "-m", "ctxflow", "batch", "in.jsonl", "-o", "out.jsonl", "--column", "n", "--workers", "2"]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with sighup(signal.SIG_DFL):
        process = subprocess.Popen(
            [*words, "--function", "batch_doubling:double"], cwd=folder, env=environment, start_new_session=True,
            stdin=terminal, stdout=terminal, stderr=terminal,
        )  # fmt: skip
    os.close(terminal)
    await_lines(folder / "out.jsonl", 40, process)
    os.close(ours)  # From now on what it prints is an error.
    process.send_signal(signal.SIGHUP)
    assert process.wait(patience()) == 130
    assert read_status(folder / "out.jsonl")["state"] == "interrupted"
    assert len(lines(folder / "out.jsonl")) >= 40


@pytest.mark.parametrize("ignored", [False, True])
def test_sighup_ends_a_job_in_order_unless_it_is_ignored(folder, ignored):
    write_numbers(folder, range(50_000))
    (folder / "hold").touch()
    with sighup(signal.SIG_IGN if ignored else signal.SIG_DFL):
        process = started(folder, program=subprocess)
    await_lines(folder / "out.jsonl", 40, process)
    process.send_signal(signal.SIGHUP)
    if ignored:
        reached = len(lines(folder / "out.jsonl"))
        await_lines(folder / "out.jsonl", reached + 40, process)
        assert process.poll() is None, "as under nohup"
        process.send_signal(signal.SIGTERM)
    _, said = output(process)
    assert process.returncode == 130 and "ctxflow: interrupted; what is done is kept" in said
    assert read_status(folder / "out.jsonl")["state"] == "interrupted"


@pytest.mark.parametrize("reader", ["a pipe", "a terminal"])
def test_a_job_goes_on_where_nobody_reads_what_it_says(folder, reader):
    """As one that was disowned before its terminal closed, or whose messages went to `head`."""
    write_numbers(folder, [*range(4000), *[-1] * 20])
    (folder / "hold").touch()
    ours, theirs = pty.openpty() if reader == "a terminal" else os.pipe()
    words = [sys.executable, "-m", "ctxflow", "batch", "in.jsonl", "-o", "out.jsonl", "--column", "n", "--workers", "2"]
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [*words, "--function", "batch_doubling:double"], cwd=folder, env=environment, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    await_lines(folder / "out.jsonl", 40, process)
    os.close(ours)
    (folder / "hold").unlink()
    assert process.wait(patience()) == 3
    assert len(lines(folder / "out.jsonl")) == 4000 and read_status(folder / "out.jsonl")["state"] == "done"
