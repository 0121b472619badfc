"""What an engine answered, a response of OpenAI's form, as it is written: whole in that form, or as columns. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from ctxflow.batch.bounded_validator import first_error
from ctxflow.models.openai_engine import CHAT
from ctxflow.models.openai_responses import RESPONSES, response_body

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_NESTED = ("tool_calls", "logprobs", "choices")
_ENDED = {"eos_token": "stop", "stop_sequence": "stop", "end_turn": "stop"}  # Others' words for OpenAI's.
_OF_THE_RUN = {"id", "object", "created", "model", "choices", "data", "usage", "timings", "metrics"}


def whole_body(
    endpoint: str, answer: Mapping[str, Any], name: str, created: int, model: str, request: Mapping[str, Any] = _NOTHING
) -> dict[str, Any]:
    """Return the body of a response: all that the engine said of the answer, and nothing that differs from run to run.

    :param name: of the row, from which the response's id is made.
    :param request: as the engine got it.

    >>> said = {"choices": [{"text": "Two", "finish_reason": "eos_token"}], "usage": {"prompt_tokens": 3}}
    >>> whole_body("/v1/completions", said, "a", 0, "m")["choices"]
    [{'index': 0, 'text': 'Two', 'logprobs': None, 'finish_reason': 'stop'}]
    """
    others = {key: value for key, value in answer.items() if key not in _OF_THE_RUN and value is not None}
    usage = usage_of(answer)
    if "data" in answer:
        data = [
            {"object": "embedding", "index": number, "embedding": each["embedding"]}
            for number, each in enumerate(_in_order(answer["data"]))
        ]
        usage.pop("completion_tokens")
        return {"object": "list", "data": data, "usage": usage, "model": model, **others}
    if endpoint == RESPONSES:
        return {**response_body(choices_of(answer)[0], usage, request, name, created, model), **others}
    kind, prefix = ("chat.completion", "chatcmpl") if endpoint == CHAT else ("text_completion", "cmpl")
    body = {"id": f"{prefix}-{name}", "object": kind, "choices": choices_of(answer), "usage": usage}
    return {**body, "created": created, "model": model, **others}


def choices_of(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an answer's choices in their order, without what engines leave empty."""
    return [_choice(choice, number) for number, choice in enumerate(_in_order(answer["choices"]))]


def _in_order(parts: Any) -> list[Any]:
    return sorted(parts, key=lambda part: part.get("index") or 0)


def _choice(choice: Mapping[str, Any], number: int) -> dict[str, Any]:
    made: dict[str, Any] = {"index": number}
    if "message" in choice:
        made["message"] = _message(choice["message"])
    else:
        made["text"] = choice.get("text") or ""
    made["logprobs"] = _logprobs(choice.get("logprobs"), "message" in choice)
    ended = choice.get("finish_reason")
    made["finish_reason"] = _ENDED.get(str(ended), ended)
    return {**made, **{key: value for key, value in choice.items() if key not in made and value is not None}}


def _logprobs(said: Any, chat: bool) -> Any:
    """Return log probabilities in OpenAI's form; llama-server gives those of completions in that of chats."""
    if chat or not isinstance(said, Mapping) or not isinstance(said.get("content"), list):
        return said
    tokens = said["content"]
    return {
        "tokens": [each["token"] for each in tokens],
        "token_logprobs": [each["logprob"] for each in tokens],
        "top_logprobs": [{top["token"]: top["logprob"] for top in each.get("top_logprobs", ())} for each in tokens],
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.get("role") or "assistant", "content": message.get("content")}
    reasoning = message.get("reasoning_content") or message.get("reasoning")  # As engines have called it.
    if reasoning:
        made["reasoning_content"] = reasoning
    for key, value in message.items():
        if key not in ("role", "content", "reasoning", "reasoning_content") and value not in (None, []):
            made[key] = value
    return made


def usage_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens that an answer took, with the details that the engine gave of them."""
    said = _said(answer.get("usage") or {})
    read, written = int(said.get("prompt_tokens", 0)), int(said.get("completion_tokens", 0))
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written, **said}


def _said(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an engine said in an object, without what it left empty."""
    found = {key: _said(value) if isinstance(value, Mapping) else value for key, value in part.items()}
    return {key: value for key, value in found.items() if value not in (None, {})}


def columns_of(answer: Mapping[str, Any], taken: Collection[str] = ()) -> dict[str, Any]:
    """Return an answer as columns: those that each has, of its first choice, then those that only some have.

    These are "reasoning", "tool_calls", "logprobs", and "choices", all of them where there are several.

    :param taken: names of columns that are the input's own: where one of the later ones is called so, it begins with
        "answer_".
    """
    choices, usage = choices_of(answer), usage_of(answer)
    first = choices[0] if choices else {}
    message: Mapping[str, Any] = first.get("message", {})
    text = message.get("content") if "message" in first else first.get("text")
    made = {
        "text": text or "",
        "finish_reason": first.get("finish_reason"),
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "truncated": bool(answer.get("truncated")),
        "original_prompt_tokens": answer.get("original_prompt_tokens"),
    }
    later = {
        "reasoning": message.get("reasoning_content"),
        "tool_calls": message.get("tool_calls"),
        "logprobs": first.get("logprobs"),
        "choices": choices if len(choices) > 1 else None,
    }
    return made | {later_name(name, taken): value for name, value in later.items() if value is not None}


def later_name(name: str, taken: Collection[str]) -> str:
    """Return what a column that only some answers have is called."""
    while name in taken:
        name = f"answer_{name}"
    return name


def later_columns(taken: Collection[str]) -> tuple[str, ...]:
    """Return what the columns are called that only some answers have."""
    return tuple(later_name(name, taken) for name in ("reasoning", *_NESTED))


def nested_columns(taken: Collection[str]) -> tuple[str, ...]:
    """Return those of them that hold lists and objects: as JSON text where the form has types."""
    return tuple(later_name(name, taken) for name in _NESTED)


def vectors_of(answer: Mapping[str, Any]) -> list[Any]:
    """Return an answer's embeddings, in the order of the texts."""
    return [each["embedding"] for each in _in_order(answer["data"])]


def is_response(answer: Any) -> bool:
    """Return whether an answer is a response of OpenAI's form, as engines give it."""
    return isinstance(answer, Mapping) and ("choices" in answer or "data" in answer)


def ended_at_no_ones_limit(request: Mapping[str, Any], answer: Any) -> bool:
    """Return whether an answer was cut off at a number of tokens, though its request names none.

    >>> ended_at_no_ones_limit({"prompt": "One"}, {"choices": [{"text": "Two", "finish_reason": "length"}]})
    True
    """
    named = any(request.get(name) is not None for name in ("max_tokens", "max_completion_tokens"))
    choices = answer.get("choices", ()) if isinstance(answer, Mapping) and not named else ()
    return any(choice.get("finish_reason") == "length" for choice in choices)


def schema_missed(request: Mapping[str, Any], answer: Mapping[str, Any]) -> str | None:
    """Return why an answer is none: it is not what the request binds it to, JSON or a JSON schema; None if it is.

    Not all engines keep to all of a schema. What was cut off says so itself, by its `finish_reason`, and a text that
    echoes its prompt is not looked at. Regular expressions are left to the engine, and without the package jsonschema
    that is unknown; so whatever the schema, it takes a second or so at most.

    :param request: as it was sent to the engine.

    >>> request = {"structured_outputs": {"json": {"properties": {"price": {"maximum": 3}}}}}
    >>> schema_missed(request, {"choices": [{"text": '{"price": 12.5}', "finish_reason": "stop"}]})
    "the answer is not as the request's JSON schema has it: 12.5 is greater than the maximum of 3 (at price)"
    """
    schema = _schema_of(request)
    if schema is None or "choices" not in answer or request.get("echo"):
        return None
    for choice in choices_of(answer):
        text = choice.get("message", choice).get("content" if "message" in choice else "text")
        if choice["finish_reason"] != "stop" or text is None or choice.get("message", {}).get("tool_calls"):
            continue
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            ended = "; one of the request's stop texts may have ended it" if request.get("stop") else ""
            return f"the answer is no JSON, to which the request binds it: {error}{ended}"
        if (wrong := _first_error(schema, value)) is not None:
            return f"the answer is not as the request's JSON schema has it: {wrong}"
    return None


def _first_error(schema: Any, value: Any) -> str | None:
    """Return what is wrong with a value, and where; None also where that is unknown."""
    try:
        return first_error(json.dumps(schema), value)
    except ImportError:
        return None
    except ArithmeticError:
        return "it has a number beyond all bounds"


def _schema_of(request: Mapping[str, Any]) -> Any:
    """Return the schema that a request has, in whichever engine's words; None without."""
    form = request.get("response_format") or {}
    if form.get("type") == "json_schema":
        return form["json_schema"]["schema"]
    bound = request.get("structured_outputs") or {}
    if form.get("type") == "json_object" or bound.get("json_object"):
        return {"type": "object"}
    schema = bound.get("json", request.get("json_schema"))
    return json.loads(schema) if isinstance(schema, str) else schema
