"""How servers write what OpenAI's API has no field for, and which fields they pass over in silence. Pure.

A request that a server would answer as if a field were not there is refused; llama-server's were found by asking one,
the others' in their documentation.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from ctxflow.models.openai_contents import shown
from ctxflow.models.openai_engine import CHAT
from ctxflow.models.server_command import programs_of


class Dialect(NamedTuple):
    """What is particular to a kind of server.

    :ivar programs: the programs, or modules behind `python -m`, by which it is known.
    :ivar passed_over: fields that it does not know.
    :ivar bound: kinds of what an answer may be bound to that it can do, of "json", "regex", "choice", "grammar".
    """

    programs: tuple[str, ...]
    passed_over: frozenset[str]
    bound: frozenset[str]


_DIALECTS = {
    "llama-server": Dialect(
        ("llama-server",),
        frozenset({
            "min_tokens", "stop_token_ids", "allowed_token_ids", "bad_words", "prompt_logprobs", "return_token_ids",
            "return_tokens_as_token_ids", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens",
            "thinking_token_budget", "include_reasoning", "echo", "suffix", "best_of", "dimensions",
        }),
        frozenset({"json", "json_object", "choice", "grammar"}),
    ),
    "sglang": Dialect(
        ("sglang", "sglang.launch_server"),
        frozenset({"allowed_token_ids", "bad_words", "prompt_logprobs", "thinking_token_budget", "include_reasoning"}),
        frozenset({"json", "json_object", "regex", "choice", "grammar"}),
    ),
    "tgi": Dialect(
        ("text-generation-launcher",),
        frozenset({
            "min_tokens", "stop_token_ids", "allowed_token_ids", "bad_words", "prompt_logprobs", "return_token_ids",
            "return_tokens_as_token_ids", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens",
            "thinking_token_budget", "include_reasoning", "reasoning_effort", "ignore_eos", "echo", "suffix", "best_of",
            "dimensions", "logit_bias", "top_k", "min_p", "repetition_penalty", "chat_template_kwargs",
        }),
        frozenset({"json", "json_object"}),
    ),
}  # fmt: skip


def server_kind(command: str) -> str:
    """Return the kind of server that a command starts, "" for one that takes requests as vLLM does, or is unknown.

    >>> server_kind("/opt/llama.cpp/llama-server -m {model}"), server_kind("vllm serve /models/sglang")
    ('llama-server', '')
    """
    try:
        programs = set(programs_of(shlex.split(command)))
    except ValueError:
        return ""
    return next((kind for kind, each in _DIALECTS.items() if set(each.programs) & programs), "")


def dialect_refusal(kind: str, sent: Mapping[str, Any]) -> str | None:
    """Return why a server of a kind cannot do a request, as `as_sent` made it; None if it can.

    >>> dialect_refusal("llama-server", {"prompt": "One", "min_tokens": 3})
    'llama-server passes over min_tokens = 3: leave it out, or run it with --backend vllm'
    """
    dialect = _DIALECTS.get(kind)
    if dialect is None:
        return None
    for name in dialect.passed_over:
        if name in sent:
            return f"{kind} passes over {name} = {shown(sent[name])}: leave it out, or run it with --backend vllm"
    for bound in sent.get("structured_outputs", ()):
        if bound not in dialect.bound:
            return f"{kind} binds no answer by {bound}: run it with --backend vllm or --backend transformers"
    return None


def in_dialect(kind: str, endpoint: str, sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request, as `as_sent` made it, as a server of a kind takes it.

    >>> in_dialect("llama-server", "/v1/completions", {"prompt": "One", "structured_outputs": {"choice": ["a", "b"]}})
    {'prompt': 'One', 'grammar': 'root ::= "a" | "b"'}
    """
    body = dict(sent)
    if kind not in _DIALECTS:
        return body
    bound = body.pop("structured_outputs", {})
    if "json" in bound or "json_object" in bound:
        schema = bound.get("json", {"type": "object"})
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": json.loads(schema) if isinstance(schema, str) else schema},
        }
    if kind == "tgi":
        return body
    if kind == "sglang":
        if "choice" in bound:
            bound = {"regex": "|".join(f"({re.escape(each)})" for each in bound["choice"])}
        names = {"regex": "regex", "grammar": "ebnf"}
        return {**body, **{names[each]: value for each, value in bound.items() if each in names}}
    if "choice" in bound:
        body["grammar"] = "root ::= " + " | ".join(map(_literal, bound["choice"]))
    if "grammar" in bound:
        body["grammar"] = bound["grammar"]
    if "repetition_penalty" in body:
        body["repeat_penalty"] = body.pop("repetition_penalty")
    likeliest = "top_logprobs" if endpoint == CHAT else "logprobs"
    if type(body.get(likeliest)) is int and body[likeliest] == 0:
        body[likeliest] = 1  # With 0 of the likeliest tokens it tells of none that it took.
    wanted = body.get("response_format", {})
    if endpoint != CHAT and wanted:  # There it knows a field of its own alone.
        del body["response_format"]
        if wanted["type"] != "text":
            body["json_schema"] = wanted.get("json_schema", {}).get("schema", {"type": "object"})
    return body


def _literal(text: str) -> str:
    r"""Return a text as llama.cpp's grammars have it.

    >>> _literal('say "a\n"')
    '"say \\"a\\n\\""'
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'
