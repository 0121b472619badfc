"""Make lines of answers: results in OpenAI's batch form or plain, and dead letters. Pure."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ctxflow.batch.engine_answers import (
    columns_of,
    is_response,
    later_columns,
    later_name,
    nested_columns,
    usage_of,
    vectors_of,
    whole_body,
)
from ctxflow.batch.job import Job
from ctxflow.batch.row_items import Prepared, asked_of
from ctxflow.errors import CallError, RemoteTraceback, article
from ctxflow.rows.source import RowError

Record = Callable[[Prepared, Any], dict[str, Any]]  # Makes the object of a result's line from its row and its answer.

_GENERATION = ("text", "finish_reason", "prompt_tokens", "completion_tokens", "truncated")
_PARTS = {"generate": _GENERATION, "chat": _GENERATION, "embed": ("embedding",), "classify": ("label", "scores")}
_CUT = ("prompt_tokens", "truncated", "original_prompt_tokens")  # Of every row, where inputs may be cut.


def line(record: Mapping[str, Any], nan: bool = False) -> bytes:
    """Return a record as a line of JSON, which no reader of lines takes for several.

    :param nan: whether NaN and infinities may be written, as Python reads them; JSON lacks them.
    :raises ValueError, TypeError: if it holds what JSON cannot.
    """
    text = (_ENCODE_NAN if nan else _ENCODE)(record)
    if not text.isascii():
        for end in "\x85\u2028\u2029":  # Of lines, to Unicode; JSON itself escapes those below a space.
            text = text.replace(end, f"\\u{ord(end):04x}")
    return text.encode() + b"\n"


def error_line(letter: Mapping[str, Any]) -> bytes:
    """Return a dead letter as a line of JSON, with whatever text is in it."""
    try:
        return line(letter)
    except UnicodeEncodeError:
        return json.dumps(letter, allow_nan=False, default=plain_value).encode() + b"\n"


def whole_text(text: str) -> str:
    r"""Return text with U+FFFD in place of each half of a surrogate pair, which is no character.

    >>> whole_text("x\ud800"), whole_text("\ud83d\ude00") == "\U0001f600"
    ('x\ufffd', True)
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def plain_value(value: Any) -> Any:
    """Return what JSON lacks as what it has: numpy's numbers and arrays, dataclasses, dates, decimals, bytes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        try:
            return sorted(value)
        except TypeError:  # Of several types.
            return sorted(value, key=repr)
    if isinstance(value, (bytes, bytearray)):
        return value.decode("latin-1")
    module = type(value).__module__
    if type(value).__name__ in ("Timestamp", "Timedelta", "NaTType") and module.partition(".")[0] == "pandas":
        return None if str(value) == "NaT" else str(value)
    if module.partition(".")[0] in ("datetime", "decimal", "uuid", "pathlib"):
        return str(value)
    raise TypeError(f"the result holds {article(type(value).__name__)}, which JSON cannot: return plain data")


_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=plain_value).encode
_ENCODE_NAN = json.JSONEncoder(ensure_ascii=False, default=plain_value).encode


def plain_columns(job: Job) -> tuple[str, ...]:
    """Return the columns of results that are not in OpenAI's form, in their order."""
    identifier = () if job.id_column is None else (job.id_column,)
    return tuple(dict.fromkeys(("row", *identifier, *job.keep, *_parts(job), *_properties(job).values())))


def _parts(job: Job) -> tuple[str, ...]:
    parts = _PARTS.get(str(job.task), ("result",))
    if job.task is not None and job.too_long != "error":
        parts = tuple(dict.fromkeys((*parts, *_CUT)))
    return parts


def _properties(job: Job) -> dict[str, str]:
    """Return the properties of the schema that answers keep to, each with the column that it becomes."""
    named = (job.schema_of_answers or {}).get("properties")
    taken = {"row", "context", job.id_column or "custom_id", *job.keep, *_parts(job)}
    found: dict[str, str] = {}
    for name in named if isinstance(named, Mapping) else ():
        found[name] = later_name(name, taken)
        taken.add(found[name])
    return found


def _not_of_answers(job: Job) -> set[str]:
    """Return the columns whose names those that only some answers have cannot take."""
    return {job.id_column or "custom_id", *job.keep, *_properties(job).values()}


def nested(job: Job) -> tuple[str, ...]:
    """Return the columns of plain results that hold lists and objects: as JSON text where the form has types."""
    return nested_columns(_not_of_answers(job)) if job.task is not None else ()


def plain_record(job: Job) -> Record:
    """Return what makes plain results: a row's number, id and kept columns, the parts of its answer, and its context.

    The properties of an answer that keeps to a schema follow; null where an answer that was cut off has none.

    :raises ValueError: if a kept column and a part of the answer have one name.
    """
    parts = _parts(job)
    copied = [name for name in parts if name != "embedding"]
    properties = _properties(job)
    ours = {"row", *parts}
    name = job.id_column or "custom_id"
    theirs = {*job.keep, name}
    if clash := sorted(ours & theirs):
        raise ValueError(f"the results have a column {clash[0]!r} of their own: rename yours")
    taken = _not_of_answers(job)

    def make(row: Prepared, answer: Any) -> dict[str, Any]:
        record: dict[str, Any] = {"row": row.number}
        if row.id is not None:
            record[name] = row.id
        record.update(row.kept)
        if job.task is None:
            record["result"] = answer
        else:
            found = _columns(answer, taken) if is_response(answer) else answer
            if job.task == "embed":
                vectors = found["embeddings"]
                record["embedding"] = vectors[0] if isinstance(asked_of(row.item)["input"], str) else vectors
            record.update((name, found[name]) for name in copied)
            if properties:
                values = _object(found["text"])
                record.update((column, values.get(name)) for name, column in properties.items())
            record.update((name, found[name]) for name in later_columns(taken) if name in found)
        if row.context is not None:
            record.setdefault("context", row.context)
        return record

    return make


def _object(text: str) -> Mapping[str, Any]:
    """Return the object that an answer is; an empty one for what was cut off."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, Mapping) else {}


def _columns(answer: Mapping[str, Any], taken: Collection[str]) -> dict[str, Any]:
    """Return what an engine answered as the parts of a plain result."""
    if "choices" in answer:
        return columns_of(answer, taken)
    cut = {name: answer.get(name) for name in ("truncated", "original_prompt_tokens")}
    read = usage_of(answer)["prompt_tokens"]
    return {"embeddings": vectors_of(answer), "prompt_tokens": read, **cut, "truncated": bool(cut["truncated"])}


def openai_record(job: Job, created: int) -> Record:
    """Return what makes lines of OpenAI's batch output.

    :param created: the time that all responses name, in seconds since 1970: a job that is run again writes the same.
    """
    model = str(job.model)

    def make(row: Prepared, answer: Any) -> dict[str, Any]:
        name = f"{row.key:016x}"
        if is_response(answer):
            endpoint, request = row.item[0]
            body = whole_body(endpoint, answer, name, created, str(request.get("model", model)), request)
            return _line_of(row, name, body)
        if "messages" in row.item[0]:
            choice = {"message": {"role": "assistant", "content": answer["text"]}}
            body = _completion(f"chatcmpl-{name}", "chat.completion", choice, answer)
        elif "prompt" in row.item[0]:
            body = _completion(f"cmpl-{name}", "text_completion", {"text": answer["text"]}, answer)
        else:
            body = _embeddings(answer)
        named = {"model": str(row.item[0].get("model", model))}
        body |= named if "data" in body else {"created": created, **named}
        if truncated(answer):  # Fields of our own: OpenAI's clients keep what they do not know.
            body |= {"truncated": True, "original_prompt_tokens": answer["original_prompt_tokens"]}
        return _line_of(row, name, body)

    return make


def _line_of(row: Prepared, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": row.id, "response": response, "error": None}


def _completion(name: str, kind: str, choice: dict[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    read, written = answer["prompt_tokens"], answer["completion_tokens"]
    return {
        "id": name,
        "object": kind,
        "choices": [{"index": 0, **choice, "logprobs": None, "finish_reason": answer["finish_reason"]}],
        "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
    }


def tokens_of(answer: Mapping[str, Any]) -> int:
    """Return the tokens that a model read and wrote for an answer."""
    if is_response(answer):
        return int(usage_of(answer)["total_tokens"])
    count: int = answer["prompt_tokens"] + answer.get("completion_tokens", 0)
    return count


def truncated(answer: Mapping[str, Any]) -> bool:
    """Return whether a model read less than it was given."""
    return bool(answer.get("truncated"))


def _embeddings(answer: Mapping[str, Any]) -> dict[str, Any]:
    tokens, vectors = answer["prompt_tokens"], answer["embeddings"]
    data = [{"object": "embedding", "index": n, "embedding": vector} for n, vector in enumerate(vectors)]
    return {"object": "list", "data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def dead_letter(number: int, key: int, identifier: Any, place: str, error: BaseException) -> dict[str, Any]:
    """Return the dead letter of a row: OpenAI's error form, with the row's place and the worker's traceback."""
    cause = error.__cause__
    told = error if isinstance(error, CallError) else cause if isinstance(cause, RemoteTraceback) else None
    remote = cause.text if isinstance(cause, RemoteTraceback) else getattr(error, "remote_traceback", "")
    code = "InvalidRow" if isinstance(error, RowError) else type(error).__name__
    return {
        "id": f"batch_req_{key:016x}",
        "custom_id": identifier,
        "response": None,
        "error": {"code": code, "message": str(error)},
        "row": number,
        "place": place,
        "worker": told.worker if told else "",
        "host": told.host if told else "",
        "traceback": remote,
    }


_DEEP = 500  # Levels; deeper ones JSON's readers refuse.
_NULL = "values that JSON cannot hold", "null stands in their place"
_KEYS = "keys that JSON cannot hold", "their text stands in their place"
_HALVES = "texts with half of a surrogate pair, which is no character", "U+FFFD stands in its place"


class Held:
    r"""Makes lines of records, and counts the values that had to become something else.

    :param kept: the columns that are the input's own; the others are the answer.
    :param nan: whether NaN and infinities may stand in the lines, since they are only read again here.
    :param told: called with a sentence the first time that a column loses a value.
    :ivar nulled: how many values are null for that, by column; `altered`, how many texts and keys are changed.

    >>> held = Held(["price"], told=print)
    >>> held.line({"row": 0, "price": float("nan"), "result": "yes"})
    the column price has values that JSON cannot hold, such as nan: null stands in their place
    b'{"row": 0, "price": null, "result": "yes"}\n'
    >>> held.nulled
    {'price': 1}
    """

    def __init__(
        self, kept: Collection[str] = (), nan: bool = False, told: Callable[[str], None] | None = None
    ) -> None:
        self.nulled: dict[str, int] = {}
        self.altered: dict[str, int] = {}
        self._told = told or (lambda sentence: None)
        self._kept = frozenset(kept)
        self._nan = nan
        self._said: set[tuple[str, tuple[str, str]]] = set()

    def line(self, record: Mapping[str, Any]) -> bytes:
        """Return a record as a line, with null for parts of an answer, and kept values, that cannot be held.

        :raises ValueError, TypeError, RecursionError: if the answer itself cannot be held, saying why.
        """
        try:
            return line(record, self._nan)
        except (ValueError, TypeError, RecursionError):
            changes: list[_Changes] = []
            replaced: dict[str, Any] = {}
            for name, value in record.items():
                changes.append(_Changes(name, self._nan, name not in self._kept))
                replaced[name] = changes[-1].replaced(value, itself=name not in self._kept)
            made = line(replaced, self._nan)
        for each in changes:
            self._count(each.name, _NULL, each.lost, self.nulled)
            self._count(each.name, _KEYS, each.keys, self.altered)
            self._count(each.name, _HALVES, each.halves, self.altered)
        return made

    def _count(self, name: str, what: tuple[str, str], values: list[Any], counts: dict[str, int]) -> None:
        if not values:
            return
        counts[name] = counts.get(name, 0) + len(values)
        if (name, what) not in self._said:
            self._said.add((name, what))
            self._told(f"the column {name} has {what[0]}, such as {_shown(values[0])}: {what[1]}")


class _Changes:
    """The changes to a column's value that let the output hold it.

    :param answer: whether the column is the answer, or a part of it, not one of the input.
    :ivar lost: what became null; `keys`, of dictionaries, that became text; `halves`, texts that lost half a character.
    """

    def __init__(self, name: str, nan: bool, answer: bool) -> None:
        self.name = name
        self.lost: list[Any] = []
        self.keys: list[Any] = []
        self.halves: list[str] = []
        self._nan = nan
        self._answer = answer

    def replaced(self, value: Any, itself: bool, level: int = 0) -> Any:
        """Return a value that can be held; the answer `itself`, not a part of it, is refused if it cannot be."""
        if level > _DEEP:
            if self._answer:
                raise RecursionError("it is nested too deeply")
            return self._null(value)
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, float):
            if self._nan or math.isfinite(value):
                return value
            if itself:
                raise ValueError(
                    f"the {self.name} is {float(value)!r}, which JSON cannot hold: return None, or have the output end "
                    "in .parquet or .csv"
                )
            return self._null(value)
        if isinstance(value, dict):
            return self._dictionary(value, level)
        if isinstance(value, (list, tuple)):
            return [self.replaced(each, False, level + 1) for each in value]
        if value is None or isinstance(value, bool):
            return value
        try:
            plain = value if isinstance(value, int) else plain_value(value)
            if isinstance(plain, int):
                line({"": plain})
                return plain
        except (ValueError, TypeError, RecursionError):
            if itself:
                raise
            return self._null(value)
        return self.replaced(plain, itself, level + 1)

    def _dictionary(self, value: dict[Any, Any], level: int) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        others = []
        for key, each in value.items():
            if _holds({key: None}, self._nan):
                made[key] = self.replaced(each, False, level + 1)
            else:
                others.append((key, each))
        for key, each in others:  # Behind those whose names they must not take.
            name = self._key(key)
            while name in made:
                name = f"{name}'"
            made[name] = self.replaced(each, False, level + 1)
        return made

    def _key(self, key: Any) -> Any:
        """Return a key as JSON has it."""
        if isinstance(key, str):
            return self._text(key)
        try:
            plain = plain_value(key)  # As it stands for values of its type.
            if _holds({plain: None}, self._nan):
                return plain
        except (ValueError, TypeError):
            pass
        self.keys.append(key)
        return whole_text(_shown(key))

    def _text(self, value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            whole = whole_text(value)
            if whole.count("\ufffd") > value.count("\ufffd"):  # Else the halves are of one pair.
                self.halves.append(value)
            return whole
        return value

    def _null(self, value: Any) -> None:
        self.lost.append(value)


def _holds(record: Mapping[Any, Any], nan: bool) -> bool:
    try:
        line(record, nan)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # An integer of more digits than Python writes, or a class that fails at it.
        text = article(type(value).__name__)
    return text if len(text) <= 60 else f"{text[:57]}..."
