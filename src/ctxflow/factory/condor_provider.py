"""Run workers, and detached drivers, as HTCondor jobs, through its Python bindings (htcondor2; condor_process.py)."""

from __future__ import annotations

import contextlib
import functools
import getpass
import os
import secrets
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from ctxflow.errors import counted
from ctxflow.factory.condor_jobs import (
    BATCH_ATTRIBUTE,
    BATCH_VARIABLE,
    DRIVER_ATTRIBUTE,
    EXCLUDED_ATTRIBUTE,
    RUN_ATTRIBUTE,
    SEEN_ATTRIBUTE,
    SUBMISSION_ATTRIBUTE,
    change_of,
    describe,
    escaped,
    excluded_text,
    id_of,
    log_of,
    none_left,
    room_left,
    variables_text,
)
from ctxflow.factory.condor_process import CondorError, CondorProcess, CutOff, ScheddNotFound, condor_process, explained
from ctxflow.factory.provider import FoundJob, JobChange, JobState, PoolSurvey, ProviderError, WorkerJob, tail
from ctxflow.files import write_private
from ctxflow.topology import Topology

_REASON = "ctxflow gave the worker back"
_ID = ("ClusterId", "ProcId")
_STATES: dict[int, JobState] = {1: "queued", 2: "running", 5: "held", 6: "running", 7: "evicted"}  # By JobStatus.


class CondorProvider:
    """Jobs in an HTCondor queue: one submission for each call of `submit`, one job per worker.

    Changes are read from the jobs' event log, a file of the provider's directory; only while jobs are pending the
    schedd is queried, now and then, whether it has them still. The directory must be one that the schedd's machine
    sees under the same path: as a rule the driver runs where people call condor_submit.

    A job that ends by itself leaves the queue, with whatever status; an evicted one is queued again by HTCondor. When
    the driver is killed, running workers leave, as they find no manager, and pending and held ones leave the queue
    when the lease is over. (HTCondor looks every PERIODIC_EXPR_INTERVAL, by default a minute.)

    Each request has a timeout. After a submission that timed out, none is made before the queue has been queried for
    its jobs.

    A job's options: `requirements` (an expression on the machine's ad), `require_gpus` (one on a GPU's), `priority`
    (among the user's own jobs), `image` (of a container), `submit` (any other submit keys, such as +ProjectName).

    :param run: the run's id, by default a random one: `condor_rm -constraint 'CtxflowRun == "ID"'` finds its jobs.
    :param schedd: the name of the schedd, by default this machine's.
    :param pool: the central manager's host, where the schedd is in another pool than this machine.
    :param lease: seconds for which waiting jobs stay in the queue once `changes` is no longer called.
    :param patience: seconds that `stop` waits for jobs to leave their machines.

    >>> provider = CondorProvider(run="run-7", lease=600)  # doctest: +SKIP
    >>> provider.start(directory)  # doctest: +SKIP
    >>> provider.submit(WorkerJob("a10", ["vine_worker", "submit", "9123"], gpus=1), 2)  # doctest: +SKIP
    ['12.0', '12.1']
    >>> provider.changes()  # doctest: +SKIP
    [JobChange(job='12.0', state='running', reason='', host='host1.testbed', waited=None)]
    """

    def __init__(
        self,
        run: str | None = None,
        schedd: str | None = None,
        pool: str | None = None,
        lease: int = 600,
        patience: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run or uuid.uuid4().hex
        self.queries = 0
        self._place = schedd, pool
        self._process: CondorProcess | None = None
        self._lease = lease
        self._patience = patience
        self._clock = clock
        self._directory = ""
        self._read = 0  # How many events of the log.
        self._variables: dict[str, str] = {}  # Their text -> a file that holds it.
        self._states: dict[str, JobState] = {}  # As reported last; jobs that ended are not kept.
        self._removed: set[str] = set()  # By us, and still to end.
        self._missing: set[str] = set()  # Those that were not in the queue when last looked.
        self._lost: list[str] = []  # Not in the queue any more, without an event in the log; still to be reported.
        self._cut_off: tuple[str, WorkerJob] | None = None  # A submission whose answer was lost.
        self._early: list[JobChange] = []  # Of jobs that may be of that one.
        self._told_late: list[JobChange] = []
        self._renew_at = float("-inf")
        self._asked = False

    def start(self, directory: str) -> None:
        """Open the job log and start the process of the bindings; to be called once, before anything else."""
        self._directory = os.path.abspath(directory)
        log = log_of(self._directory)
        with open(log, "a"):  # A log can be read from the beginning only if it is there.
            os.chmod(log, 0o600)
        self._bindings().start()

    def submit(self, job: WorkerJob, count: int) -> list[str]:
        """Submit jobs that are all alike, and return their ids, CLUSTER.PROC: fewer where the queue takes no more."""
        if count < 1:
            return []
        batch = os.environ.get(BATCH_VARIABLE, "")
        variables = self._variables_file(job)
        name = secrets.token_hex(8)
        description = describe(job, self._directory, self.run, time.time(), self._lease, batch, variables, name)
        with explained(f"HTCondor did not take {counted(count, 'worker')} of tier {job.tier}"):
            if ids := self._taken(job, count):
                return ids
            asked, self._asked = self._asked, True  # Jobs may be queued, even if we never learn of it.
            self._cut_off = name, job  # Also where HTCondor complains: it may have waited for the last answer.
            try:
                cluster, first = self._ask("submit", description, count, os.getcwd())
            except (ScheddNotFound, ProviderError):
                self._asked, self._cut_off = asked, None
                raise
            except CondorError as error:
                if (left := room_left(str(error))) is None:
                    raise
                count, limit = left
                if not count:
                    self._cut_off = None
                    raise ProviderError(none_left(limit)) from None
                cluster, first = self._ask("submit", description, count, os.getcwd())
            self._cut_off = None
        ids = [f"{cluster}.{number}" for number in range(first, first + count)]
        self._states.update(dict.fromkeys(ids, "queued"))
        return ids

    def _taken(self, job: WorkerJob, count: int) -> list[str]:
        """Return the jobs of a submission whose answer was lost, if they will do for this one; else remove them."""
        if self._cut_off is None:
            return []
        (name, cut_off), early = self._cut_off, self._early
        theirs = f'{self._mine} && {SUBMISSION_ATTRIBUTE} == "{name}"'
        ads = self._query(theirs, [*_ID, "JobStatus"])
        ids = [id_of(ad) for ad in ads if ad["JobStatus"] in _STATES]
        if ids and (cut_off != job or len(ids) > count):
            self._ask("remove", theirs, _REASON)
            ids = []
        self._cut_off, self._early = None, []
        self._states.update(dict.fromkeys(ids, "queued"))
        self._told_late += [change for change in early if change.job in ids]
        return ids

    def _variables_file(self, job: WorkerJob) -> str:
        """Return the file of such a job's variables, which HTCondor transfers when it starts; "" for none."""
        text = variables_text(job)
        if text and text not in self._variables:
            path = os.path.join(self._directory, f"variables-{secrets.token_hex(4)}")
            try:
                write_private(path, text)
            except OSError as error:
                raise ProviderError(f"a worker's variables cannot be written: {error}; make room there") from None
            self._variables[text] = path
        return self._variables[text] if text else ""

    def description(self, job: WorkerJob, count: int, directory: str) -> str:
        """Return the submit file for this many workers, to be read; nothing is submitted."""
        described = describe(job, directory, self.run, time.time(), self._lease)
        return "".join(f"{key} = {value}\n" for key, value in described.items()) + f"queue {count}\n"

    def remove(self, jobs: Sequence[str]) -> None:
        """Remove jobs from the queue; those that run get SIGTERM, and time to end that the machine's owner sets."""
        if ours := [job for job in jobs if job in self._states]:
            self._act(ours)
            self._removed.update(ours)

    def exclude(self, jobs: Sequence[str], hosts: Sequence[str]) -> list[str]:
        """Keep this provider's jobs from machines, also those that run, should they be evicted; all can be changed."""
        if any(job in self._states for job in jobs):
            self.queries += 1
            try:
                # Not by their ids: one that has ended would keep all from being changed.
                with explained("HTCondor does not keep workers from machines"):
                    self._ask("edit", self._mine, EXCLUDED_ATTRIBUTE, excluded_text(hosts))
            except ProviderError:
                if self._waiting_for(self._mine):
                    raise
        return []

    def changes(self) -> list[JobChange]:
        """Return what happened since the last call, in order."""
        self._renew()
        with explained("HTCondor's job log cannot be read"):
            events = self._bindings().ask("events", log_of(self._directory), self._read)
        self._read += len(events)
        found = self._told_late + [change for change in map(change_of, events) if change is not None]
        found += [JobChange(job, "ended", "HTCondor has lost it: was its queue's disk full?") for job in self._lost]
        self._told_late, self._lost = [], []
        return [change for change in found if self._is_new(change)]

    def output(self, job: str) -> str:
        """Return the path of what a job's present or last incarnation wrote."""
        return os.path.join(self._directory, f"{job}.out")

    def last_words(self, job: str) -> str:
        """Return the last lines that a job's present or last incarnation wrote."""
        return tail(self.output(job))

    def survey(self, job: WorkerJob) -> PoolSurvey:
        """Return what the pool has for such a job now."""
        self.queries += 1
        with explained("HTCondor's pool cannot be asked", who="collector or schedd"):
            return cast(PoolSurvey, self._ask("survey", job))

    def machines(self, job: WorkerJob) -> list[Topology]:
        """Return the machines that a worker may be on, with who uses their GPUs."""
        self.queries += 1
        with explained("HTCondor's pool cannot be asked", who="collector"):
            return cast(list[Topology], self._ask("machines", job))

    def find(self) -> list[FoundJob]:
        """Return all workers of this user in the schedd's queue, also those of runs that are over."""
        wanted = f'{RUN_ATTRIBUTE} =!= undefined && Owner == "{escaped(getpass.getuser())}"'
        with explained("HTCondor does not say which workers there are"):
            ads = self._query(wanted, [*_ID, "JobStatus", "RemoteHost", RUN_ATTRIBUTE])
        return [
            FoundJob(
                id_of(ad),
                str(ad[RUN_ATTRIBUTE]),
                _STATES[ad["JobStatus"]],
                (ad.get("RemoteHost") or "").rpartition("@")[2] or None,
            )
            for ad in ads
            if ad["JobStatus"] in _STATES
        ]

    def discard(self, jobs: Sequence[str]) -> None:
        """Remove jobs that `find` found."""
        if jobs:
            self._act(list(jobs))

    def stop(self) -> None:
        """Remove all jobs of this provider, and wait until they have left the queue or the patience is over.

        Jobs that are still there then end when HTCondor reaches their machines again; none starts anew.
        """
        try:
            self._remove_all()
        finally:
            for path in self._variables.values():
                with contextlib.suppress(OSError):
                    os.unlink(path)
            self._variables.clear()
            if self._process is not None and self._directory:
                with contextlib.suppress(CondorError, ProviderError):
                    self._process.ask("forget", log_of(self._directory))
            self._process = None  # Which ends unless another provider has it.

    def _remove_all(self) -> None:
        if not self._asked:
            return
        mine = self._mine
        try:
            if self._waiting_for(mine):
                self._act(mine)
            deadline = time.monotonic() + self._patience
            while self._waiting_for(mine) and time.monotonic() < deadline:
                time.sleep(0.2)
        except ProviderError as error:
            raise ProviderError(f"{error}; later, call condor_rm -constraint '{mine}'") from None
        self._states.clear()

    @property
    def _mine(self) -> str:
        """The constraint that holds of the jobs of this provider, and of no others."""
        return f'{RUN_ATTRIBUTE} == "{self.run}" && UserLog == "{escaped(log_of(self._directory))}"'

    def _is_new(self, change: JobChange) -> bool:
        """Record a change; return whether it is to be reported."""
        before = self._states.get(change.job)
        if before is None:  # It had ended: a straggling event.
            if self._cut_off is not None:
                self._early.append(change)
            return False
        if change.state == "ended":
            del self._states[change.job]
            self._removed.discard(change.job)
            return True
        # Of a removed job only the end counts; one that is evicted had begun, unless that is known already.
        if change.job in self._removed or (change.state == "evicted" and before != "running"):
            return False
        self._states[change.job] = change.state
        return True

    def _renew(self) -> None:
        """Renew the lease of waiting jobs, and check that they are there, four times in a lease."""
        now = self._clock()
        if now < self._renew_at or all(state == "running" for state in self._states.values()):
            return
        self._renew_at = now + self._lease / 4
        ours = f'{RUN_ATTRIBUTE} == "{self.run}"'
        try:
            ads = self._query(ours, [*_ID, "ServerTime"])
            missing = set(self._states) - set(map(id_of, ads))
            # An event may still be on its way to the log; not for so long.
            self._lost += sorted(missing & self._missing)
            self._missing = missing - set(self._lost)
            waiting = f"{ours} && (JobStatus == 1 || JobStatus == 5)"
            # By the schedd's own clock, by which it counts a lease; by ours where it does not say.
            now_there = int(next((ad["ServerTime"] for ad in ads if "ServerTime" in ad), time.time()))
            self.queries += 1
            self._ask("edit", waiting, SEEN_ATTRIBUTE, str(now_there))
        except (CondorError, ProviderError):
            # None waits by now, or the schedd is down: the next time. Nobody removes jobs while it is.
            self._renew_at = self._clock() + min(10.0, self._lease / 4)

    def _act(self, jobs: list[str] | str) -> None:
        with explained("HTCondor did not remove workers"):
            self._ask("remove", jobs, _REASON)

    def _waiting_for(self, constraint: str) -> bool:
        with explained("HTCondor does not say which workers are left"):
            return bool(self._query(constraint, ["ClusterId"], 1))

    def _query(self, constraint: str, names: Sequence[str], limit: int = -1) -> list[dict[str, Any]]:
        self.queries += 1
        return cast(list[dict[str, Any]], self._ask("query", constraint, names, limit))

    def _ask(self, request: str, *arguments: Any) -> Any:
        """Return the answer of the schedd to a request."""
        return self._bindings().ask(request, self._place, *arguments)

    def _bindings(self) -> CondorProcess:
        """Return the process with HTCondor's bindings."""
        if self._process is None:
            self._process = condor_process(self._place)
        return self._process


# --- a run's driver as a job; a ProviderError says that HTCondor's bindings or schedd cannot be used

_REMOVED, _COMPLETED = 3, 4
_HERE = (None, None)  # This machine's schedd.


def why_no_driver() -> str | None:
    """Return why no driver can be submitted on this machine, None if it can."""
    with explained("HTCondor does not say whether it takes the driver", who="collector or schedd"):
        return cast("str | None", _bindings().ask("refusal"))


class OutcomeUnknown(ProviderError):
    """HTCondor gave no answer: what it was asked may be done, or be done later."""


def submit_driver(description: Mapping[str, str]) -> str:
    """Submit a driver to this machine's schedd, and return its job's id, CLUSTER.PROC.

    :raises OutcomeUnknown: if the schedd does not say whether it took the driver.
    """
    try:
        with explained("HTCondor did not take the driver"):
            cluster, first = _bindings().ask("submit", _HERE, dict(description), 1, os.getcwd())
    except ProviderError as error:
        if not isinstance(error.__context__, CutOff):
            raise
        theirs = f"{DRIVER_ATTRIBUTE} == {description[f'+{DRIVER_ATTRIBUTE}']}"
        raise OutcomeUnknown(f"{error}; should it be queued all the same, condor_rm -constraint '{theirs}'") from None
    return f"{cluster}.{first}"


def driver_events(log: str) -> list[dict[str, Any]]:
    """Return the events of a driver's log, each with "time", in seconds since 1970."""
    if not os.path.exists(log):
        return []
    with explained("HTCondor's job log cannot be read"):
        events: list[dict[str, Any]] = _bindings().ask("events", os.path.abspath(log), 0)
        _bindings().ask("forget", os.path.abspath(log))
    return events


def jobs_there(tags: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return what this machine's schedd has of drivers: tag -> id of its or a worker's job -> HTCondor's state."""
    if not tags:
        return {}
    wanted = " || ".join(f'{DRIVER_ATTRIBUTE} == "{tag}" || {BATCH_ATTRIBUTE} == "{tag}"' for tag in tags)
    with explained("HTCondor does not say which jobs there are"):
        ads = _bindings().ask("query", _HERE, wanted, [*_ID, "JobStatus", DRIVER_ATTRIBUTE, BATCH_ATTRIBUTE], -1)
    found: dict[str, dict[str, int]] = {tag: {} for tag in tags}
    for ad in ads:
        tag = str(ad.get(DRIVER_ATTRIBUTE) or ad.get(BATCH_ATTRIBUTE))
        if ad["JobStatus"] != _COMPLETED:
            found[tag][id_of(ad)] = int(ad["JobStatus"])
    return found


def end_jobs(jobs: Mapping[str, int]) -> None:
    """Remove jobs that `jobs_there` found; those that are being removed already are left alone."""
    if these := [job for job, state in jobs.items() if state != _REMOVED]:
        with explained("HTCondor did not remove the job"):
            _bindings().ask("remove", _HERE, these, "ctxflow cancel")


@functools.cache
def _bindings() -> CondorProcess:
    """Return the process with HTCondor's bindings, until this one ends."""
    return condor_process(_HERE)
