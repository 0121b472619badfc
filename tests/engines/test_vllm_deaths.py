"""vLLM's processes, killed and stopped while they answer: it is told, nobody waits, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import vllm_programs
from engine_belongings import kill
from vllm_programs import SOURCE, run

pytestmark = pytest.mark.timeout(900)  # Starts of engines, on a machine that may be busy.


def test_whoever_waits_for_an_engine_that_dies_or_stops_is_told(vllm_python, llama):
    victims = [
        ("EngineCore", signal.SIGKILL, {}),
        ("Worker", signal.SIGKILL, {}),
        ("Worker", signal.SIGSTOP, {"stopped_seconds": 2}),
        ("EngineCore", signal.SIGSTOP, {"stopped_seconds": 1000, "silent_seconds": 3}),
    ]
    found = run(vllm_python, "deaths", str(llama), victims)
    for each in found:
        assert {kind for kind, _ in each["told"]} == {"ContextLost"}
        assert len({said for _, said in each["told"]}) == 1 and each["later"] == each["told"][0]
        assert each["left"] == []
    core, worker, stopped, silent = (each["later"][1] for each in found)
    assert "EngineCore, killed by SIGKILL" in core
    assert "Worker" in worker
    assert "was stopped (SIGSTOP)" in stopped
    assert "has not answered for" in silent


def test_an_engine_ends_with_the_process_that_started_it(vllm_python, llama, belongings):
    variables = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [str(vllm_python), vllm_programs.__file__, "until_killed", json.dumps([str(llama)])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr, env=variables, text=True) as program:
        assert program.stdout is not None
        assert any(line == "running\n" for line in program.stdout)
        assert len(belongings.of("EngineCore", "Worker")) >= 2
        kill(program.pid)
        belongings.none_left()
