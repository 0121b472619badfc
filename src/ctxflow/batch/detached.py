"""Follow detached jobs, whose driver is a job of HTCondor's: each has a folder of its user's that keeps all of it.

    JOBS/3/job.json      every choice that was made, as `ctxflow batch --job` reads it
    JOBS/3/driver.sh     becomes the driver: in the folder, with the environment and the Python of who submitted it
    JOBS/3/driver.log    what the driver says, of all its starts
    JOBS/3/events.log    what HTCondor says of it
    JOBS/3/about.json    what this module has to know (`Detached`)

How such a folder comes to be is in detaching.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from socket import gethostname
from typing import Any, Literal

from ctxflow.batch.job_status import read_status
from ctxflow.errors import CtxflowError
from ctxflow.factory import condor_provider
from ctxflow.factory.condor_jobs import change_of
from ctxflow.files import own_folder, read_own

State = Literal["queued", "running", "held", "done", "failed", "cancelled", "lost"]
ENDED = ("done", "failed", "cancelled", "lost")
_EXECUTING, _EVICTED, _TERMINATED, _ABORTED = 1, 4, 5, 9
_SOME_DEAD, _INTERRUPTED = 3, 130


@dataclasses.dataclass(frozen=True)
class Standing:
    """How a job stands.

    :ivar state: "queued" (its driver waits to start, or to start again), "running", "held", or how it ended: "done"
        (every row was tried), "failed", "cancelled", "lost" (HTCondor has it no more, and does not say why).
    :ivar since: when that began, in seconds since 1970.
    :ivar restarts: how often the driver was started again.
    :ivar reason: why, "" where there is nothing to say.
    :ivar status: the driver's exit status, None if it has not ended by itself.
    """

    state: State
    since: float
    restarts: int = 0
    reason: str = ""
    status: int | None = None

    @property
    def exit_status(self) -> int:
        """Return the exit status of waiting for the job: the driver's own, 130 if it was cancelled.

        >>> Standing("done", since=0, status=3).exit_status, Standing("lost", since=0).exit_status
        (3, 1)
        """
        if self.state == "cancelled":
            return _INTERRUPTED
        return 1 if self.status is None else self.status


def standing_of(events: Iterable[Mapping[str, Any]], submitted: float) -> Standing:
    """Return how a job stands after some events.

    :param events: HTCondor's, each with "time"; in the order of its log.
    :param submitted: when the job was submitted.

    >>> begin = {"EventTypeNumber": 1, "Cluster": 12, "Proc": 0, "time": 5.0}
    >>> standing_of([begin], submitted=4.0).state
    'running'
    >>> standing_of([begin, {**begin, "EventTypeNumber": 5, "ReturnValue": 3, "time": 9.0}], submitted=4.0).status
    3
    """
    state: State = "queued"
    since, starts, reason = submitted, 0, ""
    status: int | None = None
    for event in events:
        kind = event["EventTypeNumber"]
        change = change_of(event)
        if change is None:
            continue
        reason, status = change.reason, None
        if kind == _EXECUTING:
            starts += 1
        if kind == _TERMINATED:
            if event.get("TerminatedNormally", True):
                status = int(event.get("ReturnValue", 0))
            state = "done" if status in (0, _SOME_DEAD) else "failed"
            reason = "" if state == "done" else change.reason
        elif kind == _ABORTED:
            state = "cancelled"
        elif change.state == "held":
            state = "held"
        elif change.state == "running":
            state = "running"
        else:
            state, reason = "queued", _why_again(event, change.reason) if kind == _EVICTED else change.reason
        since = float(event["time"])
    return Standing(state, since, max(0, starts - 1), " ".join(reason.split()), status)


def _why_again(event: Mapping[str, Any], reason: str) -> str:
    """Return why a driver that ended starts again.

    >>> _why_again({"TerminatedAndRequeued": True, "TerminatedNormally": True, "ReturnValue": 130}, "OnExitRemove ...")
    'it was interrupted'
    """
    if not event.get("TerminatedAndRequeued"):
        return reason or "it was vacated"
    if event.get("TerminatedNormally"):
        status = int(event.get("ReturnValue", 0))
        return "it was interrupted" if status == _INTERRUPTED else f"it ended with status {status}"
    number = int(event.get("TerminatedBySignal", 0))
    try:
        return f"it was killed by {signal.Signals(number).name}"
    except ValueError:
        return f"it was killed by signal {number}"


@dataclasses.dataclass(frozen=True)
class Detached:
    """A job that was detached.

    :ivar id: what people call it, a number.
    :ivar tag: by which HTCondor knows its driver and its workers.
    :ivar cluster: the driver's job, CLUSTER.PROC.
    :ivar host: the machine whose schedd has it.
    :ivar directory: where the driver runs.
    :ivar submitted: when, in seconds since 1970.
    :ivar does: what, in some words.
    """

    id: int
    tag: str
    cluster: str
    host: str
    directory: str
    input: str
    output: str
    site: str
    submitted: float
    does: str

    @property
    def folder(self) -> Path:
        """Return the job's folder."""
        return jobs_directory() / str(self.id)

    @property
    def log(self) -> Path:
        """Return the driver's log."""
        return self.folder / "driver.log"


@dataclasses.dataclass(frozen=True)
class DetachedView:
    """A job, and how it stands.

    :ivar status: its status file, None if there is none of this job's.
    """

    job: Detached
    standing: Standing
    status: Mapping[str, Any] | None


def jobs_directory() -> Path:
    """Return the folder of the user's jobs.

    >>> jobs_directory().parts[-2:]
    ('ctxflow', 'jobs')
    """
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "ctxflow" / "jobs"


def found_jobs() -> list[Detached]:
    """Return the user's jobs, the oldest first."""
    jobs = []
    base = jobs_directory()
    for name in os.listdir(base) if own_folder(str(base)) else ():
        with contextlib.suppress(OSError, ValueError, TypeError):
            jobs.append(Detached(**json.loads(read_own(str(base / name / "about.json")))))
    return sorted(jobs, key=lambda job: job.id)


def job_named(name: str) -> Detached:
    """Return the job of that id.

    :raises ValueError: if there is none.
    """
    jobs = found_jobs()
    for job in jobs:
        if name == str(job.id):
            return job
    known = f"there are {', '.join(str(job.id) for job in jobs[-10:])}" if jobs else "there is none yet"
    raise ValueError(f"there is no job {name!r}: {known}; `ctxflow jobs` lists them")


def views(jobs: Sequence[Detached]) -> list[DetachedView]:
    """Return how jobs stand, by the logs in their folders, and one query of the queue for those not over.

    :raises CtxflowError: if HTCondor's Python bindings are missing.
    """
    found = [view_of(job) for job in jobs]
    here = [view for view in found if view.standing.state not in ENDED and view.job.host == gethostname()]
    try:
        there = condor_provider.jobs_there([view.job.tag for view in here])
    except CtxflowError:  # Then what was written is the best that is known.
        return found
    missing = {view.job.id for view in here if view.job.cluster not in there[view.job.tag]}
    return [_lost(view_of(view.job)) if view.job.id in missing else view for view in found]


def view_of(job: Detached) -> DetachedView:
    """Return how a job stands, by what is in its folder."""
    standing = standing_of(condor_provider.driver_events(str(job.folder / "events.log")), job.submitted)
    if standing.state == "failed":
        standing = dataclasses.replace(standing, reason=last_complaint(job) or standing.reason)
    status = read_status(Path(job.output))
    # One from before is another run's.
    current = status is not None and float(status.get("updated") or 0) >= job.submitted
    return DetachedView(job, standing, status if current else None)


def _lost(view: DetachedView) -> DetachedView:
    """Return a job that the queue no longer has: it ended in this moment, or nobody knows how."""
    if view.standing.state in ENDED:
        return view
    reason = "HTCondor has it no more, and does not say why: the same ctxflow batch command goes on"
    return dataclasses.replace(view, standing=dataclasses.replace(view.standing, state="lost", reason=reason))


def last_complaint(job: Detached) -> str:
    """Return the last line that a driver logged, "" if there is none."""
    for path in (job.log, job.folder / "shell.log"):
        with contextlib.suppress(OSError):
            lines = [line for line in path.read_text(errors="replace").splitlines()[-20:] if line.strip()]
            said = [line.removeprefix("ctxflow: ") for line in lines if line.startswith("ctxflow: ")] or lines
            if said and not said[-1].startswith("---"):
                return said[-1][:500]
    return ""
