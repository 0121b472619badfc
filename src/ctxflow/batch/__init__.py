"""Files in, files out: batches for people who write no Python.

`ctxflow batch` makes a `Job` (job.py) and calls `run_job` (driver.py), which has preparation.py check all of it before
anything starts. On the way of a row: rows/ reads it, intake.py makes an item of it, job_apps.py names the app that
workers run, records.py makes a line of the answer, and ledger.py keeps it, in the format of journal.py.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctxflow.batch.job import Job, load_job
    from ctxflow.batch.phrases import Outcome

__all__ = ["Job", "Outcome", "load_job"]


def __getattr__(name: str) -> Any:
    # Lazily: whoever looks at a job from outside needs no model of one.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("ctxflow.batch.phrases" if name == "Outcome" else "ctxflow.batch.job"), name)
