from __future__ import annotations

import json
import types

import pytest

from ctxflow.models.vllm_schemas import bind_by_patterns, bound_by_patterns

jsonschema = pytest.importorskip("jsonschema")

NESTED = {
    "type": "object",
    "properties": {
        "maxLength": {"type": "string", "minLength": 1, "maxLength": 3},
        "many": {"type": "array", "items": {"type": ["string", "null"], "minLength": 2}},
        "enum": {"anyOf": [{"$ref": "#/$defs/short"}, {"enum": [{"type": "string", "maxLength": 9}]}]},
        "dated": {"type": "string", "format": "date", "maxLength": 12},
        "number": {"type": "integer", "minimum": 3},
        "long": {"type": "string", "maxLength": 5000},
    },
    "$defs": {"short": {"type": "string", "maxLength": 1}},
}


def test_a_schema_means_what_it_meant():
    made = bound_by_patterns(NESTED)
    found = made["properties"]
    for part, kind, bounds in [
        (found["maxLength"], "string", "{1,3}$"),
        (found["many"]["items"], ["string", "null"], "{2,}$"),
        (made["$defs"]["short"], "string", "{0,1}$"),
    ]:
        assert set(part) == {"type", "pattern"} and part["type"] == kind and part["pattern"].endswith(bounds)
    for name in ("enum", "dated", "number", "long"):
        assert found[name] == NESTED["properties"][name], "what is no string of bounded length stays"
    # Python writes the last range otherwise.
    made = json.loads(json.dumps(made).replace(r"\\u{10000}-\\u{10ffff}", "\U00010000-\U0010ffff"))
    for text in ("", "a", "a\nb", '"\\ü', "long text", "\x01\x02", "\U0001f600"):
        for value in ({"maxLength": text}, {"many": [text, None]}, {"enum": text}):
            assert jsonschema.Draft202012Validator(made).is_valid(value) == (
                jsonschema.Draft202012Validator(NESTED).is_valid(value)
            ), value


def test_what_binds_a_request_s_answer_is_written_so_in_each_form():
    short = {"type": "string", "maxLength": 2}
    tag = {
        "type": "structural_tag",
        "format": {"type": "tag", "content": {"type": "json_schema", "json_schema": short}},
    }
    for name, given in [("json", short), ("json", json.dumps(short)), ("structural_tag", json.dumps(tag))]:
        bound = types.SimpleNamespace(**{"json": None, "structural_tag": None, name: given})
        bind_by_patterns(bound)
        made = getattr(bound, name)
        assert isinstance(made, type(given)) and "){0,2}$" in str(made), made
    xml = json.dumps({"format": {"type": "json_schema", "style": "qwen_xml", "json_schema": short}})
    bound = types.SimpleNamespace(structural_tag=xml)
    bind_by_patterns(bound)
    assert bound.structural_tag == xml, "arguments that are no JSON stay as they are"
    bound = types.SimpleNamespace(json="no JSON", regex="a+")
    bind_by_patterns(bound)
    assert (bound.json, bound.regex) == ("no JSON", "a+")
