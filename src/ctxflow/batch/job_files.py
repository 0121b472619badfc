"""The files of a job: where it writes, that it does not write what it reads, and `-`, the standard input and output.

A stream cannot be read again after a restart, so the standard input is first copied to OUTPUT.input. What is written to
the standard output cannot be taken back: such a job cannot be resumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from ctxflow.batch.job import Job
from ctxflow.batch.job_status import status_path
from ctxflow.batch.ledger import CUT
from ctxflow.batch.publish import PUBLISHED
from ctxflow.errors import CtxflowError, UsageError
from ctxflow.files import open_new, part_of, sync_folder, written_whole
from ctxflow.ownership import AppendFile
from ctxflow.rows.source import Source

Named = tuple[str, Path]  # What a person calls a file ("the input"), and its path.


@dataclasses.dataclass(frozen=True)
class Files:
    """Where a job writes."""

    output: Path
    rows: Path  # The lines that the output is made of: the same, unless it is made at the end.
    errors: Path
    journal: Path

    @property
    def written(self) -> list[Named]:
        """Return all of them, by what messages call them."""
        status, made = status_path(self.output), self.rows != self.output
        return [
            ("the output", self.output),
            *([("the file of results", self.rows)] * made),
            ("the file of dead letters", self.errors),
            ("the file of what is cut off results", self.rows.with_name(self.rows.name + CUT)),
            ("the job's journal", self.journal),
            ("the job's status file", status),
            ("the job's status file", part_of(status)),
            *([("the output", part_of(self.output))] * made),
        ]

    @property
    def input(self) -> Path:
        """Return the copy of the standard input."""
        return self.output.with_name(self.output.name + ".input")


def files_of(output: Path, form: str) -> Files:
    """Return the files of a job with that output."""
    real = output.resolve()

    def beside(suffix: str) -> Path:
        return real.with_name(real.name + suffix)

    rows = beside(".rows.jsonl") if form in PUBLISHED else real
    return Files(real, rows, beside(".errors.jsonl"), beside(".progress"))


_FORMS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", "": "jsonl"}


def form_of(output: Path) -> str:
    """Return the form that an output's name asks for.

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
    """Return whether an output keeps what is written to it, as all do but the null device."""
    try:
        return not os.path.samefile(output, os.devnull)
    except OSError:  # It is not there.
        return True


def check_files(job: Job, source: Source, files: Files) -> None:
    """Check that a job can write its files, and that it reads none of them, before any is opened.

    :raises UsageError: if not, saying which file is to have another name.
    """
    check_names(files)
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
        check_not_among(job.input, source.files, files.written, all_below=job.input_format == "documents")


_NAME_BYTES = 255  # Of a name, where the filesystem does not say.


def check_names(files: Files) -> None:
    """Refuse an output whose name leaves no room for what is put beside it.

    :raises UsageError: saying how long it may be.
    """
    try:
        limit = os.pathconf(files.output.parent, "PC_NAME_MAX")
    except OSError:  # It is not there yet.
        limit = _NAME_BYTES
    output = len(os.fsencode(files.output.name))
    what, name = max(((what, path.name) for what, path in files.written), key=lambda each: len(os.fsencode(each[1])))
    if (beside := len(os.fsencode(name))) > limit:
        raise UsageError(
            f"the output's name is too long, {output} bytes, for {what} beside it, {'...' + name[-20:]}: "
            f"name one of at most {limit - (beside - output)} bytes"
        )


def _read_beside(job: Job) -> list[Named]:
    """Return what a job reads beside its input."""
    named = [("the job file", job.file)] if job.file is not None else []
    for what, text in (("the template", job.template), ("the system message", job.system)):
        if text is not None and text.startswith("@"):
            named.append((what, Path(text[1:])))
    if job.answer_schema is not None and not job.answer_schema.startswith("{"):
        named.append(("the schema", Path(job.answer_schema)))
    if job.site != "local":
        named.append(("the site file", Path(job.site)))
    return named


def check_apart(reads: Iterable[Named], writes: Sequence[Named]) -> None:
    """Refuse a job that would write a file that it reads, or one file under two names, such as a link.

    :raises UsageError: naming both.

    >>> check_apart([("the input", Path("in.jsonl"))], [("the output", Path("out.jsonl"))])
    >>> check_apart([("the input", Path("here/../in.jsonl"))], [("the output", Path("in.jsonl"))])
    Traceback (most recent call last):
    ...
    ctxflow.errors.UsageError: the output in.jsonl is the input here/../in.jsonl: name another output
    """
    known: dict[object, Named] = {}
    for what, path in writes:
        other = known.setdefault(_identity(path), (what, path))
        if other != (what, path):
            raise UsageError(
                f"{other[0]} {other[1]} and {what} {path} are one file by two names: "
                "name another output, or remove one of them"
            )
    for what, path in reads:
        if (key := _identity(path)) in known:
            theirs, written = known[key]
            how = "" if os.path.abspath(written) == os.path.abspath(path) else " by another name"
            raise UsageError(f"{theirs} {written} is {what} {path}{how}: name another output")


def check_not_among(folder: Path, shards: Iterable[Path], writes: Sequence[Named], all_below: bool = False) -> None:
    """Refuse an output that the next start would read as one more part of its input's folder.

    :param all_below: whether the input is all that is in the folder and in those below.
    """
    read = {(os.path.realpath(shard.parent), shard.suffix.lower()) for shard in shards}
    real = Path(os.path.realpath(folder))
    for what, path in writes:
        within = all_below and real in Path(os.path.realpath(path)).parents
        if within or (os.path.realpath(path.parent), path.suffix.lower()) in read:
            raise UsageError(
                f"{what} {path} would be a part of the input {folder} at the next start: name an output elsewhere"
            )


def _identity(path: Path) -> object:
    """Return what identifies a file, whatever links lead to it: itself if it exists, else where it would be made."""
    try:
        found = os.stat(path)
    except OSError:
        return os.path.realpath(path)
    return found.st_dev, found.st_ino


STANDARD = Path("-")  # The standard input or output.

_PATIENCE = 2.0  # Seconds from one note on a long wait to the next.
_BLOCK = 1 << 20


def with_input(job: Job, stream: BinaryIO, told: Callable[[str], None]) -> Job:
    """Return the job with a copy of the stream as its input: that of an earlier run for a terminal, or an empty one.

    :param told: called with sentences to the person.
    :raises UsageError: if there is neither a stream nor a copy.
    :raises OSError: if there is no room for the copy; the one that was there stays.
    """
    if not keeps(job.output):
        raise UsageError(f"what is piped in is kept beside the output, and {job.output} keeps nothing: name another")
    files = files_of(job.output, "jsonl")
    check_names(files)
    copy = files.input
    if stream.isatty():
        if not copy.is_file():
            raise UsageError("the input is the standard input, which is a terminal: pipe rows into it, or name a file")
        told(f"the standard input is a terminal: going on with its copy of before, {copy}")
    else:
        _copy(stream, copy, files, told)
    return job.reads_copy(copy, "the standard input")


def _copy(stream: BinaryIO, copy: Path, files: Files, told: Callable[[str], None]) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(copy, f".{os.urandom(4).hex()}")
    try:
        with open_new(part, 0o600) as file:
            try:
                size = _pass_on(stream, file, told)
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                raise OSError(error.errno, f"the standard input cannot be copied to {copy}: {error.strerror}") from None
        if not copy.exists():
            if not size:
                raise UsageError("the standard input is empty: pipe rows into it, or name a file")
            os.replace(part, copy)
            sync_folder(copy.parent)
        elif not size:
            told(f"the standard input is empty: going on with its copy of before, {copy}")
        elif not filecmp.cmp(part, copy, shallow=False):
            _replace(part, copy, files, told)
    finally:
        part.unlink(missing_ok=True)


def _replace(part: Path, copy: Path, files: Files, told: Callable[[str], None]) -> None:
    """Take another input, unless a driver reads the copy of before, which stays beside it."""
    before = copy.with_name(copy.name + ".before")
    with contextlib.closing(AppendFile(files.journal)) as journal:
        journal.lock(files.output)
        os.replace(copy, before)
        os.replace(part, copy)
        sync_folder(copy.parent)
    told(f"the standard input is not what it was; its copy of before is {before}")


def _pass_on(stream: BinaryIO, file: BinaryIO, told: Callable[[str], None]) -> int:
    size, due = 0, time.monotonic() + _PATIENCE
    while block := stream.read(_BLOCK):
        file.write(block)
        size += len(block)
        if time.monotonic() >= due:
            due = time.monotonic() + _PATIENCE
            told(f"copying the standard input: {size / 1e6:,.0f} MB so far")
    return size


DEAD_LETTERS = Path("standard-output.errors.jsonl")  # Of a job that writes to the standard output: where it started.

Take = Callable[[bytes], None]  # Takes lines of results as they come.


@contextlib.contextmanager
def to_output(job: Job, descriptor: int, told: Callable[[str], None]) -> Iterator[tuple[Job, Take]]:
    """Yield the job with an output that is passed on and removed, and what passes its lines on.

    A form that is made at the end is passed on as a whole then. Nothing else may be written to the descriptor.

    :raises CtxflowError: if nobody reads it any more.
    """
    told("results go to the standard output: nothing is kept of them, so that a job that is stopped begins anew")
    with tempfile.TemporaryDirectory(prefix="ctxflow-") as folder:
        form = job.output_format or "jsonl"
        lines = form in ("jsonl", "openai")
        output = Path(folder) / f"standard-output.{'jsonl' if lines else form}"

        def take(data: bytes) -> None:
            if lines:
                _write(descriptor, data)

        try:
            yield job.model_copy(update={"output": output}), take
        finally:
            errors = files_of(output, form).errors
            if errors.exists():
                with open(errors, "rb") as source, written_whole(DEAD_LETTERS) as target:
                    shutil.copyfileobj(source, target)
        if not lines:
            with open(output, "rb") as file:
                while block := file.read(_BLOCK):
                    _write(descriptor, block)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except BrokenPipeError:
        raise CtxflowError("nobody reads the standard output any more: the job is stopped") from None
