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
from ctxflow.cli import clean_command
from ctxflow.cli.app import app
from ctxflow.cli.clean_command import seconds_of
from ctxflow.errors import UsageError
from ctxflow.host.linux import python_path
from ctxflow.host.local_files import Scratch
from ctxflow.observe import progress
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


NUMBERS = ["abc", "", [], {}, True, float("nan"), 10**400, -(1 << 70)]
MALFORMED = [
    *({"updated": value} for value in NUMBERS),
    *({"done": value} for value in [*NUMBERS, None]),
    *({"total": value} for value in NUMBERS),
    *({"pid": value} for value in NUMBERS),
    *({name: value} for name in ("state", "reason", "host", "run", "output", "unit") for value in (1, None, [], {})),
    *({"tiers": value} for value in (None, [], "a", {"a": 1}, {"a": {}}, {"a": {"joined": "x"}})),
    *({"contexts": value} for value in (None, [1], {"a": 1}, {"a": {"warm": "x"}})),
    *({"limits": value} for value in (None, 7, ["a"], [{}], [{"used": "a"}])),
    {"sessions": {"idle": "a"}},
]


@pytest.mark.parametrize("facts", MALFORMED, ids=lambda facts: str(facts)[:60])
def test_a_malformed_status_file_ends_no_command(folder, facts):
    good = make_run(folder, "1")
    bad = make_run(folder, "2", state="interrupted")
    status = json.loads((bad / "status.json").read_text())
    (bad / "status.json").write_text(json.dumps({**status, **facts}))
    (folder / "out.jsonl.status.json").write_text(json.dumps({**status, "output": str(folder / "out.jsonl"), **facts}))
    for words in (["status"], ["status", "--json"], ["status", str(bad)], ["top"], ["workers"], ["clean", "--json"]):
        ended = CliRunner().invoke(app, words)
        assert isinstance(ended.exception, (SystemExit, UsageError, type(None))), (words, ended.exception)
    assert run("--yes").exit_code == 0
    assert not good.exists() and bad.exists()


@pytest.mark.parametrize("what", ["nothing", "text", "a list", "a pipe", "a folder", "deep"])
def test_what_is_no_status_file_ends_no_command(folder, what):
    good, bad = make_run(folder, "1"), make_run(folder, "2")
    path = bad / "status.json"
    path.unlink()
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a folder":
        path.mkdir()
    else:
        path.write_text({"nothing": "", "text": "abc", "a list": "[1]", "deep": "[" * 100_000}[what])
    assert run("--yes").exit_code == 0
    assert not good.exists() and bad.exists()


@pytest.mark.parametrize("level", ["runs", "1", "ctxflow"])
@pytest.mark.parametrize("by", ["a link", "another folder"])
def test_what_takes_a_runs_place_between_look_and_removal_stays(folder, tmp_path_factory, monkeypatch, level, by):
    """As by somebody who may write to a folder above."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    theirs = make_run(elsewhere, "1")
    mine = make_run(folder, "1")
    places = {"runs": folder / "runs", "1": mine.parent, "ctxflow": mine}
    aside = {"runs": elsewhere / "runs", "1": theirs.parent, "ctxflow": theirs}[level]

    def swap(*_):
        places[level].rename(folder / "away")
        places[level].symlink_to(aside) if by == "a link" else aside.rename(places[level])
        return True

    monkeypatch.setattr(clean_command, "_asked", swap)
    ended = run()
    assert ended.exit_code == 1
    assert (
        "is left: its run goes on, or another folder has its place now" in ended.output or "cannot be" in ended.output
    )
    log = theirs if by == "a link" else mine
    assert (log / "events.jsonl").exists()


def test_runs_of_other_users_are_left(folder, monkeypatch):
    mine = make_run(folder, "1")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    told = run("--yes")
    assert told.exit_code == 0 and "left: 1 run of other users" in told.stdout and mine.exists()


def test_all_that_is_in_a_runs_folder_goes_with_it(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "kept").write_text("kept")
    run_folder = make_run(folder, "1")
    (run_folder / "a" / "b").mkdir(parents=True)
    (run_folder / "a" / "b" / "c").write_text("c")
    (run_folder / "a" / "link").symlink_to(elsewhere)
    (run_folder / "a" / "dangling").symlink_to("nowhere")
    os.mkfifo(run_folder / "pipe")
    assert run("--yes").exit_code == 0
    assert not (folder / "runs" / "1").exists() and (elsewhere / "kept").exists()


@pytest.mark.parametrize("entries", range(4))
def test_what_is_left_of_a_run_by_a_removal_that_fails_is_removed_by_the_next(folder, monkeypatch, entries):
    run_folder = make_run(folder, "1")
    (run_folder / "a").mkdir()
    (run_folder / "a" / "b").touch()
    with monkeypatch.context() as patch:
        removed = progress._remove_entry

        def remove_some(name, inside):
            nonlocal entries
            entries -= 1
            if entries < 0:
                raise OSError(39, "Directory not empty", name)
            removed(name, inside)

        patch.setattr(progress, "_remove_entry", remove_some)
        run("--yes")
    assert run("--yes").exit_code == 0 and not run_folder.exists()
