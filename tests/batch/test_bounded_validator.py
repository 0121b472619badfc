"""A validator whose work is bounded: as jsonschema's where that judges the same, and never for ever."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxflow.batch.bounded_validator import first_error

jsonschema = pytest.importorskip("jsonschema")

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, 1.0, 2.5]) | st.sampled_from("abc"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
_TYPES = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null"])


def _schemas(inner):
    several = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    return st.booleans() | st.fixed_dictionaries({}, optional={
        "type": _TYPES, "enum": st.lists(_VALUES, min_size=1, max_size=3), "const": _VALUES,
        "properties": named, "required": st.lists(st.sampled_from("abc"), max_size=2, unique=True),
        "additionalProperties": inner, "propertyNames": inner, "dependentSchemas": named, "items": inner,
        "prefixItems": several, "uniqueItems": st.booleans(), "contains": inner, "maxContains": st.integers(0, 2),
        "minimum": st.integers(-2, 2), "multipleOf": st.sampled_from([1, 2, 0.5]), "maxLength": st.integers(0, 2),
        "minItems": st.integers(0, 2), "allOf": several, "anyOf": several, "oneOf": several, "not": inner,
        "if": inner, "then": inner, "else": inner, "$ref": st.sampled_from(["#/$defs/a", "#a"]),
    })  # fmt: skip


@given(st.recursive(st.just(True) | st.just({}), _schemas, max_leaves=6), _VALUES)
def test_what_has_no_patterns_is_judged_as_jsonschema_does(schema, value):
    whole = {"allOf": [schema], "$defs": {"a": {"$anchor": "a", "type": ["integer", "object"]}}}
    right = jsonschema.Draft202012Validator(whole).is_valid(value)
    assert (first_error(json.dumps(whole), value) is None) == right


HARD = {"pattern": "^(a+)+$"}
TEXT = "a" * 40 + "!"
DOUBLING = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
ALIKE = [[{"a": number % 7, "b": [1.0, True]} for number in range(2000)] for _ in range(30)]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (HARD, TEXT),
        ({"patternProperties": {"^(a+)+$": False}}, {TEXT: 1}),
        ({"patternProperties": {"^(a+)+$": {}}, "additionalProperties": False}, {TEXT: 1}),
        ({"propertyNames": HARD}, {TEXT: 1}),
        ({"unevaluatedProperties": False, "patternProperties": {"^(a+)+$": {}}}, {TEXT: 1}),
        ({"properties": {"a": {"$schema": "http://json-schema.org/draft-07/schema#", **HARD}}}, {"a": TEXT}),
        ({"$schema": "http://json-schema.org/draft-04/schema#", **HARD}, TEXT),
        ({"not": {"not": HARD}}, TEXT),
        ({"not": HARD}, "aaa"),
        ({"oneOf": [HARD, {"pattern": "b"}]}, "c"),
        ({"if": HARD, "then": False, "else": True}, "b"),
        ({"contains": HARD, "maxContains": 0}, ["b"]),
        ({"$ref": "#/$defs/d0", "$defs": {**DOUBLING, "d60": {"type": "string"}}}, 5),
        ({"$ref": "#"}, 5),
        ({"items": {"uniqueItems": True}}, [each[:7] for each in ALIKE]),
        ({"anyOf": [{"type": "string"}] * 9000}, ALIKE),
        ({"items": {"allOf": [{"$ref": "#/$defs/a"}] * 3000}, "$defs": {"a": {"enum": [ALIKE[0]]}}}, ALIKE),
        ({"items": {"$ref": "#a"}, "$defs": {"a": {"$anchor": "a"}, "b": {"enum": [[]] * 9000}}}, list(range(9000))),
    ],
)
def test_what_takes_too_much_work_or_has_patterns_is_left_to_the_engine(schema, value):
    assert first_error(json.dumps(schema), value) is None


def test_what_is_beside_a_pattern_is_judged():
    schema = {"properties": {"a": {**HARD, "minLength": 2}, "b": {"uniqueItems": True}}, "required": ["a"]}
    assert first_error(json.dumps(schema), {"a": "x"}) == "'x' is too short (at a)"
    assert first_error(json.dumps(schema), {}) == "'a' is a required property"
    assert first_error(json.dumps(schema), {"a": "xx", "b": [1, True, 1.0]}).endswith("non-unique elements (at b)")
    assert first_error(json.dumps({"oneOf": [HARD, {"type": "null"}], "maxLength": 1}), "xx") == "'xx' is too long"


def test_what_a_schema_says_besides_costs_its_work_too():
    """Else a few references to a part of thousands of unknown keywords take half an hour."""
    unknown = {"items": {f"x{n}": n for n in range(3000)}}
    schema = {"$defs": {"a": unknown}, "allOf": [{"$ref": "#/$defs/a"}] * 3000, "maxItems": 1}
    assert first_error(json.dumps(schema), [1] * 2000) is None
    assert "is too long" in first_error(json.dumps({**schema, "allOf": []}), [1] * 2)
