"""Prompts from columns: Jinja2 templates, sandboxed, where a column that a row lacks is an error of that row.

Needs jinja2. What does not live here: what a prompt is for (requests.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ctxflow.errors import CtxflowError
from ctxflow.rows.source import RowError

Render = Callable[[Mapping[str, Any]], str]


def compile_template(text: str, what: str = "template") -> Render:
    """A function that renders a row.

    Columns are variables; one whose name is no identifier is `row["the name"]`.

    :param text: the template, or "@" and the path of its file.
    :raises ValueError: for a template that is none, with the line where it goes wrong.

    >>> compile_template("Is it true that {{ claim }}?")({"claim": "2 > 1"})
    'Is it true that 2 > 1?'
    """
    try:
        import jinja2
        import jinja2.sandbox
    except ImportError as error:
        raise CtxflowError(f"templates need jinja2 ({error}): pip install 'ctxflow[batch]'") from None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    try:
        template = environment.from_string(template_text(text))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the {what} is no Jinja2 template: {error.message} (line {error.lineno})") from None

    def render(row: Mapping[str, Any]) -> str:
        try:
            return template.render({**row, "row": row})
        except jinja2.UndefinedError as error:
            raise RowError(f"the {what} needs what the row lacks: {error.message}") from None
        except Exception as error:  # A template is a program: it raises what it likes.
            raise RowError(f"the {what} fails on the row: {type(error).__name__}: {error}") from None

    return render


def template_text(text: str) -> str:
    """The template itself, read from its file if only that is named.

    :raises ValueError: if the file cannot be read.
    """
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, ValueError) as error:
        raise ValueError(f"the template {text[1:]} cannot be read: {error}") from None
