"""`ctxflow site` as a person meets it."""

import json
import os
import sys
import venv
from pathlib import Path

import pytest
from in_process import ctxflow
from typer.testing import CliRunner

from ctxflow.cli.app import app
from ctxflow.sites import load_site

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "site-configs").glob("*.toml"))
LOCAL = """engine = "taskvine"
[[tiers]]
name = "here"
provider = "local"
workers = 2
gpus = 0
cores = 1
memory_gb = 0.01
disk_gb = 0.01
"""


def inside(*arguments):
    """Run the command in this process, which is quicker."""
    return CliRunner().invoke(app, ["site", *map(str, arguments)], env={"COLUMNS": "200"})


def command(*arguments):
    return ctxflow("site", *arguments, env={"COLUMNS": "200"})


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "site.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_site_file_passes(path):
    run = inside("check", path)
    assert run.exit_code == 0, run.output
    assert f"fine   {path}: site {path.stem}, engine " in run.stdout and "wrong" not in run.stdout


def test_what_is_wrong_is_told_line_by_line(write):
    path = write('workers = 0\nbatchng = "fixed"\n')
    run = command("check", path)
    assert run.returncode == 1 and run.stderr == ""
    assert run.stdout.splitlines() == [
        f"wrong  {path}, line 1: workers cannot be 0: write 1 or more",
        f"wrong  {path}, line 2: a site has no key 'batchng': did you mean 'batching'?",
    ]
    told = json.loads(command("check", path, "--json").stdout)
    assert told["problems"] == [line.removeprefix("wrong  ") for line in run.stdout.splitlines()]


def test_a_policy_s_options_are_tried(write):
    run = command("check", write("[batching]\npolicy = 'fixed'\nsise = 3"))
    assert run.returncode == 1 and "policy 'fixed' has no option 'sise': it takes size, linger, share" in run.stdout


def test_what_is_seldom_meant_is_no_error(write):
    run = command("check", write(LOCAL + "[[tiers]]\nprovider = 'local'\nmemory_gb = 10000\n"))
    assert run.returncode == 0 and "think  memory_gb = 10000 of tier gpu is 10 TB: if you meant MB, write" in run.stdout
    run = command("check", write("fan_out = 2\n"))
    assert run.returncode == 0 and "think  fan_out does nothing with the embedded engine: leave it out" in run.stdout


def test_secrets_are_named_where_others_may_read_them(write):
    told = "[[tiers]]\nprovider = '{}'\nname = 'a10'\n"
    path = write(
        'engine = "taskvine"\n' + told.format("condor") + "env = {HF_TOKEN = 'hf_abc', TOKENIZERS_PARALLELISM = 'no'}"
    )
    path.chmod(0o640)
    said = "think  HF_TOKEN in env of tier a10 looks like a secret, and other users may read this file: call chmod"
    assert said in command("check", path).stdout
    path.chmod(0o600)
    assert "think" not in command("check", path).stdout
    path = write(path.read_text() + "\nsubmit = {'+Api' = 'API_KEY=abc'}")
    assert "think  API_KEY in submit of tier a10 looks like a secret" in command("check", path).stdout
    options = "options = {partition = 'gpu', worker_init = 'module load cuda; export WANDB_API_KEY=abc'}"
    run = command("check", write('engine = "taskvine"\naddress = "10.0.0.1"\n' + told.format("slurm") + options))
    assert "think  WANDB_API_KEY in options of tier a10 looks like a secret" in run.stdout
    assert "abc" not in run.stdout


def test_a_wrong_command_line_is_another_exit_status():
    assert command("check").returncode == 2
    assert command("check", "local", "--alive").returncode == 2
    run = command("show", "/nowhere/site.toml")
    assert run.returncode == 2 and "there is no site '/nowhere/site.toml'" in run.stderr


@pytest.fixture
def has_vine_worker(tmp_path, monkeypatch):
    """A PATH with a vine_worker, which no probe starts."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vine_worker").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)


def test_live_asks_this_machine(write, has_vine_worker):
    run = command("check", write(LOCAL), "--live", "--json")
    assert run.returncode == 0, run.stdout + run.stderr
    told = json.loads(run.stdout)
    assert told["tiers"]["here"]["provider"] == "local" and told["tiers"]["here"]["may_submit"]
    assert told["environment"] == "python3 of the workers' PATH, which cannot be seen from here"
    run = command("check", write(LOCAL), "--live")
    assert run.returncode == 0 and run.stdout.startswith("tier here (local): 1 machine, 1 free; ")
    assert "tier here: a probe on " in run.stdout and " connected to this machine after " in run.stdout
    assert "probe" not in command("check", write(LOCAL), "--live", "--no-probe").stdout
    assert "probe" not in command("check", write(LOCAL)).stdout


def test_live_finds_the_environment_or_says_what_to_do(write, tmp_path, has_vine_worker):
    run = command("check", write(f"python_environment = '{tmp_path}/none'\n{LOCAL}"), "--live")
    assert run.returncode == 1
    missing = f"wrong  python_environment {tmp_path}/none is not on this machine: write a folder that this machine"
    assert missing in run.stdout
    venv.create(tmp_path / "env", symlinks=True)
    run = command("check", write(f"python_environment = '{tmp_path}/env'\n{LOCAL}"), "--live")
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert run.returncode == 0, run.stdout
    assert (
        f"Environment: {tmp_path}/env: Python {version}; whether the workers' machines see it cannot be" in run.stdout
    )
    (tmp_path / "env" / "bin" / "python").unlink()
    (tmp_path / "env" / "bin" / "python").write_text("#!/bin/sh\necho '[3, 7]'\n")
    (tmp_path / "env" / "bin" / "python").chmod(0o755)
    run = command("check", write(f"python_environment = '{tmp_path}/env'\n{LOCAL}"), "--live")
    assert run.returncode == 1
    assert f"wrong  the environment has Python 3.7 and this is Python {version}: run the program with" in run.stdout
    (tmp_path / "env.tar.gz").write_text("nothing packed")
    run = command("check", write(f"python_environment = '{tmp_path}/env.tar.gz'\n{LOCAL}"), "--live")
    assert run.returncode == 1 and "is no packed environment that this version of ctxflow knows" in run.stdout


def test_a_batch_system_that_cannot_be_asked_is_one_sentence(write):
    text = 'engine = "taskvine"\n[[tiers]]\nname = "a"\nrequire_gpus = "Capability > 7"\n[[tiers]]\nname = "b"\n'
    run = command("check", write(text), "--live")
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert run.stdout.count("wrong  tier a: ") == run.stdout.count("wrong  tier b: ") == 1


@pytest.mark.parametrize("path", [*FILES, "local"], ids=str)
def test_show_prints_a_file_that_is_the_same_site(path, tmp_path):
    run = inside("show", path, "--toml")
    assert run.exit_code == 0, run.output
    again = tmp_path / "again.toml"
    again.write_text(run.stdout)
    assert load_site(again) == load_site(path)


def test_show_marks_what_was_given(write):
    path = write(LOCAL)
    lines = command("show", path).stdout.splitlines()
    assert 'engine = "taskvine"' in lines and 'name = "local"                     # default' in lines
    assert "# scratch =" in lines and lines.index("[[tiers]]") < lines.index('provider = "local"')
    told = json.loads(command("show", path, "--json").stdout)
    assert told["given"][:3] == ["engine", "tiers.0.name", "tiers.0.provider"]
    assert told["site"]["tiers"][0]["memory_gb"] == 0.01 and told["site"]["slots"] == 1


def test_a_preemption_policy_without_machines_is_told(write):
    head = 'engine = "taskvine"\npreemption = "exact"\n[[tiers]]\n'
    run = command("check", write(head))
    assert run.returncode == 0 and "think  preemption makes room on machines for workers with several" in run.stdout
    assert "think  preemption" not in command("check", write(head + "machine_gpus = 8\n")).stdout
