"""Requests with each field, drawn from a seed, answered by transformers through `ctxflow batch`: all are right."""

from __future__ import annotations

import pytest

pytest.importorskip("openai")
pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

from drawn_requests import EACH, SCHEMAS, all_wrong, answered, drawn_fields, drawn_schemas
from suite.depth import some

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("output", some(["out.parquet"], deeply=["out.jsonl", "out.parquet"]))
def test_each_field_is_answered_as_openai_s_types_and_the_schemas_have_it(causal_lm_folder, tmp_path, output):
    lines = [*drawn_schemas(SCHEMAS), *drawn_fields(EACH, ("logprobs", "n", "choices"))]
    tools = drawn_fields(EACH, ("tools",))
    bodies, dead = answered(causal_lm_folder, [*lines, *tools], tmp_path, output)
    assert all_wrong(lines, bodies) == {}
    assert set(dead) == {line["custom_id"] for line in tools}
    assert all(said.endswith("run it with --backend vllm or --backend server") for said in dead.values())
