"""TOML as people write it: what can be wrong with a file, parsing that says what to write, and values written out."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from ctxflow.errors import closest, one_line

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class FileProblem:
    """What a file's author should change, and where: keys, and numbers of tiers from 0; () for the file as a whole."""

    path: KeyPath
    text: str


class FileError(ValueError):
    """What a person wrote cannot be used. Its message has one line for each problem.

    :ivar lines: those lines, each with the file and its line where there is a file.
    :ivar missing: whether there is no such file, so that another one is to be named.
    """

    def __init__(self, lines: Iterable[str], missing: bool = False) -> None:
        self.lines = tuple(map(one_line, lines))
        self.missing = missing
        super().__init__("\n".join(self.lines))


class SiteError(FileError):
    """A site that cannot be used."""


def toml_value(value: Any) -> str:
    """Return a value as TOML has it, on one line; text with double quotes inside stands in single ones.

    >>> print(toml_value({"a b": [1, True], "expression": 'Arch == "X86_64"'}))
    {"a b" = [1, true], expression = 'Arch == "X86_64"'}
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(key)} = {toml_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, str):
        plain = '"' in value and "'" not in value and value.isprintable()
        # TOML allows all that JSON does, but for the character DEL.
        return f"'{value}'" if plain else json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else str(value)


def toml_key(key: object) -> str:
    """Return a key as TOML has it.

    >>> toml_key("partition"), toml_key("+ProjectName")
    ('partition', '"+ProjectName"')
    """
    return str(key) if re.fullmatch(r"[A-Za-z0-9_-]+", str(key)) else json.dumps(str(key), ensure_ascii=False)


def shown(value: Any) -> str:
    """Return a value as TOML has it, short.

    >>> shown("10 GB"), shown("x" * 200)[-6:]
    ('"10 GB"', 'xxx...')
    """
    text = toml_value(value)
    return text if len(text) <= 80 else text[:77] + "..."


def suggestion(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return a question for the word that was meant, if one is close; else another sentence.

    >>> suggestion("partion", ["partition", "account"], "there is none"), suggestion("x", ["partition"], "?")
    ("did you mean 'partition'?", '?')
    """
    close = closest(word, known)
    return f"did you mean {close!r}?" if close else otherwise


_POSITION = re.compile(r" \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


_WORD = re.compile(r"(?P<key>[^=]*?)\s*=\s*(?P<value>.*?)\s*$")


class NotToml(ValueError):
    """Text that is no TOML: the message says what to write, and `line` where, from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def parse(text: str) -> dict[str, Any]:
    """Return the values of a TOML text.

    :raises NotToml: if it is none.

    >>> parse("workers = 3")
    {'workers': 3}
    >>> parse("name = lab")
    Traceback (most recent call last):
    ...
    ctxflow.sites.site_problems.NotToml: name is text, which goes in quotes: write name = "lab"
    """
    try:
        return tomllib.loads(text)
    except ValueError as error:
        message = str(error)
    found = _POSITION.search(message)
    what = message[: found.start()] if found else message
    lines = text.splitlines()
    line = int(found["line"]) if found and found["line"] else _last_statement(text)
    here = lines[line - 1] if line <= len(lines) else ""
    raise NotToml(_advice(what, here), line)


def lines_of(text: str) -> dict[KeyPath, int]:
    """Return the line on which each key of a TOML text begins; a table's is that of its header.

    >>> lines_of('workers = 3\\n\\n[[tiers]]\\nname = "a10"')
    {('workers',): 1, ('tiers',): 3, ('tiers', 0): 3, ('tiers', 0, 'name'): 4}
    """
    found: dict[KeyPath, int] = {}
    begin = 0  # Of the statement that is being read: what ends where the text so far is TOML.
    lines = text.splitlines(keepends=True)
    for end in range(1, len(lines) + 1):
        try:
            values = tomllib.loads("".join(lines[:end]))
        except ValueError:
            continue
        line = next((n for n in range(begin, end) if not _is_blank(lines[n])), begin) + 1
        for path in _paths(values):
            found.setdefault(path, line)
        begin = end
    return found


def _is_blank(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _paths(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the place of every value inside a value."""
    if path:
        yield path
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _paths(inner, (*path, number))


def _last_statement(text: str) -> int:
    """Return where the statement begins that goes wrong, of a text that goes wrong at its end."""
    lines = text.splitlines(keepends=True)
    for end in range(len(lines) - 1, -1, -1):
        try:
            tomllib.loads("".join(lines[:end]))
        except ValueError:
            continue
        return next((n for n in range(end, len(lines)) if not _is_blank(lines[n])), end) + 1
    return 1


def _advice(what: str, line: str) -> str:
    """Return what to write in place of a line that is no TOML, by what the parser says of it."""
    assignment = _WORD.match(line)
    key = assignment["key"].strip() if assignment else ""
    if what.startswith("Cannot overwrite a value") or "twice" in what:
        return _twice(line, key)
    if re.match(r"\s*\[\[[^\]]*\]?\s*(#.*)?$", line):
        return "a table's header is not closed: write [[tiers]], with two brackets on either side"
    if what.startswith("Illegal character"):
        return f"{key or 'the line'} has a character that cannot be seen, {what[18:]}: take it out"
    if any(quote in line for quote in "“”‘’„"):
        return "the quotes are typographic ones: write plain ones, \" or '"
    if "Unescaped '\\'" in what:
        return f"a backslash means something else in double quotes: put {key or 'the text'} in single quotes, '...'"
    if match := re.match(r"\s*([\w.-]+)\s*:\s*(\S.*)$", line):
        return f"a key and its value have = between them: write {match[1]} = {match[2].strip()}"
    if assignment:
        return _advice_on_value(what, key, assignment["value"])
    if what.startswith("Expected '='"):
        return f"there is no value: write {line.split(maxsplit=1)[0]} = VALUE"
    return "a line is KEY = VALUE, or a header such as [[tiers]]"


# What people write for a value, and what to say: {key}, {value} and the pattern's groups are filled in.
_VALUES = (
    (r"$", "{key} has no value: write one after the =, or leave the line out"),
    (r"=\s*(?P<rest>.*)$", "= is there twice: write {key} = {rest}"),
    (r"(?i:true|yes|on)$", "{key} cannot be {value}: write {key} = true"),
    (r"(?i:false|no|off)$", "{key} cannot be {value}: write {key} = false"),
    (r"(?i:none|null|nil)$", "TOML has no {value}: leave {key} out"),
    (r"(?P<number>[\d.]+)\s*[A-Za-z]+$", "{key} is a number without a unit: write {key} = {number}"),
    (r"(?P<whole>\d+),(?P<part>\d+)$", "{key} has a decimal comma: write {key} = {whole}.{part}"),
    (r"0+(?P<rest>\d+)$", "{key} begins with 0: write {key} = {rest}"),
    (r"\.\d+$", "{key} begins with a point: write {key} = 0{value}"),
    (r"\[[^\]]*$", "{key}'s list is not closed: end it with ]"),
    (r".*[{,]\s*(?P<inner>\+[\w.]+)\s*=", 'the key {inner} has a character that wants quotes: write "{inner}" = ...'),
    (r"\{", "{key}'s table is wrong: write {key} = {{key = value, key = value}} on one line"),
    (r"[A-Za-z_/~<$][^\"'#]*$", '{key} is text, which goes in quotes: write {key} = "{value}"'),
)


def _advice_on_value(what: str, key: str, value: str) -> str:
    if not re.fullmatch(r"""[\w.-]+|"[^"]*"|'[^']*'""", key):
        return f'the key {key} has characters that want quotes: write "{key}" = {value or "VALUE"}'
    if value[:1] in ('"', "'"):
        return _advice_on_text(key, value)
    if percent := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", value):
        return f"TOML has no percent: write {key} = {float(percent[1]) / 100:g}"
    for pattern, advice in _VALUES:
        if match := re.match(pattern, value):
            return advice.format(key=key, value=value, **match.groupdict())
    return f"{key}'s value is not TOML ({what.lower()}): text goes in quotes, a list in [ ], a table in {{ }}"


def _advice_on_text(key: str, value: str) -> str:
    quote = value[0]
    other = "'" if quote == '"' else '"'
    if value.count(quote) % 2:
        return f"{key}'s text is not closed: end it with {quote}"
    begin = f"{key} has {quote} inside {quote}: put it in the other quotes, {key} = {other}"
    if other in value or not value.endswith(quote):
        return f"{begin}...{other}"
    return f"{begin}{value[1:-1]}{other}"


def _twice(line: str, key: str) -> str:
    header = line.strip()
    if header.strip("[] \t") == "tiers":
        return "every tier has a header of its own with two brackets: write [[tiers]] before each"
    if header.startswith("["):
        return f"{header} is there twice: leave one out"
    return f"{key or 'a key'} is there twice: leave one out"
