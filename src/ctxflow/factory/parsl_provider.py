"""Run workers as jobs of any batch system that Parsl has a provider for.

The job's script and its events: parsl_script.py; what Parsl leaves out: parsl_systems.py and slurm.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import secrets
import shlex
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from parsl.launchers import SimpleLauncher, SingleNodeLauncher
from parsl.providers.base import ExecutionProvider

from ctxflow.errors import counted
from ctxflow.factory import slurm
from ctxflow.factory.parsl_script import (
    FIRST_PAUSE,
    ID_VARIABLES,
    SHORTEST_PAUSE,
    JobPaths,
    JobReport,
    JobStory,
    PollPace,
    SubmittedJob,
    check_directory,
    job_id,
    mark_seen,
    worker_script,
    write_script,
)
from ctxflow.factory.parsl_systems import EXCLUDES, OnePod, ParslIntercept, kept_from, report_of
from ctxflow.factory.provider import FoundJob, JobChange, PoolSurvey, ProviderError, WorkerJob, tail

_READ_SECONDS, _TURN_SECONDS = 0.9, (8.0, 16.0)  # How often the events of a job that works are read, at most and else.
_MOST_ENDED = 1000  # Jobs that are over and may still be asked about; so many may end at once.
_HURRIED_SECONDS = 0.5
_SETTLE_SECONDS = 10.0  # How long a batch system may take to see that a job's script has ended.
_GONE = re.compile(r"invalid job|already|unknown job|not exist|finished|not found", re.IGNORECASE)


class ParslProvider:
    """Jobs of a batch system, through one of Parsl's execution providers: each worker its own job, on one node.

    `start`'s directory must be on a filesystem that the machines share under the same path, as clusters' home
    directories are: program and password are copied from there into a job's scratch directory (in TMPDIR, or /tmp), and
    the job's events are read there. So starts, ends and notices are known at once, and the batch system is queried
    about all jobs together, every 5 s at first and ever more seldom, up to 60 s, while nothing happens.

    Cores, memory, GPUs and options are those with which the Parsl provider was made (parsl_systems.py), not the
    `WorkerJob`'s. SingleNodeLauncher, which keeps signals from the worker, is replaced by SimpleLauncher.

    Eviction. Under Slurm, a job that was cancelled by others, preempted, requeued or suspended, timed out, or lost its
    node, was evicted. Elsewhere one is that got SIGTERM, was cancelled or timed out, or that is queued again. Notice
    (SIGTERM to the script, USR1 or USR2) is passed on to the worker as SIGTERM. Slurm's `scancel`, and its preemption
    where slurm.conf has no `PreemptParameters=send_user_signal`, signal all processes at once, which ends the call that
    is running. When the driver is killed, running workers leave as they find no manager, and pending ones when they
    begin, unless they begin within the lease.

    `find` and `survey` are answered for Slurm alone: Parsl can neither list what it did not submit itself (`qstat -u
    $USER` and `kubectl get pods` show jobs named ctxflow.RUN.TIER), nor query what there is.

    :param parsl: the Parsl provider, for this one's use alone. Of a block, one node is requested.
    :param run: the run's id, with which the jobs' names begin; by default a random one.
    :param lease: seconds since the driver's last sign of life within which a job may begin.
    :param patience: seconds that `stop` waits for jobs to leave their machines.

    >>> from parsl.providers import SlurmProvider  # doctest: +SKIP
    >>> provider = ParslProvider(SlurmProvider("gpu", walltime="01:00:00", exclusive=False))  # doctest: +SKIP
    >>> provider.start("/home/ada/runs/7/jobs/gpu")  # doctest: +SKIP
    >>> provider.submit(WorkerJob("gpu", ["vine_worker", "login1", "9123"]), 2)  # doctest: +SKIP
    ['4711', '4712']
    """

    def __init__(
        self,
        parsl: ExecutionProvider,
        run: str | None = None,
        lease: int = 120,
        patience: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run or uuid.uuid4().hex[:12]
        self.queries = 0
        self._parsl = parsl
        self._lease = lease
        self._patience = patience
        self._clock = clock
        self._label = str(getattr(parsl, "label", "") or type(parsl).__name__)
        self._intercept = ParslIntercept(parsl, self._label)
        self._directory = ""
        self._jobs: dict[str, SubmittedJob] = {}
        self._ended: dict[str, SubmittedJob] = {}
        self._news: list[JobChange] = []
        self._tiers: set[str] = set()
        self._mark_at = self._read_at = float("-inf")
        self._pace = PollPace()
        parsl.nodes_per_block = 1
        if self._label == "slurm" and "--comment" not in (given := str(parsl.scheduler_options or "")):
            # By which squeue and sacct group the jobs of a run: their names differ.
            parsl.scheduler_options = f"{given.rstrip()}\n#SBATCH --comment=ctxflow.{self.run}\n".lstrip()
        if self._label == "kubernetes":
            parsl.kube_client = OnePod(parsl.kube_client)
        if isinstance(getattr(parsl, "launcher", None), SingleNodeLauncher):
            parsl.launcher = SimpleLauncher()

    def start(self, directory: str) -> None:
        """Check the directory, and mark it as looked after; to be called once, before anything else."""
        self._directory = os.path.abspath(directory)
        check_directory(self._directory, self._label, getattr(self._parsl, "persistent_volumes", ()))
        self._parsl.script_dir = self._directory
        self._mark_alive()

    def submit(self, job: WorkerJob, count: int) -> list[str]:
        """Submit jobs that are all alike, and return the ids of those that the batch system takes.

        :raises ProviderError: if it takes none.
        """
        ids: list[str] = []
        self._mark_alive()
        self._tiers.add(job.tier)
        for _ in range(count):
            try:
                ids.append(self._submit(job))
            except ProviderError:
                if not ids:
                    raise
                break
        if ids:
            self._pace.hurry(self._clock(), FIRST_PAUSE)
        return ids

    def _submit(self, job: WorkerJob) -> str:
        places = JobPaths(self._directory, f"job-{secrets.token_hex(4)}")
        variable = ID_VARIABLES.get(self._label)
        text = worker_script(job, places, variable, self._lease)
        write_script(places, text)
        with kept_from(self._parsl, self._label, job.excluded):
            native = self._intercept.called(
                "did not take a worker", self._parsl.submit, self._command(places.script), 1, self._name(job)
            )
        if not native:
            os.unlink(places.script)
            raise ProviderError(
                f"{self._label} did not take a worker: {self._intercept.complaint() or 'it says no more'}"
            )
        name = job_id(native) if variable else places.name
        self._jobs[name] = SubmittedJob(native, places, JobStory(name), self._intercept.script)
        return name

    def description(self, job: WorkerJob, count: int, directory: str) -> str:
        """Return what would be submitted, to be read: Parsl's script, if it has one, and the worker's own."""
        places = JobPaths(directory, "job-ID")
        own = worker_script(job, places, ID_VARIABLES.get(self._label), self._lease)
        submit = functools.partial(self._parsl.submit, self._command(places.script), 1, self._name(job))
        theirs = self._with_temporary_scripts(functools.partial(self._intercept.rehearsal, submit))
        return f"# {counted(count, 'time')}, through Parsl ({self._label}):\n{theirs}\n# {places.script}:\n{own}"

    def _with_temporary_scripts(self, call: Callable[[], str]) -> str:
        """Call Parsl with a temporary script directory."""
        before = getattr(self._parsl, "script_dir", None)
        with tempfile.TemporaryDirectory(prefix="ctxflow-") as directory:
            self._parsl.script_dir = directory
            try:
                return str(self._intercept.called("cannot be asked about such a job", call))
            finally:
                self._parsl.script_dir = before

    @staticmethod
    def _command(script: str) -> str:
        """Return what Parsl writes into its own script, which becomes ours, so that signals reach it."""
        return f"exec /bin/bash {shlex.quote(script)}"

    def _name(self, job: WorkerJob) -> str:
        return f"ctxflow.{self.run}.{job.tier}"

    def remove(self, jobs: Sequence[str]) -> None:
        """Cancel jobs; those that run get SIGTERM, and time to end that the batch system sets."""
        if ours := [self._jobs[job] for job in jobs if job in self._jobs]:
            for each in ours:
                each.story.removed = True
            self._cancel(ours)
            self._pace.hurry(self._clock(), SHORTEST_PAUSE)

    def exclude(self, jobs: Sequence[str], hosts: Sequence[str]) -> list[str] | None:
        """Keep jobs that wait from hosts: Slurm's are changed, those of others are to be submitted again."""
        if self._label not in EXCLUDES:
            return None
        waiting = [job for job in jobs if job in self._jobs and self._jobs[job].story.state == "queued"]
        if self._label != "slurm":
            return waiting
        self.queries += 1
        natives = [self._jobs[job].native for job in waiting]
        slurm.exclude(self._intercept.run, natives, hosts, getattr(self._parsl, "clusters", None))
        return []

    def changes(self) -> list[JobChange]:
        """Return what happened since the last call, in order."""
        self._mark_alive()
        self._read_due()
        if self._jobs and self._clock() >= self._pace.next_at:
            self._query()
        news, self._news = self._news, []
        return news

    def output(self, job: str) -> str:
        """Return the path of what a job's present or last incarnation wrote."""
        its = self._jobs.get(job) or self._ended.get(job)
        return its.places.output if its else ""

    def last_words(self, job: str) -> str:
        """Return the last lines that a job's present or last incarnation wrote, or the batch system in its place."""
        its = self._jobs.get(job) or self._ended.get(job)
        if its is None:
            return ""
        words = tail(its.places.output) or tail(f"{its.script}.stderr")  # Or what the batch system wrote.
        if not words and not os.path.exists(its.places.events):
            start = "start the run in a directory that all nodes share under that path"
            return f"nothing of it was seen in {self._directory}: {start}"
        return words

    def survey(self, job: WorkerJob) -> PoolSurvey:
        """Return what the batch system has for such a job now."""
        if self._label != "slurm":
            look = "kubectl describe nodes" if self._label == "kubernetes" else "qhost or pbsnodes -a or bhosts"
            return PoolSurvey(advice=(f"{self._label} cannot be asked through Parsl what it has: see `{look}`",))
        parsl = self._parsl
        submit = functools.partial(parsl.submit, "true", 1, self._name(job))
        trial = self._with_temporary_scripts(functools.partial(self._intercept.trial, submit))
        self.queries += 1
        gres, constraint = getattr(parsl, "gres", None), getattr(parsl, "constraint", None)
        return slurm.survey(self._intercept.run, trial, job, parsl.partition, gres, constraint)

    def find(self) -> list[FoundJob]:
        """Return all workers of this user in Slurm's queue, also those of runs that are over; elsewhere none."""
        return slurm.found_jobs(self._squeue()) if self._label == "slurm" else []

    def discard(self, jobs: Sequence[str]) -> None:
        """Cancel jobs that `find` found."""
        if jobs and self._label == "slurm":
            self._scancel(jobs)

    def stop(self) -> None:
        """Cancel all jobs of this provider, and wait until they have left, or the patience is at its end."""
        deadline, pause = self._clock() + self._patience, 0.2
        try:
            self._read_events()
            self.remove(list(self._jobs))
            self._scancel(self._unanswered())
            while (self._jobs or self._unanswered()) and self._clock() < deadline:
                time.sleep(pause)
                pause = min(2.0, pause * 1.5)
                self._read_events()
                if self._jobs:
                    self._query()
        except ProviderError as error:
            left = " ".join(str(job.native) for job in self._jobs.values())
            raise ProviderError(f"{error}; later, cancel the jobs {left}") from None

    # --- what happens to jobs

    def _read_events(self) -> None:
        for job in list(self._jobs.values()):
            self._read(job)

    def _read_due(self) -> None:
        """Read the events of jobs that may have news: each open of a file asks the file server.

        Running jobs are read in turns; but all within a second while changes are requested often, as after a loss.
        """
        now = self._clock()
        hurried, self._read_at = now - self._read_at < _HURRIED_SECONDS, now
        for job in list(self._jobs.values()):
            wait = 0.0 if not job.story.works else _READ_SECONDS if hurried else random.uniform(*_TURN_SECONDS)
            if now - job.read_at >= wait:
                self._read(job)

    def _read(self, job: SubmittedJob) -> None:
        """Read what a job's script has written since the last time."""
        whole = job.news(self._clock())
        if not whole:
            return
        for line in whole.decode(errors="replace").splitlines():
            self._record(job, job.story.on_event(line))
        job.ended_at = self._clock() if job.story.status is not None else None
        if not whole.startswith(b"began"):
            self._pace.hurry(self._clock(), SHORTEST_PAUSE)  # The batch system knows why.

    def _query(self) -> None:
        """Query the batch system for all jobs, after their own events were read."""
        now = self._clock()
        for job in list(self._jobs.values()):
            if now - job.read_at >= _READ_SECONDS:
                self._read(job)
        told = len(self._news)
        self._pace.queried(now)
        reports = self._slurm_reports() if self._label == "slurm" else self._parsl_reports()
        for job in list(self._jobs.values()):
            report = reports.get(job.story.job)
            if report is not None and report.state == "ended":
                self._read(job)  # Its last events.
            if report is not None:
                if report.state == "held" or (report.state == "queued" and self._label == "slurm"):
                    job.ended_at = None  # Its script has ended, and it waits to run again.
                self._record(job, job.story.on_report(report))
        self._end_overdue()
        settling = any(job.ended_at is not None or job.story.removed for job in self._jobs.values())
        self._pace.answered(moved=len(self._news) > told, settling=settling)

    def _end_overdue(self) -> None:
        """End jobs whose script has ended long ago, though the batch system does not notice."""
        wait = 0.0 if self._label == "kubernetes" else _SETTLE_SECONDS  # There, pods that ended stay.
        limit = self._clock() - wait
        over = [job for job in self._jobs.values() if job.ended_at is not None and job.ended_at <= limit]
        if over:
            self._cancel(over)
        for job in over:
            self._record(job, job.story.end("its script has ended"))

    def _record(self, job: SubmittedJob, news: list[JobChange]) -> None:
        self._news += news
        if job.story.state == "ended" and job.story.job in self._jobs:
            self._ended[job.story.job] = self._jobs.pop(job.story.job)
            if len(self._ended) > _MOST_ENDED:
                self._ended.pop(next(iter(self._ended))).remove_files()
            with contextlib.suppress(OSError):
                os.unlink(job.places.script)  # It may hold secrets, among its variables.

    def _slurm_reports(self) -> Mapping[str, JobReport]:
        lines = self._squeue()
        unknown = JobReport("ended", "Slurm knows it no more")
        return {name: lines[job.native].report if job.native in lines else unknown for name, job in self._jobs.items()}

    def _parsl_reports(self) -> Mapping[str, JobReport]:
        self.queries += 1
        natives = [job.native for job in self._jobs.values()]
        found = self._intercept.called("does not say how its jobs are", self._parsl.status, natives)
        reports = {name: report_of(status, self._label) for name, status in zip(self._jobs, found, strict=True)}
        return {name: report for name, report in reports.items() if report is not None}

    # --- commands and queries

    def _cancel(self, jobs: Sequence[SubmittedJob]) -> None:
        done = self._intercept.called("did not cancel workers", self._parsl.cancel, [job.native for job in jobs])
        if not all(done or ()) and not _GONE.search(said := self._intercept.complaint()):
            raise ProviderError(f"{self._label} did not cancel workers: {said or 'it says no more'}")

    def _unanswered(self) -> list[str]:
        """Return jobs of this provider whose submission was never answered, where they can be found."""
        if self._label != "slurm" or not self._tiers:
            return []
        names = tuple(f"ctxflow.{self.run}.{tier}." for tier in self._tiers)
        known = {job.native for job in self._jobs.values()}
        return [
            line.id
            for line in self._squeue().values()
            if line.name.startswith(names) and line.report.state != "ended" and line.id not in known
        ]

    def _scancel(self, ids: Sequence[str]) -> None:
        try:
            slurm.scancel(self._intercept.run, ids, getattr(self._parsl, "clusters", None))
        except ProviderError as error:
            if not _GONE.search(str(error)):
                raise

    def _squeue(self) -> dict[str, slurm.QueueEntry]:
        self.queries += 1
        return slurm.squeue(self._intercept.run, getattr(self._parsl, "clusters", None))

    def _mark_alive(self) -> None:
        """Mark the directory, so that jobs that begin know that their driver lives."""
        now = self._clock()
        if now < self._mark_at:
            return
        mark_seen(self._directory)
        self._mark_at = now + self._lease / 6
