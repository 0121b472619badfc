"""Check a job's models and engine before a worker is asked for, as far as they are on this machine too."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ctxflow.batch.job import Job
from ctxflow.errors import UsageError, closest, counted
from ctxflow.models.model_checks import (
    DTYPES,
    VLLM_DTYPES,
    device_problem,
    dtype_problem,
    files_problems,
    system_problem,
)
from ctxflow.models.model_folder import ability_of, missing_here, refusal
from ctxflow.models.results import MissingPackageError
from ctxflow.models.server_command import find_program, read_command
from ctxflow.models.server_options import SLOW, check_options
from ctxflow.models.vllm_options import check_options_apart
from ctxflow.topology.machine import cuda_devices

_OURS = {"dtype", "device", "max_input_tokens", "too_long", "model", "task", "name"}  # Which a job says otherwise.


_OTHER_FILES = {"variant", "gguf_file", "subfolder", "backend", "load_format", "tokenizer", "skip_tokenizer_init"}
"""Options by which an engine reads other files than those of a model's folder by itself."""
_SPEAKS = re.compile("chat[-_]template|--tokenizer")  # By which it speaks by another template than the folder's.


def model_problems(job: Job, folder: Path | None, local: bool) -> Iterator[str]:
    """Yield what is wrong with a job's model, a sentence each.

    :param folder: of the model, None where it is not on this machine.
    :param local: whether workers are on this machine, so that a model that is not here is nowhere.
    """
    name, task = str(job.model), str(job.task)
    if job.dtype is not None:
        known = VLLM_DTYPES if job.backend == "vllm" else DTYPES
        yield from filter(None, [dtype_problem(job.dtype, known)])
    if job.device is not None:
        yield from filter(None, [device_problem(job.device)])
    if folder is None:
        if Path(name).expanduser().is_dir():
            yield f"the folder {name} holds no model: name one with a config.json, or a model of the hub"
        elif local and (missing := missing_here(name, job.engine_options.get("revision"))) is not None:
            yield missing
        return
    ability = ability_of(folder)
    if (reason := refusal(name, ability, task)) is not None:
        yield reason
        return
    if task in ("generate", "chat") and ability.length is not None and (job.max_new_tokens or 0) >= ability.length:
        yield (
            f"--max-new-tokens {job.max_new_tokens} leaves no room for a prompt: the model {name} reads and "
            f"writes {ability.length} tokens together"
        )
    options = {option.replace("-", "_") for option in job.engine_options}
    own = not options & _OTHER_FILES
    yield from files_problems(name, folder, weights=own and job.backend == "transformers", tokenizer=own)
    speaks = own and not any(map(_SPEAKS.search, [*options, job.server_command or ""]))
    if job.system is not None and speaks:
        yield from filter(None, [system_problem(name, folder)])


def place_problems(job: Job) -> Iterator[str]:
    """Yield what this machine lacks to run a job's engine itself, a sentence each."""
    if job.function is not None:
        return
    asked = job.gpus if job.gpus is not None else int(job.backend == "vllm")
    device = job.device if job.device is not None and device_problem(job.device) is None else ""
    wanted = max(asked, int(device.partition(":")[2] or 0) + 1 if device.startswith("cuda") else 0)
    if wanted > 0 and (found := len(cuda_devices())) < wanted:
        flag = f"--gpus {asked}" if job.gpus is not None else f"--backend {job.backend}"
        flag = f"--device {device}" if wanted > asked else flag
        less = "--gpus 0 for its build for CPUs" if job.backend == "vllm" else "fewer"
        yield (
            f"{flag} takes {counted(wanted, 'GPU')}, and this machine has {found or 'none'}: ask for {less}, or name a "
            "--site that has them"
        )
    if os.environ.get("CTXFLOW_PYTHON"):  # Whose packages are not known.
        return
    if job.backend == "server":
        yield from _program(job)
        return
    needed = ["vllm"] if job.backend == "vllm" else ["torch", "transformers"]
    needed += ["llguidance"] if job.backend == "transformers" and job.answer_schema else []
    needed += ["sentence_transformers"] if job.backend == "transformers" and job.task == "embed" else []
    if lacking := [name.replace("_", "-") for name in needed if importlib.util.find_spec(name) is None]:
        yield str(MissingPackageError.about(*lacking, extra="vllm" if job.backend == "vllm" else "transformers"))


def _program(job: Job) -> Iterator[str]:
    try:
        program = read_command(str(job.server_command), model=job.model, options=job.engine_options).arguments[0]
    except UsageError:  # `engine_problems` reports it.
        return
    if "{" not in program and shutil.which(find_program(program, os.environ)) is None:
        yield f"the program {program} of --server-command is not found on this machine: give its path"


def refuse(wrong: Sequence[str]) -> None:
    """Raise `UsageError` with all that is wrong with a job, if anything is."""
    found = list(dict.fromkeys(wrong))
    if len(found) == 1:
        raise UsageError(found[0])
    if found:
        raise UsageError(f"{len(found)} things are wrong with this job:", *found)


def engine_problems(job: Job) -> Iterator[str]:
    """Yield what is wrong with a job's engine options, server's command and adapters, a sentence each.

    What only an engine itself can tell, after a start of many seconds, is left to `LaterChecks`.
    """
    yield from _adapters(job)
    try:
        if job.backend == "server":
            command = read_command(str(job.server_command), model=job.model, options=job.engine_options)
            if command.name not in SLOW:
                check_options(command)
        elif job.backend != "vllm" and job.engine_options:
            yield from _of_transformers(job)
    except UsageError as error:
        yield str(error)
    except ImportError:  # Workers have what is missing here, and say what is wrong.
        return


class LaterChecks:
    """Checks of engine options by the engines themselves, on threads: they go on while workers are asked for.

    :param told: called with each note on them.
    """

    def __init__(self, jobs: Iterable[Job], told: Callable[[str], None]) -> None:
        self._wrong: list[str] = []
        checks = [check for job in jobs if job.engine_options and (check := _slow_check(job, told)) is not None]
        self._threads = [threading.Thread(target=self._run, args=(check,), daemon=True) for check in checks]
        for thread in self._threads:
            thread.start()

    def _run(self, check: Callable[[], None]) -> None:
        try:
            check()
        except UsageError as error:
            self._wrong += error.args
        except (OSError, TypeError, ValueError):  # As values that are no JSON: workers say what is wrong.
            return

    def settle(self) -> None:
        """Wait for their ends.

        :raises UsageError: with what is wrong.
        """
        for thread in self._threads:
            thread.join()
        refuse(self._wrong)


def _slow_check(job: Job, told: Callable[[str], None]) -> Callable[[], None] | None:
    """Return what checks a job's engine options slowly; None if nothing does."""
    if job.backend == "vllm":
        return lambda: check_options_apart(job.engine_options)
    if job.backend != "server":
        return None
    try:
        command = read_command(str(job.server_command), model=job.model, options=job.engine_options)
    except UsageError:  # As `engine_problems` says.
        return None
    return (lambda: check_options(command, told)) if command.name in SLOW else None


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
