"""The programs in docs/loading.md run as they are printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import patience

PROGRAMS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parent.parent / "docs" / "loading.md").read_text(), re.DOTALL
)
PRINTED = ["[[Decimal('1.5')], [Decimal('2.25')]]", "[9, 144]"]


@pytest.mark.parametrize(("program", "printed"), zip(PROGRAMS, PRINTED, strict=True), ids=["preload", "artifacts"])
def test_programs(tmp_path, program, printed):
    (tmp_path / "program.py").write_text(program)
    run = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, check=False, text=True, timeout=patience()
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == printed
