"""What is wrong with what a request binds answers to: JSON schemas, tools, regular expressions, choices. Pure.

Rows bring them, and engines take time to make them ready: none is larger than what takes a moment.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urljoin

from ctxflow.models.openai_contents import DEEPEST, shown

# What an answer may be bound to: engines take time in proportion to it at each token, or in its square before.
_MOST_CHOICES = 5_000
_MOST_CHOSEN = 50_000  # Characters of all texts to choose among: xgrammar takes a second for 60,000, 8 for 200,000.
_LONGEST = 10_000  # Characters of a text, or of a regular expression.
_MOST_PARTS = 10_000  # Of a schema.
_MOST_TEXT = 1_000_000
_CACHED_TEXT = 20_000


def format_problem(value: Any) -> str | None:
    """Return what is wrong with a response_format.

    >>> format_problem({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}})
    "its schema is no JSON schema: 'strin' is not valid under any of the given schemas (at type)"
    """
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind in ("text", "json_object"):
        return None if set(value) == {"type"} else f"give nothing beside the type {kind}"
    if kind != "json_schema":
        return "give an object of the type text, json_object or json_schema"
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping) or set(value) != {"type", "json_schema"} or inner.get("schema") is None:
        return "give a json_schema with a name and a schema beside the type"
    if others := set(inner) - {"name", "description", "schema", "strict"}:
        return f"its json_schema has {min(others)!r}, which is not known there"
    wrong = schema_problem(inner["schema"])
    return None if wrong is None else f"its schema is {wrong}"


_IMPORT = re.compile(r"%\s*import\s+(?!\s|common\b)")


def tools_problem(value: Any) -> str | None:
    """Return what is wrong with the tools that a model may call; none but functions, whose callers run them."""
    if not isinstance(value, list):
        return "give a list of tools"
    if (wrong := _size_problem(value)) is not None:
        return f"these are {wrong}"
    for number, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind != "function":
            return f"tools[{number}] is of type {shown(kind)}, and only functions are known, which the asker runs"
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            return f"tools[{number}] has no function with a name"
        if set(tool) - {"type", "function"} or set(function) - {"name", "description", "parameters", "strict"}:
            return f"tools[{number}] has more than a function's name, description, parameters and strict"
        parameters = function.get("parameters")
        if parameters is not None and (wrong := schema_problem(parameters)) is not None:
            return f"the parameters of tools[{number}] are {wrong}"
    return None


def constraint_problem(kind: str, value: Any) -> str | None:
    """Return what is wrong with what an answer is bound to: of kind "json", "regex", "choice", "grammar"."""
    if kind == "json_object":
        return None if value is True else "give true for json_object"
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
            return "give a list of texts to choose among, none of them empty"
        if len(value) > _MOST_CHOICES or sum(map(len, value)) > _MOST_CHOSEN:
            return f"give at most {_MOST_CHOICES:,} texts, of at most {_MOST_CHOSEN:,} characters together"
        return None
    if kind in ("regex", "grammar"):
        if not isinstance(value, str) or not value:
            return f"give the {kind} as text"
        if len(value) > _LONGEST * (10 if kind == "grammar" else 1):
            return f"give a {kind} of at most {_LONGEST * (10 if kind == 'grammar' else 1):,} characters"
        return "a grammar imports nothing" if kind == "grammar" and _IMPORT.search(value) else None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return "its schema is no JSON"
    wrong = schema_problem(value)
    return None if wrong is None else f"its schema is {wrong}"


def schema_problem(schema: Any) -> str | None:
    """Return why something is no JSON schema that stands for itself; None if it is.

    What it refers to lies in it: a schema at an address is not fetched.

    >>> schema_problem({"$ref": "https://example.org/schema.json"})
    "one with a $ref to 'https://example.org/schema.json', which lies outside of it: put that into the schema"
    """
    if not isinstance(schema, Mapping):
        return f"no JSON schema: {shown(schema)} is no object"
    try:
        if (wrong := _size_problem(schema)) is not None:
            return wrong
        text = json.dumps(schema, sort_keys=True)
        return (_known_problem if len(text) <= _CACHED_TEXT else _long_problem)(text)
    except RecursionError:
        return "no JSON schema that can be read: it is nested too deeply"
    except (ValueError, TypeError) as error:
        return f"no JSON schema: {error}"


@functools.lru_cache(maxsize=512)
def _known_problem(text: str) -> str | None:
    """Return what is wrong with a schema; most rows of a job have the same."""
    schema = json.loads(text)
    return _reference_problem(schema) or _metaschema_problem(schema)


_long_problem = functools.lru_cache(maxsize=8)(_known_problem.__wrapped__)  # Few, since each may be long.


def _size_problem(value: Any) -> str | None:
    """Return that a schema, or several together, are too large; None if not.

    :raises RecursionError: if it has more levels than any request has.
    """
    characters = chosen = 0
    for parts, (part, _) in enumerate(_walked(value), 1):
        texts: Iterable[str] = ()
        if isinstance(part, dict):
            texts = [*part, *(each for key, each in part.items() if isinstance(each, str) and key not in _FOR_PEOPLE)]
            characters += sum(len(each) for key, each in part.items() if isinstance(each, str) and key in _FOR_PEOPLE)
            chosen += sum(_characters(part[key]) for key in ("enum", "const") if key in part)
        elif isinstance(part, list):
            texts = [each for each in part if isinstance(each, str)]
        characters += sum(map(len, texts))
        if parts > _MOST_PARTS or characters > _MOST_TEXT or max(map(len, texts), default=0) > _LONGEST:
            return (
                f"too large: give one of at most {_MOST_PARTS:,} parts, {_MOST_TEXT:,} characters, and {_LONGEST:,} in "
                "a text"
            )
        if chosen > _MOST_CHOSEN:
            return f"too large: give at most {_MOST_CHOSEN:,} characters in all that is to be chosen among"
    return None


_FOR_PEOPLE = {"description", "title", "$comment"}


def _characters(value: Any) -> int:
    """Return the characters of all texts in what a schema gives to choose among."""
    found = value if isinstance(value, str) else "" if not isinstance(value, (list, dict)) else None
    if found is not None:
        return len(found)
    return sum(len(part) for part, _ in _walked(value) if isinstance(part, str))


def _walked(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield all values in a value, each with its level, in their order.

    :raises RecursionError: if there are more levels than any request has.
    """
    yield value, 0
    rest = [_inner(value)]
    while rest:
        if (part := next(rest[-1], rest)) is rest:
            rest.pop()
            continue
        if len(rest) > DEEPEST:
            raise RecursionError
        yield part, len(rest)
        rest.append(_inner(part))


def _inner(value: Any) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())


def _reference_problem(schema: Any) -> str | None:
    anchors, references = set(), []
    for part, level in _walked(schema):
        for key, value in part.items() if isinstance(part, dict) else ():
            if not isinstance(value, str):
                continue
            if key in ("$ref", "$dynamicRef", "$recursiveRef"):
                references.append((key, value))
            elif key in ("$anchor", "$dynamicAnchor", "$id"):
                anchors.add(value.removeprefix("#") if key == "$id" else value)
                if key == "$id" and level and not value.startswith("#"):
                    return f"one with a part of an address of its own, {shown(value)}: leave that $id out"
    for key, value in references:
        if not value.startswith("#"):
            return f"one with a {key} to {shown(value)}, which lies outside of it: put that into the schema"
        if value != "#" and not (_points(schema, value) if value.startswith("#/") else value[1:] in anchors):
            return f"one with a {key} to {shown(value)}, and nothing is there"
    return None


def _points(schema: Any, pointer: str) -> bool:
    for part in pointer[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and len(name) < 9 and int(name) < len(schema):
            schema = schema[int(name)]
        elif isinstance(schema, dict) and name in schema:
            schema = schema[name]
        else:
            return False
    return True


def _metaschema_problem(schema: Any) -> str | None:
    try:
        from jsonschema import Draft202012Validator
        from jsonschema.validators import validator_for
    except ImportError:  # An engine says then what is wrong with it.
        return None
    # Without formats: patterns are not of Python's dialect, by which it would judge them.
    kind = validator_for(schema, default=Draft202012Validator)
    error = next(_metaschema_of(kind).iter_errors(schema), None)
    return None if error is None else f"no JSON schema: {located(error)}"


def located(error: Any) -> str:
    """Return what a `jsonschema.ValidationError` says, and where in the value that is."""
    where = "/".join(map(str, error.absolute_path))
    return f"{error.message[:200]}" + (f" (at {where})" if where else "")


def unique_items(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[Any]:
    """Judge the keyword uniqueItems for jsonschema, whose own compares each item of a list with all others.

    It takes time in proportion to the list's parts.
    """
    from jsonschema import ValidationError

    if wanted and isinstance(value, list) and len({_hashable(each) for each in value}) < len(value):
        yield ValidationError(f"{value!r} has non-unique elements")


_FALSE, _TRUE = object(), object()  # Which equal neither 0 nor 1.


def _hashable(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return frozenset((name, _hashable(each)) for name, each in value.items())
    return (_FALSE, _TRUE)[value] if isinstance(value, bool) else value


@functools.cache
def _metaschema_of(kind: Any) -> Any:
    """Return what judges schemas of a draft."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    judging = extend(kind, {"uniqueItems": unique_items})
    return judging(_newest_metaschema() if kind is Draft202012Validator else kind.META_SCHEMA)


def _newest_metaschema() -> dict[str, Any]:
    """Return draft 2020-12's metaschema with its vocabularies as one schema: that takes a sixth of the time."""
    from jsonschema import Draft202012Validator
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

    whole = Draft202012Validator.META_SCHEMA
    made: dict[str, Any] = {"type": whole["type"], "properties": {**whole["properties"]}, "$defs": {}}
    for part in whole["allOf"]:
        vocabulary = REGISTRY.contents(urljoin(whole["$id"], part["$ref"]))
        made["properties"] |= vocabulary.get("properties", {})
        made["$defs"] |= vocabulary.get("$defs", {})
    text = json.dumps(made).replace('"$dynamicRef": "#meta"', '"$ref": "#"').replace('"meta/validation#', '"#')
    found: dict[str, Any] = json.loads(text)
    return found
