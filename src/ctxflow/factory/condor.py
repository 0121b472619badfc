"""Workers as HTCondor's jobs, through its Python bindings (htcondor2).

What does not live here: the submit description (condor_description.py), what events mean (condor_events.py).
"""

from __future__ import annotations

import functools
import getpass
import importlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ctxflow.factory.condor_description import (
    BATCH_VARIABLE,
    RUN_ATTRIBUTE,
    SEEN_ATTRIBUTE,
    describe,
    log_of,
    output_of,
)
from ctxflow.factory.condor_events import change_of
from ctxflow.factory.condor_survey import ask, ask_for_places
from ctxflow.factory.provider import FoundJob, JobChange, JobState, ProviderError, Survey, WorkerJob, tail
from ctxflow.installing import how_to_install
from ctxflow.topology import Topology
from ctxflow.wording import counted

_BY_US = 0  # The subcode of a removal's reason.
_STATES: dict[int, JobState] = {1: "queued", 2: "running", 5: "held", 6: "running", 7: "evicted"}  # By JobStatus.


class CondorProvider:
    """Jobs in an HTCondor queue: one submission for each call of `submit`, one job per worker.

    Changes are read from the jobs' event log, a file of the provider's directory, so that nothing is asked of the
    schedd for them; only while jobs wait it is asked, now and then, whether it has them still. The directory must be
    one that the schedd's machine sees under the same path: as a rule the driver runs where people call condor_submit.

    A job that ends by itself leaves the queue, with whatever status; an evicted one is queued again by HTCondor. When
    the driver is killed, running workers leave by themselves, as they find no manager, and those that wait or are
    held leave the queue when the lease is over. (HTCondor looks every PERIODIC_EXPR_INTERVAL, by default a minute.)

    A job's options: `requirements` (an expression on the machine's ad), `require_gpus` (one on a GPU's), `priority`
    (among the user's own jobs), `image` (a container image: the job runs in the container universe), `submit` (a
    mapping of any other submit keys, such as +ProjectName).

    :param run: the run's id. All jobs are tagged with it, so that `condor_rm -constraint 'CtxflowRun == "ID"'` finds
        them; by default one is made up.
    :param schedd: the name of the schedd, by default this machine's.
    :param pool: the central manager's host, where the schedd is in another pool than this machine.
    :param lease: seconds for which waiting jobs stay in the queue when `changes` is not called any more.
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
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run = run or uuid.uuid4().hex
        self.queries = 0
        self._schedd_name = schedd
        self._pool = pool
        self._lease = lease
        self._patience = patience
        self._clock = clock
        self._directory = ""
        self._log: Any = None
        self._states: dict[str, JobState] = {}  # What was told last; jobs that ended are not kept.
        self._removed: set[str] = set()  # By us, and still to end.
        self._missing: set[str] = set()  # Those that were not in the queue when last looked.
        self._lost: list[str] = []  # Not in the queue any more, though the log does not say so; still to be told.
        self._renew_at = 0.0
        self._asked = False

    def start(self, directory: str) -> None:
        """Make ready, once, before anything else.

        :raises ProviderError: if HTCondor's Python bindings are missing.
        """
        self._directory = os.path.abspath(directory)
        log = log_of(self._directory)
        with open(log, "a"):  # A log can be read from the beginning only if it is there.
            os.chmod(log, 0o600)
        with told("HTCondor's job log cannot be read"):
            self._log = bindings().JobEventLog(log)

    def submit(self, job: WorkerJob, count: int) -> list[str]:
        """Submit jobs that are all alike, and return their ids, CLUSTER.PROC.

        :raises ProviderError: if HTCondor refuses them or cannot be reached; none is queued then.
        """
        if count < 1:
            return []
        batch = os.environ.get(BATCH_VARIABLE, "")
        description = describe(job, self._directory, self.run, self._clock(), self._lease, batch)
        with told(f"HTCondor did not take {counted(count, 'worker')} of tier {job.tier}"):
            schedd = self._schedd()
            self._asked = True  # From here on jobs may be queued, even if we never learn of it.
            done = schedd.submit(bindings().Submit(description), count=count)
        first = done.first_proc()
        ids = [f"{done.cluster()}.{number}" for number in range(first, first + count)]
        self._states.update(dict.fromkeys(ids, "queued"))
        return ids

    def description(self, job: WorkerJob, count: int, directory: str) -> str:
        """The submit file that asks for so many workers, to be read; nothing is asked for.

        :raises ProviderError: if HTCondor could not be told so.
        """
        described = describe(job, directory, self.run, self._clock(), self._lease)
        return "".join(f"{key} = {value}\n" for key, value in described.items()) + f"queue {count}\n"

    def remove(self, jobs: Sequence[str]) -> None:
        """Remove jobs from the queue; those that run get SIGTERM, and time to end that the machine's owner sets.

        :raises ProviderError: if the schedd cannot be reached.
        """
        ours = [job for job in jobs if job in self._states]
        if ours:
            self._act(ours)
            self._removed.update(ours)

    def changes(self) -> list[JobChange]:
        """What happened since the last call, in order.

        :raises ProviderError: if the log cannot be read.
        """
        self._renew()
        with told("HTCondor's job log cannot be read"):
            events = list(self._log.events(0))
        found = [change for change in map(change_of, events) if change is not None]
        found += [JobChange(job, "ended", "HTCondor has lost it: was its queue's disk full?") for job in self._lost]
        self._lost = []
        return [change for change in found if self._is_new(change)]

    def last_words(self, job: str) -> str:
        """The last lines that a job's present or last incarnation wrote."""
        return tail(output_of(self._directory, job))

    def survey(self, job: WorkerJob) -> Survey:
        """What the pool has for such a job now.

        :raises ProviderError: if the pool cannot be asked.
        """
        self.queries += 1
        with told("HTCondor's pool cannot be asked"):
            return ask(job, bindings(), self._schedd_name, self._pool)

    def machines(self, job: WorkerJob) -> list[Topology]:
        """The machines that a worker may be on, with who uses their GPUs.

        :raises ProviderError: if the pool cannot be asked.
        """
        self.queries += 1
        with told("HTCondor's pool cannot be asked"):
            return ask_for_places(job, bindings(), self._pool)

    def find(self) -> list[FoundJob]:
        """All workers of this user in the schedd's queue, also those of runs that are over.

        :raises ProviderError: if the schedd cannot be reached.
        """
        self.queries += 1
        wanted = f'{RUN_ATTRIBUTE} =!= undefined && Owner == "{_escaped(getpass.getuser())}"'
        with told("HTCondor does not say which workers there are"):
            names = ["ClusterId", "ProcId", "JobStatus", "RemoteHost", RUN_ATTRIBUTE]
            ads = self._schedd().query(wanted, projection=names)
        return [
            FoundJob(f"{ad['ClusterId']}.{ad['ProcId']}", str(ad[RUN_ATTRIBUTE]), state, _machine(ad.get("RemoteHost")))
            for ad in ads
            if (state := _STATES.get(ad["JobStatus"])) is not None
        ]

    def discard(self, jobs: Sequence[str]) -> None:
        """Remove jobs that `find` found.

        :raises ProviderError: if the schedd cannot be reached.
        """
        if jobs:
            self._act(list(jobs))

    def stop(self) -> None:
        """Remove all jobs of this provider, and wait until they have left the queue, or the patience is at its end.

        Jobs that are still there then end when HTCondor reaches their machines again; none starts anew.

        :raises ProviderError: if the schedd cannot be reached; the message says what to call later.
        """
        if not self._asked:
            return
        mine = f'{RUN_ATTRIBUTE} == "{self.run}" && UserLog == "{_escaped(log_of(self._directory))}"'
        try:
            if self._waiting_for(mine):
                self._act(mine)
            deadline = time.monotonic() + self._patience
            while self._waiting_for(mine) and time.monotonic() < deadline:
                time.sleep(0.2)
        except ProviderError as error:
            raise ProviderError(f"{error}; later, call condor_rm -constraint '{mine}'") from None
        self._states.clear()

    def _is_new(self, change: JobChange) -> bool:
        """Whether a change is one to tell, taking note of it."""
        before = self._states.get(change.job)
        if before is None:  # It had ended: a straggling event.
            return False
        if change.state == "ended":
            del self._states[change.job]
            self._removed.discard(change.job)
            return True
        if change.job in self._removed:  # Its end is told, not what leads there.
            return False
        if change.state == "evicted" and before != "running":  # It had not begun, or is told already.
            return False
        self._states[change.job] = change.state
        return True

    def _renew(self) -> None:
        """Keep waiting jobs in the queue, and see that they are there: four times in a lease, if there are any."""
        now = self._clock()
        if now < self._renew_at or all(state == "running" for state in self._states.values()):
            return
        self._renew_at = now + self._lease / 4
        self.queries += 2
        ours = f'{RUN_ATTRIBUTE} == "{self.run}"'
        try:
            schedd = self._schedd()
            there = {f"{ad['ClusterId']}.{ad['ProcId']}" for ad in schedd.query(ours, ["ClusterId", "ProcId"])}
            missing = set(self._states) - there
            # An event may still be on its way to the log; not for so long.
            self._lost += sorted(missing & self._missing)
            self._missing = missing - set(self._lost)
            schedd.edit(f"{ours} && (JobStatus == 1 || JobStatus == 5)", SEEN_ATTRIBUTE, str(int(now)))
        except (bindings().HTCondorException, ProviderError):
            # None waits by now, or the schedd is down: the next time. Nobody removes jobs while it is.
            self._renew_at = now + min(10.0, self._lease / 4)

    def _act(self, jobs: list[str] | str) -> None:
        with told("HTCondor did not remove workers"):
            self._schedd().act(bindings().JobAction.Remove, jobs, ("ctxflow gave the worker back", _BY_US))

    def _waiting_for(self, constraint: str) -> bool:
        self.queries += 1
        with told("HTCondor does not say which workers are left"):
            return bool(self._schedd().query(constraint, projection=["ClusterId"], limit=1))

    def _schedd(self) -> Any:
        """The schedd, asked for anew each time, since its address changes when it is started again."""
        htcondor = bindings()
        if self._schedd_name is None and self._pool is None:
            return htcondor.Schedd()
        ad = htcondor.Collector(self._pool).locate(htcondor.DaemonType.Schedd, self._schedd_name)
        if ad is None:
            raise ProviderError(
                f"there is no schedd {self._schedd_name!r} in the pool: condor_status -schedd lists their names"
            )
        return htcondor.Schedd(ad)


@functools.cache
def bindings() -> Any:
    """The module htcondor2.

    :raises ProviderError: if it is not installed.
    """
    try:
        return importlib.import_module("htcondor2")
    except ImportError:
        raise ProviderError(
            f"HTCondor's Python bindings (htcondor2) are missing: {how_to_install('htcondor', extra='htcondor')}; "
            "or on Debian install the package condor and make the virtual environment with --system-site-packages"
        ) from None


@contextmanager
def told(what: str) -> Iterator[None]:
    """Make HTCondor's complaint one sentence of ours, a ProviderError."""
    try:
        yield
    except (bindings().HTCondorException, OSError) as error:
        raise ProviderError(f"{what}: {_why(' '.join(str(error).split()).rstrip(',.'))}") from None


def _why(complaint: str) -> str:
    """HTCondor's complaint, and what to do about it.

    >>> _why("Unable to commit transaction")
    'its schedd cannot keep them: is the disk full that its SPOOL directory is on? (Unable to commit transaction)'
    >>> _why("Failed to create new cluster").partition(":")[0]
    'its schedd takes no jobs, or ended meanwhile'
    """
    if "commit transaction" in complaint:
        return f"its schedd cannot keep them: is the disk full that its SPOOL directory is on? ({complaint})"
    if "create new cluster" in complaint:
        return f"its schedd takes no jobs, or ended meanwhile: see whether condor_q works on this machine ({complaint})"
    if any(each in complaint for each in ("connect to schedd", "SECMAN", "locate local daemon")):
        return f"its schedd does not answer: see whether condor_q works on this machine ({complaint})"
    return f"{complaint}; see whether condor_q works on this machine"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _machine(remote: str | None) -> str | None:
    return remote.rpartition("@")[2] if remote else None
