"""Requests to `/v1/responses`, OpenAI's newest endpoint, as those to chat completions; and answers as its own. Pure.

What engines have no chat completion for is refused: state that OpenAI keeps, tools that it runs, files that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ctxflow.errors import InputError
from ctxflow.models.openai_contents import shown

RESPONSES = "/v1/responses"
"""The endpoint. Engines are asked at that of chats in its place."""

_SAME = {"max_output_tokens": "max_completion_tokens"}
_KEPT = "is kept by OpenAI alone: write all of the conversation into the input"
_REFUSED = {
    "previous_response_id": _KEPT,
    "conversation": _KEPT,
    "prompt": "names a prompt that OpenAI keeps: write it into the input",
    "max_tool_calls": "is for tools that OpenAI runs: leave it out",
    "messages": "is of chat completions: write the input",
    "context_management": _KEPT,
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,), "stream": (False,), "truncation": ("disabled",), "n": (1,),
}  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


class UntranslatableError(InputError):
    """A request cannot be made one to chat completions; the message says why, and what to change."""


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's body as one to chat completions, whose own checks are still to come.

    :raises UntranslatableError: for what chat completions have nothing for.

    >>> as_chat({"instructions": "Be brief.", "input": "Hello", "max_output_tokens": 5})["messages"]
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hello'}]
    """
    made: dict[str, Any] = {"messages": _messages(body), **_logprobs(body)}
    for name, value in body.items():
        if value is None or name in ("input", "instructions", "include", "top_logprobs"):
            continue
        if name in _REFUSED:
            raise UntranslatableError(f"the body's {name} = {shown(value)} {_REFUSED[name]}")
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise UntranslatableError(f"the body's {name} = {shown(value)} is not supported: leave it out")
        elif name == "text":
            made.update(_format(value))
        elif name == "reasoning":
            made.update(_reasoning(value))
        elif name == "tools":
            made["tools"] = [_tool(each) for each in value] if isinstance(value, list) else value
        elif name == "tool_choice":
            made["tool_choice"] = _choice(value)
        else:
            made[_SAME.get(name, name)] = value
    return made


def _logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    included, likeliest = body.get("include") or [], body.get("top_logprobs") or 0
    if not isinstance(included, list) or any(each != _LOGPROBS for each in included):
        raise UntranslatableError(f"the body's include = {shown(included)} is not supported: give {_LOGPROBS} alone")
    if likeliest and not included:
        raise UntranslatableError(f"the body's top_logprobs needs include = [{_LOGPROBS!r}] beside it")
    return {"logprobs": True, "top_logprobs": likeliest} if included else {}


def _messages(body: Mapping[str, Any]) -> list[Any]:
    said, given = body.get("instructions"), body.get("input")
    if said is not None and not isinstance(said, str):
        raise UntranslatableError(f"the body's instructions are {shown(said)}, not text")
    messages: list[Any] = [] if said is None else [{"role": "system", "content": said}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise UntranslatableError(f"the body's input is {shown(given)}: give text, or a list of items")
    for number, item in enumerate(given):
        what = f"input[{number}]"
        if not isinstance(item, Mapping):
            raise UntranslatableError(f"{what} is {shown(item)}, not an object")
        _add(messages, item, item.get("type", "message"), what)
    return messages


def _add(messages: list[Any], item: Mapping[str, Any], kind: object, what: str) -> None:
    """Add an item of the input to a conversation; calls of tools that follow one another are of one message."""
    if kind == "message":
        content = item.get("content")
        parts = [_part(each, what) for each in content] if isinstance(content, list) else content
        messages.append({"role": item.get("role"), "content": parts})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant" and "tool_calls" in last:
            last["tool_calls"].append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        parts = [_part(each, what) for each in output] if isinstance(output, list) else output
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": parts})
    elif kind != "reasoning":  # What a model thought before an earlier answer is no part of a conversation.
        raise UntranslatableError(f"{what} is of type {shown(kind)}, which only OpenAI has: leave it out")


def _part(part: Any, what: str) -> Any:
    """Return a part of a content as chats have it; texts have the same form there, whatever they are called."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXTS:
        return {"type": "text", "text": part.get(_TEXTS[str(kind)])}
    if kind == "input_image":
        if part.get("file_id") is not None:
            raise UntranslatableError(f"{what} has an image that OpenAI keeps: write it as a data URL")
        detail = {} if part.get("detail") in (None, "auto") else {"detail": part["detail"]}
        return {"type": "image_url", "image_url": {"url": part.get("image_url"), **detail}}
    if kind == "input_file":
        raise UntranslatableError(f"{what} has a file, which no engine reads: write its text")
    return part


def _format(text: Any) -> dict[str, Any]:
    if not isinstance(text, Mapping) or set(text) - {"format", "verbosity"}:
        raise UntranslatableError(f"the body's text = {shown(text)} is not supported: give a format")
    made = {"verbosity": text["verbosity"]} if text.get("verbosity") not in (None, "medium") else {}
    given = text.get("format")
    if isinstance(given, Mapping) and given.get("type") == "json_schema":
        shape = {name: value for name, value in given.items() if name != "type" and value is not None}
        return {**made, "response_format": {"type": "json_schema", "json_schema": shape}}
    return made if given is None else {**made, "response_format": given}


def _reasoning(given: Any) -> dict[str, Any]:
    known = {name: value for name, value in given.items() if value is not None} if isinstance(given, Mapping) else None
    if known is None or set(known) - {"effort"}:
        raise UntranslatableError(f"the body's reasoning = {shown(given)} is not supported: give its effort alone")
    return {"reasoning_effort": known["effort"]} if known else {}


def _tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        return tool  # Which the checks of chats refuse.
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _choice(given: Any) -> Any:
    named = isinstance(given, Mapping) and given.get("type") == "function" and "name" in given
    return {"type": "function", "function": {"name": given["name"]}} if named else given


def response_body(
    choice: Mapping[str, Any], usage: Mapping[str, Any], request: Mapping[str, Any], name: str, created: int, model: str
) -> dict[str, Any]:
    """Return an answer to a chat as the body of a response.

    :param choice: the answer's, as `engine_answers` cleans it; `usage`, likewise.
    :param request: to the chat, as `as_chat` made it.
    :param name: of the row, from which ids are made.
    """
    ended = choice.get("finish_reason")
    reasons = {"length": "max_output_tokens", "content_filter": "content_filter"}
    status = "incomplete" if ended in reasons else "completed"
    tokens: dict[str, Any] = {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": _detail(usage, "prompt_tokens_details", "cached_tokens"),
            "cache_write_tokens": _detail(usage, "prompt_tokens_details", "cache_write_tokens"),
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": _detail(usage, "completion_tokens_details", "reasoning_tokens")},
        "total_tokens": usage["total_tokens"],
    }
    empty = {"type": "function", "strict": None, "parameters": None}
    tools = [{**empty, **each["function"]} for each in request.get("tools") or ()]
    chosen = request.get("tool_choice", "auto")
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": reasons[str(ended)]} if ended in reasons else None,
        "instructions": None,
        "model": model,
        "output": list(_output(choice["message"], choice.get("logprobs"), name, status)),
        "parallel_tool_calls": request.get("parallel_tool_calls", True),
        "tool_choice": {"type": "function", **chosen["function"]} if isinstance(chosen, Mapping) else chosen,
        "tools": tools,
        "usage": tokens,
    }


def _detail(usage: Mapping[str, Any], part: str, name: str) -> int:
    return int((usage.get(part) or {}).get(name) or 0)


def _output(message: Mapping[str, Any], logprobs: Any, name: str, status: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thought}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content})
    calls: Sequence[Any] = message.get("tool_calls") or ()
    if message.get("content") or not calls:
        told = (logprobs or {}).get("content") or []
        part = {"type": "output_text", "text": message.get("content") or "", "annotations": [], "logprobs": told}
        refused = message.get("refusal")
        parts = [{"type": "refusal", "refusal": refused}] if refused else [part]
        items.append({"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status, "content": parts})
    for number, call in enumerate(calls):
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        ids = {"id": f"fc_{name}_{number}", "call_id": call.get("id") or f"call_{name}_{number}"}
        items.append({"type": "function_call", **ids, **function, "status": "completed"})
    return items
