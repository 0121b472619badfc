"""Files in, files out: batches for people who write no Python.

`ctxflow batch` makes a `Job` (job.py) and calls `run_job` (driver.py), which has preparation.py check all of it before
anything starts. On the way of a row: rows/ reads it, row_items.py makes an item of it, pump.py has it run, records.py
makes a line of the answer, and ledger.py keeps it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ctxflow.batch.driver import Outcome
    from ctxflow.batch.job import Job, load_job

__all__ = ["Job", "Outcome", "load_job"]


def __getattr__(name: str) -> Any:
    # Lazily: whoever looks at a job from outside needs no model of one.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"ctxflow.batch.{'driver' if name == 'Outcome' else 'job'}"), name)
