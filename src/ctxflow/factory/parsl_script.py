"""The script that is one worker's job where a batch system transfers no files: what it does, and what it tells. Pure.

It lies in a directory that the machines share, as do the job's files and what it writes of itself: its output, and
its *events*, a line each, by which the provider learns at once what the batch system would say only when asked.

What does not live here: submitting it (parsl_jobs.py), and what its events mean (parsl_story.py).
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass

from ctxflow.factory.provider import JOB_VARIABLE, ProviderError, WorkerJob, arguments, check_job

ID_VARIABLES = {
    "slurm": "SLURM_JOB_ID",
    "pbspro": "PBS_JOBID",
    "torque": "PBS_JOBID",
    "grid_engine": "JOB_ID",
    "lsf": "LSB_JOBID",
}
"""In which variable a job finds its own id, by the label of Parsl's provider."""

SCRIPT = """\
#!/bin/bash
# One worker, as ctxflow asked for it.
exec >{output} 2>&1 </dev/null
export {job_variable}={job}
{exports}
tell() {{ printf '%s\\n' "$*" >>{events}; }}
fail() {{ echo "$1"; tell ended 1; exit 1; }}
# TERM to the worker is its notice, whatever the batch system's is; a trap also ends `wait`, which then has no status.
notice() {{ caught=1; tell notice "$1"; [[ -z $worker ]] || kill -TERM "$worker" 2>/dev/null; }}
worker= caught=
for name in TERM USR1 USR2; do trap "notice $name" "$name"; done
seen() {{ cat {seen} 2>/dev/null; }}
# Its clock and ours may differ by anything: a driver that lives soon writes another time.
lives() {{
    local then=$(seen)
    (( $(date +%s) - ${{then:-0}} <= {lease} )) && return 0
    for (( left = {lease} / 3 + 1; left > 0; left-- )); do
        sleep 1
        [[ $(seen) == "$then" ]] || return 0
    done
    return 1
}}
lives || fail "the run is over: nobody has looked after its workers for {lease} s"
base=${{TMPDIR:-/tmp}}
scratch=$(mktemp -d "$base/ctxflow-XXXXXXXX") || fail "there is no room for a scratch directory in $base: set TMPDIR"
trap 'cd /; rm -rf -- "$scratch"' EXIT
{copies}
cd "$scratch" || fail "the scratch directory is gone"
export TMPDIR=$scratch
tell began "$(uname -n)"
{command} &
worker=$!
[[ -z $caught ]] || kill -TERM "$worker"
while caught=; wait "$worker"; status=$?; [[ -n $caught ]]; do :; done
# Where both get a signal at once, bash may have lost the worker's status: then it is -1.
(( status >= 0 )) || status=143
tell ended "$status"
exit "$status"
"""
COPY = """\
cp -p -- {paths} "$scratch"/ || fail "the run's files cannot be read on $(uname -n): start the run in a directory that \
all machines share" """


@dataclass(frozen=True)
class Places:
    """Where a job's files are, in the provider's directory.

    >>> Places("/run/7", "job-1").events
    '/run/7/job-1.events'
    """

    directory: str
    name: str

    @property
    def script(self) -> str:
        """What the batch system runs."""
        return os.path.join(self.directory, f"{self.name}.sh")

    @property
    def output(self) -> str:
        """What the job's present or last incarnation wrote."""
        return os.path.join(self.directory, f"{self.name}.out")

    @property
    def events(self) -> str:
        """What it tells of itself."""
        return os.path.join(self.directory, f"{self.name}.events")

    @property
    def seen(self) -> str:
        """When the driver was there last, in seconds since 1970; one for all jobs."""
        return os.path.join(self.directory, "seen")


def worker_script(job: WorkerJob, places: Places, id_variable: str | None, lease: int) -> str:
    """The text of a worker's script, for bash.

    Its events are `began HOST`, `notice SIGNAL` and `ended STATUS`. The job's files are copied into a scratch directory
    that only its user can enter, which is removed when the script ends (a batch system that kills without a warning
    leaves it). It ends with the worker's status.

    :param id_variable: the variable in which the batch system tells a job its id; the job's name is its id if None.
    :param lease: seconds for which a job that begins may not have heard of its driver; it ends at once if longer.
    :raises ProviderError: if a shell could not be told so.

    >>> text = worker_script(WorkerJob("a10", ["worker", "it's"]), Places("/run/7", "job-1"), "SLURM_JOB_ID", 120)
    >>> [line for line in text.splitlines() if "worker 'it" in line]
    ['worker \\'it\\'"\\'"\\'s\\' &']
    """
    check_job(job)
    for name in job.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ProviderError(f"{name!r} cannot be the name of an environment variable: write another")
    paths = [shlex.quote(os.path.abspath(path)) for path in job.files]
    exports = {name: value for name, value in job.environment.items() if name != JOB_VARIABLE}
    text = SCRIPT.format(
        output=shlex.quote(places.output),
        events=shlex.quote(places.events),
        seen=shlex.quote(places.seen),
        job_variable=JOB_VARIABLE,
        job=f'"${{{id_variable}//[^A-Za-z0-9.-]/-}}"' if id_variable else shlex.quote(places.name),
        exports="\n".join(f"export {name}={shlex.quote(value)}" for name, value in exports.items()),
        copies=COPY.format(paths=" ".join(paths)) if paths else "",
        lease=lease,
        command=" ".join(map(shlex.quote, arguments(job))),
    )
    if "\0" in text:
        raise ProviderError(f"the workers of tier {job.tier} cannot have a zero byte among their words: leave it out")
    return text


def job_id(native: object) -> str:
    """A batch system's id as one that consists of letters, digits, dots and hyphens, as the script makes it too.

    >>> job_id("12.server_1")
    '12.server-1'
    """
    return re.sub(r"[^A-Za-z0-9.-]", "-", str(native))
