"""Submit a run's driver as a job to HTCondor, find it in the queue, and end it with all its workers.

The job is of the local universe: it runs at once on the machine of the schedd, which lives as long as the queue does,
sees the files that its user sees there, is reached by workers, and may submit them. There it needs no slot and does not
compete with workers; no owner takes it away, and when it ends early or the machine starts again, it restarts within
seconds. (A vanilla job would run on a machine that has none of this; one of the scheduler universe, which DAGMan uses,
is left to cool down for five minutes whenever it is vacated.)

What the job's events mean: batch/detached.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ctxflow.factory.condor_jobs import BATCH_ATTRIBUTE, literal, quoted
from ctxflow.factory.condor_process import CondorProcess, CutOff, condor_process, told
from ctxflow.factory.provider import ProviderError

_REMOVED, _COMPLETED = 3, 4
_HERE = (None, None)  # This machine's schedd.
_DRIVER_ATTRIBUTE = "CtxflowDriver"
_KILLED = 10  # So often may a driver be killed, until it is held: something is wrong with it or its machine.
_FINAL = (0, 1, 2, 3)  # Exit statuses after which another start would do nothing, or fail again.


def describe_driver(script: str, directory: str, log: str, complaints: str, tag: str) -> dict[str, str]:
    """Return the submit description of a driver.

    It leaves the queue when it ends with one of the statuses of a job that is over. After any other one (130, when it
    was interrupted), and when it is killed, it starts anew; killed ten times, it is held. Whoever removes it removes
    all jobs with its tag, which are its workers.

    :param script: a shell's program that becomes the driver.
    :param directory: where it runs.
    :param log: where HTCondor writes the job's events; to `complaints` goes what the shell says before the driver runs.
    :param tag: letters, digits and hyphens.

    >>> text = describe_driver("/jobs/3/driver.sh", "/home/ada", "/jobs/3/log", "/jobs/3/err", "3-af")
    >>> print(text["arguments"], text["+OtherJobRemoveRequirements"])
    "/jobs/3/driver.sh" "CtxflowBatch == \\"3-af\\""
    >>> print(text["on_exit_remove"])
    ExitBySignal =!= true && (ExitCode == 0 || ExitCode == 1 || ExitCode == 2 || ExitCode == 3)
    """
    final = " || ".join(f"ExitCode == {status}" for status in _FINAL)
    return {
        "universe": "local",
        "executable": "/bin/sh",
        "transfer_executable": "false",
        "arguments": quoted([script]),
        "initialdir": literal(directory),
        "log": literal(log),
        "output": "/dev/null",  # The script sends what the driver says elsewhere: HTCondor begins files anew.
        "error": literal(complaints),
        "notification": "never",
        "leave_in_queue": "false",
        "kill_sig": "SIGTERM",
        "remove_kill_sig": "SIGTERM",
        "on_exit_remove": f"ExitBySignal =!= true && ({final})",
        "on_exit_hold": f"ExitBySignal =?= true && NumJobStarts >= {_KILLED}",
        "on_exit_hold_reason": f'strcat("the driver was killed by signal ", ExitSignal, " at its start number ",'
        f' NumJobStarts, ": see ctxflow logs {tag.partition("-")[0]}, and let it go on with condor_release")',
        "batch_name": f"ctxflow job {tag.partition('-')[0]}",
        f"+{_DRIVER_ATTRIBUTE}": f'"{tag}"',
        "+OtherJobRemoveRequirements": f'"{BATCH_ATTRIBUTE} == \\"{tag}\\""',
    }


def why_no_driver() -> str | None:
    """Return why no driver can be submitted on this machine, None if it can.

    :raises ProviderError: if HTCondor's Python bindings are missing.
    """
    with told("HTCondor does not say whether it takes the driver", who="collector or schedd"):
        found: str | None = _bindings().ask("refusal")
        return found


def submit_driver(description: Mapping[str, str]) -> str:
    """Submit a driver to this machine's schedd, and return its job's id, CLUSTER.PROC.

    :raises ProviderError: if it is refused, or there is no schedd.
    """
    try:
        with told("HTCondor did not take the driver"):
            cluster, first = _bindings().ask("submit", _HERE, dict(description), 1, os.getcwd())
    except ProviderError as error:
        if not isinstance(error.__context__, CutOff):
            raise
        theirs = f"{_DRIVER_ATTRIBUTE} == {description[f'+{_DRIVER_ATTRIBUTE}']}"
        raise ProviderError(f"{error}; should it be queued all the same, condor_rm -constraint '{theirs}'") from None
    return f"{cluster}.{first}"


def driver_events(log: str) -> list[dict[str, Any]]:
    """Return the events of a driver's log, each with "time", in seconds since 1970.

    :raises ProviderError: if it cannot be read.
    """
    if not os.path.exists(log):
        return []
    with told("HTCondor's job log cannot be read"):
        events: list[dict[str, Any]] = _bindings().ask("events", os.path.abspath(log), 0)
        _bindings().ask("forget", os.path.abspath(log))
    return events


def jobs_there(tags: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return what this machine's schedd has of some drivers: tag -> id of its or a worker's job -> HTCondor's state of
    it.

    :raises ProviderError: if the schedd cannot be reached.
    """
    if not tags:
        return {}
    wanted = " || ".join(f'CtxflowDriver == "{tag}" || {BATCH_ATTRIBUTE} == "{tag}"' for tag in tags)
    names = ["ClusterId", "ProcId", "JobStatus", "CtxflowDriver", BATCH_ATTRIBUTE]
    with told("HTCondor does not say which jobs there are"):
        ads = _bindings().ask("query", _HERE, wanted, names, -1)
    found: dict[str, dict[str, int]] = {tag: {} for tag in tags}
    for ad in ads:
        tag = str(ad.get("CtxflowDriver") or ad.get(BATCH_ATTRIBUTE))
        if ad["JobStatus"] != _COMPLETED:
            found[tag][f"{ad['ClusterId']}.{ad['ProcId']}"] = int(ad["JobStatus"])
    return found


def end_jobs(jobs: Mapping[str, int]) -> None:
    """Remove jobs that `jobs_there` found; those that are being removed already are left alone.

    :raises ProviderError: if the schedd cannot be reached.
    """
    if these := [job for job, state in jobs.items() if state != _REMOVED]:
        with told("HTCondor did not remove the job"):
            _bindings().ask("remove", _HERE, these, "ctxflow cancel")


@functools.cache
def _bindings() -> CondorProcess:
    """Return the process with HTCondor's bindings, until this one ends."""
    return condor_process(_HERE)
