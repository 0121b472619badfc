"""Turn an input's rows into items: what each asks of the model or the user's function, and which are still to be done.

What is found wrong here costs a row one line; what a worker finds costs its batch another run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ctxflow.apps import BatchApp
from ctxflow.batch.job import Job
from ctxflow.batch.journal import Keys, SeenKeys, as_keys, contained, id_key
from ctxflow.batch.ledger import Ledger
from ctxflow.batch.templates import Render, compile_template
from ctxflow.errors import counted
from ctxflow.models.results import Sampling
from ctxflow.rows.source import Row, RowError, Source, cell, columns_for, item_maker

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
    """Return which app does a job's task: "generate", "embed" or "classify"."""
    return "generate" if job.task in ("generate", "chat") else str(job.task)


def maker(job: Job, app: BatchApp | None, known: Sequence[str] | None = None) -> Make:
    """Return what makes items of a job's rows.

    :param app: the job's own function, None where a model does it.
    :param known: the input's columns, None where each row has its own.
    :raises ValueError: if the app's parameters do not fit the columns, or for a template that is none.
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
    """Return what makes arguments of the user's own batch app of rows of columns.

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


_ITEM_OVERHEAD = 500  # Bytes that an item on its way takes beside its values.


@dataclasses.dataclass(slots=True)
class Prepared:
    """A row on its way.

    :ivar key: what the ledger knows it by.
    :ivar id: its id, None where rows are known by their numbers.
    :ivar item: what the app gets, () for a row that failed before.
    :ivar kept: columns that go to the output.
    :ivar error: why it failed, None if it did not.
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


class Intake:
    """The rows of an input that are not settled.

    :param make: makes items of rows.
    :param id_column: the column of the ids; None knows rows by their numbers.
    :param keep: columns to be kept.
    :param ledger: what is settled; without one nothing is.
    :ivar read: how many rows the input has up to where it is read.
    """

    def __init__(
        self, source: Source, make: Make, id_column: str | None, keep: tuple[str, ...], ledger: Ledger | None = None
    ) -> None:
        self.read = 0
        self._source = source
        self._make = make
        self._id_column = id_column
        self._keep = keep
        self._settled = as_keys(()) if ledger is None else ledger.settled
        self._skip = b"" if ledger is None else ledger.skip
        self._seen = SeenKeys()
        if id_column is not None and ledger is not None:
            self._seen.take(ledger.skipped)

    def chunks(self) -> Iterator[list[Prepared]]:
        """Yield chunks of rows, which may be empty: all of a chunk may be settled."""
        for rows in self._source.chunks(self._skip):
            ids: list[Any] = [None] * len(rows)
            errors: list[RowError | None] = [None] * len(rows)
            keys = self._keys(rows, ids, errors)
            settled = contained(keys, self._settled).tolist()
            self.read = rows[-1].number + 1
            yield [
                self._prepared(row, key, identifier, error)
                for row, key, identifier, error, known in zip(rows, keys.tolist(), ids, errors, settled, strict=True)
                if not known
            ]

    def _keys(self, rows: list[Row], ids: list[Any], errors: list[RowError | None]) -> Keys:
        """Return the rows' keys; fill in their ids, and what is wrong with them."""
        numbers = [row.number for row in rows]
        if self._id_column is None:
            return as_keys(numbers)
        given = []
        for n, row in enumerate(rows):
            try:
                ids[n] = identifier = _id(row, self._id_column)
                given.append(id_key(str(identifier)))
            except RowError as error:
                errors[n] = error
                given.append(row.number)
        keys = as_keys(given)
        for n in np.flatnonzero(self._seen.add(keys)).tolist():
            errors[n] = RowError(f"the {self._id_column} {ids[n]!r} is that of an earlier row: each needs its own")
            keys[n] = numbers[n]
        return keys

    def _prepared(self, row: Row, key: int, identifier: Any, error: RowError | None) -> Prepared:
        values = row.values
        if isinstance(values, RowError):
            error = values
        if error is None:
            assert isinstance(values, dict)
            try:
                kept = {name: _kept(values, name) for name in self._keep} if self._keep else _NOTHING
                return Prepared(row.number, key, identifier, self._make(values), kept, row.size + _ITEM_OVERHEAD)
            except RowError as reason:
                error = reason
        return Prepared(row.number, key, identifier, (), _NOTHING, _ITEM_OVERHEAD, error)


_NOTHING: Mapping[str, Any] = {}


def _id(row: Row, column: str) -> str | int:
    if isinstance(row.values, RowError):
        raise row.values
    identifier = row.values.get(column)
    if isinstance(identifier, bool) or not isinstance(identifier, (str, int)) or identifier == "":
        shown = "missing" if identifier is None else repr(identifier)[:60]
        raise RowError(f"the {column} is {shown}: each row needs one, a string or a whole number")
    return identifier


def _kept(values: Mapping[str, Any], name: str) -> Any:
    if name not in values:
        raise RowError(f"the row has no {name!r}, which is to be kept")
    return values[name]
