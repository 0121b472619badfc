"""Run a job from its beginning to its end: open or resume its files, run what is missing, make the output.

A job may add to earlier results only if its settings, its model or function, and the rows that are done are unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ctxflow.batch.display import Display, QuietDisplay
from ctxflow.batch.job import Job, defaults
from ctxflow.batch.job_files import Files, files_of, keeps
from ctxflow.batch.job_status import StatusFile, read_status, serving
from ctxflow.batch.ledger import Ledger, as_keys, contained, row_digest
from ctxflow.batch.preparation import prepare, refused
from ctxflow.batch.publish import publish
from ctxflow.batch.pump import Intake
from ctxflow.batch.records import nested, plain_columns
from ctxflow.batch.row_items import Make, Prepared, known_as
from ctxflow.batch.work import Work, kept_summary
from ctxflow.causes import duration
from ctxflow.errors import counted
from ctxflow.identity import Identity, changes
from ctxflow.observe.progress import Progress
from ctxflow.rows.source import Limited, Source

_PATIENCE = 2.0  # Seconds from one note on a long wait to the next.
_INSTEAD = "name another output, or begin anew with --fresh"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended: all its rows are done or dead.

    :ivar done: rows with a result, `done_now` those of this run; `dead` and `dead_now` likewise.
    :ivar seconds: that this run took; `already`, whether an earlier run had finished, so that there was nothing to do.
    :ivar truncated_now: rows of this run whose input was too long and was cut, as `too_long` of the job said.
    :ivar limited_now: rows of this run whose answers ended at a default limit of tokens.
    :ivar nulled: values of this run that the output's form cannot hold, so that null stands in their place, by column;
        `altered`, texts and keys of dictionaries that had to be written otherwise.
    :ivar summary: of this run, as `ctxflow report` has it; None if nothing ran.

    >>> Outcome(done=3, dead=1, done_now=3, dead_now=1, seconds=1.0).exit_status
    3
    """

    done: int
    dead: int
    done_now: int
    dead_now: int
    seconds: float
    already: bool = False
    nulled: dict[str, int] = dataclasses.field(default_factory=dict)
    altered: dict[str, int] = dataclasses.field(default_factory=dict)
    summary: dict[str, Any] | None = None
    truncated_now: int = 0
    limited_now: int = 0

    @property
    def exit_status(self) -> int:
        """Return 0 if all rows have a result, 3 if some are dead."""
        return 3 if self.dead else 0


def run_job(
    job: Job,
    *,
    fresh: bool = False,
    retry_errors: bool = False,
    display: Display | None = None,
    metrics: tuple[str, int] | None = None,
    passed_on: Callable[[bytes], None] | None = None,
) -> Outcome:
    """Run what is missing of a job.

    :param fresh: begin anew, and forget what an earlier run did.
    :param retry_errors: retry the dead letters.
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
            _finish(begun.work, ledger, files, metrics, began)
        finally:
            display.end()
        if not ledger.done + ledger.dead:
            display.note(f"{begun.work.source.name} holds no rows: nothing to do")
        now = (ledger.done - before[0], ledger.dead - before[1], time.monotonic() - began)
        work, held = begun.work, begun.work.held
        return Outcome(
            ledger.done, ledger.dead, *now, nulled=held.nulled, altered=held.altered,
            summary=kept_summary(work.directory, display), truncated_now=work.truncated,
            limited_now=work.limited,
        )  # fmt: skip


def begin_job(job: Job, *, fresh: bool = False, retry_errors: bool = False, display: Display | None = None) -> bool:
    """Check and prepare a job as `run_job` does, for another process to run; return whether there is something to run.

    That process needs neither of the flags: after a restart it could not tell whether they were applied.

    :raises ValueError, CtxflowError: as `run_job`.
    """
    with _begun(job, fresh, retry_errors, display or QuietDisplay(), settled=True) as begun:
        return not begun.ended


@dataclasses.dataclass(frozen=True)
class _Begun:
    """A job whose files are open; whether an earlier run did all of it."""

    work: Work
    ledger: Ledger
    files: Files
    ended: bool


@contextlib.contextmanager
def _begun(job: Job, fresh: bool, retry_errors: bool, display: Display, *, settled: bool = False) -> Iterator[_Begun]:
    """Check a job, and open its files; to the end first, if it is to be `settled` or to lose what is there."""
    work = prepare(job, display)
    with contextlib.ExitStack() as stack:
        with refused():
            files = stack.enter_context(_files(work))
            made = files.output if files.rows != files.output else None
            paths = files.rows, files.errors, files.journal
            if settled or retry_errors or (fresh and any(path.exists() for path in paths)):
                work.later.settle()
            ledger = stack.enter_context(Ledger(*paths, fresh, made, input_of(work.source)))
            ended = _opened(work, files, ledger, fresh, retry_errors)
        yield _Begun(work, ledger, files, ended)


def _opened(work: Work, files: Files, ledger: Ledger, fresh: bool, retry_errors: bool) -> bool:
    """Check that a job may go on where its files are; return whether an earlier run did all of it."""
    job, source, display = work.job, work.source, work.display
    facts = facts_of(job, source, work.identity(), ledger.facts)
    finished = ledger.finished and ledger.facts == facts and not retry_errors and files.output.exists()
    if ledger.lacking:
        gone = not files.rows.stat().st_size
        what = f"{files.rows}, of which {files.output} was made, is {'gone' if gone else 'shorter than it was'}"
        if not (gone and finished):
            raise ValueError(
                f"{what}, so that the job cannot go on: put it back, name another output, or remove {files.output} to "
                "have the rows whose results are lost run again"
            )
        display.note(f"{what}: nothing can be added to the job without it")
    for note in ledger.notes:
        display.note(note)
    if finished:
        return True
    if not ledger.facts and not fresh and files.rows != files.output and files.output.exists():
        raise ValueError(f"{files.output} is there already: name another output, or overwrite it with --fresh")
    missing = True
    if ledger.done:
        check_same(ledger, facts, files, retry_errors, display)
        whole = source.whole if isinstance(source, Limited) else source
        if input_changed(ledger, facts):
            missing = check_rows(whole, maker_then(ledger, job, work.maker), ledger, job, files, display)
        elif ledger.undigested.size:
            learn_rows(whole, maker_then(ledger, job, work.maker), ledger, job, display)
    if ledger.forgotten:
        lost = counted(ledger.forgotten, "row")
        display.note(f"{files.rows} is shorter than it was: {lost} that it lost will run again")
    # Where nothing is done there is nothing that could be mixed, so that a mistake can be fixed at once.
    if retry_errors or (not ledger.done and ledger.facts != facts):
        if ledger.dead:
            work.later.settle()
        ledger.retry()
    ended = ledger.finished and not missing and not retry_errors and files.output.exists()
    ledger.note(facts)
    if ended:
        ledger.finish()
    return ended


@contextlib.contextmanager
def _files(work: Work) -> Iterator[Files]:
    """Yield a job's files; where its output keeps nothing, those in a folder that is removed at the end."""
    if keeps(work.files.output):
        yield work.files
        return
    work.display.note(f"{work.files.output} keeps nothing, neither of results nor of rows that fail")
    with tempfile.TemporaryDirectory(prefix="ctxflow-batch-") as folder:
        work.files = files_of(Path(folder, "results"), str(work.job.output_format))
        yield work.files


def _finish(work: Work, ledger: Ledger, files: Files, metrics: tuple[str, int] | None, began: float) -> None:
    """Run what is missing, and make the output of it, while others can see how it stands."""
    job = work.job
    with StatusFile(files.output) as file, serving(lambda: file.progress, metrics) as port:
        if metrics is not None:
            work.display.note(f"metrics are at http://{metrics[0]}:{port}/metrics")
        work.run(ledger, file, began)
        if files.rows != files.output:
            types = {name: kind for name, kind in work.source.types().items() if name in (job.id_column, *job.keep)}
            embeds = job.task == "embed"
            unpacked = "result" if job.task is None else ""
            form, columns = str(job.output_format), plain_columns(job)
            publish(form, files.rows, files.output, embeds, types, columns, nested(job), unpacked)
        ledger.finish()


def _say_finished(ledger: Ledger, files: Files) -> None:
    """Have the status file say that the job is done, if the driver that finished it was killed before it could."""
    if (read_status(files.output) or {}).get("state") != "done":
        with StatusFile(files.output) as file:
            file.update(Progress(done=ledger.done, dead=ledger.dead, total=ledger.done + ledger.dead))


def facts_of(job: Job, source: Source, identity: Identity, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the ledger keeps of a job, as JSON; `known` is what it has, for what this machine has no more."""
    earlier = Identity.from_json(known.get("made_of", {}))
    facts = {
        "input": input_of(source),
        "settings": job.identity(),
        "made_of": identity.knowing(earlier).as_json(),
    }
    return facts if job.limit is None and "limit" not in known else {**facts, "limit": job.limit}


def input_of(source: Source) -> dict[str, Any]:
    """Return what the ledger keeps of an input, as JSON."""
    stats = [path.stat() for path in source.files]
    return {"digest": source.identity(), "files": [[each.st_size, each.st_mtime_ns] for each in stats]}


def check_same(ledger: Ledger, facts: Mapping[str, Any], files: Files, retry_errors: bool, display: Display) -> None:
    """Refuse to mix the results of two jobs, unless with `retry_errors`.

    :raises ValueError: if the output holds those of another, saying what differs.
    """
    # An earlier ctxflow did not know all choices: what it did is their default.
    known, settings = {**defaults(), **ledger.facts.get("settings", {})}, facts["settings"]
    names = [name for name in dict.fromkeys([*settings, *known]) if name in Job.model_fields]
    both = [(name, *(of.get(name, Job.model_fields[name].default) for of in (known, settings))) for name in names]
    changed = [f"{name} was {old!r} and is {new!r}" for name, old, new in both if new != old]
    if "made_of" in ledger.facts:
        changed += changes(Identity.from_json(ledger.facts["made_of"]), Identity.from_json(facts["made_of"]))
    else:
        display.note(
            f"{files.output} was begun by an earlier ctxflow, which did not keep what its function or model was made "
            "of: changes of it are noticed from now on"
        )
    if changed:
        text = "; ".join(changed)
        if not retry_errors:
            raise ValueError(
                f"{files.output} holds the results of another job ({text}): name another output, begin anew with "
                "--fresh, or keep what is done and have the rest done so with --retry-errors"
            )
        display.note(f"rows that are done keep their results, although {text}")


def input_changed(ledger: Ledger, facts: Mapping[str, Any]) -> bool:
    """Return whether the input may have changed; an earlier ctxflow kept a digest of it alone."""
    known = ledger.facts.get("input")
    return bool(known != (facts["input"]["digest"] if isinstance(known, str) else facts["input"]))


def maker_then(ledger: Ledger, job: Job, make: Callable[[Job], Make]) -> Make:
    """Return what made items of the rows that are done: by the settings as they were."""
    settings = ledger.facts.get("settings", {})
    if settings == job.identity():
        return make(job)
    return make(Job(**{**settings, "input": job.input, "output": job.output}))


def check_rows(source: Source, make: Make, ledger: Ledger, job: Job, files: Files, display: Display) -> bool:
    """Check that the rows that are done are in the input as they were; return whether it has others.

    :param make: what made items of them then.
    :raises ValueError: for the first that is not, saying where it is and what to do.
    """
    intake = Intake(source, make, job.id_column, tuple(ledger.facts.get("settings", {}).get("keep", job.keep)))
    keys, digests = ledger.digests()
    found = np.zeros(len(keys), dtype=bool)
    compared, new, refused_now, first = 0, 0, 0, ""
    due = time.monotonic() + _PATIENCE
    for rows in intake.chunks():
        given = as_keys([row.key for row in rows])
        new += int((~contained(given, ledger.settled)).sum())
        places = np.searchsorted(keys, given)
        for row, place, is_done in zip(rows, places.tolist(), contained(given, keys).tolist(), strict=True):
            if is_done:
                found[place] = True
                if digests[place]:
                    compared += 1
                    if row.refused:  # By this ctxflow: of an earlier one it has a result.
                        refused_now, first = refused_now + 1, first or f"{source.place(row.number)}: {row.error}"
                    else:
                        _check_row(row, int(digests[place]), source, job, files)
        if time.monotonic() > due:
            due = time.monotonic() + _PATIENCE
            display.note(f"the input has changed: {source.fraction():.0%} of it are compared with what is done")
    if job.id_column is None and compared < len(keys):
        called = job.reading.name or f"the input {job.input}"
        why = f"it lacks {counted(int((~found).sum()), 'row')} done before"
        if (digests == 0).any():
            which = "rows that its journal lacked or an earlier ctxflow did"
            why = f"of {which} it cannot be known whether they are unchanged"
        raise ValueError(
            f"{called} has changed since {files.output} was begun, and its rows are known by their "
            f"numbers alone: {why}: {_INSTEAD}; another time, know rows by an --id-column"
        )
    if refused_now:
        display.note(
            f"{counted(refused_now, 'row')} done before would be refused now, such as {first}: results are kept"
        )
    gone = len(keys) - int(found.sum())
    done = f"its rows that are done ({compared:,}) are as they were" if compared else "done rows are not run again"
    display.note(f"the input has changed; {done}" + (f", {gone:,} are in it no more" if gone else ""))
    return new > 0


def learn_rows(source: Source, make: Make, ledger: Ledger, job: Job, display: Display) -> None:
    """Keep digests of the rows that are done without one, as those are which a kill left without a frame."""
    intake = Intake(source, make, job.id_column, tuple(ledger.facts.get("settings", {}).get("keep", job.keep)))
    learnt = 0
    due = time.monotonic() + _PATIENCE
    for rows in intake.chunks():
        wanted = contained(as_keys([row.key for row in rows]), ledger.undigested).tolist()
        digests = {
            row.key: int.from_bytes(row_digest(known_as(row.item), row.kept), "little")
            for row, is_wanted in zip(rows, wanted, strict=True)
            if is_wanted and row.error is None
        }
        ledger.learn(digests)
        learnt += len(digests)
        if learnt == ledger.undigested.size:
            return
        if time.monotonic() > due:
            due = time.monotonic() + _PATIENCE
            display.note(f"the journal lacks what tells rows that are done: {source.fraction():.0%} are read again")


def _check_row(row: Prepared, digest: int, source: Source, job: Job, files: Files) -> None:
    if row.error is None and int.from_bytes(row_digest(known_as(row.item), row.kept), "little") == digest:
        return
    why = f" ({row.error})" if row.error is not None else ""
    if job.id_column is None:
        what = (
            f"{files.output} holds the result of another row in its place{why}: rows are known by their numbers alone, "
            "and one was changed, put in or taken out here or before; put it back"
        )
    else:
        what = (
            f"the row with the {job.id_column} {row.id!r} is not what it was when {files.output} got its result{why}: "
            "give it another id or put it back"
        )
    raise ValueError(f"{source.place(row.number)}: {what}, {_INSTEAD}")


def summary(outcome: Outcome, output: str, goes_on: bool = True) -> str:
    """Return a sentence or two on how a job ended; `goes_on` says whether it can be resumed."""
    if outcome.already:
        text = f"nothing to do: {counted(outcome.done, 'row')} done before, in {output}"
    else:
        text = f"{counted(outcome.done_now, 'row')} done in {duration(outcome.seconds)}"
        text += f", {outcome.done:,} in all: {output}" if outcome.done != outcome.done_now else f": {output}"
    if outcome.truncated_now:
        text += f'\n{counted(outcome.truncated_now, "row")} of these too long, and cut: they say "truncated": true'
    if outcome.limited_now:
        text += f"\n{counted(outcome.limited_now, 'row')} ended at a default limit of tokens"
        text += ": give --max-new-tokens, or max_tokens in the request"
    for column, many in outcome.nulled.items():
        values = counted(many, "value")
        text += f"\n{values} of {column} became null, since the output cannot hold {'it' if many == 1 else 'them'}"
    for column, many in outcome.altered.items():
        were, are = ("was", "it as it is") if many == 1 else ("were", "them as they are")
        texts = counted(many, "text or key", "texts or keys")
        text += f"\n{texts} of {column} {were} written otherwise, since the output cannot hold {are}"
    if outcome.dead:
        text += f"\n{counted(outcome.dead, 'row')} failed"
        if output != os.devnull:
            text += f", see {output}.errors.jsonl" + ("; --retry-errors tries them again" if goes_on else "")
    return text
