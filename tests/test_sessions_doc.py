"""The program in docs/sessions.md runs as it is printed, and prints what is shown."""

import re
import sys
from pathlib import Path

import forked
from waiting import patience

TEXT = (Path(__file__).parent.parent / "docs" / "sessions.md").read_text()


def test_program(tmp_path):
    [program] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    [shown] = re.findall(r"```\n(.*?)```", TEXT.partition(program)[2].partition("```")[2], re.DOTALL)
    (tmp_path / "program.py").write_text(program)
    run = forked.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, check=False, text=True, timeout=patience()
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == shown
