"""Check what a job says of its engine before a worker is asked for, as far as the engine is on this machine too."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ctxflow.batch.job import Job
from ctxflow.errors import UsageError, closest
from ctxflow.models.server_command import read_command
from ctxflow.models.vllm_options import check_vllm_options

_OURS = {"dtype", "device", "max_input_tokens", "too_long", "model", "task", "name"}  # Which a job says otherwise.


def engine_problems(job: Job, told: Callable[[str], None] = lambda text: None) -> Iterator[str]:
    """Yield what is wrong with a job's engine options, server's command and adapters, a sentence each.

    :param told: takes what is said of a check that takes long.
    """
    yield from _adapters(job)
    try:
        if job.backend == "server":
            from ctxflow.models.server_options import SLOW, check_options

            command = read_command(str(job.server_command), model=job.model, options=job.engine_options)
            if job.engine_options or command.name not in SLOW:  # Else the server itself says soon what is wrong.
                check_options(command, told)
        elif job.backend == "vllm" and job.engine_options:
            check_vllm_options(job.engine_options)
        elif job.engine_options:
            yield from _of_transformers(job)
    except UsageError as error:
        yield str(error)
    except ImportError:  # Workers have what is missing here, and say what is wrong.
        return


def _of_transformers(job: Job) -> Iterator[str]:
    """Check the options of transformers by name."""
    from ctxflow.models.encode import SentenceEncoder
    from ctxflow.models.transformers import load_language_model
    from ctxflow.models.transformers_serving import TransformersEngine

    known = _names(SentenceEncoder if job.task == "embed" else TransformersEngine) | _names(load_language_model)
    able = sorted(known - _OURS)
    for name in job.engine_options:
        if name in _OURS and name in Job.model_fields:
            yield f"--engine-option {name} is a flag of its own: give --{name.replace('_', '-')}"
        elif name not in able:
            close = closest(name, able)
            hint = f"did you mean {close!r}?" if close else f"there are {', '.join(able)}"
            yield f"--engine-option {name} is none of the backend transformers: {hint}"


def _names(function: Callable[..., Any]) -> set[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name for name, each in inspect.signature(function).parameters.items() if each.kind in named}


def _adapters(job: Job) -> Iterator[str]:
    served = job.engine_options.get("served_model_name", job.engine_options.get("served-model-name"))
    for name, path in job.adapter.items():
        folder = Path(path).expanduser().absolute()
        if name in (job.model, Path(str(job.model)).name, served) or not name:
            yield f"the adapter {name!r} is called as the job's model is: give it another name"
        if folder.parent.exists() and not folder.exists():
            yield f"the adapter {name}, {path}, is not there: name a folder"
        elif folder.exists() and not (folder / "adapter_config.json").is_file():
            yield f"the adapter {name}, {path}, holds no adapter_config.json: give a LoRA's folder"
