"""Make the options of `ctxflow batch`, and their reference, of the keys of a job (`ctxflow.batch.job.Job`).

``python -m ctxflow.cli.batch_options > docs/batch-options.md`` writes the reference.
"""

from __future__ import annotations

import enum
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import typer

from ctxflow.batch.job import Job, Option, options
from ctxflow.errors import UsageError


def with_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each key of a job, in front of its own; it gets those as keyword arguments.

    :param command: a function with `**given`, which gets the keys that a person wrote something for.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    own = [each for each in inspect.signature(command).parameters.values() if each.kind is not each.VAR_KEYWORD]
    made = [_parameter(name, said) for name, said in options().items()]
    parameters = [*made, *(each.replace(annotation=hints[each.name], kind=each.KEYWORD_ONLY) for each in own)]

    def called(**given: Any) -> None:
        command(
            **{each.name: given.pop(each.name) for each in own},
            **{name: _value(name, value) for name, value in given.items() if value is not None},
        )

    called.__doc__ = command.__doc__
    called.__name__ = command.__name__
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called


def _parameter(name: str, said: Option) -> inspect.Parameter:
    """Return the option, or the argument, of a key as typer reads it."""
    if not said.panel:
        about = typer.Argument(metavar=said.metavar, help=said.help, show_default=False)
    else:
        about = typer.Option(
            *flags(name, said), help=said.help, rich_help_panel=said.panel, show_default=False, metavar=said.metavar
        )
    kind = Annotated[_written(name) | None, about]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def flags(name: str, said: Option) -> tuple[str, ...]:
    """Return a key's flags.

    >>> flags("id_column", options()["id_column"]), flags("model", options()["model"])
    (('--id-column',), ('-m', '--model'))
    """
    return said.flags or (f"--{name.replace('_', '-')}",)


def _plain(name: str) -> Any:
    """Return the type of a key, without what it may be beside: None."""
    kind = Job.model_fields[name].annotation
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(each for each in typing.get_args(kind) if each is not type(None))
    return kind


def _written(name: str) -> Any:
    """Return the type that typer takes for a key: the job's own check says what is wrong with a value."""
    kind = _plain(name)
    origin = typing.get_origin(kind)
    if origin is Literal:
        return enum.Enum(name, {each: each for each in typing.get_args(kind)}, type=str)
    if origin in (tuple, dict):
        return list[str]
    return kind if kind in (int, float) else str


def _value(name: str, value: Any) -> Any:
    """Return what a person wrote as a job takes it."""
    if isinstance(value, enum.Enum):
        return value.value
    return constants(value) if typing.get_origin(_plain(name)) is dict else value


def constants(given: Sequence[str]) -> dict[str, Any]:
    """Return the constants of NAME=VALUE, where a value is JSON if it can be, else text.

    :raises UsageError: for what is no constant.

    >>> constants(["top=3", "name=Paris"])
    {'top': 3, 'name': 'Paris'}
    """
    found = {}
    for each in given:
        name, separator, value = each.partition("=")
        if not separator or not name.isidentifier():
            raise UsageError(f"--set {each!r} is no constant: write NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


# --- the reference

_HEAD = """# Options of `ctxflow batch`, and keys of a job file

This page is generated from the options (`python -m ctxflow.cli.batch_options`). A job file, TOML or JSON, holds any
of the keys, and a flag overrides the file's key; [batch.md](batch.md) explains them. The flags that are not part
of a job (`--job`, `--dry-run`, `--fresh`, ...) are in `ctxflow batch --help`.
"""


def reference() -> str:
    """Return the reference of all keys, as Markdown."""
    sections: dict[str, list[str]] = {}
    for name, said in options().items():
        shown = ", ".join(f"`{flag}`" for flag in flags(name, said)) if said.panel else f"`{said.metavar}`"
        free = "" if not said.free else "yes"
        text = said.help.replace("|", "\\|")
        sections.setdefault(said.panel or "Input", []).append(
            f"| {shown} | `{name}` | {_kind(name)} | {free} | {text} |"
        )
    parts = [_HEAD, "*Free* keys may change from one run of a job to the next: no result depends on them.\n"]
    for title, lines in sections.items():
        parts += [f"## {title}\n", "| flag | key | value | free | meaning |", "| --- | --- | --- | --- | --- |"]
        parts += [*lines, ""]
    return "\n".join(parts)


def _kind(name: str) -> str:
    kind = _plain(name)
    origin, several = typing.get_origin(kind), ""
    if origin is tuple:
        kind, several = typing.get_args(kind)[0], "list of "
        origin = typing.get_origin(kind)
    if origin is Literal:
        return several + ", ".join(f"`{each}`" for each in typing.get_args(kind))
    words: Mapping[Any, str] = {int: "whole number", float: "number", dict: "table"}
    return several + words.get(origin or kind, "texts" if several else "text")


if __name__ == "__main__":
    print(reference(), end="")
