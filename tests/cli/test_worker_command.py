"""`ctxflow worker-command` as a person meets it, with connection files as runs write them."""

import dataclasses
import json
import os
import shlex
import subprocess

import pytest
from in_process import ctxflow

from ctxflow.factory.run_files import PublishedRun, write_private


def command(*arguments, runtime):
    environment = {"XDG_RUNTIME_DIR": str(runtime), "HOME": str(runtime / "home")}
    return ctxflow("worker-command", *arguments, env=environment)


@pytest.fixture
def write(tmp_path):
    def write(name, **more):
        directory = str(tmp_path / "runs" / name)
        line = [
            "python3",
            f"{directory}/ctxflow.pyz",
            "worker",
            "10.0.0.1:9000",
            "--password",
            f"{directory}/pass word",
        ]
        run = PublishedRun(
            name,
            os.uname().nodename,
            os.getpid(),
            directory,
            "10.0.0.1",
            9000,
            f"{directory}/pass word",
            f"{directory}/ctxflow.pyz",
            {tier: [*line, "--tier", tier] for tier in ("a10", "h100")},
            {"a10": [], "h100": ["HF_HOME"]},
        )
        (tmp_path / "ctxflow").mkdir(mode=0o700, exist_ok=True)
        run = dataclasses.replace(run, **more)
        write_private(str(tmp_path / "ctxflow" / f"{name}.json"), json.dumps(dataclasses.asdict(run)))
        return run

    return write


def test_one_run(write, tmp_path):
    run = write("abc123")
    done = command(runtime=tmp_path)
    assert (done.returncode, shlex.split(done.stdout)) == (0, run.commands["a10"])
    assert "reach 10.0.0.1, port 9000" in done.stderr and "HF_HOME" not in done.stderr
    done = command("--tier", "h100", runtime=tmp_path)
    assert shlex.split(done.stdout) == run.commands["h100"] and "HF_HOME" in done.stderr
    told = json.loads(command("--json", runtime=tmp_path).stdout)
    assert (told["command"], told["id"], told["port"]) == (run.commands["a10"], "abc123", 9000)


def test_what_is_not_clear_is_said(write, tmp_path):
    nothing = command(runtime=tmp_path)
    assert nothing.returncode == 1 and 'engine = "taskvine"' in nothing.stderr
    for name in ("abc123", "abd456"):
        write(name)
    both = command("ab", runtime=tmp_path)
    assert both.returncode == 2 and "abc123 in" in both.stderr and "abd456 in" in both.stderr
    assert "abd456" in command("abd", runtime=tmp_path).stdout
    assert "abd456" in command(str(tmp_path / "runs" / "abd456"), runtime=tmp_path).stdout
    wrong = command("zzz", runtime=tmp_path)
    assert wrong.returncode == 2 and "no run 'zzz' is going on; these are" in wrong.stderr


def test_runs_that_are_over_or_elsewhere_do_not_count(write, tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    write("dead", pid=ended.pid)
    write("far", host="elsewhere.example")
    (tmp_path / "ctxflow" / "torn.json").write_text('{"id": ')
    assert command(runtime=tmp_path).returncode == 1
    write("here")
    assert "here" in command(runtime=tmp_path).stdout


def test_a_private_file_is_private_whatever_was_there_before(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o644)
    write_private(str(path), "new")
    assert (path.stat().st_mode & 0o777, path.read_text()) == (0o600, "new")
