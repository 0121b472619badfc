"""`ctxflow env` as a person meets it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
from in_process import ctxflow as in_process

import ctxflow
from ctxflow.environments import archiving

_NAMES = "_ssl _sqlite3 examples simulator policies idlelib lib2to3 pydoc_data encodings/cp distutils"
LITTLE = [word for name in _NAMES.split() for word in ("--exclude", f"*/{name}*")]
"""What need not be packed for a worker to start: most of it, and of the time that it takes."""


def command(*arguments, **more):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archiving, "_LEVEL", 0)  # What is thrown away in a moment need not be small.
        return in_process("env", *arguments, env={"COLUMNS": "200", **more})


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("project") / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    site = next(prefix.glob("lib/python*/site-packages"))
    for package in (cloudpickle, ctxflow):
        place = Path(package.__file__).parent
        shutil.copytree(place, site / place.name, ignore=shutil.ignore_patterns("__pycache__"))
    return prefix


@pytest.fixture(scope="module")
def packed(environment, tmp_path_factory):
    run = command("pack", environment, "-o", tmp_path_factory.mktemp("archives"), "--json", *LITTLE)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_pack_prints_the_path_and_what_it_did(environment, packed):
    assert packed["new"]
    assert packed["archive_bytes"] == Path(packed["path"]).stat().st_size
    run = command("pack", environment, "-o", Path(packed["path"]).parent, *LITTLE)
    assert (run.returncode, run.stdout) == (0, f"{packed['path']}\n")
    assert "Packed before, and kept" in run.stderr
    assert f"glibc {packed['glibc']} or newer" in run.stderr
    assert Path(packed["path"]).name.startswith(f"ctxflow-env-{environment.parent.name}-")


def test_the_active_environment_is_the_default(environment, packed):
    run = command("pack", "-o", Path(packed["path"]).parent, *LITTLE, VIRTUAL_ENV=str(environment))
    assert (run.returncode, run.stdout) == (0, f"{packed['path']}\n")


def test_show(packed):
    run = command("show", packed["path"])
    assert run.returncode == 0
    shown = json.loads(run.stdout)
    assert shown["digest"] == packed["digest"]
    assert shown["python"] == ".".join(map(str, sys.version_info[:3]))


def test_check_starts_it(packed):
    run = command("check", packed["path"])
    assert run.returncode == 0, run.stderr
    assert f"ctxflow {ctxflow.__version__} starts" in run.stdout
    assert json.loads(command("check", packed["path"], "--json").stdout)["ctxflow"] == ctxflow.__version__


def test_check_tells_what_is_missing(environment, packed, tmp_path):
    run = command("pack", environment, "-o", tmp_path, "--exclude", "*/cloudpickle/*", "--json", *LITTLE)
    assert run.returncode == 0, run.stderr
    run = command("check", json.loads(run.stdout)["path"])
    assert run.returncode == 1
    assert run.stderr.startswith("ctxflow: ")
    assert "a worker could not use it" in run.stderr and "cloudpickle" in run.stderr


def test_errors_are_one_sentence(tmp_path):
    run = command("pack", tmp_path)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.count("\n") == 1 and run.stderr.endswith("bin/python: give the path of one\n")
    (tmp_path / "x.tar.gz").write_text("no archive")
    run = command("show", tmp_path / "x.tar.gz")
    assert run.returncode == 1 and "make one with `ctxflow env pack`" in run.stderr
