"""JSON schemas as xgrammar, one of the libraries by which vLLM binds answers, writes valid JSON by them. Pure.

Of strings with a bounded length it (0.2.8) makes a grammar that lets control characters in, and of regular expressions
a right one, up to some length. Neither writes a quote or a line's end into such a string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples")
_OTHERS = ("pattern", "format", *_VALUES[:2])
_LONGEST = 100  # It fails at some 200.

# By how many bytes they have: of a range across two such it makes one with sequences that are no characters. A letter
# beyond ASCII in a pattern, in the place of its number, has it take the pattern as of JSON's text, quotes and all.
_ANY = r"([\u0000-\u007f]|[\u0080-\u07ff]|[\u0800-\ud7ff]|[\ue000-\uffff]|[\u{10000}-\u{10ffff}])"


def bound_by_patterns(schema: Any) -> Any:
    """Return a schema, or what has some in it, with strings' lengths, if they are at most 100, written as patterns.

    >>> bound_by_patterns({"properties": {"a": {"type": "string", "maxLength": 3}}})["properties"]["a"]["pattern"][-7:]
    '){0,3}$'
    """
    if isinstance(schema, list):
        return [bound_by_patterns(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _part(key, value) for key, value in schema.items()}
    kinds = made.get("type")
    bounds = [made[name] for name in ("minLength", "maxLength") if type(made.get(name)) is int]
    text = kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
    if text and bounds and max(bounds) <= _LONGEST and not any(name in made for name in _OTHERS):
        least, most = made.pop("minLength", 0), made.pop("maxLength", "")
        made["pattern"] = f"^{_ANY}{{{least},{most}}}$"
    return made


def _part(key: str, value: Any) -> Any:
    if key in _VALUES:
        return value
    if key in _MAPS and isinstance(value, Mapping):
        return {name: bound_by_patterns(each) for name, each in value.items()}
    return bound_by_patterns(value)


def bind_by_patterns(bound: Any) -> None:
    """Have vLLM's `StructuredOutputsParams` write strings' lengths as patterns, in schemas and forms of tool calls.

    Calls have one character of white space at a time, too: models that are not sure write it without end.
    """
    for name, written in (("json", bound_by_patterns), ("structural_tag", _in_calls)):
        value = getattr(bound, name, None)
        if isinstance(value, str):
            try:
                setattr(bound, name, json.dumps(written(json.loads(value))))
            except (ValueError, RecursionError):
                continue  # vLLM says what is wrong with it.
        elif value is not None:
            setattr(bound, name, written(value))


def _in_calls(tag: Any) -> Any:
    """Return the form of a tool call with schemas bound; those whose arguments are no JSON stay as they are."""
    if isinstance(tag, list):
        return [_in_calls(each) for each in tag]
    if not isinstance(tag, Mapping):
        return tag
    if tag.get("type") != "json_schema":
        return {key: _in_calls(value) for key, value in tag.items()}
    if tag.get("style", "json") != "json":
        return tag
    spaces = 1 if tag.get("max_whitespace_cnt") is None else tag["max_whitespace_cnt"]
    return {**tag, "json_schema": bound_by_patterns(tag.get("json_schema")), "max_whitespace_cnt": spaces}
