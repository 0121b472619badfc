"""Prompts made from a row's columns by Jinja2 templates, in a sandbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ctxflow.errors import CtxflowError
from ctxflow.installing import how_to_install
from ctxflow.rows.source import RowError

Render = Callable[[Mapping[str, Any]], str]


def template_text(text: str) -> str:
    """Return the template itself, read from its file if only that is named."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, ValueError) as error:
        raise ValueError(f"the template {text[1:]} cannot be read: {error}") from None


class LacksColumn(RowError):
    """A row lacks what a template needs."""


def compile_template(text: str, what: str = "template") -> Render:
    """Return a function that renders a row, whose columns are variables, or `row["the name"]`.

    :param text: the template, or "@" and the path of its file.
    :raises ValueError: for an invalid template, with the line where it goes wrong.

    >>> compile_template("Is it true that {{ claim }}?")({"claim": "2 > 1"})
    'Is it true that 2 > 1?'
    """
    environment, jinja2 = _environment()
    try:
        template = environment.from_string(template_text(text))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the {what} is no Jinja2 template: {error.message} (line {error.lineno})") from None

    def render(row: Mapping[str, Any]) -> str:
        try:
            rendered: str = template.render({**row, "row": row})
        except jinja2.UndefinedError as error:
            raise LacksColumn(f"the {what} needs what the row lacks: {error.message}") from None
        except Exception as error:  # A template is a program: it raises what it likes.
            raise RowError(f"the {what} fails on the row: {type(error).__name__}: {error}") from None
        return rendered

    return render


def _environment() -> tuple[Any, Any]:
    """Return the sandbox, and jinja2's module."""
    try:
        import jinja2
        import jinja2.meta
        import jinja2.sandbox
    except ImportError as error:
        raise CtxflowError(f"templates need jinja2 ({error}): {how_to_install('jinja2', extra='batch')}") from None
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment
    return sandbox(undefined=jinja2.StrictUndefined, keep_trailing_newline=True), jinja2


def columns_named(text: str) -> list[str]:
    """Return the columns that a template names, sorted.

    >>> columns_named("{{ claim }} {% for each in parts %}{{ each }}{% endfor %} {{ row['the source'] }}")
    ['claim', 'parts', 'the source']
    """
    environment, jinja2 = _environment()
    parsed = environment.parse(template_text(text))
    found = set(jinja2.meta.find_undeclared_variables(parsed)) - {"row", *environment.globals}
    for node in parsed.find_all((jinja2.nodes.Getitem, jinja2.nodes.Getattr)):
        if isinstance(node.node, jinja2.nodes.Name) and node.node.name == "row":
            given = getattr(node, "attr", None) or getattr(getattr(node, "arg", None), "value", None)
            if isinstance(given, str):
                found.add(given)
    return sorted(found)
