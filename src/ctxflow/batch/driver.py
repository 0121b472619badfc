"""A job from its beginning to its end: files opened, an executor started if there is work, rows pumped, a result.

What does not live here: flags (cli/batch.py), and the loop (pump.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ctxflow.apps import BatchApp
from ctxflow.batch.aftermath import kept_summary, note_job
from ctxflow.batch.check import Head, Subject, check, head_of
from ctxflow.batch.display import Display, QuietDisplay
from ctxflow.batch.files import Files, check_files, files_of, form_of, keeps
from ctxflow.batch.going_on import check_rows, check_same, facts_of, input_changed, maker_then
from ctxflow.batch.held import Held
from ctxflow.batch.intake import Intake
from ctxflow.batch.job import Job
from ctxflow.batch.ledger import Ledger
from ctxflow.batch.metrics import serving
from ctxflow.batch.outcome import Outcome
from ctxflow.batch.publish import PUBLISHED, publish
from ctxflow.batch.pump import Pump
from ctxflow.batch.records import Record, openai_record, plain_columns, plain_record, tokens_of, truncated
from ctxflow.batch.requests import URLS, Make, family_of, maker
from ctxflow.batch.status_file import StatusFile, read_status
from ctxflow.batch.tasks import function_app, model_app
from ctxflow.batch.tolerance import Tolerance
from ctxflow.batch.watch import Watch
from ctxflow.errors import BusyError, UsageError
from ctxflow.executors.bare import BareExecutor
from ctxflow.executors.futures import Stream
from ctxflow.identity import Identity, identity_of, identity_of_model, reading_text
from ctxflow.models.ability import ability_of
from ctxflow.models.locate import folder_here
from ctxflow.observe.progress import Progress
from ctxflow.rows.readers import open_source
from ctxflow.rows.source import Limited, Source
from ctxflow.sites import Site, load_site
from ctxflow.wording import counted


def run_job(
    job: Job,
    *,
    fresh: bool = False,
    retry_errors: bool = False,
    display: Display | None = None,
    metrics: tuple[str, int] | None = None,
    passed_on: Callable[[bytes], None] | None = None,
) -> Outcome:
    """Do what is missing of a job.

    :param fresh: begin anew, and forget what an earlier run did.
    :param retry_errors: try the dead letters again.
    :param metrics: the address and the port at which Prometheus may ask how it stands.
    :param passed_on: gets the lines of results, too, as they are kept.
    :raises UsageError: a ValueError, for an input, output or choice that makes no sense, saying what to do.
    :raises BusyError: if another driver writes there.
    :raises CtxflowError: if nothing can be run, such as when the model cannot be loaded.

    >>> import json, pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     words = pathlib.Path(folder) / "words.csv"
    ...     _ = words.write_text("word\\nParis\\nRome\\n")
    ...     results = words.with_suffix(".jsonl")
    ...     job = Job(input=words, output=results, function="copy:copy", column=("word",), order="input")
    ...     outcome = run_job(job)
    ...     [json.loads(line)["result"] for line in results.read_text().splitlines()]
    ['Paris', 'Rome']
    >>> outcome.exit_status
    0
    """
    began = time.monotonic()
    display = display or QuietDisplay()
    with _begun(job, fresh, retry_errors, display) as begun:
        ledger, files = begun.ledger, begun.files
        if begun.ended:
            _say_finished(ledger, files)
            return Outcome(ledger.done, ledger.dead, 0, 0, time.monotonic() - began, already=True)
        before = ledger.done, ledger.dead
        if sum(before):
            display.note(f"going on: {counted(ledger.done, 'row')} done, {ledger.dead:,} dead")
        try:
            begun.work.passed_on = passed_on
            _finish(begun.work, ledger, files, begun.job, metrics, began)
        finally:
            display.end()
        if not ledger.done + ledger.dead:
            display.note(f"{begun.work.source.name} holds no rows: nothing to do")
        now = (ledger.done - before[0], ledger.dead - before[1])
        took, summary = time.monotonic() - began, kept_summary(begun.work.directory, display)
        cut, held = begun.work.truncated, begun.work.held
        return Outcome(
            ledger.done, ledger.dead, *now, took, nulled=held.nulled, altered=held.altered, summary=summary,
            truncated_now=cut,
        )  # fmt: skip


def begin_job(job: Job, *, fresh: bool = False, retry_errors: bool = False, display: Display | None = None) -> bool:
    """Do what `run_job` does before it runs anything, and keep that; whether there is something to run.

    Whoever has another process run the job learns here what is wrong with it, and that process needs neither of the
    flags: it could not tell after a restart whether they were heeded.

    :raises ValueError, CtxflowError: as `run_job`.
    """
    with _begun(job, fresh, retry_errors, display or QuietDisplay()) as begun:
        return not begun.ended


@dataclasses.dataclass(frozen=True)
class _Begun:
    """A job whose files are open.

    :ivar job: with what its input decides.
    :ivar ended: whether an earlier run did all of it.
    """

    job: Job
    work: Work
    ledger: Ledger
    files: Files
    ended: bool = False


@contextlib.contextmanager
def _begun(job: Job, fresh: bool, retry_errors: bool, display: Display) -> Iterator[_Begun]:
    """Open a job's files, once all that can be told before is seen to be in order."""
    work = prepared(job, display)
    with contextlib.ExitStack() as stack:
        with _as_usage():
            files = stack.enter_context(_files(work))
            ledger = stack.enter_context(Ledger(files.rows, files.errors, files.journal, fresh))
            ended = _opened(work, files, ledger, fresh, retry_errors)
        yield _Begun(work.job, work, ledger, files, ended)


@contextlib.contextmanager
def _as_usage() -> Iterator[None]:
    """Take what is refused before anything runs for what another command mends, unless another driver is at it."""
    try:
        yield
    except BusyError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from None


def _opened(work: Work, files: Files, ledger: Ledger, fresh: bool, retry_errors: bool) -> bool:
    """See that a job may go on where its files are; whether an earlier run did all of it.

    :raises ValueError: if it may not, saying what to do.
    """
    job, source, display = work.job, work.source, work.display
    facts = facts_of(job, source, work.identity(), ledger.facts)
    if ledger.finished and ledger.facts == facts and not retry_errors and files.output.exists():
        return True
    if not ledger.facts and not fresh and files.rows != files.output and files.output.exists():
        raise ValueError(f"{files.output} is there already: name another output, or overwrite it with --fresh")
    missing = True
    if ledger.done:
        check_same(ledger, facts, files, retry_errors, display)
        if input_changed(ledger, facts):
            whole = source.whole if isinstance(source, Limited) else source
            missing = check_rows(whole, maker_then(ledger, job, work.maker), ledger, job, files, display)
    if ledger.forgotten:
        lost = counted(ledger.forgotten, "row")
        display.note(f"{files.rows} is shorter than it was: {lost} that it lost will run again")
    # Where nothing is done there is nothing that could be mixed, so that a mistake can be mended at once.
    if retry_errors or (not ledger.done and ledger.facts != facts):
        ledger.retry()
    ended = ledger.finished and not missing and not retry_errors and files.output.exists()
    ledger.note(facts)
    if ended:
        ledger.finish()
    return ended


@contextlib.contextmanager
def _files(work: Work) -> Iterator[Files]:
    """A job's files; where its output keeps nothing, those in a folder that is removed at the end."""
    if keeps(work.files.output):
        yield work.files
        return
    work.display.note(f"{work.files.output} keeps nothing, neither of results nor of rows that fail")
    with tempfile.TemporaryDirectory(prefix="ctxflow-batch-") as folder:
        work.files = files_of(Path(folder, "results"), str(work.job.output_format))
        yield work.files


def prepared(job: Job, display: Display) -> Work:
    """Open a job's input, and find all that is wrong with the job before anything is written or started.

    :raises UsageError: for what a person is to mend.
    :raises CtxflowError: if something is not installed that it takes.
    """
    with _as_usage():
        form, source = open_source(job.input, job.reading)
        if job.limit is not None:
            source = Limited(source, job.limit)
        head = head_of(source)
        job = resolved(job, form, source)
    files = files_of(job.output, str(job.output_format))
    wrong: list[str] = []
    app = site = None
    with _noted(wrong):
        check_files(job, source, files)
    with _noted(wrong):
        site = load_site(job.site, workers=job.workers)
    with _noted(wrong):
        app = function_app(job) if job.function is not None else None
    here = folder_here(job.model) if job.model is not None else None
    check(Subject(job, head, app, ability_of(here) if here is not None else None), wrong)
    assert site is not None
    with _as_usage():
        return Work(job, source, head, files, site, app, display)


@contextlib.contextmanager
def _noted(wrong: list[str]) -> Iterator[None]:
    """Note what is found wrong, so that the rest is looked at, too."""
    try:
        yield
    except ValueError as error:
        wrong.append(str(error))


def _finish(work: Work, ledger: Ledger, files: Files, job: Job, metrics: tuple[str, int] | None, began: float) -> None:
    """Run what is missing, and make the output of it, while others can see how it stands."""
    with StatusFile(files.output) as file, serving(lambda: file.progress, metrics) as port:
        if metrics is not None:
            work.display.note(f"metrics are at http://{metrics[0]}:{port}/metrics")
        work.run(ledger, file, began)
        if files.rows != files.output:
            types = {name: kind for name, kind in work.source.types().items() if name in (job.id_column, *job.keep)}
            embeds = job.task == "embed"
            publish(str(job.output_format), files.rows, files.output, embeds, types, plain_columns(job))
        ledger.finish()


def _say_finished(ledger: Ledger, files: Files) -> None:
    """Have the status file say that the job is done, if the driver that finished it was killed before it could."""
    if (read_status(files.output) or {}).get("state") != "done":
        with StatusFile(files.output) as file:
            file.update(Progress(done=ledger.done, dead=ledger.dead, total=ledger.done + ledger.dead))


def resolved(job: Job, form: str, source: Source) -> Job:
    """The job with what its input decides: the task of OpenAI's requests, the form of the output.

    :raises ValueError: for choices that do not fit the input.
    """
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
        if form == "text" and job.template is None:
            changes["column"] = job.column or tuple(source.columns() or ())
    if form == "openai":
        changes["id_column"] = job.id_column or "custom_id"
    output = str(job.output_format or "")
    if not output:
        output = form_of(job.output)
        if output == "jsonl" and requests and job.task != "classify":
            output = "openai"
    if output == "openai" and job.keep:
        raise ValueError("OpenAI's form has no place for columns that are kept: choose another output format")
    if output == "openai" and not requests:
        raise ValueError("OpenAI's form answers OpenAI's requests alone: choose jsonl, csv or parquet as output format")
    if job.task == "classify" and requests:
        raise ValueError("OpenAI's requests do not ask for labels: classify plain rows")
    return job.model_copy(update={**changes, "output_format": output})


def _task_of(source: Source) -> str:
    """What the first request with a known URL asks for."""
    for chunk in source.chunks():
        for row in chunk:
            family = URLS.get(str(row.values.get("url"))) if isinstance(row.values, dict) else None
            if family is not None:
                return "chat" if family == "generate" else family
        break
    return "chat"


class Work:
    """What a job needs to run.

    :ivar job: with what its input decides; `source`, its input, and `head`, how that begins.
    :ivar make: makes items of rows; `held`, lines of results, and counts what the output's form cannot hold.
    :raises ValueError: if the job makes no sense.
    """

    def __init__(
        self, job: Job, source: Source, head: Head, files: Files, site: Site, app: BatchApp | None, display: Display
    ) -> None:
        self.job = job
        self.source = source
        self.head = head
        self.files = files
        self.display = display
        self.directory: Path | None = None  # The run's, once there is one.
        self.passed_on: Callable[[bytes], None] | None = None
        self._executor: BareExecutor | None = None
        self._counted: Callable[[Any], int] | None = None
        self._cut: Callable[[Any], bool] | None = None
        self.truncated = 0  # Rows of this run that were cut.
        self.site = site
        self._app: BatchApp
        self._constants: dict[str, Any]
        self._record: Record
        if app is not None:
            self._app, self._constants = app, dict(job.constants)
        else:
            family = family_of(job)
            self._app, self._constants = model_app(job, family, site.engine == "taskvine")
            if family == "generate" or (family == "embed" and job.output_format == "openai"):
                self._counted = tokens_of
            if job.too_long != "error":
                self._cut = truncated
        self._own = app
        self.held = Held(job.keep, job.output_format in PUBLISHED, display.note)
        self.make = self.maker(job)
        if job.output_format == "openai":
            self._record = openai_record(job, int(job.input.stat().st_mtime))
        else:
            self._record = plain_record(job)

    def maker(self, job: Job) -> Make:
        """What makes items of rows, by that job's settings.

        :raises ValueError: if it makes no sense.
        """
        return maker(job, self._own, self.source.columns())

    def identity(self) -> Identity:
        """What the results depend on beside rows and settings, which constants are among."""
        if self.job.model is not None:
            return identity_of_model(self.job.model, self._reading)
        return identity_of(self._app, {}, self._reading)

    def _reading(self, done: int, total: int) -> None:
        self.display.note(reading_text(done, total))

    def run(self, ledger: Ledger, file: StatusFile, began: float) -> None:
        """Run what is missing."""
        job = self.job
        intake = Intake(self.source, self.make, job.id_column, job.keep, ledger)
        watch = Watch(self.source, ledger, self.display, file, began)

        def look(running: int, last: bool = False) -> None:
            watch.look(intake, self._executor, running, pump.tokens if self._counted is not None else None, last)

        with contextlib.ExitStack() as stack:

            def submit(items: Sequence[Any], stream: Stream) -> range:
                if self._executor is None:
                    self._executor = stack.enter_context(BareExecutor(self.site))
                    file.run_began(self._executor.calls.run)
                    self.directory = Path(self._executor.calls.run.directory)
                    note_job(self.directory, job, self.files.output, self.files.errors, self.site, self.display)
                run = self._executor.calls.run
                return run.submit(self._app.declare(run, self._constants), items, stream)

            pump = Pump(
                intake.chunks(), submit, ledger, self._record, self.source.place, job.order == "input",
                watch.dead, look, self._counted, Tolerance(job.max_errors), self._cut, self.held, self.passed_on,
            )  # fmt: skip
            try:
                pump.run()
            finally:
                self.truncated = pump.truncated
                look(pump.rows, last=True)
