"""Where the environment with a real vLLM is kept, when it is built anew, and what is said where it cannot be had.

Building it for good is tested by tests/engines, which needs it.
"""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "requirements" / "vllm_environment.py"
_spec = importlib.util.spec_from_file_location("vllm_environment", PROGRAM)
built = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(built)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CTXFLOW_VLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(built, "check", lambda: None)
    return tmp_path / "cache"


@pytest.fixture
def steps(monkeypatch):
    """What pip would have installed; a Python is there from the first."""
    words = []

    def create(path, **options):
        (path / "bin").mkdir(parents=True)
        (path / "bin" / "python").symlink_to(sys.executable)

    monkeypatch.setattr(built.venv, "create", create)
    monkeypatch.setattr(built, "_pip", lambda path, *given: words.append(given[-1]))
    return words


def test_it_is_built_once(cache, steps):
    with pytest.raises(built.CannotBuild, match="has not been built: run make test-engines"):
        built.find()
    python = built.build()
    assert steps == ["torch==2.13.0+cpu", str(built.LOCK)]
    assert python == built.find() == built.build() and python.parent.parent.parent == cache
    assert len(steps) == 2


def test_what_was_cut_off_is_built_anew(steps):
    (built.folder() / "bin").mkdir(parents=True)
    (built.folder() / "half").touch()
    python = built.build()
    assert not (python.parent.parent / "half").exists()


def test_one_whose_interpreter_is_gone_is_built_anew(steps):
    python = built.build()
    python.unlink()
    python.symlink_to("/nowhere/python")
    assert os.access(built.build(), os.X_OK)


def test_what_failed_leaves_nothing(cache, steps, monkeypatch):
    def fail(path, *words):
        raise built.CannotBuild("pip cannot")

    monkeypatch.setattr(built, "_pip", fail)
    with pytest.raises(built.CannotBuild, match="pip cannot"):
        built.build()
    assert not built.folder().exists()


def test_other_versions_go_after_a_week(cache, steps):
    old, recent = cache / "env-old", cache / "env-recent"
    old.mkdir(parents=True)
    recent.mkdir()
    week = time.time() - 8 * 24 * 3600
    os.utime(old, (week, week))
    built.build()
    assert not old.exists() and recent.exists()


def test_builds_take_turns(cache, steps, capsys):
    cache.mkdir()
    holds = (
        "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    command = [sys.executable, "-c", holds, str(cache / "building")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(built, "_PATIENCE", 0.3)
            with pytest.raises(built.CannotBuild, match=r"Another process has held .* end it first"):
                built.build()
        other.kill()
    assert built.build()
    assert "Waiting for another" in capsys.readouterr().err


def test_no_space_is_told(steps, monkeypatch):
    monkeypatch.setattr(built, "SPACE_GB", 10**9)
    with pytest.raises(built.CannotBuild, match=r"needs 1000000000 GB in .*, and [\d.]+ are free"):
        built.build()


def test_another_system_is_told(monkeypatch, capsys):
    monkeypatch.undo()
    monkeypatch.setattr(built.platform, "machine", lambda: "riscv64")
    assert built.main([]) == 3
    assert capsys.readouterr().err == (
        "vLLM for CPUs is for Linux on x86_64 and aarch64, and this is another system.\n"
    )


def test_a_version_that_no_index_has_is_told(cache):
    """By pip's own words, with the log that has the rest."""
    cache.mkdir()
    built.venv.create(built.folder(), with_pip=True)
    with pytest.raises(built.CannotBuild, match=r"pip cannot install vLLM for CPUs \(ERROR: .*the whole log is"):
        built._pip(built.folder(), "--no-index", "no-such-package==1")
