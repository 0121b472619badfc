"""Files in, files out: batches for people who write no Python.

`ctxflow batch` makes a `Job` (job.py) and calls `run_job` (driver.py), which has preparation.py check all of it before
anything starts. On the way of a row: rows/ reads it, intake.py makes an item of it, job_apps.py names the app that
workers run, records.py makes a line of the answer, and ledger.py keeps it, in the format of journal.py.
"""

from ctxflow.batch.job import Job, load_job
from ctxflow.batch.phrases import Outcome

__all__ = ["Job", "Outcome", "load_job"]
