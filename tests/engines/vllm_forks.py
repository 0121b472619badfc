"""Run vllm_programs.py in the Python that has vLLM.

The programs are forked from one process that has imported vLLM (tests/forked.py), which takes ten seconds of a core,
and vLLM forks the engines' processes from them.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import vllm_programs

import forked
from waiting import patience

SOURCE = Path(__file__).resolve().parents[2] / "src"
LIMIT_SECONDS = 600  # For each engine that is started.
VARIABLES = {
    "PYTHONPATH": os.pathsep.join([str(SOURCE), str(SOURCE.parent / "tests")]),
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "INFO",  # It says at that level which signal ended its engine.
}
MODULES = (
    "ctxflow.batch.engine_answers",
    "ctxflow.models.answering",
    "ctxflow.models.vllm_serving",
    "setproctitle",
    "vllm.engine.arg_utils",
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.model_executor.models.bert",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
)
"""What the programs, and engines' processes, import."""


def started(python: Path, name: str, *given: Any, env: Mapping[str, str] | None = None) -> Any:
    """Start one of the programs; returns what `subprocess.Popen` gives, with its output in a pipe."""
    command, variables = _prepared(python, name, given)
    return forked.Popen(command, stdout=subprocess.PIPE, text=True, env={**variables, **(env or {})})


def run(python: Path, name: str, *given: Any, starts: int = 1) -> Any:
    """Run one of the programs, which starts so many engines, and return what it found."""
    command, variables = _prepared(python, name, given)
    limit = starts * LIMIT_SECONDS
    ended = forked.run(command, capture_output=True, text=True, timeout=patience(limit), env=variables, check=False)
    *said, found = ended.stdout.splitlines() or [""]
    print(*said, ended.stderr, sep="\n")  # What engines print, for a test that fails.
    assert ended.returncode == 0, found
    return json.loads(found)


def _prepared(python: Path, name: str, given: Any) -> tuple[list[str], dict[str, str]]:
    forked.preload(python, MODULES, VARIABLES)
    return [str(python), vllm_programs.__file__, name, json.dumps(given)], {**os.environ, **VARIABLES}
