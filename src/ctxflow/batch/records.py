"""From answers to lines: results in OpenAI's batch form or plain, and dead letters. Pure.

What does not live here: where lines go (ledger.py), and Parquet (publish.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from ctxflow.batch.intake import Prepared
from ctxflow.batch.job import Job
from ctxflow.errors import CallError, RemoteTraceback
from ctxflow.rows.source import RowError
from ctxflow.wording import article

Record = Callable[[Prepared, Any], dict[str, Any]]
"""Makes the object of a result's line from its row and its answer."""

_GENERATION = ("text", "finish_reason", "prompt_tokens", "completion_tokens", "truncated")
_PARTS = {"generate": _GENERATION, "chat": _GENERATION, "embed": ("embedding",), "classify": ("label", "scores")}
_CUT = ("prompt_tokens", "truncated", "original_prompt_tokens")
"""What is told of every row where inputs may be cut."""


def line(record: Mapping[str, Any], nan: bool = False) -> bytes:
    """A record as a line of JSON.

    :param nan: whether NaN and infinities may be written, as Python reads them; JSON lacks them.
    :raises ValueError: if it holds such a number and may not, or itself, or half of a surrogate pair in a text.
    :raises TypeError: if it holds what JSON cannot.
    """
    return (_ENCODE_NAN if nan else _ENCODE)(record).encode() + b"\n"


def error_line(letter: Mapping[str, Any]) -> bytes:
    """A dead letter as a line of JSON, with whatever text is in it."""
    try:
        return line(letter)
    except UnicodeEncodeError:
        return json.dumps(letter, allow_nan=False, default=plain_value).encode() + b"\n"


def whole_text(text: str) -> str:
    r"""Text with U+FFFD in place of each half of a surrogate pair, which is no character.

    >>> whole_text("x\ud800"), whole_text("\ud83d\ude00") == "\U0001f600"
    ('x\ufffd', True)
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def plain_value(value: Any) -> Any:
    """What JSON lacks, as what it has: numpy's numbers and arrays, dataclasses, dates, decimals, bytes."""
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
    """The columns of results that are not in OpenAI's form, in their order."""
    identifier = () if job.id_column is None else (job.id_column,)
    return tuple(dict.fromkeys(("row", *identifier, *job.keep, *_parts(job))))


def _parts(job: Job) -> tuple[str, ...]:
    parts = _PARTS.get(str(job.task), ("result",))
    if job.task is not None and job.too_long != "error":
        parts = tuple(dict.fromkeys((*parts, *_CUT)))
    return parts


def plain_record(job: Job) -> Record:
    """Rows' numbers, ids and kept columns, the answers' parts as columns, and who answered where that may differ.

    :raises ValueError: if a kept column and a part of the answer have one name.
    """
    parts = _parts(job)
    copied = [name for name in parts if name != "embedding"]
    ours = {"row", *parts}
    if clash := sorted(ours & {*job.keep, job.id_column or "custom_id"}):
        raise ValueError(f"the results have a column {clash[0]!r} of their own: rename yours")
    name = job.id_column or "custom_id"

    def make(row: Prepared, answer: Any) -> dict[str, Any]:
        record: dict[str, Any] = {"row": row.number}
        if row.id is not None:
            record[name] = row.id
        record.update(row.kept)
        if job.task is None:
            record["result"] = answer
        if job.task == "embed":
            vectors = answer["embeddings"]
            record["embedding"] = vectors[0] if isinstance(row.item[0]["input"], str) else vectors
        if job.task is not None:
            record.update((name, answer[name]) for name in copied)
        if row.context is not None:
            record.setdefault("context", row.context)
        return record

    return make


def openai_record(job: Job, created: int) -> Record:
    """The lines of OpenAI's batch output.

    :param created: the time that responses name, in seconds since 1970. One for all, so that a job that is run
        again writes the same lines.
    """
    model = str(job.model)

    def make(row: Prepared, answer: Any) -> dict[str, Any]:
        name = f"{row.key:016x}"
        if "messages" in row.item[0]:
            choice = {"message": {"role": "assistant", "content": answer["text"]}}
            body = _completion(f"chatcmpl-{name}", "chat.completion", choice, answer)
        elif "prompt" in row.item[0]:
            body = _completion(f"cmpl-{name}", "text_completion", {"text": answer["text"]}, answer)
        else:
            body = _embeddings(answer)
        body |= {"model": model} if "data" in body else {"created": created, "model": model}
        if truncated(answer):  # Fields of our own: OpenAI's clients keep what they do not know.
            body |= {"truncated": True, "original_prompt_tokens": answer["original_prompt_tokens"]}
        return {
            "id": f"batch_req_{name}",
            "custom_id": row.id,
            "response": {"status_code": 200, "request_id": f"req_{name}", "body": body},
            "error": None,
        }

    return make


def _completion(name: str, kind: str, choice: dict[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    read, written = answer["prompt_tokens"], answer["completion_tokens"]
    return {
        "id": name,
        "object": kind,
        "choices": [{"index": 0, **choice, "logprobs": None, "finish_reason": answer["finish_reason"]}],
        "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
    }


def tokens_of(answer: Mapping[str, Any]) -> int:
    """The tokens that a model read and wrote for an answer that counts them.

    >>> tokens_of({"prompt_tokens": 5, "completion_tokens": 2}), tokens_of({"prompt_tokens": 5})
    (7, 5)
    """
    count: int = answer["prompt_tokens"] + answer.get("completion_tokens", 0)
    return count


def truncated(answer: Mapping[str, Any]) -> bool:
    """Whether a model read less than it was given.

    >>> truncated({"text": "Paris", "truncated": True, "original_prompt_tokens": 600})
    True
    """
    return bool(answer.get("truncated"))


def _embeddings(answer: Mapping[str, Any]) -> dict[str, Any]:
    tokens = answer["prompt_tokens"]
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": n, "embedding": vector} for n, vector in enumerate(answer["embeddings"])
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def dead_letter(number: int, key: int, identifier: Any, place: str, error: BaseException) -> dict[str, Any]:
    """A row that failed: a line of OpenAI's error form, with the row's place and what the worker saw beside it."""
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
