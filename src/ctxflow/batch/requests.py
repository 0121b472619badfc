"""From rows to requests: what a row asks of the model or the user's function, checked here as far as it can be.

What is found wrong here costs a row one line; what a worker finds costs its batch another run. What does not live
here: ids and what is done already (intake.py), and what workers do (tasks.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ctxflow.apps import BatchApp
from ctxflow.batch.job import Job
from ctxflow.batch.templates import Render, compile_template
from ctxflow.models.sampling import Sampling
from ctxflow.rows.columns import cell, columns_for, item_maker
from ctxflow.rows.source import RowError
from ctxflow.wording import counted

Item = tuple[Any, ...]
Make = Callable[[Mapping[str, Any]], Item]
"""Makes the item of a row's values, or raises `RowError`."""

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
    """Which of the apps does a job's task: "generate", "embed" or "classify"."""
    return "generate" if job.task in ("generate", "chat") else str(job.task)


def maker(job: Job, app: BatchApp | None, known: Sequence[str] | None = None) -> Make:
    """What makes items of a job's rows.

    :param app: the job's own function, None where a model does it.
    :param known: the input's columns, None where each row has its own.
    :raises ValueError: if the app's parameters do not fit the columns, or for a template that is none.
    """
    if app is not None:
        return function_maker(job, app, known)
    return openai_maker(job) if job.input_format == "openai" else plain_maker(job)


def openai_maker(job: Job) -> Make:
    """For rows that are requests of OpenAI's batch format."""
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
    """For rows of columns and a model's task."""
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
    """For rows of columns and the user's own batch app.

    :param known: the input's columns, None where each row has its own.
    :raises ValueError: if the app's parameters do not fit the columns.
    """
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
    """A row's own generation parameters, those that are None left out."""
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
    """A parameter's cell: in CSV it is text, and empty where the row has none."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value else None
    except ValueError:
        return value


def _shown(value: Any) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
