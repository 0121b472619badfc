"""What can be wrong with a site, or another file that a person writes: a place and a sentence.

What does not live here: finding it (explain.py, rules.py) and telling on which line it stands (loader.py).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class FileProblem:
    """Something that a file's author should change.

    :param path: where: keys, and numbers of tiers from 0; () for the site as a whole.
    :param text: a sentence that names the key and says what to write.
    """

    path: Path
    text: str


class FileError(ValueError):
    """What a person wrote cannot be used. Its message has one line for each problem.

    :ivar lines: those lines, each with the file and its line where there is a file.
    :ivar missing: whether there is no such file, so that another one is to be named.
    """

    def __init__(self, lines: Iterable[str], missing: bool = False) -> None:
        self.lines = tuple(lines)
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
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1)
    return f"did you mean {lower[close[0]]!r}?" if close else otherwise
