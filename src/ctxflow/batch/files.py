"""Where a job writes, and that this is nowhere where it reads.

What does not live here: how files are told apart (apart.py), and what is in them (ledger.py, status_file.py).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from ctxflow.batch.apart import Named, check_apart, check_not_among
from ctxflow.batch.job import Job
from ctxflow.batch.publish import PUBLISHED
from ctxflow.batch.status_file import status_path
from ctxflow.errors import UsageError
from ctxflow.rows.source import Source
from ctxflow.safe_files import part_of


@dataclasses.dataclass(frozen=True)
class Files:
    """Where a job writes.

    :ivar output: what the user asked for; `rows`, the lines that it is made of: the same, unless it is made at the end.
    """

    output: Path
    rows: Path
    errors: Path
    journal: Path

    @property
    def written(self) -> list[Named]:
        """All of them, by what a person calls them."""
        status = status_path(self.output)
        named = [
            ("the output", self.output),
            ("the file of results", self.rows),
            ("the file of dead letters", self.errors),
            ("the job's journal", self.journal),
            ("the job's status file", status),
            ("the job's status file", part_of(status)),
        ]
        if self.rows == self.output:
            del named[1]
        else:
            named.append(("the output", part_of(self.output)))
        return named


def files_of(output: Path, form: str) -> Files:
    """The files of a job with that output.

    >>> files_of(Path("/results/out.parquet"), "parquet").rows.name
    'out.parquet.rows.jsonl'
    """
    real = output.resolve()

    def beside(suffix: str) -> Path:
        return real.with_name(real.name + suffix)

    rows = beside(".rows.jsonl") if form in PUBLISHED else real
    return Files(real, rows, beside(".errors.jsonl"), beside(".progress"))


_FORMS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", "": "jsonl"}


def form_of(output: Path) -> str:
    """Return the form that an output's name asks for.

    :raises UsageError: if it is none that can be written.

    >>> form_of(Path("out.csv")), form_of(Path("out"))
    ('csv', 'jsonl')
    """
    form = _FORMS.get(output.suffix.lower())
    if form is None:
        raise UsageError(
            f"the output {output} would be {output.suffix}, which is not written: have its name end in .jsonl, .csv, "
            ".tsv or .parquet, or name one of these forms with --output-format"
        )
    return form


def keeps(output: Path) -> bool:
    """Return whether an output keeps what is written to it, as all do but the null device.

    >>> keeps(Path("/dev/null")), keeps(Path("results.jsonl"))
    (False, True)
    """
    try:
        return not os.path.samefile(output, os.devnull)
    except OSError:  # It is not there.
        return True


def check_files(job: Job, source: Source, files: Files) -> None:
    """See that a job can write its files, and that it reads none of them, before any is opened.

    :raises UsageError: if it would, saying which file is to have another name.
    """
    if files.output.is_dir():
        raise UsageError(f"the output {job.output} is a folder: name a file")
    if not keeps(files.output):
        return
    if files.output.exists() and not files.output.is_file():
        raise UsageError(
            f"the output {job.output} is a pipe or a device, from which no restart could go on: name a file, or - for "
            "the standard output"
        )
    check_apart([("the input", job.input), *(("the input", path) for path in source.files)], files.written)
    check_apart(_read_beside(job), files.written)
    if job.input.is_dir():
        check_not_among(job.input, source.files, files.written)


def _read_beside(job: Job) -> list[Named]:
    """What a job reads beside its input."""
    named = [("the job file", job.file)] if job.file is not None else []
    for what, text in (("the template", job.template), ("the system message", job.system)):
        if text is not None and text.startswith("@"):
            named.append((what, Path(text[1:])))
    if job.site != "local":
        named.append(("the site file", Path(job.site)))
    return named
