"""ClassAds as text, the language of HTCondor's machine ads: literals, lists and records in and out.

Expressions are not evaluated: an attribute that is one is None here. What does not live here: what the attributes mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_TOKEN = re.compile(
    r'\s*(?:("(?:[^"\\]|\\.)*")|([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)(?![\w.])|([A-Za-z_]\w*)|(.))', re.S
)
_LINE = re.compile(r"\s*([A-Za-z_][\w.]*)\s*=(?!=)\s*(.*)$", re.S)
_WORDS = {"true": True, "false": False, "undefined": None, "error": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def parse_ads(text: str) -> list[dict[str, Any]]:
    """The ads of `condor_status -long`: an attribute a line, ads apart by empty lines (or by "-", as cron jobs print).

    :raises ValueError: for a line that is no attribute, saying which.

    >>> parse_ads('Machine = "m"\\nGPUs_1 = [ Id = "GPU-1"; NumaNode = 3 ]\\nStart = (Owner == "bob")\\n')
    [{'Machine': 'm', 'GPUs_1': {'Id': 'GPU-1', 'NumaNode': 3}, 'Start': None}]
    """
    ads: list[dict[str, Any]] = [{}]
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.startswith("-"):
            ads.append({})
            continue
        found = _LINE.match(line)
        if not found:
            raise ValueError(f"line {number} is no attribute of a machine ad: {line.strip()[:80]}")
        ads[-1][found[1]] = parse_value(found[2])
    return [ad for ad in ads if ad]


def parse_value(text: str) -> Any:
    """A literal, a list or a record; None for anything else.

    >>> parse_value('{ 1, 2.5, [ a = true; b = "x\\\\"y" ] }')
    [1, 2.5, {'a': True, 'b': 'x"y'}]
    >>> parse_value("1 + 1") is None
    True
    """
    tokens = [match.groups() for match in _TOKEN.finditer(text) if match[0].strip()]
    try:
        value, rest = _value(tokens, 0)
    except (ValueError, IndexError):
        return None
    return value if rest == len(tokens) else None


def _value(tokens: Sequence[tuple[str | None, ...]], at: int) -> tuple[Any, int]:
    string, number, word, sign = tokens[at]
    if string is not None:
        return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), string[1:-1], flags=re.S), at + 1
    if number is not None:
        return (float(number) if re.search("[.eE]", number) else int(number)), at + 1
    if word is not None and word.lower() in _WORDS:
        return _WORDS[word.lower()], at + 1
    if sign == "{":
        return _list(tokens, at + 1)
    if sign == "[":
        return _record(tokens, at + 1)
    raise ValueError("an expression")


def _list(tokens: Sequence[tuple[str | None, ...]], at: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    while tokens[at][3] != "}":
        value, at = _value(tokens, at)
        found.append(value)
        if tokens[at][3] == ",":
            at += 1
        elif tokens[at][3] != "}":
            raise ValueError("an expression")
    return found, at + 1


def _record(tokens: Sequence[tuple[str | None, ...]], at: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    while tokens[at][3] != "]":
        name = tokens[at][2]
        if name is None or tokens[at + 1][3] != "=":
            raise ValueError("no record")
        try:
            found[name], at = _value(tokens, at + 2)
            ended = tokens[at][3] in (";", "]")
        except ValueError:
            ended = False
        if not ended:
            # An expression inside a record: it alone is None.
            found[name] = None
            at = _skip(tokens, at)
        if tokens[at][3] == ";":
            at += 1
    return found, at + 1


def _skip(tokens: Sequence[tuple[str | None, ...]], at: int) -> int:
    depth = 0
    while depth or tokens[at][3] not in (";", "]"):
        depth += {"[": 1, "{": 1, "(": 1, "]": -1, "}": -1, ")": -1}.get(tokens[at][3] or "", 0)
        at += 1
    return at


def write_value(value: Any) -> str:
    """A value as an expression on one line.

    :raises TypeError: for what has no such form.

    >>> write_value([{"Id": "GPU-1", "Numa": None}, 2, True])
    '{ [ Id = "GPU-1"; Numa = undefined ], 2, true }'
    """
    if value is None:
        return "undefined"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    if isinstance(value, Mapping):
        return f"[ {'; '.join(f'{name} = {write_value(each)}' for name, each in value.items())} ]"
    if isinstance(value, list | tuple):
        return f"{{ {', '.join(map(write_value, value))} }}" if value else "{ }"
    raise TypeError(f"a machine ad cannot hold {value!r}")
