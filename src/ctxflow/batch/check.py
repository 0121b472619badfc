"""All that can be told to be wrong with a job before anything is started or written: one check for every flag.

Pure: it is given the job, the first rows of its input and its function. What does not live here: which choices exclude
each other (job.py), and what is wrong with a single row (requests.py).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ctxflow.apps import BatchApp
from ctxflow.batch.job import Job
from ctxflow.batch.templates import LacksColumn, columns_named, compile_template
from ctxflow.errors import UsageError
from ctxflow.models.ability import Ability, refusal
from ctxflow.rows.columns import WHOLE, closest, columns_for, told
from ctxflow.rows.source import RowError, Table


@dataclasses.dataclass(frozen=True)
class Head:
    """What the beginning of an input tells of all of it.

    :ivar name: the input's.
    :ivar columns: those that it has, None where each row has its own.
    :ivar rows: its first rows, without those that cannot be read.
    """

    name: str
    columns: tuple[str, ...] | None
    rows: Sequence[Mapping[str, Any]]

    @functools.cached_property
    def known(self) -> tuple[str, ...] | None:
        """The columns, or what any of the first rows has; None if nothing tells."""
        if self.columns is not None:
            return self.columns
        return tuple(dict.fromkeys(name for row in self.rows for name in row)) if self.rows else None

    def lacks(self, column: str, reads: str) -> str | None:
        """Return what is to be said if there is no such column.

        :param reads: who reads it.

        >>> Head("a.csv", ("id", "claim"), ()).lacks("clam", "--keep names")
        "a.csv has no column 'clam', which --keep names: it has 'id', 'claim' (did you mean 'claim'?)"
        """
        known = self.known
        if known is None or column in known:
            return None
        if self.columns is not None:
            return f"{self.name} has no column {column!r}, which {reads}: {told(column, known)}"
        if len(self.rows) == 1:
            return f"the first row of {self.name} has no {column!r}, which {reads}: {told(column, known)}"
        count = f"none of the first {len(self.rows):,} rows of {self.name}"
        return f"{count} has {column!r}, which {reads}: {told(column, known).replace('it has', 'they have', 1)}"


def head_of(table: Table) -> Head:
    """Read the beginning of an input.

    :raises ValueError: if it cannot be read at all.
    """
    columns = table.columns()
    chunk = next(iter(table.chunks()), [])
    rows = [row.values for row in chunk if not isinstance(row.values, RowError)]
    return Head(table.name, None if columns is None else tuple(columns), rows)


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is looked at.

    :ivar job: with what its input decides (its form, its task).
    :ivar app: the job's own function; None where a model does it, or where the function cannot be had.
    :ivar model: what the job's model can do; None where it is not on this machine.
    """

    job: Job
    head: Head
    app: BatchApp | None = None
    model: Ability | None = None


Check = Callable[[Subject], Iterable[str]]
"""Says what is wrong in its part, a sentence each."""


def check(subject: Subject, before: Sequence[str] = ()) -> None:
    """Refuse a job that cannot go well.

    :param before: what was found wrong before.
    :raises UsageError: with all that is wrong.
    """
    found = list(dict.fromkeys([*before, *(each for part in CHECKS for each in part(subject))]))
    if len(found) == 1:
        raise UsageError(found[0])
    if found:
        raise UsageError("\n  - ".join([f"{len(found)} things are wrong with this job:", *found]))


def _columns(subject: Subject) -> Iterator[str]:
    """The flags that name columns."""
    job, head = subject.job, subject.head
    named: list[tuple[str, str]] = []
    if job.function is None and job.input_format == "openai":
        named += [(name, "OpenAI's requests need") for name in ("custom_id", "url", "body")]
    elif job.function is None and job.template is None:
        flag = "--column names" if job.column else f"the task {job.task} reads if no --column is given"
        named += [(name, flag) for name in job.columns]
    if job.id_column is not None and job.input_format != "openai":
        named.append((job.id_column, "--id-column names"))
    named += [(name, "--keep names") for name in job.keep]
    named += [(name, "--row-parameter names") for name in job.row_parameter]
    for name, reads in named:
        if (sentence := head.lacks(name, reads)) is not None:
            yield sentence


def _templates(subject: Subject) -> Iterator[str]:
    """Templates that none of the first rows satisfies."""
    for text, what in ((subject.job.template, "template"), (subject.job.system, "system message")):
        if text is None:
            continue
        try:
            render = compile_template(text, what)
        except ValueError as error:
            yield str(error)
            continue
        yield from _unsatisfied(subject.head, render, columns_named(text), what)


def _unsatisfied(head: Head, render: Callable[[Mapping[str, Any]], str], named: list[str], what: str) -> Iterator[str]:
    reason = ""
    for row in head.rows:
        try:
            render(row)
            return
        except LacksColumn as error:
            reason = str(error)
        except RowError:
            return
    missing = [said for name in named if (said := head.lacks(name, f"the {what} names")) is not None]
    if missing:
        yield from missing
    elif head.rows:
        first = "the first row" if len(head.rows) == 1 else f"each of the first {len(head.rows):,} rows"
        yield f"{reason}: it fails so on {first} of {head.name}"


def _function(subject: Subject) -> Iterator[str]:
    """What a function gets of rows, and its constants."""
    job, head, app = subject.job, subject.head, subject.app
    if app is None:
        return
    try:
        chosen = job.column
        columns = columns_for(str(job.function), app.parameters, chosen, head.columns, head.name)
    except ValueError as error:
        if job.template is None:
            yield str(error)
    else:
        if head.columns is None and job.template is None:
            reads = "--column names" if chosen else f"{job.function} takes"
            yield from filter(None, (head.lacks(name, reads) for name in columns))
    yield from _constants(job, app)


def _constants(job: Job, app: BatchApp) -> Iterator[str]:
    parameters = inspect.signature(app.function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    by_name = {name: each for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}
    for name in job.constants:
        if name in by_name:
            continue
        if name in parameters:
            yield (
                f"--set {name}: {job.function} takes it for each item, not as a constant: make it keyword-only, "
                f"behind a *, or name its column with --column"
            )
            continue
        close = closest(name, list(by_name))
        hint = f" (did you mean {close!r}?)" if close else ""
        yield f"--set {name}: {job.function} has no such constant; it has {', '.join(by_name) or 'none'}{hint}"
    for name, each in by_name.items():
        if each.default is each.empty and name not in job.constants:
            yield f"{job.function} needs the constant {name!r}: give --set {name}=VALUE"


def _choices(subject: Subject) -> Iterator[str]:
    """What of the command line alone makes no sense."""
    job = subject.job
    if WHOLE in job.column and (job.function is None or len(job.column) > 1):
        yield "--column '*' gives whole rows to a function of one parameter: give it alone, with --function"
    for flag, names in (("--label", job.label), ("--keep", job.keep), ("--row-parameter", job.row_parameter)):
        for name in sorted({each for each in names if names.count(each) > 1}):
            yield f"{flag} {name} is given twice: give each once"
    if "" in job.label:
        yield "--label '' is empty: give each label a text"


def _model(subject: Subject) -> Iterator[str]:
    """What the model cannot do."""
    job, model = subject.job, subject.model
    if model is None or job.task is None:
        return
    if (reason := refusal(str(job.model), model, job.task)) is not None:
        yield reason
    elif job.task in ("generate", "chat") and model.length is not None and (job.max_new_tokens or 0) >= model.length:
        yield (
            f"--max-new-tokens {job.max_new_tokens} leaves no room for a prompt: the model {job.model} reads and "
            f"writes {model.length} tokens together"
        )


CHECKS: tuple[Check, ...] = (_choices, _model, _function, _columns, _templates)
