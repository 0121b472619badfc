"""`ctxflow league` as a person meets it: a stranger's plug-in plays, the page and the data, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import ctxflow

from ctxflow.cli import league_command
from ctxflow.policies.registry import FAMILIES
from waiting import eventually, nothing_left, output, patience

STRANGE = Path(__file__).parent.parent / "league" / "strange_policies.py"
SHORT = ("--family", "routing", "--workloads", "many-models")


@pytest.fixture
def installed(tmp_path):
    """A package with a policy, as pip leaves it in site-packages: the variables with which it is there."""
    (tmp_path / "strange_policies.py").write_text(STRANGE.read_text())
    info = tmp_path / "strange-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ctxflow.policies]\nrouting.nearest = strange_policies:Nearest\nrouting.printing = strange_policies:Printing\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


def command(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "ctxflow", "league", *map(str, words)],
        capture_output=True, text=True, check=False, timeout=patience(250), **options,
    )  # fmt: skip


def test_a_strangers_plug_in_plays_among_all_that_are_installed(installed, tmp_path):
    done = command(*SHORT, "--seeds", 1, "--json", "--output", tmp_path / "out", env=installed)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)  # Although a policy prints.
    names = {"context-affinity", "least-loaded", "round-robin", "sdib", "skylb", "torta", "nearest", "printing"}
    assert {each["policy"] for each in data["standings"]} == names
    assert len(data["games"]) == data["games_planned"] == len(names) and not data["interrupted"]
    ours, theirs, also = (
        next(each for each in data["standings"] if each["policy"] == name)
        for name in ("context-affinity", "nearest", "printing")
    )
    assert ours["ratio"] == theirs["ratio"] == also["ratio"] and ours["rank"] == theirs["rank"] == also["rank"]
    assert all(game["score"] >= game["bound"] > 0 for game in data["games"])
    assert json.loads((tmp_path / "out" / "routing.json").read_text()) == data
    page = (tmp_path / "out" / "routing.html").read_text()
    assert all(f"<td>{name}" in page for name in names) and data["conclusion"] in page
    assert not re.search(r"<script|<link|https?://|src=", page), "the page needs something else"


def test_the_help_names_all_families():
    assert league_command.FAMILIES == FAMILIES


def test_the_screen_has_places_ties_and_the_default(capfd):
    done = ctxflow("league", *SHORT, "--seeds", 2, "--policies", "least-loaded,context-affinity,sdib")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("6 games: 3 policies on 1 workload, 2 seeds.")
    assert any(re.match(r"  1 context-affinity \(default\) .*\[.*\] +1$", line) for line in lines)
    assert sum(line.startswith(" 2= ") for line in lines) == 2
    assert "context-affinity is first; context-affinity is the default." in done.stdout
    assert max(map(len, lines)) <= 80


def test_who_crashes_is_last_with_the_reason_and_the_status_is_one(tmp_path):
    given = ("--policies", f"{STRANGE}:Raising,least-loaded", "--seeds", 1)
    done = ctxflow("league", *SHORT, *given, "--output", tmp_path / "out")
    assert done.returncode == 1
    *_, why = [line for line in done.stdout.splitlines() if "did not play to the end" in line]
    assert "Raising did not play to the end: on many-models, seed 0, it raised RuntimeError: no idea where to" in why
    assert "least-loaded is first" in done.stdout
    assert "no idea where to" in (tmp_path / "out" / "routing.html").read_text()
    data = json.loads((tmp_path / "out" / "routing.json").read_text())
    assert data["standings"][-1]["failure"] and data["standings"][-1]["ratio"] is None


def test_where_nobody_plays_to_the_end_it_is_said():
    done = ctxflow("league", *SHORT, "--policies", f"{STRANGE}:Leaving", "--seeds", 1)
    assert done.returncode == 1 and "No policy played to the end." in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--family", "rooting"), "there is no family 'rooting': choose one of routing, batching"),
        ((*SHORT, "--policies", "tortoise"), "there is no routing policy 'tortoise'"),
        (("--family", "routing", "--workloads", "many-model"), "did you mean 'many-models'?"),
        ((*SHORT, "--output", __file__), "is a file: give a folder"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_played(words, says):
    done = ctxflow("league", *words)
    assert done.returncode == 2 and says in done.stderr and done.stdout == ""


def test_ctrl_c_keeps_what_is_done_and_leaves_no_process(tmp_path):
    notes = tmp_path / "notes"
    players = f"least-loaded,{STRANGE}:Noting"
    playing = subprocess.Popen(
        [sys.executable, "-m", "ctxflow", "league", *SHORT, "--policies", players, "--seeds", "500",
         "--output", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "NOTES": str(notes)},
    )  # fmt: skip
    enough = 2 + len(os.sched_getaffinity(0))
    eventually(lambda: notes.exists() and len(notes.read_text().split()) > enough, within=200)
    os.killpg(playing.pid, signal.SIGINT)  # As a terminal does: all processes get it.
    out, err = output(playing)
    assert playing.returncode == 130 and err == "ctxflow: interrupted\n", err
    assert re.match(r"\d+ of 1,000 games: .* It was interrupted: only games that all policies have played count", out)
    data = json.loads((tmp_path / "routing.json").read_text())
    assert data["interrupted"] and 2 <= len(data["games"]) < 1000
    nothing_left(lambda: _group(playing.pid))


def _group(number):
    """The processes of a session that are left."""
    found = subprocess.run(["ps", "-o", "pid=", "-s", str(number)], capture_output=True, text=True, check=False)
    return found.stdout.split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--family s", {"scaling", "sessions"}),
        ("--family routing --policies s", {"sdib", "skylb"}),
        ("--family routing --policies sdib,s", {"sdib,skylb"}),
        ("--family routing --workloads c", {"campus-day"}),
    ],
)
def test_the_shell_completes_families_policies_and_workloads(words, found):
    line = f"ctxflow league {words}"
    variables = {"_CTXFLOW_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    program = "import sys; sys.argv = ['ctxflow']; from ctxflow.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )
    assert set(done.stdout.split()) == found, done.stderr
