"""Files in, files out: batches for people who write no Python.

`ctxflow batch` (cli/batch.py) reads a `Job` (job.py) and calls `run_job` (driver.py), which has check.py look at
all of it before anything starts. On the way of a row:
readers.py and arrow_readers.py read it, intake.py and requests.py make an item of it, tasks.py is what workers do
with it, records.py and held.py make a line of the answer, ledger.py keeps it. What does not live here: the command
line.
"""

from ctxflow.batch.job import Job, load_job
from ctxflow.batch.outcome import Outcome

__all__ = ["Job", "Outcome", "load_job"]
