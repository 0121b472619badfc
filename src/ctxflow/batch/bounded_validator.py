"""Judge values by JSON schemas in bounded work: without regular expressions, and in so many steps at most.

Rows bring their schemas, so that a schema may ask for any amount of work: a pattern that backtracks, or references that
double at each level. What is not judged here counts as fulfilled.
"""

from __future__ import annotations

import contextvars
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ctxflow.models.openai_schemas import located, unique_items

_MOST = 10_000_000  # Units of work for a value: a second or two of a core.
_CALL = 100  # What a keyword costs beside the sizes of its value and of what it judges,
_STEP = 20  # what each value costs that a part of the schema judges, beside that part's keywords, known or not,
_CRAWL = 40  # and a reference for each part of a schema that has to be searched for its target.
_CACHED_TEXT = 20_000  # Longer schemas are read again for each value.

# What would match regular expressions, or search by itself: engines have their own dialect of the former.
_LEFT_OUT = frozenset({"pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties"})
# What may fail because a part is fulfilled: nothing can be said of it where such a part is not judged.
_INVERTING = frozenset({"not", "oneOf", "if", "contains", "disallow"})
_COMPARING = frozenset({"enum", "const", "dependentRequired", "dependencies"})  # Which look at all of their values.
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})

Check = Callable[[Any, Any, Any, Any], Any]  # A keyword of jsonschema: takes a validator, its value, what it judges.


class _TooMuch(Exception):
    """A value takes more work than any has."""


class _Unknown(Exception):
    """A part is not judged, on which the answer depends."""


class _Work:
    """The work on one value: how much is left, and in how many inverting keywords it is."""

    def __init__(self, parts: int) -> None:
        self.left = _MOST
        self.inverted = 0
        self.search = _CRAWL * parts

    def spend(self, units: int) -> None:
        """Count units of work."""
        self.left -= units
        if self.left < 0:
            raise _TooMuch


_WORK: contextvars.ContextVar[_Work] = contextvars.ContextVar("work")


def first_error(schema: str, value: Any) -> str | None:
    """Return what is wrong with a value by a JSON schema, and where; None if nothing is, or if that is unknown.

    Patterns, and properties that are evaluated nowhere else, are not judged, nor is a value that takes too much work.
    Nothing is fetched.

    :param schema: as JSON text.
    :raises ImportError: without the package jsonschema.
    :raises ArithmeticError: for a number beyond all bounds.

    >>> first_error('{"properties": {"price": {"maximum": 3}}}', {"price": 12.5})
    '12.5 is greater than the maximum of 3 (at price)'
    >>> first_error('{"pattern": "^(a+)+$"}', "a" * 40 + "!")
    """
    read = _read if len(schema) <= _CACHED_TEXT else _read.__wrapped__
    validator, parts = read(schema)
    token = _WORK.set(_Work(parts))
    try:
        wrong = next(validator.iter_errors(value), None)
    except ArithmeticError:
        raise
    except Exception:  # Whatever the library fails at, the engine has bound the value to it.
        return None
    finally:
        _WORK.reset(token)
    return None if wrong is None else located(wrong)


@functools.lru_cache(maxsize=128)
def _read(text: str) -> tuple[Any, int]:
    """Return what judges by a schema, and how many parts that has."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema = json.loads(text)
    kind = _bounded(validator_for(schema, default=Draft202012Validator))
    return kind(schema, registry=Registry()), _parts(schema)


@functools.cache
def _bounded(kind: Any) -> Any:
    """Return a validator of jsonschema's as one whose work is bounded."""
    import attrs
    from jsonschema.validators import extend

    own: dict[str, Check] = {"uniqueItems": _unique_items}
    made = extend(kind, {name: _counted(name, own.get(name, check)) for name, check in kind.VALIDATORS.items()})

    def evolve(self: Any, **changes: Any) -> Any:  # For each value that is judged by a part of the schema.
        _WORK.get().spend(_STEP + _length(changes.get("schema")))
        return attrs.evolve(self, **changes)  # The library would take the class that a part's own $schema names.

    made.evolve = evolve
    return made


def _counted(name: str, check: Check) -> Check:
    """Return a keyword's function as one that counts its work."""

    def judge(validator: Any, given: Any, value: Any, schema: Any) -> Iterator[Any]:
        work = _WORK.get()
        work.spend(_CALL + _length(given) + _length(value))
        if name in _LEFT_OUT or (name == "additionalProperties" and "patternProperties" in schema):
            if work.inverted:
                raise _Unknown
            return
        if name in _COMPARING:
            work.spend(_parts(given, work.left))
        elif name in _REFERENCES and not str(given).startswith("#/"):
            work.spend(work.search)
        errors = check(validator, given, value, schema) or ()
        for error in _inverting(work, errors) if name in _INVERTING else errors:
            work.spend(_CALL + len(error.message))
            yield error

    return judge


def _inverting(work: _Work, errors: Iterable[Any]) -> list[Any]:
    """Return the errors of a keyword that may fail because a part is fulfilled; none where such a part is unknown."""
    work.inverted += 1
    try:
        return list(errors)
    except _Unknown:
        if work.inverted > 1:
            raise
        return []
    finally:
        work.inverted -= 1


def _unique_items(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[Any]:
    if wanted and isinstance(value, list):
        _WORK.get().spend(_parts(value, _WORK.get().left))
    yield from unique_items(validator, wanted, value, schema)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, dict)) else 0


def _parts(value: Any, most: int = _MOST) -> int:
    """Return how many values there are in one; no more than some over `most` are counted."""
    rest, count = [value], 0
    while rest and count <= most:
        each = rest.pop()
        count += 1 + (len(each) // 64 if isinstance(each, str) else 0)
        if isinstance(each, (list, dict)):
            rest.extend(each.values() if isinstance(each, dict) else each)
    return count
