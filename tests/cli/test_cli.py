"""The command as a person meets it: a process, its output and its exit status."""

import json
import os
import subprocess
import sys

import pytest
from in_process import ctxflow as in_process

import ctxflow
from ctxflow.cli import machine_commands
from ctxflow.cli.app import VERBS, load_verb
from ctxflow.installing import COST_OF_TORCH, how_to_install
from waiting import patience


def test_version():
    program = [sys.executable, "-m", "ctxflow", "--version"]
    run = subprocess.run(program, capture_output=True, check=False, text=True, timeout=patience())
    assert (run.returncode, run.stdout) == (0, f"ctxflow {ctxflow.__version__}\n")


def test_help_names_the_verbs():
    run = in_process("--help")
    assert run.returncode == 0
    assert "doctor" in run.stdout and "demo" in run.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_has_each_verbs_own_first_sentence(verb):
    assert VERBS[verb] == load_verb(verb).help.partition("\n\n")[0].replace("\n", " ")


def test_help_and_version_wait_for_no_engine():
    program = "import sys; from ctxflow.cli import main\ntry: main()\nfinally: print(sorted(sys.modules))"
    for option in ("--help", "--version"):
        run = subprocess.run([sys.executable, "-c", program, option], capture_output=True, check=True, text=True)
        assert not {"'parsl'", "'numpy'", "'torch'"} & set(run.stdout.replace("]", ",").split(", "))
        assert "'ctxflow.cli.app'" in run.stdout


def test_unknown_verb():
    run = in_process("dostor")
    assert run.returncode == 2
    assert "No such command" in run.stderr


def test_doctor_finds_the_embedded_engine():
    run = in_process("doctor", "--json")
    assert run.returncode == 0, run.stdout
    findings = {finding["name"]: finding for finding in json.loads(run.stdout)}
    assert findings["embedded"]["state"] == "ok"
    assert findings["parsl"]["state"] == "ok"
    for finding in findings.values():
        assert finding["state"] == "ok" or finding["advice"], f"no advice on {finding['name']}"


def test_doctor_shows_the_same(tmp_path):
    run = in_process("doctor", env={"PATH": "", "HOME": str(tmp_path), "COLUMNS": "80"})
    assert run.returncode == 0
    assert "a worker started and answered" in run.stdout
    assert "condor_submit not found" in run.stdout
    assert all(len(line) <= 80 for line in run.stdout.splitlines())


def without(monkeypatch, *modules):
    """Have this process not find some modules, as if they were not installed."""

    class Missing:
        def find_spec(name, path=None, target=None):
            if name in modules:
                raise ModuleNotFoundError(name)

    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])
    for name in modules:
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_doctor_says_ready_only_for_what_is_there(monkeypatch):
    without(monkeypatch, "torch", "matplotlib")
    run = in_process("doctor", env={"COLUMNS": "200"})
    assert run.returncode == 0
    ready, lacking = (
        next(line for line in run.stdout.splitlines() if line.startswith(word)) for word in ("Ready", "Not ready")
    )
    assert "own functions" in ready and "ctxflow batch" in ready
    for task in ("models", "README's programs", "ctxflow demo", "pictures, pages"):
        assert task not in ready.split("; ") and task in lacking
    assert " demo." not in run.stdout
    told = " ".join(run.stdout.split())
    assert "torch not installed" in told
    assert how_to_install("torch", extra="transformers") in told and COST_OF_TORCH in told


def test_doctor_tells_of_the_other_package_of_this_name(tmp_path, monkeypatch):
    metadata = tmp_path / "ctxflow-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ctxflow\nVersion: 1.5\n")
    (metadata / "entry_points.txt").write_text("[console_scripts]\nctx = ctxflow.__main__:main\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = in_process("doctor", env={"COLUMNS": "200"})
    assert run.returncode == 1
    assert "1.5: another project's package" in run.stdout and "pip uninstall ctxflow" in run.stdout
    assert "1 thing will not work: ctxflow" in run.stdout and "Ready" not in run.stdout


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """`ctxflow demo`, but for the program itself."""
    monkeypatch.setattr(machine_commands, "_DEMO", {})
    monkeypatch.setattr(os, "execv", lambda program, words: sys.exit(0))
    monkeypatch.chdir(tmp_path)
    return lambda *words: in_process("demo", *words)


def test_a_demo_begins_anew_in_its_own_folder_and_removes_what_it_made_there(demo, tmp_path):
    for _ in range(2):
        assert demo("--out", "shown/demo", "--fresh").returncode == 0
    out = tmp_path / "shown" / "demo"
    (out / "results").mkdir()
    (out / "results" / "a.jsonl").write_text("{}")
    (out / "run.json").write_text("{}")
    (out / "notes.txt").write_text("mine")
    assert demo("--out", "shown/demo").returncode == 0 and (out / "run.json").exists()
    assert demo("--out", "shown/demo", "--fresh").returncode == 0
    assert sorted(each.name for each in out.iterdir()) == [".ctxflow-demo", "notes.txt"]


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_a_demo_removes_nothing_of_others(demo, tmp_path, kind):
    theirs = tmp_path / "theirs"
    (theirs / "results").mkdir(parents=True)
    (theirs / "results" / "precious").write_text("mine")
    out = {"folder": theirs, "link": tmp_path / "link", "file": theirs / "results" / "precious"}[kind]
    if kind == "link":
        out.symlink_to(theirs)
    refused = demo("--out", str(out), "--fresh")
    assert refused.returncode == 2 and "was not made by a demo" in refused.stderr
    assert (theirs / "results" / "precious").read_text() == "mine" and not (theirs / ".ctxflow-demo").exists()


def groups():
    """All commands, with those that have commands of their own."""
    for verb in VERBS:
        command = load_verb(verb)
        yield (verb,), command
        for name, inner in getattr(command, "commands", {}).items():
            yield (verb, name), inner


def test_what_helps_show_as_it_is_fits_80_columns():
    """Examples can be copied, and tables are read as they were written."""
    for words, command in groups():
        shown = in_process(*words, "--help", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).stdout
        lines = [line.strip() for line in shown.splitlines()]
        blocks = (block.splitlines()[1:] for block in (command.help or "").split("\n\n") if block.startswith("\b"))
        for line in (line.replace("\\[", "[") for block in blocks for line in block):
            assert line.strip() in lines, f"ctxflow {' '.join(words)} --help breaks {line!r}"


def test_a_directory_that_was_removed_is_told(tmp_path, monkeypatch):
    (tmp_path / "in.csv").write_text("text\nhello\n")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    run = in_process("batch", tmp_path / "in.csv", "-o", tmp_path / "out.jsonl", "--function", "f:g")
    assert run.returncode == 2
    assert run.stderr.endswith("; the current directory was removed: change to one that is there\n")
