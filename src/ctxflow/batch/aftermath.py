"""What a job leaves in its run's directory: what it was, for reports, and at the end the summary of the run.

What does not live here: what is in a summary (observe/), and how it is shown (cli/batch.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ctxflow.batch.display import Display
from ctxflow.batch.job import Job
from ctxflow.observe.run_report import BATCH, EVENTS, summary_of
from ctxflow.observe.summary import SUMMARY, keep
from ctxflow.sites.model import Site

_PATIENCE = 2.0  # Seconds until a person is told why it takes so long; and from one time to the next.
_OF_SITE = (
    "name",
    "engine",
    "level",
    "slots",
    "routing",
    "batching",
    "placement",
    "preemption",
    "scaling",
    "health",
    "sessions",
)


def note_job(run: Path, job: Job, output: Path, errors: Path, site: Site, display: Display) -> None:
    """Note in a run's directory which job it is of, so that a report finds its settings and its dead letters."""
    settings = job.model_dump(mode="json", exclude_defaults=True)
    of_site = {name: value for name, value in site.model_dump(mode="json").items() if name in _OF_SITE}
    noted = {"job": settings, "site": of_site, "output": str(output), "errors": str(errors)}
    try:
        keep(run, BATCH, noted)
    except OSError as error:
        display.note(f"a report on this run will not tell its settings ({error})")


def kept_summary(run: Path | None, display: Display) -> dict[str, Any] | None:
    """The summary of a run that has ended, which is also kept in its directory; None if nothing ran.

    A job that is done must not fail for it: what is wrong is told in a sentence.
    """
    if run is None or not (run / EVENTS).is_file():
        return None
    try:
        summary = summary_of(run, _telling((run / EVENTS).stat().st_size, display))
        keep(run, SUMMARY, summary)
    except (OSError, ValueError) as error:
        display.note(f"there is no summary of this run ({error})")
        return None
    return summary


def _telling(size: int, display: Display) -> Callable[[int], None]:
    """Tells now and then how far the event log is read, if that takes a while."""
    read, due = 0, time.monotonic() + _PATIENCE

    def advance(count: int) -> None:
        nonlocal read, due
        read += count
        if time.monotonic() >= due:
            due = time.monotonic() + _PATIENCE
            display.note(f"making the summary: {read / size:.0%} of the event log is read")

    return advance
