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

pytestmark = pytest.mark.timeout(3000)  # Starts of engines, on a machine that may be busy.

PROMPTS = ["The river that flows through the city", "A worker may be taken away"]
KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP
WARM = {"enforce_eager": False, "compilation_config": {"backend": "eager"}}
"""Without its warming up vLLM 0.32 fails at the first request on CPUs where the layers are spread."""
CASES = [
    ([("EngineCore", KILLED)], {}),
    # EngineCore would say that a worker of several is gone, but only after it has waited for the others.
    ([("EngineCore", STOPPED), ("Worker", KILLED)], {"tensor_parallel_size": 2, "stopped_seconds": 1000}),
    ([("Worker", STOPPED)], {"pipeline_parallel_size": 2, **WARM, "stopped_seconds": 2}),
    ([("EngineCore", STOPPED)], {"stopped_seconds": 1000, "silent_seconds": 3}),
]


def test_engines_of_one_and_two_processes_answer_alike_and_tell_who_waits_that_they_died_or_stopped(vllm_python, llama):
    found = run(vllm_python, "deaths", str(llama), PROMPTS, CASES, starts=len(CASES))
    assert [each["workers"] for each in found] == [1, 2, 2, 1]
    for each in found:
        assert each["texts"] == found[0]["texts"], "in float32, greedy"
        assert {kind for kind, _ in each["told"]} == {"ContextLost"}
        assert len({said for _, said in each["told"]}) == 1 and each["later"] == each["told"][0]
        assert (each["names"], each["left"]) == ([], []), "in /dev/shm while it runs, and of its processes afterwards"
    core, worker, stopped, silent = (each["later"][1] for each in found)
    assert "EngineCore, killed by SIGKILL" in core
    assert "Worker" in worker
    assert "was stopped (SIGSTOP)" in stopped
    assert "has not answered for" in silent


def test_an_engine_ends_with_the_process_that_started_it(vllm_python, llama, belongings, tmp_path):
    variables = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    variables["CTXFLOW_LIBRARY_SCRATCH"] = str(tmp_path)  # Which goes with a library process.
    command = [str(vllm_python), vllm_programs.__file__, "until_killed", json.dumps([str(llama)])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sys.stderr, env=variables, text=True) as program:
        assert program.stdout is not None
        assert any(line == "running\n" for line in program.stdout)
        assert len(belongings.of("EngineCore", "Worker")) >= 2
        kill(program.pid)
        belongings.none_left()
