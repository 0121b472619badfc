"""How a site file, a name or a model becomes a site, or one line for each thing that is wrong with it.

What does not live here: what can be wrong (toml_text.py, explain.py, rules.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pydantic

from ctxflow.sites import toml_text
from ctxflow.sites.explain import explain
from ctxflow.sites.model import Site
from ctxflow.sites.problem import Problem, SiteError
from ctxflow.sites.rules import problems


def load_site(site: str | Path | Site, **overrides: Any) -> Site:
    """A site from the name of a built-in one ("local"), a TOML file, or a model.

    :param overrides: keys that take the place of the site's own, if they are not None.
    :raises SiteError: a ValueError, for an unknown site or key, or impossible values; the message has a line for each
        problem that names the key and says what to write, with the file and its line.

    >>> load_site("local", workers=3).workers
    3
    """
    text = ""
    if isinstance(site, Site):
        values = {key: getattr(site, key) for key in site.model_fields_set}
    elif str(site) == "local":
        values = {}
    else:
        text, values = _read(Path(site))
    changed = {key: value for key, value in overrides.items() if value is not None}
    values.update(changed)
    try:
        made = Site(**values)
        found = list(problems(made))
    except pydantic.ValidationError as error:
        found = list(explain(error, values))
    if found:
        raise SiteError(_located(found, str(site) if text else "", text, changed))
    return made


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    """A site file's text and its values."""
    try:
        text = path.read_text(encoding="utf-8")
        return text, toml_text.parse(text)
    except FileNotFoundError:
        raise SiteError([f'there is no site {str(path)!r}: give "local" or the path of a site file']) from None
    except IsADirectoryError:
        inside = sorted(path.glob("*.toml"))
        hint = f"one of the files in it, such as {inside[0]}" if inside else "the path of a site file"
        raise SiteError([f"{path} is a folder: give {hint}"]) from None
    except OSError as error:
        raise SiteError([f"the site file {path} cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise SiteError(
            [f"{path}, line {line}: it is not TOML: a character is not UTF-8: save the file as UTF-8"]
        ) from None
    except toml_text.NotToml as error:
        raise SiteError([f"{path}, line {error.line}: it is not TOML: {error}"]) from None


def _located(found: Iterable[Problem], name: str, text: str, changed: Mapping[str, Any]) -> list[str]:
    """Problems with the file and the line where they stand, in the order of the lines."""
    if not name:
        return [problem.text for problem in found]
    lines = toml_text.lines_of(text)
    told = []
    for problem in found:
        path = problem.path
        while path and path not in lines:
            path = path[:-1]
        of_file = bool(path) and path[0] not in changed
        line = lines[path] if of_file else 0
        told.append((line, f"{name}, line {line}: {problem.text}" if of_file else f"{name}: {problem.text}"))
    return [each for _, each in sorted(told, key=lambda pair: pair[0])]
