"""Requests with each field, drawn from a seed, answered by a real vLLM: all are right."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("openai")
pytest.importorskip("jsonschema")

from vllm_forks import run

from drawn_requests import EACH, SCHEMAS, all_wrong, answered, drawn_fields, drawn_schemas

pytestmark = pytest.mark.timeout(1800)  # Starts of engines, on a machine that may be busy.

OPTIONS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 26,
    "max_model_len": 512,
    "tool_call_parser": "hermes",
}
LINES = [*drawn_schemas(SCHEMAS), *drawn_fields(EACH)]
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
NO_CALL = "the answer calls no tool, as tool_choice = 'required' demands: it ended at max_tokens, so raise that"


def test_each_field_is_answered_as_openai_s_types_and_the_schemas_have_it(vllm_python, llama):
    questions = [(line["custom_id"], line["url"], line["body"]) for line in [*LINES, UNBOUNDED]]
    *answers, unbounded = run(vllm_python, "fields", str(llama), questions, OPTIONS)
    bodies = {line["custom_id"]: answer for line, answer in zip(LINES, answers, strict=True)}
    assert all_wrong(LINES, bodies) == {}, bodies
    assert unbounded == ["ItemRefused", NO_CALL]


@pytest.mark.release
@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet"])
def test_a_batch_job_has_each_field_answered(engine_environment, belongings, llama, tmp_path, output):
    words = [word for name, value in OPTIONS.items() for word in ("--engine-option", f"{name}={json.dumps(value)}")]
    bodies, dead = answered(llama, [*LINES, UNBOUNDED], tmp_path, output, "--backend", "vllm", "--gpus", "0", *words)
    assert all_wrong(LINES, bodies) == {}, bodies
    assert dead == {"unbounded": NO_CALL}
    belongings.none_left()
