"""How a site file, a name or a model becomes a site, or one line for each thing that is wrong with it.

`read_toml` and `located` are for other files too that people write, such as the simulator's workloads. What does not
live here: what can be wrong with values (explain.py, site_rules.py).
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from ctxflow.sites.engine_kinds import SITE_KEYS, TIER_KEYS, given_keys, relocated, renamed_keys
from ctxflow.sites.explain import explain
from ctxflow.sites.site_model import Site, site_class
from ctxflow.sites.site_problems import FileError, FileProblem, SiteError
from ctxflow.sites.site_problems import Path as KeyPath
from ctxflow.sites.site_rules import problems

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

logger = logging.getLogger("ctxflow")
_told: set[tuple[str, str]] = set()  # Files and tables whose keys stand where earlier versions had them.


def load_site(site: str | Path | Site, **overrides: Any) -> Site:
    """Return a site, from the name of a built-in one ("local"), a TOML file, or a model.

    :param overrides: keys that take the place of the site's own, if they are not None.
    :raises SiteError: a ValueError, for an unknown site or key, or impossible values; the message has a line for each
        problem that names the key and says what to write, with the file and its line.

    >>> load_site("local", workers=3).workers
    3
    """
    text, moved = "", dict[str, list[str]]()
    if isinstance(site, Site):
        values = given_keys(site)
    elif str(site) == "local":
        values = {}
    else:
        text, values = read_toml(Path(site))
        values = _by_new_names(str(site), values)
        values, moved = relocated(values)
        for line in moved_text(str(site), moved):
            logger.warning("%s", line)
    given = renamed_keys({key: value for key, value in overrides.items() if value is not None}, SITE_KEYS)
    changed, flat = relocated(given)
    for key, value in changed.items():
        tables = isinstance(value, Mapping) and key in flat
        values[key] = {**given_keys(values.get(key, {})), **value} if tables else value
    try:
        made = site_class(values.get("engine"))(**values)
        found = list(problems(made))
    except pydantic.ValidationError as error:
        found = list(explain(error, values))
    if found:
        above = {(table, key) for table, keys in (*moved.items(), *flat.items()) for key in keys}
        found = [FileProblem(each.path[1:], each.text) if each.path[:2] in above else each for each in found]
        raise SiteError(located(found, str(site) if text else "", text, {(key,) for key in given}))
    return made


def _by_new_names(file: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return a site file's values with keys of earlier versions by their new names, which is told once of each file."""
    tiers = values.get("tiers")
    if isinstance(tiers, list):
        renamed = [renamed_keys(tier, TIER_KEYS) if isinstance(tier, dict) else tier for tier in tiers]
        values, old = {**values, "tiers": renamed}, {key for tier in tiers if isinstance(tier, dict) for key in tier}
    else:
        old = set()
    for names, keys in ((SITE_KEYS, values.keys()), (TIER_KEYS, old)):
        for key in names.keys() & keys:
            if (file, key) not in _told:
                _told.add((file, key))
                logger.warning("%s: %s is now called %s", file, key, names[key])
    return renamed_keys(values, SITE_KEYS)


def moved_text(file: str, moved: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Say once of each table of a site file which keys belong into it, and stand above the first header."""
    for table, keys in moved.items():
        if (file, table) not in _told:
            _told.add((file, table))
            yield f"{file}: write {', '.join(keys)} under a header [{table}]: each engine has a table of its own keys"


def read_toml(
    path: Path,
    what: str = "site",
    instead: str = '"local" or the path of a site file',
    error: type[FileError] = SiteError,
) -> tuple[str, dict[str, Any]]:
    """Return the text of a file that a person wrote, and its values.

    :param what: what it is a file of, for messages; `instead`: what to give where there is none.
    :raises FileError: of the kind given, if it cannot be read or is no TOML.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return text, parse(text)
    except FileNotFoundError:
        raise error([f"there is no {what} {str(path)!r}: give {instead}"], missing=True) from None
    except IsADirectoryError:
        inside = sorted(path.glob("*.toml"))
        hint = f"one of the files in it, such as {inside[0]}" if inside else f"the path of a {what} file"
        raise error([f"{path} is a folder: give {hint}"], missing=True) from None
    except OSError as trouble:
        raise error([f"the {what} file {path} cannot be read: {trouble.strerror}"]) from None
    except UnicodeDecodeError as trouble:
        line = trouble.object[: trouble.start].count(b"\n") + 1
        raise error(
            [f"{path}, line {line}: it is not TOML: a character is not UTF-8: save the file as UTF-8"]
        ) from None
    except NotToml as trouble:
        raise error([f"{path}, line {trouble.line}: it is not TOML: {trouble}"]) from None


def located(found: Iterable[FileProblem], name: str, text: str, changed: Collection[KeyPath] = ()) -> list[str]:
    """Return problems with the file and the line where they stand, in the order of the lines.

    :param name: of the file; "" if there is none.
    :param changed: the places whose values are not the file's.
    """
    if not name:
        return [problem.text for problem in found]
    lines = {_new_path(path): line for path, line in lines_of(text).items()}
    told = []
    for problem in found:
        path = problem.path
        own = any(path[:n] in changed for n in range(1, len(path) + 1))
        while path and path not in lines:
            path = path[:-1]
        of_file = bool(path) and not own
        line = lines[path] if of_file else 0
        told.append((line, f"{name}, line {line}: {problem.text}" if of_file else f"{name}: {problem.text}"))
    return [each for _, each in sorted(told, key=lambda pair: pair[0])]


_POSITION = re.compile(r" \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")
_WORD = re.compile(r"(?P<key>[^=]*?)\s*=\s*(?P<value>.*?)\s*$")


class NotToml(ValueError):
    """Text that is no TOML; the message says what to write.

    :ivar line: the line of the mistake, from 1.
    """

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
    ctxflow.sites.loader.NotToml: name is text, which goes in quotes: write name = "lab"
    """
    try:
        values: dict[str, Any] = tomllib.loads(text)
        return values
    except ValueError as error:
        message = str(error)
    found = _POSITION.search(message)
    what = message[: found.start()] if found else message
    lines = text.splitlines()
    line = int(found["line"]) if found and found["line"] else _last_statement(text)
    here = lines[line - 1] if line <= len(lines) else ""
    raise NotToml(_advice(what, here), line)


def _new_path(path: KeyPath) -> KeyPath:
    """Return where a key of a site file stands by its new name."""
    if path[:1] == ("tiers",):
        return (*path[:2], *(TIER_KEYS.get(str(key), key) for key in path[2:3]), *path[3:])
    return (*(SITE_KEYS.get(str(key), key) for key in path[:1]), *path[1:])


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
