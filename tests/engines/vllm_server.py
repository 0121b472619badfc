"""The command of vLLM's server."""

from __future__ import annotations

from pathlib import Path

from suite.depth import deep

FORKING = """#!{python}
import os
import runpy

from vllm.model_executor.models import registry
from vllm.platforms import current_platform

update = current_platform.check_and_update_config


def fork(config):
    update(config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


if __name__ == "__main__":
    type(current_platform).check_and_update_config = staticmethod(fork)
    registry._run_in_subprocess = lambda inspect: inspect()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""


def vllm_server(python: Path, folder: Path) -> str:
    """Return the command of vLLM's server, without options.

    On CPUs vLLM spawns its processes, and one more for a look at the model's class: each imports for ten seconds what
    the server has imported. A run in depth has it as it is; an ordinary one has a program that forks them, as vLLM does
    where there is a GPU.

    :param folder: where that program is made. It is called vllm, by which ctxflow recognises it.
    """
    if deep():  # Not by its command: in builds of another name than vllm that does not find its version.
        return f"{python} -m vllm.entrypoints.openai.api_server"
    program = folder / "vllm"
    program.write_text(FORKING.format(python=python))
    program.chmod(0o755)
    return str(program)
