"""The programs in docs/streams.md run as they are printed, and print what is shown."""

import re
import sys
from pathlib import Path

import pytest

import forked
from waiting import patience

TEXT = (Path(__file__).parent.parent / "docs" / "streams.md").read_text()


def test_programs(tmp_path):
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    programs = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", TEXT, re.DOTALL)
    assert len(programs) == TEXT.count("```python") == 2
    for program, shown in programs:
        (tmp_path / "program.py").write_text(program)
        run = forked.run(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            capture_output=True,
            check=False,
            text=True,
            timeout=patience(),
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout == shown
    assert len((tmp_path / "lengths.jsonl").read_text().splitlines()) == 3
