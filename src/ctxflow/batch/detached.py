"""Submit and follow detached jobs, whose driver is a job of HTCondor's: each has a folder that keeps all of it.

JOBS/3/job.json      every choice that was made, as `ctxflow batch --job` reads it
JOBS/3/driver.sh     becomes the driver: in the folder, with the environment and the Python of who submitted it
JOBS/3/driver.log    what the driver says, of all its starts
JOBS/3/events.log    what HTCondor says of it
JOBS/3/about.json    what this module has to know (`Detached`)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any, Literal, cast

from ctxflow.batch.job_status import read_status
from ctxflow.errors import CtxflowError, UsageError
from ctxflow.factory import condor_provider
from ctxflow.factory.condor_jobs import BATCH_VARIABLE, change_of, describe_driver
from ctxflow.files import make_own_folder, own_folder, read_own, write_private

if TYPE_CHECKING:
    from ctxflow.batch.job import Job
    from ctxflow.sites import Site

State = Literal["queued", "running", "held", "done", "failed", "cancelled", "lost"]
ENDED = ("done", "failed", "cancelled", "lost")
_EXECUTING, _EVICTED, _TERMINATED, _ABORTED = 1, 4, 5, 9
_SOME_DEAD, _INTERRUPTED = 3, 130


@dataclasses.dataclass(frozen=True)
class Standing:
    """How a job stands.

    :ivar state: "queued" (its driver waits to start, or to start again), "running", "held", or how it ended: "done"
        (every row was tried), "failed", "cancelled", "lost" (HTCondor has it no more, and does not say why).
    :ivar since: when that began, in seconds since 1970; `restarts`, of the driver.
    :ivar reason: why, "" where there is nothing to say; `status`, the driver's exit status, if it ended by itself.
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
    """Return how a job stands after HTCondor's events, in the order of its log.

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
        elif change.state in ("held", "running"):
            state = cast(State, change.state)
        else:
            state, reason = "queued", _why_again(event, change.reason) if kind == _EVICTED else change.reason
        since = float(event["time"])
    return Standing(state, since, max(0, starts - 1), " ".join(reason.split()), status)


def _why_again(event: Mapping[str, Any], reason: str) -> str:
    """Return why a driver that ended starts again."""
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

    :ivar tag: by which HTCondor knows its driver and its workers.
    :ivar cluster: the driver's job, CLUSTER.PROC, "" while it is submitted; `host`, the machine whose schedd has it.
    :ivar directory: where the driver runs; `does`, what it does, in some words.
    :ivar submitted: when, in seconds since 1970.
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
    """A job, how it stands, and its status file, None if there is none of this job's."""

    job: Detached
    standing: Standing
    status: Mapping[str, Any] | None


def jobs_directory() -> Path:
    """Return the folder of the user's jobs."""
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
    if (job := next((job for job in jobs if name == str(job.id)), None)) is not None:
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
    missing = {view.job.id for view in here if not _is_among(view.job, there[view.job.tag])}
    return [_lost(view_of(view.job)) if view.job.id in missing else view for view in found]


def _is_among(job: Detached, queued: Mapping[str, int]) -> bool:
    """Return whether a driver is among the jobs in the queue that have its tag."""
    return job.cluster in queued if job.cluster else bool(queued)


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
    """Return a job that the queue no longer has: it ended in this moment, or for an unknown reason."""
    if view.standing.state in ENDED:
        return view
    reason = "HTCondor has it no more, and does not say why" if view.job.cluster else "it never came to HTCondor"
    reason += ": the same ctxflow batch command goes on"
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


# What belongs to the terminal, to another job of HTCondor's, or, like the directory that is removed when its user has
# logged out, to the login: a driver outlives all of them.
_NOT_CARRIED = re.compile(
    r"_|PWD|OLDPWD|SHLVL|TERM.*|DISPLAY|SSH_.*|_CONDOR_.*|_condor_.*|CONDOR_.*|XDG_(RUNTIME|SESSION).*"
)
_TEMPORARY = ("TMPDIR", "TEMP", "TMP")  # HTCondor sets them to a folder that it removes, of a name that may be long.


def site_for_detaching(job: Job) -> Site:
    """Return the site of a job that is to be detached.

    :raises UsageError: if it is a site for which no driver can be submitted.
    :raises CtxflowError: if none can be submitted from here, or another that goes on writes the same output.
    """
    from ctxflow.sites import load_site

    site = load_site(job.site, workers=job.workers)
    if not site.capabilities.acquires:
        raise UsageError(
            "--detach makes the driver a job of HTCondor's, beside its workers: give --site with a site file whose "
            "tiers are HTCondor's; on this machine, run the command in tmux or with nohup"
        )
    if others := [tier for tier in site.tiers if tier.provider != "condor"]:
        raise UsageError(
            f"--detach submits the driver to HTCondor, and the tier {others[0].name} of {job.site} is "
            f"{others[0].provider}'s: leave --detach out, and run the command in tmux or with nohup"
        )
    if (why := condor_provider.why_no_driver()) is not None:
        raise CtxflowError(f"the job cannot be detached: {why}")
    for other in views([each for each in found_jobs() if each.output == os.path.abspath(job.output)]):
        if other.standing.state not in ENDED:
            raise CtxflowError(
                f"job {other.job.id} writes {job.output} and is {other.standing.state}: see `ctxflow jobs`, or end it "
                f"with `ctxflow cancel {other.job.id}`"
            )
    return site


def detach(job: Job, site: Site, flags: Sequence[str] = ()) -> Detached:
    """Submit a job's driver, and remember it.

    :param flags: of `ctxflow batch`, for the driver; what changes results is in the job.
    :raises CtxflowError: if HTCondor refuses.
    """
    number, folder = _new_folder()
    about = Detached(
        id=number,
        tag=f"{number}-{secrets.token_hex(6)}",
        cluster="",
        host=gethostname(),
        directory=os.getcwd(),
        input=os.path.abspath(job.input),
        output=os.path.abspath(job.output),
        site=os.path.abspath(job.site),
        submitted=time.time(),
        does=what_it_does(job),
    )
    try:
        _remember(folder, about)  # Before it is submitted: by its tag it is found, whatever happens then.
        write_private(str(folder / "job.json"), json.dumps(self_contained(job), indent=1) + "\n")
        environment = carried(os.environ, keep_runtime=site.acquire == "factory")
        write_private(str(folder / "driver.sh"), driver_script(about, folder, environment, flags))
        write_private(str(folder / "events.log"), "")
        description = describe_driver(
            str(folder / "driver.sh"), about.directory, str(folder / "events.log"), str(folder / "shell.log"), about.tag
        )
        about = dataclasses.replace(about, cluster=condor_provider.submit_driver(description))
        _remember(folder, about)
    except BaseException as error:
        unknown = isinstance(error, condor_provider.OutcomeUnknown)
        if (isinstance(error, CtxflowError) and not unknown) or _withdrawn(about, late=unknown):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return about


def _remember(folder: Path, about: Detached) -> None:
    write_private(str(folder / "about.json"), json.dumps(dataclasses.asdict(about), indent=1) + "\n")


def _withdrawn(about: Detached, late: bool) -> bool:
    """Take a driver out of the queue again, should it be there; return whether it is known that it will not run.

    :param late: whether it may still be queued, if it is not there now.
    """
    try:
        there = condor_provider.jobs_there([about.tag])[about.tag]
        condor_provider.end_jobs(there)
    except CtxflowError:
        return False
    return bool(there) or not late


def _new_folder() -> tuple[int, Path]:
    base = jobs_directory()
    try:
        make_own_folder(str(base))
        number = max((int(name) for name in os.listdir(base) if name.isdigit()), default=0)
        while True:
            number += 1
            with contextlib.suppress(FileExistsError):  # Another one was quicker.
                (base / str(number)).mkdir(mode=0o700)
                return number, base / str(number)
    except OSError as error:
        raise CtxflowError(
            f"{base}, where jobs are remembered, cannot be written ({error.strerror}): set XDG_STATE_HOME"
        ) from None


def self_contained(job: Job) -> dict[str, Any]:
    """Return a job as JSON, with absolute paths, and with the text of its templates and schema in place of their files.

    The model stays as it was named, since it is a part of the job's identity; the driver runs in the same directory.

    >>> from ctxflow.batch import Job
    >>> made = self_contained(Job(input="in.csv", output="out.jsonl", model="lm", site="campus.toml", top_k=3))
    >>> made["model"], made["top_k"], os.path.isabs(made["input"]), os.path.isabs(made["site"]), "stop" in made
    ('lm', 3, True, True, False)
    """
    from ctxflow.batch.templates import template_text

    values = job.model_dump(mode="json", exclude_defaults=True)
    for name in ("input", "output", "site"):
        if name in values:
            values[name] = os.path.abspath(values[name])
    for name in ("template", "system"):
        if values.get(name) is not None and not (text := template_text(values[name])).startswith("@"):
            values[name] = text
    if job.answer_schema is not None:
        values["answer_schema"] = json.dumps(job.schema_of_answers)
    return values


def carried(environment: Mapping[str, str], keep_runtime: bool = False) -> dict[str, str]:
    """Return the environment variables that a driver gets; XDG_RUNTIME_DIR only to find a factory of the login's there.

    >>> carried({"HF_HOME": "/data/hf", "TERM": "xterm", "XDG_RUNTIME_DIR": "/run/user/1000"})
    {'HF_HOME': '/data/hf'}
    """
    return {
        name: value
        for name, value in sorted(environment.items())
        if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
        and (not _NOT_CARRIED.fullmatch(name) or (keep_runtime and name == "XDG_RUNTIME_DIR"))
    }


def driver_script(about: Detached, folder: Path, environment: Mapping[str, str], flags: Sequence[str]) -> str:
    """Return the shell script that becomes the driver."""
    log, job = shlex.quote(str(folder / "driver.log")), shlex.quote(str(folder / "job.json"))
    script = os.path.abspath(sys.argv[0])  # ctxflow is started as it was started now.
    called = os.path.basename(script) == "ctxflow" and os.path.isfile(script)
    words = [sys.executable, *([script] if called else ["-m", "ctxflow"]), "batch", "--job"]
    mask = os.umask(0o077)
    os.umask(mask)
    return "\n".join(
        [
            "#!/bin/sh",
            f"# The driver of job {about.id}. It may be run by hand, when the job is over.",
            f"exec >>{log} 2>&1 </dev/null",
            f"umask {mask:03o}",
            f"unset {' '.join(_TEMPORARY)}",
            *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
            f"export {BATCH_VARIABLE}={about.tag}",
            f"cd {shlex.quote(about.directory)} || exit 1",
            'echo "--- $(date "+%Y-%m-%d %H:%M:%S"): the driver starts on $(uname -n)"',
            f"exec {shlex.join(words)} {job} {shlex.join(flags)}".rstrip(),
            "",
        ]
    )


def what_it_does(job: Job) -> str:
    """Return a job in some words.

    >>> from ctxflow.batch import Job
    >>> what_it_does(Job(input="in.csv", output="out.jsonl", model="package:minilm", task="embed"))
    'embed with package:minilm'
    """
    models = " and ".join(str(each.model) for each in job.by_model().values())
    return f"function {job.function}" if job.function else f"{job.task or 'generate'} with {models}"
