"""The app that does a job's rows: of a model's task, or of a function of the user's."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from ctxflow.apps import BatchApp, ContextApp
from ctxflow.batch.job import Job
from ctxflow.context import ContextFunction
from ctxflow.decorators import batch_app
from ctxflow.errors import article
from ctxflow.recipe import Context
from ctxflow.rows.source import closest


def model_app(job: Job, family: str, staged: bool) -> tuple[BatchApp, dict[str, Any]]:
    """Return the app that does a job's task, and its constants.

    :param family: "generate" (which answers conversations too), "embed" or "classify".
    :param staged: whether workers get a model's folder sent, since they do not share this machine's disk.
    """
    from ctxflow.models import encoder, generator, vllm_generator
    from ctxflow.models.answering import classify, embed, generate, label_chooser

    names = ("dtype", "max_input_tokens", "too_long", *(() if job.backend == "vllm" else ("device",)))
    inputs: dict[str, Any] = {name: value for name in names if (value := getattr(job, name)) is not None}
    options: dict[str, Any] = {} if job.gpus is None else {"gpus": job.gpus}
    folder = Path(job.model or "").expanduser()
    if folder.is_dir() and staged:
        options["files"] = {"model": str(folder.absolute())}
    else:
        inputs["model"] = str(folder.absolute()) if folder.is_dir() else job.model
    if family == "embed":
        return _app(job, embed, encoder.options(**options)(**inputs)), {}
    if family == "classify":
        return _app(job, classify, label_chooser.options(**options)(labels=tuple(job.label), **inputs)), {}
    if job.task == "chat":
        inputs["task"] = "chat"
    recipe = (vllm_generator if job.backend == "vllm" else generator).options(**options)(**inputs)
    return _app(job, generate, recipe), {"parameters": job.parameters}


def _app(job: Job, function: Any, recipe: Any) -> BatchApp:
    options: dict[str, Any] = {"batch_size": job.batch_size, "timeout": job.timeout, "retries": job.retries}
    app: BatchApp = batch_app(recipe, **options)(function)
    return app


def function_app(job: Job) -> BatchApp:
    """Return the user's own batch app that a job names, or a function made one.

    :raises ValueError: if there is none of that name, or it is something else; its module may raise what it likes.
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
    """Return what something is that is neither a batch app nor a function, and what to write."""
    if inspect.isfunction(found):
        return None
    from ctxflow.sessions import SessionApp

    if isinstance(found, ContextApp):
        return "a context_app, which takes one call at a time: make it a batch_app, a function over lists"
    if isinstance(found, SessionApp):
        return "a session_app, whose sessions are opened in Python: make it a batch_app, a function over lists"
    if isinstance(found, (Context, ContextFunction)):
        return "a context, not a function: name a batch_app that uses it"
    if not callable(found) or isinstance(found, type):
        kind = "a class" if isinstance(found, type) else article(type(found).__name__)
        return f"{kind}, not a function or a batch app"
    return None
