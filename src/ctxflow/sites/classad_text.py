"""ClassAd expressions as people write them: whether one is whole, and the mistakes that are easy to make.

It needs no HTCondor; where its bindings are, their parser has the last word. What does not live here: what an
expression means for a pool (factory/condor_survey.py).
"""

from __future__ import annotations

import importlib
import re

_TOKEN = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\])*")|(?P<name>'(?:\\.|[^'\\])*')|(?P<quote>["'])|(?P<open>[(\[{])|(?P<close>[)\]}])"""
    r"""|(?P<operator>=\?=|=!=|==|!=|<=|>=|&&|\|\||[=&|])|(?P<word>[A-Za-z_][\w.]*)|(?P<other>\S)|\s+""",
    re.DOTALL,
)
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def mistake(expression: str) -> str | None:
    """What to change in an expression that HTCondor would not understand, or not as it was meant; None if nothing.

    >>> mistake('DeviceName = "NVIDIA A10"')
    '= does not compare: write =='
    >>> mistake('(Cpus > 2 && Memory > 1000')
    'a ( is not closed: add a )'
    >>> mistake('Cpus > 2 && Memory > 1000')
    """
    if not expression.strip():
        return "it is empty: write an expression, or leave the key out"
    opened: list[str] = []
    last = ""
    for token in _TOKEN.finditer(expression):
        kind, word = token.lastgroup, token[0]
        if kind is None:
            continue
        if kind == "quote":
            return f"a {word} is not closed: add a {word}"
        if kind == "open":
            opened.append(word)
        elif kind == "close":
            if not opened or _CLOSING[opened[-1]] != word:
                return f"a {word} closes nothing: leave it out"
            opened.pop()
        elif found := _wrong_token(kind, word, last, "[" in opened):
            return found
        last = word
    if opened:
        return f"a {opened[-1]} is not closed: add a {_CLOSING[opened[-1]]}"
    if last in ("&&", "||", "==", "!=", "<=", ">=", "<", ">", "=?=", "=!="):
        return f"it ends in {last}: write what comes after it, or leave it out"
    return _parsed(expression)


def _wrong_token(kind: str, word: str, last: str, in_record: bool) -> str | None:
    if word == "=" and not in_record:
        return "= does not compare: write =="
    if word in ("&", "|"):
        return f"{word} does not join conditions: write {word * 2}"
    if kind == "word" and word.lower() in ("and", "or") and last:
        return f"{word} does not join conditions: write {'&&' if word.lower() == 'and' else '||'}"
    if kind == "word" and word.lower() == "not":
        return "not is no word of ClassAds: write !"
    if kind == "name" and last in ("==", "!=", "=?=", "=!="):
        inner = word[1:-1]
        return f'{word} is the name of an attribute, since text has double quotes: write "{inner}"'
    return None


def _parsed(expression: str) -> str | None:
    try:
        classad = importlib.import_module("classad2")
    except ImportError:
        return None
    try:
        classad.ExprTree(expression)
    except Exception:  # The bindings' own, whose base classes differ from version to version.
        return "HTCondor does not understand it: see that every condition is complete"
    return None


def conditions(expression: str) -> list[str]:
    """The conditions that an expression joins with && at its top.

    >>> conditions('Cpus > 2 && (Memory > 9 || regexp("a && b", Machine))')
    ['Cpus > 2', '(Memory > 9 || regexp("a && b", Machine))']
    """
    found, depth, begin = [], 0, 0
    for token in _TOKEN.finditer(expression):
        if token.lastgroup == "open":
            depth += 1
        elif token.lastgroup == "close":
            depth -= 1
        elif not depth and token[0] in ("||", "?"):
            return [expression.strip()]  # && binds closer than these.
        elif not depth and token[0] == "&&":
            found.append(expression[begin : token.start()].strip())
            begin = token.end()
    return [*found, expression[begin:].strip()]


_WORDS = {"true", "false", "undefined", "error", "is", "isnt", "my", "target"}


def attributes(expression: str) -> list[str]:
    """The attributes that an expression looks at, each once, without MY. and TARGET.

    >>> attributes('TARGET.Arch == "Cpus" && regexp("x", Machine) && AvailableGPUs[0].Capability > 7 && true')
    ['Arch', 'Machine', 'AvailableGPUs']
    """
    found: dict[str, str] = {}
    before = ""
    for token in _TOKEN.finditer(expression):
        word = token[0]
        if token.lastgroup == "word" and before != ".":
            name = re.sub(r"^(?:MY|TARGET)\.", "", word, flags=re.IGNORECASE).partition(".")[0]
            is_function = expression[token.end() :].lstrip().startswith("(")
            if name.lower() not in _WORDS and not is_function:
                found.setdefault(name.lower(), name)
        if token.lastgroup:
            before = word
    return list(found.values())
