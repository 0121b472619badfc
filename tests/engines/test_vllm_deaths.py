"""vLLM's processes, killed and stopped while they answer: it is told, nobody waits, and nothing is left."""

from __future__ import annotations

import signal

import pytest
from engine_belongings import kill
from vllm_forks import run, started

from suite.depth import some

pytestmark = pytest.mark.timeout(3000)  # Starts of engines, on a machine that may be busy.

PROMPTS = ["The river that flows through the city", "A worker may be taken away"]
KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP
WARM = {"enforce_eager": False, "compilation_config": {"backend": "eager"}}
"""Without its warming up vLLM 0.32 fails at the first request on CPUs where the layers are spread."""
CASES = [  # Whom to kill or stop, vLLM's options, how many workers it has then, and what is said of it.
    ([("EngineCore", KILLED)], {}, 1, "EngineCore, killed by SIGKILL"),
    ([("EngineCore", STOPPED)], {"stopped_seconds": 1000, "silent_seconds": 10}, 1, "has not answered for"),
]
SPREAD = [
    # EngineCore would say that a worker of several is gone, but only after it has waited for the others.
    (
        [("EngineCore", STOPPED), ("Worker", KILLED)],
        {"tensor_parallel_size": 2, "stopped_seconds": 1000},
        2,
        "Worker",
    ),
    ([("Worker", STOPPED)], {"pipeline_parallel_size": 2, **WARM, "stopped_seconds": 2}, 2, "was stopped (SIGSTOP)"),
]


def test_engines_of_one_and_two_processes_answer_alike_and_tell_who_waits_that_they_died_or_stopped(vllm_python, llama):
    cases = some(CASES, deeply=[*CASES, *SPREAD])
    found = run(vllm_python, "deaths", str(llama), PROMPTS, [case[:2] for case in cases], starts=len(cases))
    for each, (_, _, workers, words) in zip(found, cases, strict=True):
        assert (each["workers"], each["method"]) == (workers, "fork")
        assert each["texts"] == found[0]["texts"], "in float32, greedy"
        assert {kind for kind, _ in each["told"]} == {"ContextLost"}
        assert len({said for _, said in each["told"]}) == 1 and each["later"] == each["told"][0]
        assert (each["names"], each["left"]) == ([], []), "in /dev/shm while it runs, and of its processes afterwards"
        assert words in each["later"][1]


def test_an_engine_ends_with_the_process_that_started_it(vllm_python, llama, belongings, tmp_path):
    # The folder goes with a library process.
    with started(vllm_python, "until_killed", str(llama), env={"CTXFLOW_LIBRARY_SCRATCH": str(tmp_path)}) as program:
        assert any(line == "running\n" for line in program.stdout)
        assert len(belongings.of("EngineCore", "Worker")) >= 2
        kill(program.pid)
        belongings.none_left()
