"""Prompts made from a row's columns by Jinja2 templates, in a sandbox."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from ctxflow.errors import CtxflowError
from ctxflow.files import text_of
from ctxflow.installing import how_to_install
from ctxflow.rows.source import RowError

Render = Callable[[Mapping[str, Any]], str]


def template_text(text: str) -> str:
    """Return the template itself, read from its file if only that is named."""
    if not text.startswith("@"):
        return text
    try:
        return text_of(text[1:]).removesuffix("\n")
    except (OSError, ValueError) as error:
        raise ValueError(f"the template {text[1:]} cannot be read: {error}") from None


class LacksColumn(RowError):
    """A row lacks what a template needs."""


def compile_template(text: str, what: str = "template") -> Render:
    """Return a function that renders a row, whose columns are variables, or `row["the name"]`.

    A field of an object is its key of that name, never a method of Python's, which is only called: `order.items` is
    what the row has there, `order.items()` all pairs. A null is written no more than what is missing.

    :param text: the template, or "@" and the path of its file.
    :raises ValueError: for an invalid template, with the line where it goes wrong.

    >>> compile_template("Is it true that {{ claim }}?")({"claim": "2 > 1"})
    'Is it true that 2 > 1?'
    """
    environment, jinja2 = _environment()
    try:
        template = environment.from_string(_fields_as_keys(environment.parse(template_text(text))))
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


@functools.cache
def _environment() -> tuple[Any, Any]:
    """Return the sandbox, and jinja2's module."""
    try:
        import jinja2
        import jinja2.meta
        import jinja2.sandbox
    except ImportError as error:
        raise CtxflowError(f"templates need jinja2 ({error}): {how_to_install('jinja2', extra='batch')}") from None

    class Rows(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """A sandbox in which what is not called is no method."""

        def getitem(self, obj: Any, argument: Any) -> Any:
            try:
                return obj[argument]
            except (AttributeError, TypeError, LookupError):
                found = self.undefined(obj=obj, name=argument)
            if isinstance(argument, str) and not isinstance(obj, Mapping):
                attribute = self.getattr(obj, argument)
                found = found if callable(attribute) and not isinstance(attribute, jinja2.Undefined) else attribute
            return found

    def written(value: Any) -> Any:
        if value is None:
            raise jinja2.UndefinedError("a value that is to be written is null ({{ name or '' }} writes nothing then)")
        return value

    return Rows(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=written), jinja2


def _fields_as_keys(template: Any) -> Any:
    """Return a parsed template in which fields are looked up by key first, but for methods that are called."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    class Fields(NodeTransformer):
        def visit_Call(self, node: Any) -> Any:
            called = node.node
            self.generic_visit(node)
            if isinstance(called, nodes.Getattr):
                node.node = called  # Whose own parts were visited.
            return node

        def visit_Getattr(self, node: Any) -> Any:
            self.generic_visit(node)
            return nodes.Getitem(node.node, nodes.Const(node.attr), node.ctx, lineno=node.lineno)

    return Fields().visit(template)


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
