"""Submit a batch's driver as a job of HTCondor's: `ctxflow batch --detach`."""

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

from ctxflow.batch.detached import ENDED, Detached, found_jobs, jobs_directory, views
from ctxflow.batch.job import Job
from ctxflow.batch.templates import template_text
from ctxflow.errors import CtxflowError, UsageError
from ctxflow.factory import condor_provider
from ctxflow.factory.condor_jobs import BATCH_VARIABLE, describe_driver
from ctxflow.files import make_own_folder, write_private
from ctxflow.sites import Site, load_site

# What belongs to the terminal, to another job of HTCondor's, or, like the directory that is removed when its user has
# logged out, to the login: a driver outlives all of them.
_NOT_CARRIED = re.compile(
    r"_|PWD|OLDPWD|SHLVL|TERM.*|DISPLAY|SSH_.*|_CONDOR_.*|_condor_.*|CONDOR_.*|XDG_(RUNTIME|SESSION).*"
)
_TEMPORARY = ("TMPDIR", "TEMP", "TMP")  # HTCondor sets them to a folder that it removes, of a name that may be long.


def site_for_detaching(job: Job) -> Site:
    """Return the site of a job that is to be detached.

    :raises UsageError: if it is a site for which no driver can be submitted.
    :raises CtxflowError: if none can be submitted from here, or one that is not over writes the same
        output; saying what to do.
    """
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
        write_private(str(folder / "job.json"), json.dumps(self_contained(job), indent=1) + "\n")
        environment = carried(os.environ, keep_runtime=site.acquire == "factory")
        write_private(str(folder / "driver.sh"), driver_script(about, folder, environment, flags))
        write_private(str(folder / "events.log"), "")
        description = describe_driver(
            str(folder / "driver.sh"), about.directory, str(folder / "events.log"), str(folder / "shell.log"), about.tag
        )
        about = dataclasses.replace(about, cluster=condor_provider.submit_driver(description))
        write_private(str(folder / "about.json"), json.dumps(dataclasses.asdict(about), indent=1) + "\n")
    except BaseException:
        if about.cluster:
            condor_provider.end_jobs({about.cluster: 0})
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
    """Return a job as JSON, with absolute paths, and with the text of its templates in place of their files.

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
    """Return the environment variables that a driver gets.

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
    """Return the shell script that becomes the driver."""
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
    """Return the command line that starts ctxflow as it was started now."""
    script = os.path.abspath(sys.argv[0])
    called = os.path.basename(script) == "ctxflow" and os.path.isfile(script)
    return [sys.executable, script] if called else [sys.executable, "-m", "ctxflow"]


def _umask() -> int:
    now = os.umask(0o077)
    os.umask(now)
    return now


def what_it_does(job: Job) -> str:
    """Return a job in some words.

    >>> what_it_does(Job(input="in.csv", output="out.jsonl", model="package:minilm", task="embed"))
    'embed with package:minilm'
    """
    return f"function {job.function}" if job.function else f"{job.task or 'generate'} with {job.model}"
