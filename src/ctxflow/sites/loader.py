"""How a site file, a name or a model becomes a site, or one line for each thing that is wrong with it.

`read_toml` and `located` are for other files too that people write, such as the simulator's workloads. What does not
live here: what can be wrong (toml_text.py, explain.py, rules.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pydantic

from ctxflow.sites import toml_text
from ctxflow.sites.explain import explain
from ctxflow.sites.model import Site
from ctxflow.sites.problem import FileError, Problem, SiteError
from ctxflow.sites.problem import Path as KeyPath
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
        text, values = read_toml(Path(site))
    changed = {key: value for key, value in overrides.items() if value is not None}
    values.update(changed)
    try:
        made = Site(**values)
        found = list(problems(made))
    except pydantic.ValidationError as error:
        found = list(explain(error, values))
    if found:
        raise SiteError(located(found, str(site) if text else "", text, {(key,) for key in changed}))
    return made


def read_toml(
    path: Path,
    what: str = "site",
    instead: str = '"local" or the path of a site file',
    error: type[FileError] = SiteError,
) -> tuple[str, dict[str, Any]]:
    """The text of a file that a person wrote, and its values.

    :param what: what it is a file of, for messages; `instead`: what to give where there is none.
    :raises FileError: of the kind given, if it cannot be read or is no TOML.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return text, toml_text.parse(text)
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
    except toml_text.NotToml as trouble:
        raise error([f"{path}, line {trouble.line}: it is not TOML: {trouble}"]) from None


def located(found: Iterable[Problem], name: str, text: str, changed: Collection[KeyPath] = ()) -> list[str]:
    """Problems with the file and the line where they stand, in the order of the lines.

    :param name: of the file; "" if there is none.
    :param changed: the places whose values are not the file's.
    """
    if not name:
        return [problem.text for problem in found]
    lines = toml_text.lines_of(text)
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
