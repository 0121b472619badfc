"""The script that is one worker's job where a batch system transfers no files, and what its events mean.

It lies in a directory that the machines share, as do the job's files, its output, and its *events*, a line each, by
which the provider learns at once what the batch system would report only when queried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctxflow.factory.provider import JOB_VARIABLE, JobChange, JobState, ProviderError, WorkerJob, arguments, check_job
from ctxflow.files import written_whole

ID_VARIABLES = {
    "slurm": "SLURM_JOB_ID",
    "pbspro": "PBS_JOBID",
    "torque": "PBS_JOBID",
    "grid_engine": "JOB_ID",
    "lsf": "LSB_JOBID",
}
"""The variable in which a job finds its own id, by the label of Parsl's provider."""

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
trap '' TERM USR1 USR2  # A signal after the worker's end is no notice.
tell ended "$status"
exit "$status"
"""
COPY = """\
cp -p -- {paths} "$scratch"/ || fail "the run's files cannot be read on $(uname -n): start the run in a directory that \
all machines share" """


class JobPaths:
    """The paths of a job's files in the provider's directory.

    :ivar script: what the batch system runs; `events`, what the script reports.
    :ivar output: of the job's present or last incarnation.
    :ivar seen: the time of the driver's last sign of life, in seconds since 1970; one for all jobs.

    >>> JobPaths("/run/7", "job-1").events
    '/run/7/job-1.events'
    """

    def __init__(self, directory: str, name: str) -> None:
        self.name = name
        self.seen = os.path.join(directory, "seen")
        self.script, self.output, self.events = (
            os.path.join(directory, name + end) for end in (".sh", ".out", ".events")
        )


def worker_script(job: WorkerJob, places: JobPaths, id_variable: str | None, lease: int) -> str:
    """Return the text of a worker's script, for bash.

    Its events are `began HOST`, `notice SIGNAL` and `ended STATUS`. The job's files are copied into a scratch directory
    that only its user can enter, removed when the script ends (a batch system that kills without a warning leaves it).

    :param id_variable: the variable in which the batch system tells a job its id; the job's name is its id if None.
    :param lease: seconds since the driver's last sign of life, after which a job that begins ends at once.
    :raises ProviderError: if it cannot be expressed for a shell.

    >>> text = worker_script(WorkerJob("a10", ["worker", "it's"]), JobPaths("/run/7", "job-1"), "SLURM_JOB_ID", 120)
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
    """Return a batch system's id with letters, digits, dots and hyphens alone, as the script writes it too.

    >>> job_id("12.server_1")
    '12.server-1'
    """
    return re.sub(r"[^A-Za-z0-9.-]", "-", str(native))


SHORTEST_PAUSE, FIRST_PAUSE = 1.0, 5.0  # Seconds between queries of the batch system.
_LONGEST_PAUSE, _GROWTH = 60.0, 1.5
_BY_HAND = re.compile("JobHeld|requeued.in.held.state")  # Slurm's, after `scontrol hold` and `requeuehold`.
GIVEN_BACK = "ctxflow gave the worker back"


@dataclass(frozen=True)
class JobReport:
    """What a batch system reports of a job.

    :ivar state: `evicted` if it is suspended; `ended` also if it is unknown there.
    :ivar taken: of one that ended, whether the batch system took its machine.
    :ivar restarts: how often it was put back into the queue; None where that is not counted.
    """

    state: JobState
    reason: str = ""
    taken: bool = False
    host: str | None = None
    restarts: int | None = None


@dataclass
class JobStory:
    """The state of one job, reconciled from its script's events and the batch system's reports.

    A SIGTERM is an eviction, since the batch system sends it to all processes; any other signal only announces one,
    which counts when the script has ended.

    :ivar status: with which the script ended, in its present incarnation.
    :ivar removed: whether we ended it: then only its end is news.

    >>> story = JobStory("12")
    >>> lines = ("began n1", "notice TERM", "ended 143", "began n2")
    >>> [change.state for line in lines for change in story.on_event(line)]
    ['running', 'evicted', 'running']
    >>> [change.state for change in story.on_report(JobReport("ended", "Slurm says NODE_FAIL", taken=True))]
    ['evicted', 'ended']
    """

    job: str
    state: JobState = "queued"
    removed: bool = False
    status: int | None = None
    _notice: str = ""
    _begun: int = 0
    _restarts: int = 0
    _ahead: bool = False  # The batch system reported that it runs before the script did.
    _unconfirmed: bool = False  # It was reported to run, and its script has not begun.
    _doubted: bool = False

    @property
    def works(self) -> bool:
        """Whether it runs, and nothing announces its end."""
        return self.state == "running" and not self._notice and self.status is None and not self.removed

    def on_event(self, line: str) -> list[JobChange]:
        """Return the changes that an event of the script means."""
        kind, _, rest = line.partition(" ")
        if kind == "began":
            news = [] if self._ahead else self._evicted("it began anew")
            self._begun += 1
            self.status, self._notice, self._ahead, self._unconfirmed = None, "", False, False
            return [*news, *self._become("running", host=rest)]
        if kind == "notice":
            self._notice = rest
            return self._evicted("the batch system ended it") if rest == "TERM" else []
        if kind == "ended" and rest.isdigit():
            self.status = int(rest)
            return self._evicted(f"the batch system gave notice (SIG{self._notice})") if self._notice else []
        return []

    def on_report(self, report: JobReport) -> list[JobChange]:
        """Return the changes that a report of the batch system means, after all events so far were read."""
        if report.state == "ended":
            taken = self._evicted(report.reason) if report.taken else []
            return [*taken, *self.end(report.reason, report.host)]
        if report.state == "evicted":
            return self._evicted(report.reason)
        if report.state == "held":
            by_hand = bool(_BY_HAND.search(report.reason))
            evicted, held = self._evicted(report.reason), self._become("held", report.reason)
            return [*evicted, *(dataclasses.replace(each, by_hand=by_hand) for each in held)]
        news = self._evicted(report.reason or "it was queued again") if self._has_restarted(report) else []
        if report.state == "running" and self.state != "running" and self.status is None and not self._notice:
            if report.host is not None or self._unconfirmed:  # Else the script will report where.
                news += self._become("running", host=report.host)
                self._ahead = True
            self._unconfirmed = True
        if report.state == "queued" and self.state == "held":
            return self._become("queued", report.reason)
        return news

    def end(self, reason: str, host: str | None = None) -> list[JobChange]:
        """End the job, which has left the batch system, and ran on a host if that is known; return the change."""
        if self.state == "ended":
            return []
        removed, self.removed = self.removed, False
        how = f"it ended with status {self.status}" if self.status is not None else reason
        return self._become("ended", GIVEN_BACK if removed else reason if self.state == "evicted" else how, host)

    def _has_restarted(self, report: JobReport) -> bool:
        """Return whether it was put back into the queue since it began."""
        if report.restarts is not None:
            before, self._restarts = self._restarts, report.restarts
            return report.restarts > before and report.restarts >= self._begun
        # A batch system may be slow to see that a job runs: it counts only when it reports that twice.
        again, self._doubted = self._doubted, report.state == "queued"
        return self._doubted and (again or self.status is not None)

    def _evicted(self, reason: str) -> list[JobChange]:
        return self._become("evicted", reason) if self.state == "running" else []

    def _become(self, state: JobState, reason: str = "", host: str | None = None) -> list[JobChange]:
        if self.state in (state, "ended"):
            return []
        self.state, self._ahead = state, False
        return [] if self.removed else [JobChange(self.job, state, reason, host)]


@dataclass
class SubmittedJob:
    """A job that was submitted through Parsl: its files, and how far its events were read."""

    native: Any  # Parsl's id.
    places: JobPaths
    story: JobStory
    script: str  # Parsl's, if it is known; beside it are the batch system's own messages.
    read: int = 0  # Bytes of its events.
    read_at: float = float("-inf")
    ended_at: float | None = None  # When its script was seen to have ended.

    def news(self, now: float) -> bytes:
        """Return the whole lines that the job's script has written to its events since the last call."""
        self.read_at = now
        try:
            with open(self.places.events, "rb") as file:
                file.seek(self.read)
                text = file.read()
        except OSError:
            return b""
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        return whole

    def remove_files(self) -> None:
        """Remove the job's files."""
        own = [self.places.output, self.places.events]
        for path in own + [self.script + end for end in ("", ".stdout", ".stderr") if self.script]:
            with contextlib.suppress(OSError):
                os.unlink(path)


@dataclass
class PollPace:
    """When to query the batch system about jobs: soon while something changes, ever more seldom else."""

    next_at: float = float("-inf")
    _asked_at: float = float("-inf")
    _pause: float = FIRST_PAUSE

    def queried(self, now: float) -> None:
        """Record that it is queried now; if that fails, the next time is in half a minute."""
        self._asked_at, self.next_at = now, now + _LONGEST_PAUSE / 2

    def answered(self, moved: bool, settling: bool) -> None:
        """Record the answer: whether it had news of some job, and whether jobs are about to leave."""
        first = SHORTEST_PAUSE if settling else FIRST_PAUSE
        self._pause = first if moved else min(_LONGEST_PAUSE, max(first, self._pause * _GROWTH))
        self.next_at = self._asked_at + self._pause

    def hurry(self, now: float, pause: float) -> None:
        """Query it within the pause, since something changes."""
        self._pause = pause
        self.next_at = min(self.next_at, max(now, self._asked_at + pause))


def check_directory(directory: str, label: str, volumes: Iterable[Sequence[str]]) -> None:
    """Check that jobs can be submitted from a directory.

    :param volumes: for Kubernetes, the volumes of a pod: claim and mount point.
    :raises ProviderError: if its path cannot be given to a shell, or pods do not see it.
    """
    mounts = [Path(os.path.abspath(mount)) for _, mount in volumes]
    if label == "kubernetes" and not any(Path(directory).is_relative_to(mount) for mount in mounts):
        raise ProviderError(
            f"pods cannot see the run's directory {directory}: start the run in a directory of a volume that "
            "they mount at the same path, and name it in the tier's options.persistent_volumes, as [[CLAIM, PATH]]"
        )
    if re.search(r"[^\w@%+=:,./-]", directory):
        raise ProviderError(
            f"Parsl cannot submit from the directory {directory!r}: start the run in one whose path has "
            "no spaces and no characters that a shell knows"
        )


def write_script(places: JobPaths, text: str) -> None:
    """Write a job's script, readable by its user alone."""
    try:
        with open(os.open(places.script, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "w") as file:
            file.write(text)
    except OSError as error:
        raise ProviderError(f"a worker's script cannot be written: {error}; make room there") from None


def mark_seen(directory: str) -> None:
    """Write the time, by which jobs that begin know that their driver lives."""
    try:
        with written_whole(Path(JobPaths(directory, "").seen), sync=False) as file:
            file.write(b"%d\n" % time.time())
    except OSError as error:
        raise ProviderError(f"{directory} cannot be written: {error}; make room there") from None
