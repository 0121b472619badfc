"""The item that an app gets of each row: a request to a model, or the values that a function takes.

What is found wrong with a row here costs it one line; what a worker finds costs it a call.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxflow.apps import BatchApp
from ctxflow.batch.job import Job
from ctxflow.batch.templates import Render, compile_template
from ctxflow.errors import counted
from ctxflow.models.model_folder import folder_here, vocabulary_of
from ctxflow.models.openai_contents import messages_problem, shown, text_problem, without_empty
from ctxflow.models.openai_engine import CHAT, COMPLETIONS, EMBEDDINGS
from ctxflow.models.openai_requests import CONTENTS, FIELDS, MOST_TOKENS, as_before, as_sent, bound_by, refusal
from ctxflow.models.openai_responses import RESPONSES, UntranslatableError, as_chat
from ctxflow.models.results import Sampling
from ctxflow.models.server_dialects import dialect_refusal, in_dialect, server_kind
from ctxflow.rows.source import RowError, cell, columns_for, item_maker

Item = tuple[Any, ...]
Make = Callable[[Mapping[str, Any]], Item]  # Makes the item of a row's values, or raises `RowError`.

URLS = {CHAT: "generate", COMPLETIONS: "generate", EMBEDDINGS: "embed", RESPONSES: "generate"}


def family_of(job: Job) -> str:
    """Return which app does a job's task: "generate", "embed" or "classify"."""
    return "generate" if job.task in ("generate", "chat") else str(job.task)


def answered_by_batches(job: Job) -> bool:
    """Return whether a batch app answers a job's rows, not an engine each by itself: faster for encoders."""
    return job.task == "classify" or (job.task == "embed" and job.backend == "transformers")


@dataclasses.dataclass(slots=True)
class Prepared:
    """A row in flight.

    :ivar key: what the ledger knows it by; `id`, its id, None where rows are known by their numbers.
    :ivar item: what the app gets, () for a row that failed before; `error`, why it did.
    :ivar kept: columns that go to the output.
    :ivar context: the name of the context that answered it, where the app has alternatives.
    :ivar refused: whether no item can be made of it, although it can be read.
    """

    number: int
    key: int
    id: str | int | None
    item: Item
    kept: Mapping[str, Any]
    size: int
    error: BaseException | None = None
    context: str | None = None
    refused: bool = False


def maker(job: Job, app: BatchApp | None, known: Sequence[str] | None = None) -> Make:
    """Return what makes items of a job's rows.

    :param app: the job's own function, None where a model does it.
    :param known: the input's columns, None where each row has its own.
    :raises ValueError: if the app's parameters do not fit the columns, or a template is invalid.
    """
    if app is not None:
        make = function_maker(job, app, known)
    else:
        make = openai_maker(job) if job.input_format == "openai" else plain_maker(job)

    def made(values: Mapping[str, Any]) -> Item:
        try:
            return make(values)
        except RowError:
            raise
        except Exception as error:  # Whatever a row's own values lead to, it is that row's.
            said = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
            raise RowError(f"the row cannot be used ({said}): mend it, or leave it out") from error

    return made


def openai_maker(job: Job) -> Make:
    """Return what makes items of requests in OpenAI's batch format."""
    family, backend, adapters = family_of(job), job.backend, tuple(job.adapter)
    names = {*_own_names(job), *adapters} if adapters else None
    models = tuple(job.models)
    vocabularies = _vocabularies(job)
    batches, kind = answered_by_batches(job), server_kind(job.server_command or "")
    shape = format_of(job)

    def make(values: Mapping[str, Any]) -> Item:
        body = values.get("body")
        if not isinstance(body, Mapping):
            raise RowError("the request has no body that is an object")
        if (wrong := misaddressed(values, family)) is not None:
            raise RowError(wrong)
        endpoint = asked = str(endpoint_of(values.get("url")))
        named = _check_named(body.get("model"), "the body's model", models) if models else ""
        if asked == RESPONSES:
            try:
                endpoint, body = CHAT, as_chat(body)
            except UntranslatableError as error:
                raise RowError(str(error)) from None
        if shape and not bound_by(body) and not body.get("tools"):  # Whose calls the schema would not let through.
            body = {**body, **shape}
        if (wrong := refusal(endpoint, body, backend, names, vocabularies[named])) is not None:
            raise RowError(wrong)
        sent = as_sent(endpoint, body, backend, _told_models(job, body))
        if kind:
            if (wrong := dialect_refusal(kind, sent)) is not None:
                raise RowError(wrong)
            sent = in_dialect(kind, endpoint, sent)
        return (sent,) if batches else ((asked, sent),)

    return make


def misaddressed(request: Mapping[str, Any], family: str) -> str | None:
    """Return what is wrong with a request's method or url, None if a job of that family can answer it."""
    url = request.get("url")
    if request.get("method", "POST") != "POST":
        return f"the method is {shown(request['method'])}: only POST is known"
    if (endpoint := endpoint_of(url)) is None:
        return f"the url is {shown(url)}: known are {', '.join(URLS)}"
    if URLS[endpoint] != family:
        return f"the url is {shown(url)}, but this job is to {family}: put such requests in a file of their own"
    return None


def endpoint_of(url: Any) -> str | None:
    """Return the endpoint that a request's url names, with or without a host and a slash at its end; None for others.

    >>> endpoint_of("https://api.openai.com/v1/embeddings"), endpoint_of("/v1/images")
    ('/v1/embeddings', None)
    """
    path = _HOST.sub("", url).rstrip("/") if isinstance(url, str) else ""
    return path if path in URLS else None


_HOST = re.compile(r"\Ahttps?://[^/?#]+")


def _vocabularies(job: Job) -> dict[str, int]:
    """Return how many tokens each of a job's models knows, by the names that rows have for them."""
    folders = {name: folder_here(str(each.model)) for name, each in job.by_model().items()}
    return {name: (vocabulary_of(folder) if folder else None) or MOST_TOKENS for name, folder in folders.items()}


def _own_names(job: Job) -> tuple[str, str]:
    """Return what requests may call the job's model."""
    return str(job.model), Path(str(job.model)).name


def _told_models(job: Job, body: Mapping[str, Any]) -> Collection[str]:
    """Return the names that an engine is told where they are a request's model: of what it has beside the job's own.

    Which models a server has it knows itself.
    """
    if job.models:
        return tuple(job.models)
    if job.backend == "server":
        named = body.get("model")
        return (named,) if isinstance(named, str) and named not in _own_names(job) else ()
    return tuple(job.adapter)


def plain_maker(job: Job) -> Make:
    """Return what makes requests to a model of rows of columns."""
    system = compile_template(job.system, "system message") if job.system is not None else None
    template = compile_template(job.template) if job.template is not None else None
    column = job.columns[0] if job.columns else ""
    parameters, models = job.row_parameter, tuple(job.models)
    endpoint = {"embed": EMBEDDINGS, "chat": CHAT}.get(str(job.task), COMPLETIONS)
    kind, batches, media = CONTENTS[endpoint], answered_by_batches(job), job.backend != "transformers"
    shape = in_dialect(server_kind(job.server_command or ""), endpoint, format_of(job))

    def make(values: Mapping[str, Any]) -> Item:
        content = template(values) if template is not None else cell(values, column)
        request: dict[str, Any]
        if endpoint == CHAT:
            request = {kind: _conversation(content, column, system, values, media)}
        else:
            request = {kind: _text(content, column or "prompt")}
        request.update(shape)
        if parameters:
            request.update(as_fields(_checked({name: _parsed(values.get(name)) for name in parameters})))
        if models:
            request["model"] = _check_named(values.get("model"), "the row's model", models)
        return (request,) if batches else ((endpoint, request),)

    return make


def format_of(job: Job) -> dict[str, Any]:
    """Return the field of a body that binds answers to the job's schema; none without one.

    All rows share its value, which a payload holds once.
    """
    schema = job.schema_of_answers
    if schema is None:
        return {}
    shape = {"name": "answer", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": shape}}


def as_fields(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return generation parameters as fields of a body of OpenAI's form.

    >>> as_fields({"max_new_tokens": 5, "top_k": 3})
    {'max_tokens': 5, 'top_k': 3}
    """
    named = {("max_tokens" if name == "max_new_tokens" else name): value for name, value in parameters.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in named.items()}


def _conversation(
    content: Any, column: str, system: Render | None, values: Mapping[str, Any], media: bool
) -> list[Any]:
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if system is not None:
        messages = [{"role": "system", "content": system(values)}, *(messages or ())]
    if (wrong := messages_problem(messages, column or "messages", media)) is not None:
        raise RowError(wrong)
    return without_empty(messages)


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


def _check_named(value: Any, what: str, models: tuple[str, ...]) -> str:
    """Return the name of the model that a row is for, of a job that has several."""
    if not isinstance(value, str) or value not in models:
        raise RowError(f"{what} is {shown(value)}, none of this job's: name {' or '.join(models)}")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{what} is {shown(value)}, not text")
    if (wrong := text_problem(value, what)) is not None:
        raise RowError(wrong)
    return value


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """Return a row's own generation parameters, without those that are None."""
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return given
    if "stop" in given:
        stop = given["stop"]
        given["stop"] = [stop] if isinstance(stop, str) else stop
        if (wrong := FIELDS[COMPLETIONS]["stop"].check(given["stop"])) is not None:
            raise RowError(f"stop is {shown(stop)}: {wrong}")
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


# --- what is known of items


def asked_of(item: Item) -> Mapping[str, Any]:
    """Return what a model is asked by an item: a request, or a request to one of an engine's endpoints.

    >>> asked_of((("/v1/completions", {"prompt": "One"}),)), asked_of(({"input": "Two"},))
    ({'prompt': 'One'}, {'input': 'Two'})
    """
    (asked,) = item
    found: Mapping[str, Any] = asked[1] if isinstance(asked, tuple) else asked
    return found


def for_model(item: Item) -> tuple[str, Item]:
    """Return the model that an item is for, of a job that has several, and the item as that gets it.

    >>> for_model((("/v1/completions", {"prompt": "One", "model": "small"}),))
    ('small', (('/v1/completions', {'prompt': 'One'}),))
    """
    request = dict(asked_of(item))
    name = request.pop("model")
    (asked,) = item
    return name, ((asked[0], request),) if isinstance(asked, tuple) else (request,)


def known_as(item: Item) -> Item:
    """Return the item by which a row is known in a job's journal: as version 0.1 had it, whose jobs go on.

    >>> known_as((("/v1/completions", {"prompt": "One", "max_tokens": 5}),))
    ({'prompt': 'One', 'max_new_tokens': 5},)
    """
    if len(item) == 1 and isinstance(item[0], tuple) and len(item[0]) == 2 and item[0][0] in URLS:
        return (as_before(item[0][1]),)
    return item
