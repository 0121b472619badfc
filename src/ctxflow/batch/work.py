"""Run what is missing of a job, report its progress, and note in the run's folder what a report needs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ctxflow.apps import BatchApp
from ctxflow.batch.display import Display
from ctxflow.batch.engine_answers import ended_at_no_ones_limit, is_response, schema_missed
from ctxflow.batch.engine_checks import LaterChecks
from ctxflow.batch.job import Job
from ctxflow.batch.job_apps import model_app
from ctxflow.batch.job_files import Files
from ctxflow.batch.job_status import StatusFile
from ctxflow.batch.ledger import Ledger
from ctxflow.batch.publish import PUBLISHED
from ctxflow.batch.pump import Intake, Pump, ResultError, Tolerance
from ctxflow.batch.records import Held, Record, openai_record, plain_record, tokens_of, truncated
from ctxflow.batch.row_items import Make, Prepared, asked_of, family_of, for_model, maker
from ctxflow.errors import one_line
from ctxflow.executors.bare import BareExecutor
from ctxflow.executors.figures import figures_of
from ctxflow.executors.live_run import LiveRun
from ctxflow.executors.pending import Stream
from ctxflow.identity import Identity, contents_of_model, identity_of, reading_text
from ctxflow.observe.progress import Progress, Rates
from ctxflow.rows.source import Source
from ctxflow.sites import Site

_SHOW_SECONDS = 0.5
_PATIENCE = 2.0  # Seconds from one note on a long wait to the next.
_OF_SITE = {
    "name", "engine", "level", "slots", "routing", "batching", "placement", "preemption", "scaling", "health",
    "sessions",
}  # fmt: skip


class ProgressReporter:
    """Report how a job stands while it runs, to its display and its status file."""

    def __init__(self, source: Source, ledger: Ledger, display: Display, file: StatusFile, began: float) -> None:
        self._source = source
        self._ledger = ledger
        self._display = display
        self._file = file
        self._began = began
        self._before = ledger.done, ledger.dead
        self._rates = Rates()
        self._next = 0.0
        self._newest_dead = ""

    def dead(self, place: str, message: str) -> None:
        """Report that a row went to the dead letters."""
        self._newest_dead = one_line(f"{place}: {message}")
        self._display.dead(place, message)

    def look(
        self, intake: Intake, executor: BareExecutor | None, running: int, tokens: int | None, last: bool = False
    ) -> None:
        """Report how it stands, if it is time.

        :param running: rows in flight.
        :param tokens: that models read and wrote, None if nobody counts them.
        :param last: whether it is time in any case.
        """
        if not last and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _SHOW_SECONDS
        ledger, seconds = self._ledger, time.monotonic() - self._began
        total, fraction = self._source.total, self._source.fraction()
        if total is None and fraction > 0.001:
            total = round(intake.read / fraction)
        done_now, dead_now = ledger.done - self._before[0], ledger.dead - self._before[1]
        rest = None if total is None else max(0, total - ledger.done - ledger.dead)
        self._rates.note(seconds, done_now + dead_now, tokens)
        pace = self._rates.pace(seconds, done_now + dead_now, tokens, rest)
        progress = Progress(
            done=ledger.done,
            dead=ledger.dead,
            done_now=done_now,
            dead_now=dead_now,
            running=running,
            read=intake.read,
            total=total,
            guessed=self._source.total is None and fraction < 1,
            seconds=seconds,
            tokens=tokens,
            newest_dead=self._newest_dead,
            **vars(pace),
            **(figures_of(executor.status()) if executor is not None else {}),
        )
        self._file.update(progress)
        self._display.progress(progress)


class Work:
    """Run what is missing of a job, with an executor that is started with the first row.

    :ivar job: with what its input decides.
    :ivar later: what is waited for before the first row is given to workers, which are asked for meanwhile.
    :ivar make: makes items of rows; `held`, lines of results, and counts what the output's form cannot hold.
    :ivar directory: the run's, once there is one; `truncated`, rows of this run that were cut; `limited`, those whose
        answers ended at a default limit of tokens.
    :raises ValueError: if the job makes no sense.
    """

    def __init__(
        self,
        job: Job,
        source: Source,
        files: Files,
        site: Site,
        app: BatchApp | None,
        display: Display,
        later: LaterChecks,
    ) -> None:
        self.job, self.later = job, later
        self.source = source
        self.files = files
        self.display = display
        self.directory: Path | None = None
        self.passed_on: Callable[[bytes], None] | None = None
        self._executor: BareExecutor | None = None
        self._tokens: int | None = None  # None if they are not counted.
        self.truncated = self.limited = 0
        self.site = site
        self._apps: dict[str, tuple[BatchApp, dict[str, Any]]]  # By the name that rows have for the app's model.
        self._record: Record
        if app is not None:
            self._apps = {"": (app, dict(job.constants))}
        else:
            family = family_of(job)
            sized = "batching" in site.model_fields_set
            stages = site.capabilities.stages
            self._apps = {name: model_app(each, family, stages, sized=sized) for name, each in job.by_model().items()}
            if family == "generate" or (family == "embed" and job.output_format == "openai"):
                self._tokens = 0
        self._own = app
        self.held = Held(job.keep, job.output_format in PUBLISHED, display.note)
        self.make = self.maker(job)
        if job.output_format == "openai":
            self._record = openai_record(job, int(job.input.stat().st_mtime))
        else:
            self._record = plain_record(job)
        if app is None:
            self._record = _as_bound(self._record)

    def maker(self, job: Job) -> Make:
        """Return what makes items of rows, by that job's settings."""
        return maker(job, self._own, self.source.columns())

    def identity(self) -> Identity:
        """Return what the results depend on beside rows and settings, which constants are among."""
        if self._own is not None:
            return identity_of(self._own, {}, self._reading)
        models = [str(each.model) for each in self.job.by_model().values()]
        return Identity(
            contents={path: contents_of_model(path, self._reading) for path in [*models, *self.job.adapter.values()]}
        )

    def _reading(self, done: int, total: int) -> None:
        self.display.note(reading_text(done, total))

    def run(self, ledger: Ledger, file: StatusFile, began: float) -> None:
        """Run what is missing."""
        job = self.job
        intake = Intake(self.source, self.make, job.id_column, job.keep, ledger, (job.schema_of_answers,))
        watch = ProgressReporter(self.source, ledger, self.display, file, began)

        def look(running: int, last: bool = False) -> None:
            watch.look(intake, self._executor, running, self._tokens, last)

        with contextlib.ExitStack() as stack:

            def submit(items: Sequence[Any], stream: Stream) -> Sequence[int]:
                begins = self._executor is None
                if self._executor is None:
                    self._executor = stack.enter_context(BareExecutor(self.site))
                    file.run_began(self._executor.calls.run)
                    self.directory = Path(self._executor.calls.run.directory)
                    self.later.settle()
                run = self._executor.calls.run
                numbers = self._submit(run, items, stream)
                if begins and self.directory is not None:  # While the first workers start.
                    note_job(self.directory, job, self.files.output, self.files.errors, self.site, self.display)
                return numbers

            pump = Pump(
                intake.chunks(), submit, ledger, self._record, self.source.place, job.order == "input",
                watch.dead, look, self._tally, Tolerance(job.max_errors), self.held, self.passed_on,
            )  # fmt: skip
            try:
                pump.run()
            finally:
                look(pump.rows, last=True)

    def _tally(self, row: Prepared, answer: Any) -> None:
        """Count what an answer says of itself."""
        if self._tokens is not None:
            self._tokens += tokens_of(answer)
        if self._own is None and self.job.too_long != "error":
            self.truncated += truncated(answer)
        if self._own is None and self.job.max_new_tokens is None:
            self.limited += ended_at_no_ones_limit(asked_of(row.item), answer)

    def _submit(self, run: LiveRun, items: Sequence[Any], stream: Stream) -> Sequence[int]:
        """Have each item done by the app of its model; returns their numbers."""
        if not self.job.models:
            [(app, constants)] = self._apps.values()
            return run.submit(app.declare(run, constants), items, stream)
        numbers = [0] * len(items)
        parts: dict[str, list[tuple[int, Any]]] = {}
        for place, item in enumerate(items):
            name, given = for_model(item)
            parts.setdefault(name, []).append((place, given))
        for name, part in parts.items():
            app, constants = self._apps[name]
            found = run.submit(app.declare(run, constants), [given for _, given in part], stream)
            for (place, _), number in zip(part, found, strict=True):
                numbers[place] = number
        return numbers


def note_job(run: Path, job: Job, output: Path, errors: Path, site: Site, display: Display) -> None:
    """Note in a run's directory which job it is of, so that a report finds its settings and its dead letters."""
    from ctxflow.observe.run_report import BATCH
    from ctxflow.observe.summary import keep

    settings = job.model_dump(mode="json", exclude_defaults=True)
    of_site = {name: value for name, value in site.model_dump(mode="json").items() if name in _OF_SITE}
    noted = {"job": settings, "site": of_site, "output": str(output), "errors": str(errors)}
    try:
        keep(run, BATCH, noted)
    except OSError as error:
        display.note(f"a report on this run will not tell its settings ({error})")


def kept_summary(run: Path | None, display: Display) -> dict[str, Any] | None:
    """Return the summary of a run that has ended, also kept in its directory; None if nothing ran or it cannot be."""
    if run is None:
        return None
    from ctxflow.observe.run_report import EVENTS, summary_of
    from ctxflow.observe.summary import SUMMARY, keep

    if not (run / EVENTS).is_file():
        return None
    try:
        summary = summary_of(run, _telling((run / EVENTS).stat().st_size, display))
        keep(run, SUMMARY, summary)
    except (OSError, ValueError) as error:
        display.note(f"there is no summary of this run ({error})")
        return None
    return summary


def _telling(size: int, display: Display) -> Callable[[int], None]:
    """Return what reports now and then how far the event log is read."""
    read, due = 0, time.monotonic() + _PATIENCE

    def advance(count: int) -> None:
        nonlocal read, due
        read += count
        if time.monotonic() >= due:
            due = time.monotonic() + _PATIENCE
            display.note(f"making the summary: {read / size:.0%} of the event log is read")

    return advance


def _as_bound(record: Record) -> Record:
    """Return what makes lines of answers, and refuses those that are not what their requests bind them to."""

    def make(row: Prepared, answer: Any) -> dict[str, Any]:
        missed = schema_missed(asked_of(row.item), answer) if is_response(answer) else None
        if missed is not None:
            raise ResultError(missed)
        return record(row, answer)

    return make
