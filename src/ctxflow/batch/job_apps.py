"""What does a job's rows: the app, of a model's task or of a user's function."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from ctxflow.apps import BatchApp, ContextApp
from ctxflow.batch.job import Job
from ctxflow.batch.row_items import answered_by_batches, as_fields, family_of
from ctxflow.context import ContextFunction
from ctxflow.decorators import batch_app, item_app
from ctxflow.errors import article, closest
from ctxflow.models.results import Sampling
from ctxflow.recipe import Context

TEXTS = 2000
"""Rows to embed that a worker gets at a time, where the job does not say: the more, the more are of similar lengths.

A short queue is divided by the workers all the same, and of a call that is interrupted the vectors that are there stay.
"""


def model_app(job: Job, family: str, staged: bool, *, sized: bool = False) -> tuple[BatchApp, dict[str, Any]]:
    """Return the app that does a job's task, and its constants.

    :param family: what `family_of` returns; `staged`, whether a model's folder is sent to workers.
    :param sized: whether the site says how many rows a worker gets at a time.
    """
    from ctxflow.models import encoder
    from ctxflow.models.answering import classify, embed, label_chooser

    if not answered_by_batches(job):
        return _engine_app(job, staged)
    options: dict[str, Any] = {} if job.gpus is None else {"gpus": job.gpus}
    inputs = {**_loading(job), **job.engine_options}
    _place(job, staged, options, inputs)
    function, recipe = (embed, encoder) if family == "embed" else (classify, label_chooser)
    if family == "classify":
        inputs = {"labels": tuple(job.label), **inputs}
    size = job.batch_size or (TEXTS if family == "embed" and not sized else None)
    how: dict[str, Any] = {"batch_size": size, "timeout": job.timeout, "retries": job.retries}
    app: BatchApp = batch_app(_named(recipe.options(**options)(**inputs), job), **how)(function)
    return app, {}


def _engine_app(job: Job, staged: bool) -> tuple[BatchApp, dict[str, Any]]:
    """Return the app that asks an engine, one request at a time, as many at once as the engine bears."""
    from ctxflow.models.answering import request_engine, respond

    options: dict[str, Any] = {"gpus": job.gpus if job.gpus is not None else int(job.backend == "vllm")}
    if job.batch_size is not None:
        options["concurrency"] = job.batch_size
    inputs: dict[str, Any] = {"backend": job.backend, "task": job.task, "options": job.engine_options, **_loading(job)}
    if job.server_command is not None:
        inputs["command"] = job.server_command
    _place(job, staged, options, inputs)
    adapters = dict(job.adapter)
    for number, (name, path) in enumerate(job.adapter.items()):
        folder = Path(path).expanduser().absolute()
        adapters[name] = str(folder)
        if staged and folder.exists():
            adapters[name] = f"adapter_{number}"
            options.setdefault("files", {})[adapters[name]] = str(folder)
    inputs["adapters"] = adapters
    engine = _named(request_engine.options(**options)(**inputs), job)
    app: BatchApp = item_app(engine, timeout=job.timeout, retries=job.retries)(respond)
    if family_of(job) == "embed":
        return app, {}
    # OpenAI's requests mean what they mean to OpenAI's API where they say nothing.
    own = {} if job.input_format == "openai" else {"max_tokens": Sampling.max_new_tokens, "temperature": 0}
    return app, {"parameters": {**own, **as_fields(job.parameters)}}


def _named(recipe: Context[Any], job: Job) -> Context[Any]:
    """Return a recipe by the name of its model, which a person knows it by in views and messages."""
    return dataclasses.replace(recipe, name=Path(str(job.model)).name or recipe.name)


def _loading(job: Job) -> dict[str, Any]:
    """Return how a model is to be loaded, as far as the job says."""
    names = {
        "transformers": ("dtype", "max_input_tokens", "too_long", "device"),
        "vllm": ("dtype", "max_input_tokens", "too_long"),
    }
    return {name: value for name in names.get(job.backend, ()) if (value := getattr(job, name)) is not None}


def _place(job: Job, staged: bool, options: dict[str, Any], inputs: dict[str, Any]) -> None:
    """Have workers get the model: as files that are sent to them, or by its name."""
    folder = Path(job.model or "").expanduser()
    here = folder.is_dir() or (folder.is_file() and job.backend == "server")
    if here and staged:
        options["files"] = {"model": str(folder.absolute())}
    else:
        inputs["model"] = str(folder.absolute()) if here else job.model


def function_app(job: Job) -> BatchApp:
    """Return the user's own batch app that a job names, or a function made one.

    :raises ValueError: if there is none of that name, or it is something else.
    """
    found = _found(str(job.function))
    if not isinstance(found, BatchApp):
        if (sentence := _no_function(found)) is not None:
            raise ValueError(f"{job.function} is {sentence}")
        try:
            found = batch_app(found)
        except TypeError as error:
            raise ValueError(f"{job.function} cannot be taken: {error}") from None
    changes: dict[str, Any] = {"batch_size": job.batch_size, "timeout": job.timeout, "retries": job.retries or None}
    if job.batch_size is not None and inspect.iscoroutinefunction(found.function):
        raise ValueError(f"{job.function} is an app of single items, which are not batched: leave --batch-size out")
    changed: BatchApp = found.using(**{name: value for name, value in changes.items() if value is not None})
    return changed


def _found(named: str) -> Any:
    """Return what is called MODULE:NAME."""
    module, _, name = named.partition(":")
    if not name or module.endswith(".py") or not all(part.isidentifier() for part in module.split(".")):
        hint = f" (without folders and .py: {Path(module).stem}:{name or 'name'})" if module.endswith(".py") else ""
        raise ValueError(f"the function {named!r} is to be named as module:name, such as my_prompts:summarise{hint}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module}.".startswith(f"{error.name}."):
            raise ValueError(f"the module {module} needs {error.name!r}, which is not installed here") from None
        raise ValueError(f"the function {named} is not found ({error}): run this where {module}.py is") from None
    except (Exception, SystemExit) as error:  # It is a program: it raises what it likes.
        raise ValueError(f"the module {module} fails when it is imported: {_raised(error, module)}") from None
    try:
        return getattr(loaded, name)
    except AttributeError:
        close = closest(name, [each for each in vars(loaded) if not each.startswith("_")])
        hint = f": did you mean {close!r}?" if close else ""
        raise ValueError(f"the module {module} has nothing called {name!r}{hint}") from None


def _raised(error: BaseException, module: str) -> str:
    """Return an error of a module's as text, with the line that it goes back to."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).stem == module.rpartition(".")[2]]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{where}"


def _no_function(found: Any) -> str | None:
    """Return why something is no function, and what to write; None if it is one."""
    if inspect.isfunction(found):
        return None
    from ctxflow.sessions import SessionApp

    if isinstance(found, ContextApp):
        return "a context_app, which takes one call at a time: make it a batch_app, a function over lists"
    if isinstance(found, SessionApp):
        return "a session_app, whose sessions are opened in Python: make it a batch_app, a function over lists"
    if isinstance(found, (Context, ContextFunction)):
        return "a context, not a function: name a batch_app that uses it"
    if isinstance(found, type):
        return "a class, not a function or a batch app"
    return None if callable(found) else f"{article(type(found).__name__)}, not a function or a batch app"
