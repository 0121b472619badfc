"""What does a job's rows: the app, of a model's task or of a user's function, and the item that it gets of each row.

What is found wrong with a row here costs it one line; what a worker finds costs its batch another run.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxflow.apps import BatchApp, ContextApp
from ctxflow.batch.job import Job, template_text
from ctxflow.context import ContextFunction
from ctxflow.decorators import batch_app
from ctxflow.errors import CtxflowError, article, closest, counted
from ctxflow.installing import how_to_install
from ctxflow.models.results import Sampling
from ctxflow.recipe import Context
from ctxflow.rows.source import RowError, cell, columns_for, item_maker


def model_app(job: Job, family: str, staged: bool) -> tuple[BatchApp, dict[str, Any]]:
    """Return the app that does a job's task, and its constants.

    :param family: what `family_of` returns; `staged`, whether a model's folder is sent to workers.
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
    generates = vllm_generator if job.backend == "vllm" else generator
    of_family: dict[str, tuple[Any, Any]] = {"embed": (embed, encoder), "classify": (classify, label_chooser)}
    function, recipe = of_family.get(family, (generate, generates))
    if family == "classify":
        inputs = {"labels": tuple(job.label), **inputs}
    elif job.task == "chat":
        inputs["task"] = "chat"
    how: dict[str, Any] = {"batch_size": job.batch_size, "timeout": job.timeout, "retries": job.retries}
    app: BatchApp = batch_app(recipe.options(**options)(**inputs), **how)(function)
    return app, {"parameters": job.parameters} if recipe is generates else {}


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


Item = tuple[Any, ...]
Make = Callable[[Mapping[str, Any]], Item]  # Makes the item of a row's values, or raises `RowError`.
Render = Callable[[Mapping[str, Any]], str]

URLS = {"/v1/chat/completions": "generate", "/v1/completions": "generate", "/v1/embeddings": "embed"}
# The body's names for generation parameters -> ours.
_OPENAI_PARAMETERS = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"} | {
    name: name for name in ("temperature", "top_p", "top_k", "seed", "stop")
}
# What may be in a body without changing the answer, and what may be there at the value that changes nothing.
_IGNORED = {"model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "stream_options": (), "logprobs": (False,), "echo": (False,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "tools": ([],),
    "response_format": ({"type": "text"},), "encoding_format": ("float",), "suffix": ("",), "tool_choice": ("none",),
}  # fmt: skip


def family_of(job: Job) -> str:
    """Return which app does a job's task: "generate", "embed" or "classify"."""
    return "generate" if job.task in ("generate", "chat") else str(job.task)


@dataclasses.dataclass(slots=True)
class Prepared:
    """A row in flight.

    :ivar key: what the ledger knows it by; `id`, its id, None where rows are known by their numbers.
    :ivar item: what the app gets, () for a row that failed before; `error`, why it did.
    :ivar kept: columns that go to the output.
    :ivar context: the name of the context that answered it, where the app has alternatives.
    """

    number: int
    key: int
    id: str | int | None
    item: Item
    kept: Mapping[str, Any]
    size: int
    error: BaseException | None = None
    context: str | None = None


def maker(job: Job, app: BatchApp | None, known: Sequence[str] | None = None) -> Make:
    """Return what makes items of a job's rows.

    :param app: the job's own function, None where a model does it.
    :param known: the input's columns, None where each row has its own.
    :raises ValueError: if the app's parameters do not fit the columns, or a template is invalid.
    """
    if app is not None:
        return function_maker(job, app, known)
    return openai_maker(job) if job.input_format == "openai" else plain_maker(job)


def openai_maker(job: Job) -> Make:
    """Return what makes items of requests in OpenAI's batch format."""
    family = family_of(job)

    def make(values: Mapping[str, Any]) -> Item:
        url, body = values.get("url"), values.get("body")
        if not isinstance(body, Mapping):
            raise RowError("the request has no body that is an object")
        if values.get("method", "POST") != "POST":
            raise RowError(f"the method is {_shown(values['method'])}: only POST is known")
        wanted = URLS.get(url) if isinstance(url, str) else None
        if wanted is None:
            raise RowError(f"the url is {_shown(url)}: known are {', '.join(URLS)}")
        if wanted != family:
            raise RowError(f"the url is {url}, but this job is to {family}: put such requests in a file of their own")
        return (_openai_request(str(url), body),)

    return make


def _openai_request(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    kind = {"/v1/embeddings": "input", "/v1/completions": "prompt"}.get(url, "messages")
    value = body.get(kind)
    content = {"input": _openai_texts, "prompt": _text, "messages": _messages}[kind](value, kind)
    given: dict[str, Any] = {}
    for name, value in body.items():
        if name == kind or name in _IGNORED or value is None:
            continue
        if name in _OPENAI_PARAMETERS and kind != "input":
            given[_OPENAI_PARAMETERS[name]] = value
        elif value not in _NEUTRAL.get(name, ()):
            raise RowError(f"the body's {name} = {_shown(value)} is not supported: leave it out")
    return {kind: content, **_checked(given)}


def _openai_texts(value: Any, what: str) -> str | list[str]:
    if isinstance(value, list) and value:
        return [_text(each, f"{what}[{n}]") for n, each in enumerate(value)]
    return _text(value, what)


def plain_maker(job: Job) -> Make:
    """Return what makes requests to a model of rows of columns."""
    system = compile_template(job.system, "system message") if job.system is not None else None
    template = compile_template(job.template) if job.template is not None else None
    column = job.columns[0] if job.columns else ""
    parameters = job.row_parameter
    kind = {"embed": "input", "chat": "messages"}.get(str(job.task), "prompt")

    def make(values: Mapping[str, Any]) -> Item:
        content = template(values) if template is not None else cell(values, column)
        request: dict[str, Any]
        if kind == "messages":
            request = {kind: _conversation(content, column, system, values)}
        else:
            request = {kind: _text(content, column or "prompt")}
        if parameters:
            request.update(_checked({name: _parsed(values.get(name)) for name in parameters}))
        return (request,)

    return make


def _conversation(content: Any, column: str, system: Render | None, values: Mapping[str, Any]) -> list[Any]:
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if system is not None:
        messages = [{"role": "system", "content": system(values)}, *(messages or ())]
    return _messages(messages, column or "messages")


def function_maker(job: Job, app: BatchApp, known: Sequence[str] | None = None) -> Make:
    """Return what makes arguments of the user's own batch app of rows of columns."""
    names = app.parameters
    if job.template is not None:
        render = compile_template(job.template)
        _check_width(job, app, 1)
        return lambda values: (render(values),)
    columns = columns_for(str(job.function), names, job.columns, known, job.reading.name or str(job.input))
    if not names and not columns:
        raise ValueError(
            f"{job.function} takes any number of values an item (*{app.rest}): give --column for each, in their order, "
            "or name its parameters"
        )
    _check_width(job, app, len(columns) or 1)
    return item_maker(columns)


def _check_width(job: Job, app: BatchApp, width: int) -> None:
    names = app.parameters
    if width != len(names) and (app.rest is None or width < len(names)):
        raise ValueError(
            f"{job.function} takes {counted(len(names), 'value')} an item ({', '.join(names)}), but gets {width}: "
            "give --column for each, in their order"
        )


# --- parts of rows


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{what} is {_shown(value)}, not text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RowError(f"{what} is no valid Unicode: character {error.start} is half of a pair") from None
    return value


def _messages(value: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RowError(f"{what} is {_shown(value)}, not a list of messages")
    for n, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RowError(f"{what}[{n}] is no message: it needs a role and a content")
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        for part in parts:
            if not isinstance(part, Mapping) or part.get("type", "text") != "text":
                raise RowError(f"{what}[{n}] has content that is not text")
            if part.get("text") is not None:
                _text(part["text"], f"the content of {what}[{n}]")
    return value


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Return a row's own generation parameters, without those that are None."""
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return given
    if "stop" in given:
        stop = given["stop"]
        given["stop"] = [stop] if isinstance(stop, str) else stop
        if not isinstance(given["stop"], list):
            raise RowError(f"stop is {_shown(stop)}: give a string or a list of strings")
    try:
        Sampling(**{**given, "stop": tuple(given.get("stop", ()))})
    except (TypeError, ValueError) as error:
        raise RowError(str(error)) from None
    return given


def _parsed(value: Any) -> Any:
    """Return the value of a parameter's cell: in CSV it is text, and empty where the row has none."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value else None
    except ValueError:
        return value


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- templates


class LacksColumn(RowError):
    """A row lacks what a template needs."""


def compile_template(text: str, what: str = "template") -> Render:
    """Return a function that renders a row, whose columns are variables, or `row["the name"]`.

    :param text: the template, or "@" and the path of its file.
    :raises ValueError: for an invalid template, with the line where it goes wrong.

    >>> compile_template("Is it true that {{ claim }}?")({"claim": "2 > 1"})
    'Is it true that 2 > 1?'
    """
    environment, jinja2 = _environment()
    try:
        template = environment.from_string(template_text(text))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the {what} is no Jinja2 template: {error.message} (line {error.lineno})") from None

    def render(row: Mapping[str, Any]) -> str:
        try:
            rendered: str = template.render({**row, "row": row})
        except jinja2.UndefinedError as error:
            raise LacksColumn(f"the {what} needs what the row lacks: {error.message}") from None
        except Exception as error:  # A template is a program: it raises what it likes.
            raise RowError(f"the {what} fails on the row: {type(error).__name__}: {error}") from None
        return rendered

    return render


def _environment() -> tuple[Any, Any]:
    """Return the sandbox, and jinja2's module."""
    try:
        import jinja2
        import jinja2.meta
        import jinja2.sandbox
    except ImportError as error:
        raise CtxflowError(f"templates need jinja2 ({error}): {how_to_install('jinja2', extra='batch')}") from None
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment
    return sandbox(undefined=jinja2.StrictUndefined, keep_trailing_newline=True), jinja2


def columns_named(text: str) -> list[str]:
    """Return the columns that a template names, sorted.

    >>> columns_named("{{ claim }} {% for each in parts %}{{ each }}{% endfor %} {{ row['the source'] }}")
    ['claim', 'parts', 'the source']
    """
    environment, jinja2 = _environment()
    parsed = environment.parse(template_text(text))
    found = set(jinja2.meta.find_undeclared_variables(parsed)) - {"row", *environment.globals}
    for node in parsed.find_all((jinja2.nodes.Getitem, jinja2.nodes.Getattr)):
        if isinstance(node.node, jinja2.nodes.Name) and node.node.name == "row":
            given = getattr(node, "attr", None) or getattr(getattr(node, "arg", None), "value", None)
            if isinstance(given, str):
                found.add(given)
    return sorted(found)
