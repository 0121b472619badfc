"""kill -9 of vLLM's own process, and of the driver, while rows are in flight (the others: test_engine_evictions.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engine_belongings import kill

from waiting import eventually

ROWS = 160
DRIVER = str(Path(__file__).with_name("vllm_driver.py"))


def start(model, resume, output):
    command = [sys.executable, DRIVER, str(model), str(ROWS), "1", str(resume)]
    return subprocess.Popen(command, stdout=output, cwd=resume.parent)


@pytest.mark.timeout(900)
def test_rows_are_whole_and_nothing_is_left_whoever_dies(engine_environment, llama, belongings, tmp_path):
    resume, printed = tmp_path / "answers.jsonl", tmp_path / "printed"

    def answered():
        return len(printed.read_text().split()) if printed.exists() else 0

    with printed.open("ab") as output:
        with start(llama, resume, output) as driver:
            eventually(lambda: driver.poll() is not None or answered() >= 10)
            assert driver.poll() is None, "it ended before the engine could be killed"
            [core] = belongings.of("EngineCore")
            victims = belongings.tree(core)
            kill(core)
            belongings.gone(victims)
            before = answered()
            eventually(lambda: answered() >= before + 10)
            driver.kill()
        belongings.none_left()
        assert answered() < ROWS
        with start(llama, resume, output) as driver:
            assert driver.wait() == 0
    belongings.none_left()
    lines = [json.loads(line) for line in resume.read_text().splitlines()[1:]]
    assert len(lines) == ROWS
    assert set(map(int, printed.read_text().split())) == set(range(ROWS))
