"""What can be wrong with a site: a place and a sentence.

What does not live here: finding it (explain.py, rules.py) and telling on which line it stands (loader.py).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """Something that a site's author should change.

    :param path: where: keys, and numbers of tiers from 0; () for the site as a whole.
    :param text: a sentence that names the key and says what to write.
    """

    path: Path
    text: str


class SiteError(ValueError):
    """A site that cannot be used. Its message has one line for each problem.

    :ivar lines: those lines, each with the file and its line where the site has a file.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = tuple(lines)
        super().__init__("\n".join(self.lines))


def shown(value: Any) -> str:
    """A value as TOML has it, short.

    >>> shown("10 GB"), shown(True), shown({"a": [1, 2]})
    ('"10 GB"', 'true', '{a = [1, 2]}')
    """
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key} = {shown(inner)}" for key, inner in value.items()) + "}"
    elif isinstance(value, (list, tuple)):
        text = "[" + ", ".join(map(shown, value)) + "]"
    elif isinstance(value, str):
        plain = '"' in value and "'" not in value and "\n" not in value
        text = f"'{value}'" if plain else json.dumps(value, ensure_ascii=False)
    else:
        text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def suggestion(word: str, known: Iterable[str], otherwise: str) -> str:
    """A question for the word that was meant, if one is close; else another sentence.

    >>> suggestion("partion", ["partition", "account"], "there is none"), suggestion("x", ["partition"], "?")
    ("did you mean 'partition'?", '?')
    """
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1)
    return f"did you mean {lower[close[0]]!r}?" if close else otherwise
