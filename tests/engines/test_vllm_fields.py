"""Requests with each field, drawn from a seed, answered by a real vLLM through `ctxflow batch`: all are right.

`CTXFLOW_DRAWN_REQUESTS=full` asks 1,000 with JSON schemas and 200 with each of the other fields, and writes both forms.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("openai")
pytest.importorskip("jsonschema")

from drawn_requests import EACH, FULL, SCHEMAS, all_wrong, answered, drawn_fields, drawn_schemas

pytestmark = pytest.mark.timeout(1800)  # Starts of engines, on a machine that may be busy.

OPTIONS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 28,
    "max_model_len": 512,
    "tool_call_parser": "hermes",
}
WORDS = [word for name, value in OPTIONS.items() for word in ("--engine-option", f"{name}={json.dumps(value)}")]
UNBOUNDED = {
    "custom_id": "unbounded",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}],
        "tool_choice": "required",
        "max_tokens": 5,
    },
}


@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet"] if FULL else ["out.jsonl"])
def test_each_field_is_answered_as_openai_s_types_and_the_schemas_have_it(
    engine_environment, belongings, llama, tmp_path, output
):
    lines = [*drawn_schemas(SCHEMAS), *drawn_fields(EACH)]
    words = ["--backend", "vllm", "--gpus", "0", *WORDS]
    bodies, dead = answered(llama, [*lines, UNBOUNDED], tmp_path, output, *words)
    assert all_wrong(lines, bodies) == {}
    said = "the answer calls no tool, as tool_choice = 'required' demands: it ended at max_tokens, so raise that"
    assert dead == {"unbounded": said}
    belongings.none_left()
