"""Requests of OpenAI's form, drawn from a seed, with each of the fields that bind an answer or add to it; and what is
wrong with an answer to one, field by field as the package `openai` parses it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow.parquet
from openai.types import Completion
from openai.types.chat import ChatCompletion

import forked
from suite.depth import some
from waiting import patience

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
FIELDS = ("logprobs", "n", "tools", "choices")
SCHEMAS, EACH = some((40, 10), deeply=(1000, 200))
"""How many requests there are with schemas, and with each of the other fields; in depth they take minutes."""
ROOM = 400
"""Tokens that an answer of a schema may have; the small models read 512."""

_WORDS = ("river", "city", "Zürich", 'a "b"', "x\\y", "two words", "ü", "")
_NAMES = ("kind", "size", "tags", "place", "when", "part")
Line = dict[str, Any]


def drawn_schemas(count: int, seed: int = 0) -> list[Line]:
    """Draw chats and completions whose answers are bound to JSON schemas, no two alike but by chance."""
    chance = random.Random(seed)
    lines = []
    for number in range(count):
        schema = _object(chance, 0)
        name, value = chance.choice([
            ("response_format", {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}),
            ("structured_outputs", {"json": schema}),
        ])  # fmt: skip
        lines.append(_line(f"schema-{number}", chance, {"max_tokens": ROOM, name: value}))
    return lines


def drawn_fields(count: int, kinds: Iterable[str] = FIELDS, seed: int = 0) -> list[Line]:
    """Draw so many requests with each of some fields."""
    chance = random.Random(seed)
    return [
        _line(f"{kind}-{number}", chance, _FIELDS[kind](number, chance), chats_only=kind == "tools")
        for kind in kinds
        for number in range(count)
    ]


def _line(name: str, chance: random.Random, fields: Mapping[str, Any], chats_only: bool = False) -> Line:
    """Make the line of a batch file: greedy, or by a seed of its own."""
    text = f"Which {chance.choice(_NAMES)} is number {chance.randrange(1000)}?"
    drawn = {"temperature": 1.0, "seed": chance.randrange(1000)} if chance.random() < 0.7 else {"temperature": 0}
    if chats_only or chance.random() < 0.5:
        body = {"messages": [{"role": "user", "content": text}], **drawn, **fields}
        if type(body.get("logprobs")) is int:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}
    return {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": {"prompt": text, **drawn, **fields}}


def _tools(number: int, chance: random.Random) -> dict[str, Any]:
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": "Tell.", "parameters": _object(chance, 2), "strict": True},
        }
        for name in chance.sample(["weather", "distance", "population"], 2)
    ]
    named = {"type": "function", "function": {"name": tools[1]["function"]["name"]}}
    choice = ("auto", "required", named)[number % 3]
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": ROOM}


_FIELDS: dict[str, Any] = {
    "logprobs": lambda number, chance: {"logprobs": chance.randrange(6), "max_tokens": 6},
    "n": lambda number, chance: {"n": chance.randint(2, 4), "temperature": 1.0, "max_tokens": 6},
    "tools": _tools,
    "choices": lambda number, chance: {
        "structured_outputs": {"choice": chance.sample([word for word in _WORDS if word], 3)},
        "max_tokens": 40,
    },
}


# --- schemas


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(_NAMES, chance.randint(1, 4 - depth))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(chance, depth + 1) for name in names},
        "required": names if chance.random() < 0.7 else names[:1],
        "additionalProperties": False,
    }
    if depth == 0 and chance.random() < 0.2:
        made["$defs"] = {"one": _leaf(chance)}
        made["properties"][names[0]] = {"$ref": "#/$defs/one"}
    return made


def _any(chance: random.Random, depth: int) -> dict[str, Any]:
    kind = chance.random()
    if depth < 3 and kind < 0.2:
        return _object(chance, depth)
    if depth < 3 and kind < 0.4:
        least = chance.randrange(3)
        return {
            "type": "array",
            "items": _any(chance, depth + 1),
            "minItems": least,
            "maxItems": least + chance.randrange(3),
        }
    if kind < 0.5:
        return {"anyOf": [_leaf(chance), _leaf(chance)]}
    return _leaf(chance)


def _leaf(chance: random.Random) -> dict[str, Any]:
    least = chance.randrange(-50, 50)
    return chance.choice([
        {"enum": chance.sample(_WORDS, 3)},
        {"enum": [1, "one", None, True, 2.5]},
        {"const": chance.choice(_WORDS)},
        {"type": "string", "minLength": chance.randrange(3), "maxLength": chance.randint(3, 8)},
        {"type": "string", "maxLength": chance.randint(1, 12)},
        {"type": "string", "pattern": "^[A-Z][a-z]{1,4}(-[0-9]{2})?$"},
        {"type": "string", "format": "date"},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": least, "maximum": least + chance.randrange(200)},
        {"type": "number", "minimum": 0, "exclusiveMaximum": chance.choice([1, 10])},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    ])  # fmt: skip


# --- answers


def wrong_with(line: Line, body: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the answer to a line, a response's body; None if nothing is."""
    asked = line["body"]
    kind: Any = ChatCompletion if line["url"] == CHAT else Completion
    try:
        parsed = kind.model_validate(body, strict=True)
        if [choice.index for choice in parsed.choices] != list(range(asked.get("n", 1))):
            return f"{len(parsed.choices)} choices"
        for choice in parsed.choices:
            _check(asked, choice)
    except (ValueError, AssertionError, AttributeError, TypeError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {error}"
    usage = parsed.usage
    return None if usage.prompt_tokens + usage.completion_tokens == usage.total_tokens > 0 else f"{usage}"


def _check(asked: Mapping[str, Any], choice: Any) -> None:
    chat = hasattr(choice, "message")
    text = choice.message.content if chat else choice.text
    if (top := asked.get("top_logprobs" if chat else "logprobs")) is not None:
        _check_logprobs(choice, int(top), asked["max_tokens"])
    if bound := asked.get("structured_outputs", {}):
        assert choice.finish_reason == "stop", choice.finish_reason
        if "choice" in bound:
            assert text in bound["choice"], text
    schema = bound.get("json") or asked.get("response_format", {}).get("json_schema", {}).get("schema")
    if schema is not None:
        assert choice.finish_reason == "stop", choice.finish_reason
        jsonschema.validate(json.loads(text), schema)
    if asked.get("tools"):
        _check_calls(asked, choice)


def _check_logprobs(choice: Any, top: int, most: int) -> None:
    said = choice.logprobs
    if hasattr(choice, "message"):
        assert 0 < len(said.content) <= most
        for token in said.content:
            assert token.logprob <= 0 and len(token.top_logprobs) in (top, top + 1), token
        return
    assert 0 < len(said.tokens) == len(said.token_logprobs) <= most
    assert all(value <= 0 for value in said.token_logprobs)
    # Tokens of one text are one.
    assert all(len(each) <= top + 1 for each in said.top_logprobs or [] if each)


def _check_calls(asked: Mapping[str, Any], choice: Any) -> None:
    calls, wanted = choice.message.tool_calls or [], asked["tool_choice"]
    parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in asked["tools"]}
    if wanted != "auto":
        assert len(calls) == 1, choice
        assert wanted == "required" or calls[0].function.name == wanted["function"]["name"]
    for call in calls:
        assert call.type == "function" and call.id
        jsonschema.validate(json.loads(call.function.arguments), parameters[call.function.name])


def answered(
    model: Path, lines: Sequence[Line], folder: Path, output: str, *words: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Have `ctxflow batch` answer lines; return bodies of responses and dead letters by ids.

    :param output: a file's name: in OpenAI's form with .jsonl, columns with .parquet.
    :param words: of the command line, beside the model.
    """
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "ctxflow", "batch", "in.jsonl", "-o", output, "-m", str(model), "--workers", "1"]
    ended = forked.run(
        [*command, "--dtype", "float32", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=patience(1500),
        check=False,
    )
    assert ended.returncode in (0, 3), ended.stdout[-3000:] + ended.stderr[-6000:]
    errors = folder / f"{output}.errors.jsonl"
    letters = [json.loads(line) for line in errors.read_text().splitlines()] if errors.exists() else []
    dead = {letter["custom_id"]: letter["error"]["message"] for letter in letters}
    if output.endswith(".parquet"):
        by_id = {line["custom_id"]: line for line in lines}
        rows = pyarrow.parquet.read_table(folder / output).to_pylist()
        return {row["custom_id"]: as_body(row, by_id[row["custom_id"]]) for row in rows}, dead
    rows = [json.loads(line) for line in (folder / output).read_text().splitlines()]
    return {row["custom_id"]: row["response"]["body"] for row in rows}, dead


def all_wrong(lines: Iterable[Line], bodies: Mapping[str, Any]) -> dict[str, str]:
    """Return what is wrong, by the ids of those answers with which something is; one that is missing is wrong."""
    found = {}
    for line in lines:
        name = line["custom_id"]
        wrong = wrong_with(line, bodies[name]) if name in bodies else "has no answer"
        if wrong is not None:
            found[name] = wrong
    return found


def as_body(row: Mapping[str, Any], line: Line) -> dict[str, Any]:
    """Return the response's body that a row of a Parquet file has in its columns."""
    choices = json.loads(row["choices"]) if row.get("choices") else None
    if choices is None:
        logprobs = json.loads(row["logprobs"]) if row.get("logprobs") else None
        choice: dict[str, Any] = {"index": 0, "finish_reason": row["finish_reason"], "logprobs": logprobs}
        if line["url"] == CHAT:
            calls = json.loads(row["tool_calls"]) if row.get("tool_calls") else None
            message = {"role": "assistant", "content": row["text"] or None}
            choice["message"] = {**message, **({"tool_calls": calls} if calls else {})}
        else:
            choice["text"] = row["text"]
        choices = [choice]
    kind = "chat.completion" if line["url"] == CHAT else "text_completion"
    usage = {name: row[name] for name in ("prompt_tokens", "completion_tokens")}
    usage["total_tokens"] = sum(usage.values())
    return {"id": "a", "object": kind, "created": 1, "model": "m", "choices": choices, "usage": usage}
