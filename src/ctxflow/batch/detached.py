"""Jobs whose driver is a job itself: each has a folder of its user's, in which all is kept that is known of it.

    JOBS/3/job.json      every choice that was made, as `ctxflow batch --job` reads it
    JOBS/3/driver.sh     becomes the driver: in the folder, with the environment and the Python of who submitted it
    JOBS/3/driver.log    what the driver says, of all its starts
    JOBS/3/events.log    what HTCondor says of it
    JOBS/3/about.json    what this module has to know

What does not live here: HTCondor (factory/condor_driver.py), how a job stands by its events (detached_state.py), and
what is printed (cli/jobs.py).
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
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from socket import gethostname
from typing import Any

from ctxflow.batch.detached_state import ENDED, Standing, standing_of
from ctxflow.batch.job import Job
from ctxflow.batch.status_file import read_status
from ctxflow.batch.templates import template_text
from ctxflow.errors import CtxflowError, UsageError
from ctxflow.factory import condor_driver
from ctxflow.factory.condor_jobs import BATCH_VARIABLE
from ctxflow.safe_files import make_own_folder, own_folder, read_own, write_private
from ctxflow.sites import Site, load_site

# What belongs to the terminal, to another job of HTCondor's, or, like the directory that is removed when its user has
# logged out, to the login: a driver outlives all of them.
_NOT_CARRIED = re.compile(
    r"_|PWD|OLDPWD|SHLVL|TERM.*|DISPLAY|SSH_.*|_CONDOR_.*|_condor_.*|CONDOR_.*|XDG_(RUNTIME|SESSION).*"
)
_TEMPORARY = ("TMPDIR", "TEMP", "TMP")  # HTCondor sets them to a folder that it removes, of a name that may be long.


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
        """Where it is kept."""
        return jobs_directory() / str(self.id)

    @property
    def log(self) -> Path:
        """What the driver said."""
        return self.folder / "driver.log"


@dataclasses.dataclass(frozen=True)
class View:
    """A job, and how it stands.

    :ivar status: its status file, None if there is none of this job's.
    """

    job: Detached
    standing: Standing
    status: Mapping[str, Any] | None


def jobs_directory() -> Path:
    """Where the folders of the user's jobs are.

    >>> jobs_directory().parts[-2:]
    ('ctxflow', 'jobs')
    """
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "ctxflow" / "jobs"


# --- detaching


def site_for_detaching(job: Job) -> Site:
    """The site of a job that is to be detached.

    :raises UsageError: if it is a site for which no driver can be submitted.
    :raises CtxflowError: if none can be submitted from here, or one that is not over writes the same
        output; saying what to do.
    """
    site = load_site(job.site, workers=job.workers)
    if site.engine != "taskvine":
        raise UsageError(
            "--detach makes the driver a job of HTCondor's, beside its workers: give --site with a site file whose "
            "tiers are HTCondor's; on this machine, run the command in tmux or with nohup"
        )
    if others := [tier for tier in site.tiers if tier.provider != "condor"]:
        raise UsageError(
            f"--detach submits the driver to HTCondor, and the tier {others[0].name} of {job.site} is "
            f"{others[0].provider}'s: leave --detach out, and run the command in tmux or with nohup"
        )
    if (why := condor_driver.why_no_driver()) is not None:
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
        write_private(str(folder / "job.json"), json.dumps(self_contained(job), indent=1) + "\n")
        environment = carried(os.environ, keep_runtime=site.acquire == "factory")
        write_private(str(folder / "driver.sh"), driver_script(about, folder, environment, flags))
        write_private(str(folder / "events.log"), "")
        description = condor_driver.describe_driver(
            str(folder / "driver.sh"), about.directory, str(folder / "events.log"), str(folder / "shell.log"), about.tag
        )
        about = dataclasses.replace(about, cluster=condor_driver.submit_driver(description))
        write_private(str(folder / "about.json"), json.dumps(dataclasses.asdict(about), indent=1) + "\n")
    except BaseException:
        if about.cluster:
            condor_driver.end_jobs({about.cluster: 0})
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return about


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
    """A job as JSON, in which files that must be found are named in full, and templates are what their files hold now.

    The model stays as it was named: it is a part of what tells jobs apart, and the driver runs in the same directory.

    >>> made = self_contained(Job(input="in.csv", output="out.jsonl", model="lm", site="campus.toml", top_k=3))
    >>> made["model"], made["top_k"], os.path.isabs(made["input"]), os.path.isabs(made["site"]), "stop" in made
    ('lm', 3, True, True, False)
    """
    values = job.model_dump(mode="json", exclude_defaults=True)
    for name in ("input", "output", "site"):
        if name in values:
            values[name] = os.path.abspath(values[name])
    for name in ("template", "system"):
        if values.get(name) is not None and not (text := template_text(values[name])).startswith("@"):
            values[name] = text
    return values


def carried(environment: Mapping[str, str], keep_runtime: bool = False) -> dict[str, str]:
    """The variables that a driver finds as they are now.

    :param keep_runtime: whether XDG_RUNTIME_DIR is one of them: a factory of the login's is found there.

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
    """The shell's program that becomes the driver."""
    log, job = shlex.quote(str(folder / "driver.log")), shlex.quote(str(folder / "job.json"))
    words = [*_this_command(), "batch", "--job"]
    return "\n".join(
        [
            "#!/bin/sh",
            f"# The driver of job {about.id}. It may be run by hand, when the job is over.",
            f"exec >>{log} 2>&1 </dev/null",
            "umask " + f"{_umask():03o}",
            f"unset {' '.join(_TEMPORARY)}",
            *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
            f"export {BATCH_VARIABLE}={about.tag}",
            f"cd {shlex.quote(about.directory)} || exit 1",
            'echo "--- $(date "+%Y-%m-%d %H:%M:%S"): the driver starts on $(uname -n)"',
            f"exec {shlex.join(words)} {job} {shlex.join(flags)}".rstrip(),
            "",
        ]
    )


def _this_command() -> list[str]:
    """The words that start ctxflow as it was started now."""
    script = os.path.abspath(sys.argv[0])
    called = os.path.basename(script) == "ctxflow" and os.path.isfile(script)
    return [sys.executable, script] if called else [sys.executable, "-m", "ctxflow"]


def _umask() -> int:
    now = os.umask(0o077)
    os.umask(now)
    return now


def what_it_does(job: Job) -> str:
    """A job in some words.

    >>> what_it_does(Job(input="in.csv", output="out.jsonl", model="package:minilm", task="embed"))
    'embed with package:minilm'
    """
    return f"function {job.function}" if job.function else f"{job.task or 'generate'} with {job.model}"


# --- looking


def found_jobs() -> list[Detached]:
    """The user's jobs, the oldest first."""
    jobs = []
    base = jobs_directory()
    for name in os.listdir(base) if own_folder(str(base)) else ():
        with contextlib.suppress(OSError, ValueError, TypeError):
            jobs.append(Detached(**json.loads(read_own(str(base / name / "about.json")))))
    return sorted(jobs, key=lambda job: job.id)


def job_named(name: str) -> Detached:
    """The job of that id.

    :raises ValueError: if there is none.
    """
    jobs = found_jobs()
    for job in jobs:
        if name == str(job.id):
            return job
    known = f"there are {', '.join(str(job.id) for job in jobs[-10:])}" if jobs else "there is none yet"
    raise ValueError(f"there is no job {name!r}: {known}; `ctxflow jobs` lists them")


def views(jobs: Sequence[Detached]) -> list[View]:
    """How jobs stand, by what HTCondor wrote in their folders, and one question to its queue about those not over.

    :raises CtxflowError: if HTCondor's Python bindings are missing.
    """
    found = [view_of(job) for job in jobs]
    here = [view for view in found if view.standing.state not in ENDED and view.job.host == gethostname()]
    try:
        there = condor_driver.jobs_there([view.job.tag for view in here])
    except CtxflowError:  # Then what was written is the best that is known.
        return found
    missing = {view.job.id for view in here if view.job.cluster not in there[view.job.tag]}
    return [_lost(view_of(view.job)) if view.job.id in missing else view for view in found]


def view_of(job: Detached) -> View:
    """How a job stands, by what is in its folder."""
    standing = standing_of(condor_driver.driver_events(str(job.folder / "events.log")), job.submitted)
    if standing.state == "failed":
        standing = dataclasses.replace(standing, reason=last_complaint(job) or standing.reason)
    status = read_status(Path(job.output))
    # One from before is another run's.
    current = status is not None and float(status.get("updated") or 0) >= job.submitted
    return View(job, standing, status if current else None)


def _lost(view: View) -> View:
    """A job that the queue has no more: it ended in this moment, or nobody knows how."""
    if view.standing.state in ENDED:
        return view
    reason = "HTCondor has it no more, and does not say why: the same ctxflow batch command goes on"
    return dataclasses.replace(view, standing=dataclasses.replace(view.standing, state="lost", reason=reason))


def last_complaint(job: Detached) -> str:
    """What a driver said last of itself, "" if it said nothing."""
    for path in (job.log, job.folder / "shell.log"):
        with contextlib.suppress(OSError):
            lines = [line for line in path.read_text(errors="replace").splitlines()[-20:] if line.strip()]
            said = [line.removeprefix("ctxflow: ") for line in lines if line.startswith("ctxflow: ")] or lines
            if said and not said[-1].startswith("---"):
                return said[-1][:500]
    return ""
