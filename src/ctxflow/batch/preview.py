"""What a job would do, of which nothing is done: `--dry-run`.

What does not live here: what is wrong with a job (check.py, driver.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ctxflow.batch.display import QuietDisplay
from ctxflow.batch.driver import prepared
from ctxflow.batch.job import Job
from ctxflow.batch.requests import Item
from ctxflow.batch.status_file import status_path
from ctxflow.rows.source import RowError, Source
from ctxflow.wording import counted

_SHOWN = 3
_COUNTED_BYTES = 16 << 20  # Of files up to this, rows are counted by reading them.
_LONGEST = 2000


def preview(job: Job) -> dict[str, Any]:
    """Return what a job would do, and its first rows' prompts, having checked all that is checked before it starts.

    Nothing is started, and nothing written.

    :returns: "input", its "form", "rows" (None where only reading a large file would tell) and "columns"; "does", the
        "site" with its "engine"; the files that it "writes", whether it "goes_on" where an earlier run ended; and
        "first", for some rows, the "row" and either its "prompt" (or "messages", "input", "parameters") or its "error".
    :raises UsageError, CtxflowError: as `ctxflow.batch.driver.run_job`.
    """
    work = prepared(job, QuietDisplay())
    job, files = work.job, work.files
    columns = work.head.known
    written = (files.output, files.rows, files.errors, files.journal, status_path(files.output))
    model = {} if job.model is None else {"model": job.model, "task": job.task, **job.parameters}
    function = {} if job.function is None else {"function": job.function, **job.constants}
    return {
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


def _rows(source: Source) -> int | None:
    """How many rows there are, if that is told soon."""
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
    """What a model is asked, or the values that a function gets."""
    if len(item) == 1 and isinstance(item[0], Mapping) and {"prompt", "messages", "input"} & set(item[0]):
        return dict(item[0])
    return {"parameters": [repr(value) for value in item]}


def preview_text(found: Mapping[str, Any]) -> str:
    """Return a preview as a person reads it.

    :param found: what `preview` returned.
    """
    rows = "rows" if found["rows"] is None else counted(found["rows"], "row")
    does = ", ".join(f"{name} {value}" for name, value in found["does"].items())
    going_on = "going on where an earlier run ended" if found["goes_on"] else "from its beginning"
    lines = [
        f"reads    {found['input']}: {rows} of {found['form']}, with {', '.join(found['columns']) or 'no columns'}",
        f"does     {does}",
        f"on       {found['site']} ({found['engine']}), {going_on}",
        f"writes   {found['writes'][0]}",
        *(f"         {path}" for path in found["writes"][1:]),
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


_NO_PARAMETERS = {"row", "place", "messages", "prompt", "input", "parameters"}


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters in all)"
