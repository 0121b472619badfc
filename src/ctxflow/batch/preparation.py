"""Prepare a job: open its input, settle what that decides, and check everything before anything is started."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ctxflow.apps import BatchApp
from ctxflow.batch.display import Display
from ctxflow.batch.engine_checks import LaterChecks, engine_problems, model_problems, place_problems, refuse
from ctxflow.batch.job import Job
from ctxflow.batch.job_apps import function_app
from ctxflow.batch.job_files import check_files, files_of, form_of
from ctxflow.batch.job_status import status_path
from ctxflow.batch.row_items import URLS, Item, asked_of, endpoint_of, family_of, misaddressed
from ctxflow.batch.templates import LacksColumn, columns_named, compile_template
from ctxflow.batch.work import Work
from ctxflow.errors import BusyError, UsageError, closest, counted, one_line
from ctxflow.models.model_folder import folder_here
from ctxflow.models.openai_responses import RESPONSES
from ctxflow.models.openai_schemas import schema_problem
from ctxflow.rows.documents import FILE, TEXT
from ctxflow.rows.readers import open_source
from ctxflow.rows.source import WHOLE, Head, Limited, RowError, Source, columns_for, head_of
from ctxflow.sites import load_site
from ctxflow.sites.site_problems import FileError


@dataclasses.dataclass(frozen=True)
class Subject:
    """A job under check, with what its checks need."""

    job: Job  # With what its input decides (its form, its task).
    head: Head
    app: BatchApp | None = None  # The job's own function, as far as it can be had.
    models: Mapping[str, Path] = dataclasses.field(default_factory=dict)  # The folders of those that are here.
    local: bool = False  # Whether workers are on this machine.


Check = Callable[[Subject], Iterable[str]]  # Says what is wrong in its part, a sentence each.


def check(subject: Subject, before: Sequence[str] = ()) -> None:
    """Refuse a job that cannot succeed.

    :param before: what was found wrong before.
    :raises UsageError: with all that is wrong.
    """
    refuse([*before, *(each for part in CHECKS for each in part(subject))])


def _columns(subject: Subject) -> Iterator[str]:
    """Check the flags that name columns."""
    job, head = subject.job, subject.head
    named: list[tuple[str, str]] = []
    if job.function is None and job.input_format == "openai":
        named += [(name, "OpenAI's requests need") for name in ("custom_id", "url", "body")]
    elif job.function is None and job.template is None:
        flag = "--column names" if job.column else f"the task {job.task} reads if no --column is given"
        named += [(name, flag) for name in job.columns]
    if job.id_column is not None and job.input_format != "openai":
        named.append((job.id_column, "--id-column names"))
    if job.models and job.input_format != "openai":
        named.append(("model", "says which --named-model is for a row"))
    named += [(name, "--keep names") for name in job.keep]
    named += [(name, "--row-parameter names") for name in job.row_parameter]
    for name, reads in named:
        if (sentence := head.lacks(name, reads)) is not None:
            yield sentence


def _templates(subject: Subject) -> Iterator[str]:
    """Check for templates that none of the first rows satisfies."""
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
        yield f"{reason}: it fails so on {_first_rows(head)}"


def _first_rows(head: Head) -> str:
    first = "the first row" if len(head.rows) == 1 else f"each of the first {len(head.rows):,} rows"
    return f"{first} of {head.name}"


def _addresses(subject: Subject) -> Iterator[str]:
    """Check for requests none of whose first have a supported url."""
    job, head = subject.job, subject.head
    if job.function is not None or job.input_format != "openai":
        return
    found = [misaddressed(row, family_of(job)) for row in head.rows if "url" in row]
    if found and all(found):
        yield f"{found[0]}: it fails so on {_first_rows(head)}"


def _schema(subject: Subject) -> Iterator[str]:
    """Check the schema that answers are to keep to."""
    if subject.job.answer_schema is None:
        return
    try:
        schema = subject.job.schema_of_answers
    except ValueError as error:
        yield str(error)
        return
    if (wrong := schema_problem(schema)) is not None:
        yield f"the schema of --schema is {wrong}"


def _function(subject: Subject) -> Iterator[str]:
    """Check what a function gets of rows, and its constants."""
    job, head, app = subject.job, subject.head, subject.app
    if app is None:
        return
    try:
        columns = columns_for(str(job.function), app.parameters, job.column, head.columns, head.name)
    except ValueError as error:
        if job.template is None:
            yield str(error)
    else:
        if head.columns is None and job.template is None:
            reads = "--column names" if job.column else f"{job.function} takes"
            yield from filter(None, (head.lacks(name, reads) for name in columns))
    yield from _constants(job, app)


def _constants(job: Job, app: BatchApp) -> Iterator[str]:
    parameters = inspect.signature(app.function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return
    by_name = {name: each for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}
    for name in (name for name in job.constants if name not in by_name):
        if name in parameters:
            yield (
                f"--set {name}: {job.function} takes it for each item, not as a constant: make it keyword-only, "
                "behind a *, or name its column with --column"
            )
        else:
            close = closest(name, by_name)
            hint = f" (did you mean {close!r}?)" if close else ""
            yield f"--set {name}: {job.function} has no such constant; it has {', '.join(by_name) or 'none'}{hint}"
    for name, each in by_name.items():
        if each.default is each.empty and name not in job.constants:
            yield f"{job.function} needs the constant {name!r}: give --set {name}=VALUE"


def _choices(subject: Subject) -> Iterator[str]:
    """Check what makes no sense by the command line alone."""
    job = subject.job
    if WHOLE in job.column and (job.function is None or len(job.column) > 1):
        yield "--column '*' gives whole rows to a function of one parameter: give it alone, with --function"
    for flag, names in (("--label", job.label), ("--keep", job.keep), ("--row-parameter", job.row_parameter)):
        for name in sorted({each for each in names if names.count(each) > 1}):
            yield f"{flag} {name} is given twice: give each once"
    if "" in job.label:
        yield "--label '' is empty: give each label a text"


def _model(subject: Subject) -> Iterator[str]:
    """Check what the job's models cannot do."""
    for job in subject.job.by_model().values():
        if job.model is not None and job.backend != "server":
            folder = subject.models.get(job.model)
            yield from model_problems(job, folder, subject.local)


def _engine(subject: Subject) -> Iterator[str]:
    """Check what the job says of its engine."""
    for job in subject.job.by_model().values():
        yield from engine_problems(job)
        if subject.local:
            yield from place_problems(job)


CHECKS: tuple[Check, ...] = (_choices, _model, _engine, _function, _columns, _templates, _schema, _addresses)


def prepare(job: Job, display: Display) -> Work:
    """Open a job's input, and find all that is wrong with the job before anything is written or started.

    What only an engine can tell is found out meanwhile: `Work.later`.

    :raises UsageError: with what is wrong.
    :raises CtxflowError: if something is not installed that it takes.
    """
    with refused():
        form, source = open_source(job.input, dataclasses.replace(job.reading, told=display.note))
        if job.limit is not None:
            source = Limited(source, job.limit)
        head = head_of(source)
        job = resolved(job, form, source)
    if form == "openai" and job.function is None and any(row.get("url") == RESPONSES for row in head.rows):
        display.note(f"requests to {RESPONSES} are asked as chat completions, and answered in its form")
    files = files_of(job.output, str(job.output_format))
    wrong: list[str] = []
    app = site = None
    with _noted(wrong):
        check_files(job, source, files)
    with _noted(wrong):
        site = load_site(job.site, workers=job.workers)
    with _noted(wrong):
        app = function_app(job) if job.function is not None else None
    named = [each.model for each in job.by_model().values() if each.model is not None]
    here = {name: folder for name in named if (folder := folder_here(name)) is not None}
    local = site is not None and site.engine == "embedded"
    check(Subject(job, head, app, here, local), wrong)
    assert site is not None
    later = LaterChecks(job.by_model().values() if job.function is None else (), display.note)
    with refused():
        return Work(job, source, files, site, app, display, later)


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Turn what is refused before anything runs into an error of usage, unless another driver is at it."""
    try:
        yield
    except (BusyError, UsageError):
        raise
    except ValueError as error:
        raise UsageError(str(error)) from None


@contextlib.contextmanager
def _noted(wrong: list[str]) -> Iterator[None]:
    """Note what is found wrong, so that the rest is looked at, too."""
    try:
        yield
    except ValueError as error:
        wrong += error.lines if isinstance(error, FileError) else [str(error)]


_IDS = {"openai": "custom_id", "documents": FILE}  # The columns that identify rows, of forms that have one.


def resolved(job: Job, form: str, source: Source) -> Job:
    """Return the job with what its input decides: the task of OpenAI's requests, the form of the output."""
    changes: dict[str, Any] = {"input_format": form}
    requests = form == "openai" and job.function is None
    if requests:
        if job.id_column not in (None, "custom_id"):
            raise ValueError("OpenAI's requests are known by their custom_id: leave --id-column out")
        if job.template is not None or job.column or job.system is not None or job.row_parameter:
            raise ValueError("OpenAI's requests say all themselves: templates, columns and --system are for plain rows")
        changes["task"] = job.task or _task_of(source)
    elif job.function is None:
        changes["task"] = job.task or "generate"
        if form in ("text", "documents") and job.template is None:
            changes["column"] = job.column or (TEXT,)
    if form in _IDS:
        changes["id_column"] = job.id_column or _IDS[form]
    output = str(job.output_format or "")
    if not output:
        output = form_of(job.output)
        if output == "jsonl" and requests and job.task != "classify":
            output = "openai"
    if output == "openai" and job.keep:
        raise ValueError("OpenAI's form has no place for columns that are kept: choose another output format")
    if output == "openai" and not requests:
        raise ValueError("OpenAI's form answers OpenAI's requests alone: choose jsonl, csv or parquet as output format")
    if job.answer_schema is not None and requests and changes["task"] == "embed":
        raise ValueError("a schema is for what a model writes, and these requests are to embed: leave --schema out")
    if job.task == "classify" and requests:
        raise ValueError("OpenAI's requests do not ask for labels: classify plain rows")
    return job.model_copy(update={**changes, "output_format": output})


def _task_of(source: Source) -> str:
    """Return what the first request with a known URL asks for."""
    for row in next(iter(source.chunks()), []):
        family = URLS.get(endpoint_of(row.values.get("url")) or "") if isinstance(row.values, dict) else None
        if family is not None:
            return "chat" if family == "generate" else family
    return "chat"


_NO_PARAMETERS = {"row", "place", "messages", "prompt", "input", "parameters"}
_SHOWN = 3
_COUNTED_BYTES = 16 << 20  # Of files up to this, rows are counted by reading them.
_LONGEST = 2000


def preview(job: Job) -> dict[str, Any]:
    """Check a job, and return what it would do, with its first rows' prompts; nothing is started or written.

    :returns: "input", its "form", "rows" (None where only reading a large file would tell) and "columns"; "does", the
        "site" with its "engine"; the files that it "writes", whether it "goes_on" where an earlier run ended; and
        "first", for some rows, the "row" and either its "prompt" (or "messages", "input", "parameters") or its "error";
        "notes", what else is to be known.
    :raises UsageError, CtxflowError: as `ctxflow.batch.driver.run_job`.
    """
    display = _Notes()
    work = prepare(job, display)
    work.later.settle()
    job, files = work.job, work.files
    columns = head_of(work.source).known
    written = (files.output, files.rows, files.errors, files.journal, status_path(files.output))
    engine = {"backend": job.backend, "server_command": job.server_command, **job.engine_options}
    said = {name: value for name, value in engine.items() if value not in (None, "transformers")}
    models = {"model": job.model} if job.model is not None else {"models": job.models}
    model = {} if job.function is not None else {**models, "task": job.task, **said, **job.parameters}
    function = {} if job.function is None else {"function": job.function, **job.constants}
    found = {
        "input": str(job.input),
        "form": job.input_format,
        "rows": _rows(work.source),
        "columns": list(columns) if columns is not None else [],
        "does": {**model, **function},
        "site": work.site.name,
        "engine": work.site.engine,
        "writes": list(dict.fromkeys(map(str, written))),
        "goes_on": files.journal.exists(),
        "first": list(_first(work.source, work.make)),
    }
    return {**found, "notes": list(dict.fromkeys(display.notes))}


class _Notes(Display):
    """Keeps the sentences that a job would show."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Keep a sentence."""
        self.notes.append(text)


def _rows(source: Source) -> int | None:
    """Return how many rows there are, if that is known soon."""
    if source.total is None and sum(file.stat().st_size for file in source.files) <= _COUNTED_BYTES:
        return sum(len(chunk) for chunk in source.chunks())
    return source.total


def _first(source: Source, make: Any) -> Iterator[dict[str, Any]]:
    for row in next(iter(source.chunks()), [])[:_SHOWN]:
        try:
            if isinstance(row.values, RowError):
                raise row.values
            yield {"row": row.number, "place": source.place(row.number), **_asked(make(row.values))}
        except RowError as error:
            yield {"row": row.number, "place": source.place(row.number), "error": str(error)}


def _asked(item: Item) -> dict[str, Any]:
    """Return what a model is asked, or the values that a function gets."""
    if len(item) == 1 and isinstance(item[0], (Mapping, tuple)):
        asked = asked_of(item)
        if {"prompt", "messages", "input"} & set(asked):
            return dict(asked)
    return {"parameters": [repr(value) for value in item]}


def preview_text(found: Mapping[str, Any]) -> str:
    """Return what `preview` returned as text."""
    rows = "rows" if found["rows"] is None else counted(found["rows"], "row")
    does = ", ".join(f"{name} {value}" for name, value in found["does"].items())
    going_on = "going on where an earlier run ended" if found["goes_on"] else "from its beginning"
    lines = [
        f"reads    {found['input']}: {rows} of {found['form']}, with {', '.join(found['columns']) or 'no columns'}",
        f"does     {does}",
        f"on       {found['site']} ({found['engine']}), {going_on}",
        f"writes   {found['writes'][0]}",
        *(f"         {path}" for path in found["writes"][1:]),
        *(f"note     {one_line(text)}" for text in found["notes"]),
    ]
    for row in found["first"]:
        lines += ["", f"--- {row['place']}", *_shown(row)]
    return "\n".join([*lines, "", "Nothing was started, and nothing written."])


def _shown(row: Mapping[str, Any]) -> Iterator[str]:
    if "error" in row:
        yield f"would be a dead letter: {row['error']}"
        return
    for message in row.get("messages", ()):
        yield _short(f"{message['role']}: {message.get('content')}")
    for name in ("prompt", "input"):
        if name in row:
            yield _short(str(row[name]))
    for value in row.get("parameters", ()):
        yield _short(value)
    if own := {name: value for name, value in row.items() if name not in _NO_PARAMETERS}:
        yield f"({', '.join(f'{name} {value}' for name, value in own.items())})"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters in all)"
