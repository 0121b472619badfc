"""Whether a job may add to the results that are there: it, its model and the rows that are done are as they were.

What does not live here: what is kept of all that (ledger.py), and what an identity is (ctxflow.identity).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ctxflow.batch.display import Display
from ctxflow.batch.files import Files
from ctxflow.batch.intake import Intake, Prepared
from ctxflow.batch.job import Job, defaults
from ctxflow.batch.keys import as_keys, contained, row_digest
from ctxflow.batch.ledger import Ledger
from ctxflow.batch.requests import Make
from ctxflow.identity import Identity, changes
from ctxflow.rows.source import Source
from ctxflow.wording import counted

_PATIENCE = 2.0  # Seconds until a person is told how far it is; and from one time to the next.
_INSTEAD = "name another output, or begin anew with --fresh"


def facts_of(job: Job, source: Source, identity: Identity, known: Mapping[str, Any]) -> dict[str, Any]:
    """What the ledger keeps of a job, as JSON.

    :param known: what it has, where what is not on this machine any more was told.
    """
    stats = [path.stat() for path in source.files]
    earlier = Identity.from_json(known.get("made_of", {}))
    facts = {
        "input": {"digest": source.identity(), "files": [[each.st_size, each.st_mtime_ns] for each in stats]},
        "settings": job.identity(),
        "made_of": identity.knowing(earlier).as_json(),
    }
    return facts if job.limit is None and "limit" not in known else {**facts, "limit": job.limit}


def check_same(ledger: Ledger, facts: Mapping[str, Any], files: Files, retry_errors: bool, display: Display) -> None:
    """Refuse to mix the results of two jobs.

    :param retry_errors: whether they may be mixed.
    :raises ValueError: if the output holds those of another, saying what differs.
    """
    # What an earlier ctxflow did not know was as it is by default.
    known, settings = {**defaults(), **ledger.facts.get("settings", {})}, facts["settings"]
    # An earlier ctxflow did not know all choices: what it did is their default.
    before = {name: known.get(name, Job.model_fields[name].default) for name in settings}
    changed = [f"{name} was {before[name]!r} and is {new!r}" for name, new in settings.items() if new != before[name]]
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
    """Whether the input may not be what it was; an earlier ctxflow kept a digest of it alone."""
    known = ledger.facts.get("input")
    return bool(known != (facts["input"]["digest"] if isinstance(known, str) else facts["input"]))


def maker_then(ledger: Ledger, job: Job, make: Callable[[Job], Make]) -> Make:
    """What made items of rows when those that are done were: by the settings as they were.

    :raises ValueError: if it cannot be had any more.
    """
    settings = ledger.facts.get("settings", {})
    if settings == job.identity():
        return make(job)
    return make(Job(**{**settings, "input": job.input, "output": job.output}))


def check_rows(source: Source, make: Make, ledger: Ledger, job: Job, files: Files, display: Display) -> bool:
    """See that the rows that are done are in the input as they were; whether it has others that were not tried.

    :param make: what made items of them then.
    :raises ValueError: for the first that is not, saying where it is and what to do.
    """
    intake = Intake(source, make, job.id_column, tuple(ledger.facts.get("settings", {}).get("keep", job.keep)))
    keys, digests = ledger.digests()
    found = np.zeros(len(keys), dtype=bool)
    compared, new = 0, 0
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
                    _check_row(row, int(digests[place]), source, job, files)
        if time.monotonic() > due:
            due = time.monotonic() + _PATIENCE
            display.note(f"the input has changed: {source.fraction():.0%} of it are compared with what is done")
    by_numbers = job.id_column is None
    if by_numbers and compared < len(keys):
        called = job.reading.name or f"the input {job.input}"
        raise ValueError(
            f"{called} has changed since {files.output} was begun, and its rows are known by their "
            f"numbers alone: {_not_compared(found, digests)}: {_INSTEAD}; another time, know rows by an --id-column"
        )
    gone = len(keys) - int(found.sum())
    done = f"its rows that are done ({compared:,}) are as they were" if compared else "done rows are not run again"
    display.note(f"the input has changed; {done}" + (f", {gone:,} are in it no more" if gone else ""))
    return new > 0


def _check_row(row: Prepared, digest: int, source: Source, job: Job, files: Files) -> None:
    if row.error is None and int.from_bytes(row_digest(row.item, row.kept), "little") == digest:
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


def _not_compared(found: Any, digests: Any) -> str:
    if (digests == 0).any():
        return "of the rows that an earlier ctxflow did nobody can tell whether they are as they were"
    return f"it lacks {counted(int((~found).sum()), 'row')} done before"
