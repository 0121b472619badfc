"""`ctxflow clean`: what it removes, and above all what it leaves."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time

import pytest
from typer.testing import CliRunner

import forked
from ctxflow.cli.app import app
from ctxflow.cli.clean_command import seconds_of
from ctxflow.errors import UsageError
from ctxflow.host.linux import python_path
from ctxflow.host.local_files import Scratch
from ctxflow.observe.progress import VERSION, owner, write_status

DAY = 86_400


def make_run(base, name, state="done", updated=None, label="ctxflow", **facts):
    updated = time.time() - 8 * DAY if updated is None else updated
    folder = base / "runs" / name / label
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text("x" * 1000)
    status = {"version": VERSION, "output": "", "run": str(folder), **owner(), **facts}
    write_status(folder / "status.json", {**status, "state": state, "updated": updated})
    return folder


def gone():
    """The number of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return {"pid": process.pid, "born": "1@an-earlier-boot"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    home = tmp_path.parent / f"{tmp_path.name}-home"
    (home / "tmp").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(home / "tmp"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def runs(folder):
    """Runs of all kinds, by what they are."""
    files = ("out.jsonl", "out.jsonl.progress", "out.jsonl.status.json", "out.jsonl.input")
    for name in files:
        (folder / name).write_text("{}")
    os.makedirs("runs/notes/mine")
    (folder / "runs" / "notes" / "mine" / "thesis.txt").write_text("mine")
    return {
        "done": make_run(folder, "1"),
        "failed": make_run(folder, "2", "failed"),
        "interrupted": make_run(folder, "3", "interrupted", output=str(folder / "out.jsonl")),
        "died": make_run(folder, "4", "running", **gone()),
        "young": make_run(folder, "5", updated=time.time() - DAY),
        "live": make_run(folder, "6", "running"),
        "live beside": make_run(folder, "1", "running", label="other"),
        "silent": make_run(folder, "7", "running", host="elsewhere." + socket.gethostname()),
    }


OVER = ("done", "failed", "interrupted", "died")


def run(*words, **more):
    return CliRunner().invoke(app, ["clean", *words], **more)


def there(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_runs_that_ended_are_removed_and_nothing_else(folder, runs):
    before = there(folder)
    ended = run("--yes")
    assert ended.exit_code == 0
    assert "removed 4 runs" in ended.stdout
    assert "left: 1 run ended less than 7 d 0 h ago, 3 runs not known to have ended" in ended.stdout
    expected = [name for name in before if not any(str(runs[kind].relative_to(folder)) + "/" in name for kind in OVER)]
    assert there(folder) == expected
    assert not (folder / "runs" / "2").exists() and (folder / "runs" / "1" / "other").exists()
    again = run("--yes")
    assert again.exit_code == 0 and "nothing to remove" in again.stdout


def test_nothing_is_removed_unasked(folder, runs):
    before = there(folder)
    ended = run()
    assert ended.exit_code == 0 and "give --yes to remove them" in ended.stdout
    for kind in OVER:
        [line] = [line for line in ended.stdout.splitlines() if str(runs[kind].relative_to(folder)) in line]
        assert kind in line and "kB" in line and "8 d 0 h ago" in line
    assert str(folder / "out.jsonl") in ended.stdout
    assert there(folder) == before


def test_ages(folder, runs):
    assert "removed 5 runs" in run("--older-than", "0", "--yes").stdout
    assert not runs["young"].exists() and runs["live"].exists() and runs["silent"].exists()


@pytest.mark.parametrize("age", ["", "soon", "-1d", "7 days", "1y"])
def test_ages_that_are_none(age):
    with pytest.raises(UsageError, match="is no length of time: write"):
        seconds_of(age)


def test_json(folder, runs):
    before = there(folder)
    found = json.loads(run("--json").stdout)["runs"]
    assert {each["folder"] for each in found if each["removable"]} == {
        str(runs[kind].relative_to(folder)) for kind in OVER
    }
    assert not any(each["removed"] for each in found) and there(folder) == before
    assert all(each["bytes"] > 1000 for each in found)
    removed = json.loads(run("--json", "--yes").stdout)["runs"]
    assert sum(each["removed"] for each in removed) == 4 and not runs["died"].exists()


def test_links_are_not_followed(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    make_run(elsewhere, "1")
    (folder / "runs").mkdir()
    (folder / "runs" / "linked").symlink_to(elsewhere / "runs" / "1")
    inside = make_run(folder, "2")
    (inside / "kept").symlink_to(elsewhere)
    assert "removed 1 run," in run("--yes").stdout
    assert (elsewhere / "runs" / "1" / "ctxflow" / "events.jsonl").exists()


def test_no_runs(folder):
    ended = run()
    assert (ended.exit_code, ended.stdout) == (0, "there is nothing to remove\n")


def test_the_run_of_a_program_is_known(folder):
    """As an executor leaves it."""
    from ctxflow import ContextExecutor, batch_app

    with ContextExecutor(workers=1):
        assert list(batch_app(lambda items: items).map([1])) == [1]
        assert json.loads(run("--json", "--older-than", "0").stdout)["runs"][0]["removable"] is False
    [found] = json.loads(run("--json", "--older-than", "0", "--yes").stdout)["runs"]
    assert (found["state"], found["removed"]) == ("done", True)
    assert there(folder) == []


def test_a_folder_that_is_not_there_is_a_wrong_command_line(folder):
    words = [sys.executable, "-m", "ctxflow", "clean", "nowhere"]
    ended = forked.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1) and "there is no folder nowhere" in ended.stderr


def leave_behind(base):
    """What a program leaves that is killed: a folder in the temporary directory, and its connection file."""
    code = "import os, sys; from ctxflow.host.local_files import Scratch; "
    code += "os.write(1, Scratch(sys.argv[1]).path.encode()); os._exit(0)"
    words = [sys.executable, "-c", code, str(base)]
    scratch = subprocess.check_output(words, env={**os.environ, **python_path()}, text=True)
    assert os.path.isdir(scratch)
    connections = os.path.join(os.environ["HOME"], ".ctxflow", "runs")
    os.makedirs(connections)
    connection = os.path.join(connections, "0123.json")
    with open(connection, "w") as file:
        json.dump({"host": socket.gethostname(), **gone()}, file)
    return [connection, scratch]


def test_what_killed_programs_left_elsewhere_is_shown_and_removed(folder):
    live = Scratch(tempfile.gettempdir())
    left = leave_behind(tempfile.gettempdir())
    told = run()
    assert all(path in told.stdout for path in left) and "nothing is removed" in told.stdout
    assert all(map(os.path.exists, left)), "it was not agreed to"
    assert json.loads(run("--json").stdout)["left_behind"] == [{"path": path, "removed": False} for path in left]
    ended = run("--yes")
    assert ended.exit_code == 0 and "removed 0 runs and 2 other files" in ended.stdout
    assert not any(map(os.path.exists, left)) and os.path.isdir(live.path)
    assert run("--yes").stdout == "there is nothing to remove\n"
    live.close()
