"""`ctxflow top` and `ctxflow status` as a person meets them, and a batch's metrics."""

import json
import os
import pty
import signal
import subprocess
import sys
import types
import urllib.request

import pytest

import forked
from ctxflow.batch.job_status import StatusFile, serving
from ctxflow.cli.app import main
from ctxflow.errors import CtxflowError
from ctxflow.observe.progress import Progress
from waiting import eventually, exited, patience

ENVIRONMENT = {**os.environ, "COLUMNS": "80", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
FUNCTIONS = """
import time
from ctxflow import batch_app

@batch_app(batch_size=10)
def slow(numbers):
    time.sleep(1e6 if 1999 in numbers else 0.2)  # It does not end by itself.
    return numbers
"""


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """The command as from a shell, in this process: its output and its exit status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["ctxflow", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return types.SimpleNamespace(returncode=ended.value.code or 0, stdout=said.out, stderr=said.err)

    return run


def write(output, progress, **changes):
    with StatusFile(output) as file:
        file.update(progress)
    path = output.with_name(output.name + ".status.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


LIVE = {"state": "running", "updated": 4e9}  # Its clock is ahead.
DIED = {"state": "running", "updated": 1.0, "pid": 2**22 + 1}


@pytest.mark.parametrize("verb", ["top", "status"])
@pytest.mark.parametrize(
    ("progress", "changes", "expected", "said"),
    [
        (Progress(done=3, total=3), {}, 0, "done"),
        (Progress(done=2, dead=1, total=3), {}, 3, "1 dead"),
        (Progress(done=2, total=3), {"state": "failed", "reason": "the disk is full"}, 1, "the disk is full"),
        (Progress(done=2, total=3), {"state": "interrupted"}, 1, "the same command goes on"),
        (Progress(done=2, dead=1, total=3), DIED, 1, "is gone without a last word"),
    ],
)
def test_exit_statuses(command, tmp_path, verb, progress, changes, expected, said):
    write(tmp_path / "out.jsonl", progress, **changes)
    for words in ([], ["out.jsonl"], [tmp_path / "out.jsonl.status.json"], [tmp_path]):
        ended = command(verb, *words)
        assert (ended.returncode, said in " ".join(ended.stdout.split())) == (expected, True), ended.stdout
        assert max(map(len, ended.stdout.splitlines())) <= 80 or verb == "top"


def test_status_of_a_live_one_as_json_and_as_a_view(command, tmp_path):
    write(tmp_path / "out.jsonl", Progress(done=2, dead=1, total=30, workers=200), **LIVE)
    ended = command("status", "out.jsonl", "--json")
    found = json.loads(ended.stdout)
    assert (ended.returncode, found["condition"], found["dead"], found["workers"]) == (0, "running", 1, 200)
    assert "27 left" in command("status").stdout


@pytest.mark.parametrize("words", [[], ["none.jsonl"], ["."]])
def test_what_is_not_found_is_said(command, words):
    for verb in ("top", "status"):
        ended = command(verb, *words)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert "status" in ended.stderr and "name" in ended.stderr


def test_several_live_ones_are_listed_and_the_newest_is_shown(command, tmp_path):
    for n in range(3):
        write(tmp_path / f"{n}.jsonl", Progress(done=n), **{**LIVE, "updated": 4e9 + n})
    ended = command("status")
    assert "2.jsonl" in ended.stdout and "0.jsonl" not in ended.stdout
    assert "3 are live" in ended.stderr and "0.jsonl" in ended.stderr and "1.jsonl" in ended.stderr


def started(folder, *options):
    (folder / "top_slow.py").write_text(FUNCTIONS)
    (folder / "in.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(2000)))
    words = [sys.executable, "-m", "ctxflow", "batch", "in.jsonl", "-o", "out.jsonl", "--function", "top_slow:slow"]
    words += ["--column", "n", "--workers", "1", *options]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return forked.Popen(words, cwd=folder, text=True, env=ENVIRONMENT, **pipes)


def await_rows(path, process):
    eventually(lambda: process.poll() is not None or (path.exists() and json.loads(path.read_text())["done"]))
    assert process.poll() is None


def test_a_batch_is_followed_from_other_terminals_until_its_driver_is_killed(tmp_path):
    batch = started(tmp_path, "--metrics", "0")
    with batch:
        try:
            await_rows(tmp_path / "out.jsonl.status.json", batch)
            place = batch.stderr.readline().split()[-1]
            with urllib.request.urlopen(place, timeout=patience()) as answer:
                metrics = answer.read().decode()
            assert 'ctxflow_batch_workers{tier="local"} 1.0' in metrics and "ctxflow_batch_input_rows 2000.0" in metrics
            left = top_of(tmp_path, "out.jsonl", stdout=subprocess.PIPE)
            terminal, end = pty.openpty()
            top = top_of(tmp_path, stdout=end, stderr=end)
            os.close(end)
            with left:
                assert b"of 2,000 rows" in left.stdout.readline()
                left.send_signal(signal.SIGINT)
                assert exited(left) == 0
            seen = read_until(terminal, b"left")
            assert batch.poll() is None
            batch.kill()
            batch.wait()
            seen += read_until(terminal, None)
            os.close(terminal)
            assert exited(top) == 1
        finally:
            batch.kill()
    assert b"died" in seen and b"of 1 asked for" in seen


def top_of(folder, *words, **streams):
    return forked.Popen([sys.executable, "-m", "ctxflow", "top", *words], cwd=folder, env=ENVIRONMENT, **streams)


def read_until(terminal, part):
    """What comes until a part of it, or the end."""
    seen = b""
    while part is None or part not in seen:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # Linux's way to say that nobody holds the other end.
            return seen
        if not data:
            return seen
        seen += data
    return seen


# --- metrics


def test_metrics_follow_the_job_and_end_with_it():
    now = Progress(done=1, rate=2.5, tiers={"a10": {"joined": 2, "asked": None, "gpu_hours": 0.5, "worker_hours": 1.0}})
    with serving(lambda: now, ("127.0.0.1", 0)) as port:
        place = f"http://127.0.0.1:{port}/metrics"

        def lines():
            with urllib.request.urlopen(place, timeout=patience()) as answer:
                return answer.read().decode().splitlines()

        first = lines()
        assert "ctxflow_batch_rows_done_total 1.0" in first
        assert 'ctxflow_batch_gpu_seconds_total{tier="a10"} 1800.0' in first
        assert not any(line.startswith(("ctxflow_batch_tokens", "ctxflow_batch_workers_asked{")) for line in first)
        assert not any("_limit" in line or "workers_lacking{" in line for line in first if not line.startswith("#"))
        limit = {"scope": "user", "measure": "gpu_hours", "used": 1.25, "limit": 8}
        tier = {"joined": 1, "asked": 3, "gpu_hours": 0.5, "worker_hours": 1.0, "reason": "all 4 machines are busy"}
        now = Progress(tiers={"a10": tier}, limits=[limit])
        between = lines()
        assert 'ctxflow_batch_gpu_hours_used{scope="user"} 1.25' in between
        assert 'ctxflow_batch_gpu_hours_limit{scope="user"} 8.0' in between
        assert 'ctxflow_batch_workers_lacking{reason="all 4 machines are busy",tier="a10"} 2.0' in between
        now = Progress(done=7, tokens=90, evictions=2, contexts={"llm": {"warm": 3}})
        second = lines()
        assert {"ctxflow_batch_rows_done_total 7.0", "ctxflow_batch_tokens_total 90.0"} <= set(second)
        assert 'ctxflow_batch_contexts{name="llm",state="warm"} 3.0' in second
        taken = serving(lambda: now, ("127.0.0.1", port))
        with pytest.raises(CtxflowError, match=r"cannot be served at 127\.0\.0\.1:\d+: .*; name another"), taken:
            pass
    with pytest.raises(OSError):
        urllib.request.urlopen(place, timeout=patience())


def test_a_place_that_makes_no_sense_is_refused(command, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n')
    ended = command("batch", "in.jsonl", "-o", "out.jsonl", "--function", "copy:copy", "--metrics", "here")
    assert ended.returncode == 2 and "--metrics" in ended.stderr
    assert not (tmp_path / "out.jsonl").exists()
