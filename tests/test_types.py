"""What type checkers make of a user's program: every `reveal_type` is told in a comment, every mistake is found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

PROGRAMS = Path(__file__).parent / "typed"
_MODULES = re.compile(r"\b(?:ctxflow|concurrent|user_program|builtins|typing)\.(?:\w+\.)*(?=\w)")


@pytest.fixture(scope="module")
def told():
    """What mypy --strict says of both programs: (file, line, kind, text)."""
    cache = PROGRAMS.parents[1] / "build" / "mypy"  # Kept: half of ctxflow is checked with them.
    cache.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={cache}", "--no-error-summary"]
    files = [str(PROGRAMS / "user_program.py"), str(PROGRAMS / "user_mistakes.py")]
    run = subprocess.run([*words, *files], capture_output=True, text=True, check=False, cwd=cache)
    found = re.findall(r"^\S*?(\w+\.py):(\d+): (error|note): (.*)$", run.stdout, re.MULTILINE)
    assert found, run.stdout + run.stderr
    return [(file, int(line), kind, text) for file, line, kind, text in found]


def marked(file, mark):
    """The lines of a program with a mark, and what follows it."""
    lines = (PROGRAMS / file).read_text().splitlines()
    return {number: line.partition(mark)[2] for number, line in enumerate(lines, 1) if mark in line}


def test_a_program_of_a_user_has_the_types_that_it_says(told):
    assert [each for each in told if each[0] == "user_program.py" and each[2] == "error"] == []
    revealed = {
        line: _MODULES.sub("", text).removeprefix('Revealed type is "').removesuffix('"').replace(" =", " = ...")
        for file, line, _, text in told
        if file == "user_program.py" and text.startswith("Revealed")
    }
    assert revealed == marked("user_program.py", "  # ")


def test_the_mistakes_in_a_program_are_found(told):
    found = {line for file, line, kind, _ in told if file == "user_mistakes.py" and kind == "error"}
    assert found == set(marked("user_mistakes.py", "  # error"))
