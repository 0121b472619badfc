"""How messages count things, and name values, functions and what was probably meant. Pure."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Collection
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


def counted(number: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun.

    :param nouns: of several, where an s does not make it.

    >>> counted(1, "call"), counted(1200, "map"), counted(2, "process", "processes")
    ('1 call', '1,200 maps', '2 processes')
    """
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def article(noun: str) -> str:
    """Return a noun, such as the name of a type, behind its article.

    >>> article("object"), article("list"), article("MPIJob"), article("function")
    ('an object', 'a list', 'an MPIJob', 'a function')
    """
    spelled = noun[:2].isupper()  # An acronym, which is read letter by letter.
    return f"{'an' if noun[:1] in ('AEFHILMNORSX' if spelled else 'aeiouAEIO') else 'a'} {noun}"


def header(name: str, parameters: str = "...") -> str:
    """Return how the definition of a function begins.

    >>> header("upper", "texts"), header("<lambda>")
    ('def upper(texts)', 'def f(...)')
    """
    return f"def {name if name.isidentifier() else 'f'}({parameters})"


def name_of(function: Any) -> str:
    """Return what its user calls a function."""
    return str(getattr(getattr(function, "func", function), "__name__", type(function).__name__))


def short(value: Any) -> str:
    """Return a value for a message: its beginning and its end, if it is long.

    >>> short("x" * 1000) == repr("x" * 1000)[:28] + "..." + "x" * 28 + "'"
    True
    >>> short([1, 2])
    '[1, 2]'
    """
    return _SHORT.repr(value)


def closest(name: str, known: Collection[str]) -> str:
    """Return what somebody may have meant, "" if it is like nothing that is known.

    >>> closest("priorty", ["priority", "timeout"]), closest("colour", ["priority", "timeout"])
    ('priority', '')
    """
    return next(iter(difflib.get_close_matches(name, known, 1, 0.8)), "")
