"""The command as a person meets it: a process, its output and its exit status."""

import json
import subprocess
import sys

import ctxflow


def command(*arguments, **options):
    program = [sys.executable, "-m", "ctxflow", *arguments]
    return subprocess.run(program, capture_output=True, check=False, text=True, timeout=100, **options)


def test_version():
    run = command("--version")
    assert (run.returncode, run.stdout) == (0, f"ctxflow {ctxflow.__version__}\n")


def test_help_names_the_verbs():
    run = command("--help")
    assert run.returncode == 0
    assert "doctor" in run.stdout and "demo" in run.stdout


def test_unknown_verb():
    run = command("dostor")
    assert run.returncode == 2
    assert "No such command" in run.stderr


def test_doctor_finds_the_embedded_engine():
    run = command("doctor", "--json")
    assert run.returncode == 0, run.stdout
    findings = {finding["name"]: finding for finding in json.loads(run.stdout)}
    assert findings["embedded"]["state"] == "ok"
    assert findings["parsl"]["state"] == "ok"
    for finding in findings.values():
        assert finding["state"] == "ok" or finding["advice"], f"no advice on {finding['name']}"


def test_doctor_shows_the_same(tmp_path):
    run = command("doctor", env={"PATH": "", "HOME": str(tmp_path), "COLUMNS": "80", "PYTHONPATH": ":".join(sys.path)})
    assert run.returncode == 0
    assert "a worker started and answered" in run.stdout
    assert "ctxflow[htcondor]" in run.stdout or "htcondor" in run.stdout
    assert all(len(line) <= 80 for line in run.stdout.splitlines())
