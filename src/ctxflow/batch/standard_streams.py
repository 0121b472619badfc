"""The standard input and output of `ctxflow batch`: `-` in the place of a file.

A stream cannot be read again after a restart, so it is copied beside the output first, to OUTPUT.input. What is written
to the standard output cannot be taken back: such a job cannot go on where it was stopped. What does not live here: the
job that reads the copy, or writes what is passed on (driver.py).
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from ctxflow.append_file import AppendFile
from ctxflow.batch.files import Files, files_of, keeps
from ctxflow.batch.job import Job
from ctxflow.errors import CtxflowError, UsageError
from ctxflow.safe_files import sync_folder, written_whole

STANDARD = Path("-")
"""What stands for the standard input or output."""

_PATIENCE = 2.0  # Seconds until a person is told how much is copied; and from one time to the next.
_BLOCK = 1 << 20


def with_input(job: Job, stream: BinaryIO, told: Callable[[str], None]) -> Job:
    """The job with a copy of the stream as its input.

    Where the stream is a terminal, or is empty, the copy that an earlier run made is taken.

    :param told: called with sentences to the person.
    :raises UsageError: if there is neither a stream nor a copy.
    :raises OSError: if there is no room for the copy; the one that was there stays.
    """
    if not keeps(job.output):
        raise UsageError(f"what is piped in is kept beside the output, and {job.output} keeps nothing: name another")
    files = files_of(job.output, "jsonl")
    copy = files.output.with_name(files.output.name + ".input")
    if stream.isatty():
        if not copy.is_file():
            raise UsageError("the input is the standard input, which is a terminal: pipe rows into it, or name a file")
        told(f"the standard input is a terminal: going on with its copy of before, {copy}")
    else:
        _copy(stream, copy, files, told)
    return job.reads_copy(copy, "the standard input")


def _copy(stream: BinaryIO, copy: Path, files: Files, told: Callable[[str], None]) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=copy.parent, prefix=copy.name + ".", suffix=".part")
    part = Path(name)
    try:
        with open(descriptor, "wb") as file:
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


DEAD_LETTERS = Path("standard-output.errors.jsonl")
"""Where the dead letters of a job stay that writes to the standard output: in the directory where it was started."""

Take = Callable[[bytes], None]
"""Takes lines of results as they come."""


@contextlib.contextmanager
def to_output(job: Job, descriptor: int, told: Callable[[str], None]) -> Iterator[tuple[Job, Take]]:
    """The job with an output that is passed on and removed, and what passes its lines on.

    A form that is made at the end is passed on as a whole then.

    :param descriptor: where it goes to; nothing else may be written there.
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
