"""Translate worker and driver jobs into HTCondor's submit descriptions, and its job events into changes. Pure."""

from __future__ import annotations

import getpass
import math
import os
import re
import shlex
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from ctxflow.factory.provider import (
    JOB_VARIABLE,
    JobChange,
    JobState,
    ProviderError,
    WorkerJob,
    arguments,
    check_job,
    how_ended,
)
from ctxflow.sites.provider_keys import OWN_SUBMIT_KEYS
from ctxflow.sites.site_problems import suggestion

RUN_ATTRIBUTE = "CtxflowRun"
SEEN_ATTRIBUTE = "CtxflowSeen"
EXCLUDED_ATTRIBUTE = "CtxflowExcluded"
BATCH_ATTRIBUTE = "CtxflowBatch"
SUBMISSION_ATTRIBUTE = "CtxflowSubmission"
TIER_ATTRIBUTE = "CtxflowTier"
DRIVER_ATTRIBUTE = "CtxflowDriver"
BATCH_VARIABLE = "CTXFLOW_BATCH"
"""Where a driver that is a job itself finds the tag that its workers' jobs get, so that they end with it."""
_JOB_ID = "$(Cluster).$(Process)"
# The file goes as soon as it is read: a worker sends its peers any file that its user may read.
_WITH_VARIABLES = 'exec 2>&1; . "./$1" && rm -f "./$1" && shift && exec "$@"'
# A job that waits needs only another value there, not other requirements, of which condor_submit adds a part.
_ELSEWHERE = f"(!stringListIMember(TARGET.Machine, MY.{EXCLUDED_ATTRIBUTE}))"
_KILLED = 10  # So often may a driver be killed, until it is held: something is wrong with it or its machine.
_FINAL = (0, 1, 2, 3)  # Exit statuses after which another start would do nothing, or fail again.
_OPTIONS = ("requirements", "require_gpus", "priority", "image", "submit")


def describe(
    job: WorkerJob,
    directory: str,
    run: str,
    now: float,
    lease: int,
    batch: str = "",
    variables: str = "",
    submission: str = "",
) -> dict[str, str]:
    """Return the submit description of a worker, or of several that are alike.

    The job's standard output and error go to one file of the directory, as they are written. A pending or held job
    leaves the queue when nobody has set its `CtxflowSeen` to the present for the time of the lease, in seconds.

    :param directory: where HTCondor writes the log and the jobs' output, an absolute path.
    :param run: the tag `CtxflowRun`: letters, digits, dots, hyphens and underscores; `batch`, `CtxflowBatch` likewise.
    :param now: seconds since 1970.
    :param variables: the path of a file for this user alone that holds `variables_text`, by default one of the
        directory: everybody may read a job's ad, and a token may be among the variables.
    :param submission: what identifies this submission, as `CtxflowSubmission`.
    :raises ProviderError: if it cannot be expressed for HTCondor, saying what to change.

    >>> text = describe(WorkerJob("a10", ["worker", "it's"], gpus=1), "/run/7", "7", now=0, lease=600)
    >>> print(text["arguments"])
    "-c 'exec ""$(DOLLAR)@"" 2>&1' sh worker 'it''s'"
    >>> text["request_memory"], text["request_gpus"], text["log"]
    ('954', '1', '/run/7/htcondor.log')
    """
    check_job(job)
    options = _checked_options(job)
    where = literal(directory)
    private = [variables or os.path.join(directory, "variables")] if variables_text(job) else []
    first = [_WITH_VARIABLES, "sh", os.path.basename(private[0])] if private else ['exec "$@" 2>&1', "sh"]
    description = {
        "universe": "vanilla",
        # A shell, so that errors stand among the output where they happened, and a missing program is reported there.
        "executable": "/bin/sh",
        "transfer_executable": "false",
        "arguments": quoted(["-c", *first, *arguments(job)]),
        "environment": f'"{JOB_VARIABLE}={_JOB_ID}"',  # The one macro that is meant as such.
        "output": f"{where}/{_JOB_ID}.out",
        "stream_output": "true",  # So that it can be read while the job runs.
        "log": literal(log_of(directory)),
        "should_transfer_files": "YES",
        "when_to_transfer_output": "ON_EXIT",
        "transfer_output_files": '""',
        "request_cpus": str(job.cores),
        "request_memory": str(math.ceil(job.memory / 2**20)),  # MiB
        "request_disk": str(math.ceil(job.disk / 2**10)),  # KiB
        "notification": "never",
        "leave_in_queue": "false",
        "batch_name": f"ctxflow {run}",  # By which condor_q groups the jobs of a run, of whichever tier.
        f"+{TIER_ATTRIBUTE}": f'"{literal(_one_line(job.tier))}"',
        f"+{RUN_ATTRIBUTE}": _tag("run", run),
        f"+{SEEN_ATTRIBUTE}": str(int(now)),
        f"+{EXCLUDED_ATTRIBUTE}": excluded_text(job.excluded),
    }
    if batch:
        description[f"+{BATCH_ATTRIBUTE}"] = _tag("batch", batch)
    if submission:
        description[f"+{SUBMISSION_ATTRIBUTE}"] = f'"{submission}"'
    if job.gpus:
        description["request_gpus"] = str(job.gpus)
    if job.files or private:
        description.update(_files(job.files, private))
    if any("," in path for path in private):
        description["initialdir"] = where
    return _with_options(description, options, lease)


def _tag(what: str, tag: str) -> str:
    if not re.fullmatch(r"[\w.-]+", tag, re.ASCII):
        raise ProviderError(f"HTCondor's jobs cannot be tagged with the {what} {tag!r}: use letters, digits, . _ -")
    return f'"{tag}"'


def _with_options(description: dict[str, str], options: Mapping[str, Any], lease: int) -> dict[str, str]:
    """Add what the tier says: its own submit keys take the place of ours."""
    if options.get("require_gpus"):
        description["require_gpus"] = _one_line(str(options["require_gpus"]))
    if options.get("priority") is not None:
        description["priority"] = str(int(options["priority"]))
    if options.get("image"):
        description.update(universe="container", container_image=_one_line(str(options["image"])))
    theirs = {
        str(key): _one_line(str(value).lower() if isinstance(value, bool) else str(value))
        for key, value in dict(options.get("submit", {})).items()
    }
    remove, wish = _taken(theirs, "periodic_remove"), _taken(theirs, "requirements")
    wish = wish or _one_line(str(options.get("requirements") or ""))
    description["requirements"] = (f"({wish}) && " if wish else "") + _ELSEWHERE
    description["periodic_remove"] = _abandoned(lease) + (f" || ({remove})" if remove else "")
    taken = {key.lower() for key in theirs}
    return {key: value for key, value in description.items() if key.lower() not in taken} | theirs


def _taken(theirs: dict[str, str], name: str) -> str:
    """Take a submit key out of those that a tier sets."""
    return next((theirs.pop(key) for key in list(theirs) if key.lower() == name), "")


def describe_driver(script: str, directory: str, log: str, complaints: str, tag: str) -> dict[str, str]:
    """Return the submit description of a driver.

    The job is of the local universe: it runs at once on the schedd's machine, which lives as long as the queue does,
    sees the files that its user sees there, is reached by workers, and may submit them. It needs no slot, no owner
    evicts it, and it restarts within seconds. (A vanilla job's machine has none of this; one of the scheduler universe
    is left to cool down for five minutes whenever it is vacated.)

    It leaves the queue when it ends with one of the statuses of a job that is over. After any other one (130, when it
    was interrupted), and when it is killed, it starts anew; killed ten times, it is held. Whoever removes it removes
    all jobs with its tag, which are its workers. What its events mean: batch/detached.py.

    :param script: a shell's program that becomes the driver in `directory`.
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
        f"+{DRIVER_ATTRIBUTE}": f'"{tag}"',
        "+OtherJobRemoveRequirements": f'"{BATCH_ATTRIBUTE} == \\"{tag}\\""',
    }


def excluded_text(hosts: Sequence[str]) -> str:
    """Return the value of `CtxflowExcluded`, the machines on which a job is not to run."""
    return f'"{",".join(hosts)}"'


def log_of(directory: str) -> str:
    """Return the path of the log of all jobs of a provider."""
    return os.path.join(directory, "htcondor.log")


def quoted(words: Sequence[str]) -> str:
    """Return words as the value of `arguments`, or settings as that of `environment`: each arrives as it is.

    >>> print(quoted(["two words", "plain", ""]))
    "'two words' plain ''"
    """
    told = []
    for word in words:
        plain = word and not re.search(r"[\s']", word)
        told.append(word if plain else "'" + word.replace("'", "''") + "'")
    return '"' + literal(_one_line(" ".join(told))).replace('"', '""') + '"'


def variables_text(job: WorkerJob) -> str:
    """Return a job's variables as its shell takes them in, "" if there are none.

    :raises ProviderError: if it cannot be expressed for a shell.

    >>> variables_text(WorkerJob("a10", ["worker"], environment={"HF_TOKEN": "hf abc"}))
    "export HF_TOKEN='hf abc'\\n"
    """
    lines = []
    for name, value in job.environment.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or "\0" in value:
            raise ProviderError(f"{name!r} cannot be the name of an environment variable: write another")
        if name != JOB_VARIABLE:
            lines.append(f"export {name}={shlex.quote(value)}\n")
    return "".join(lines)


def literal(text: str) -> str:
    """Return text in which HTCondor finds no macros, neither the submit description's nor the match's."""
    return re.sub(r"\$\$|\$", lambda found: "$$(DOLLARDOLLAR)" if found[0] == "$$" else "$(DOLLAR)", text)


def _one_line(text: str) -> str:
    if re.search(r"[\n\r\0]", text):
        raise ProviderError(f"HTCondor cannot be told what has more than one line: shorten {text!r}")
    return text


def _files(paths: Sequence[str], private: Sequence[str]) -> dict[str, str]:
    """Return the keys for a job's files, and for those that nobody else may read and that need not be there yet."""
    for path in paths:
        if "," in path or path != path.strip():
            raise ProviderError(f"HTCondor cannot transfer a file named {path!r}: name it without commas and spaces")
    # Where the run's directory has a comma in its name, the job begins in there.
    private = [os.path.basename(path) if "," in path else path for path in private]
    paths = [os.path.abspath(path) for path in paths]
    secret = [*(path for path in paths if not stat.S_IMODE(os.stat(path).st_mode) & 0o77), *private]
    found = {"transfer_input_files": _listed([*paths, *private])}
    return {**found, "encrypt_input_files": _listed(secret)} if secret else found


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(literal(_one_line(path)) for path in paths)


def _abandoned(lease: int) -> str:
    """Return an expression that is true of a pending or held job that no driver has seen for a lease."""
    last = f"max({{ {SEEN_ATTRIBUTE}, EnteredCurrentStatus, QDate }})"
    return f"((JobStatus == 1 || JobStatus == 5) && time() - {last} > {lease})"


def _checked_options(job: WorkerJob) -> Mapping[str, Any]:
    for option in job.options:
        if option not in _OPTIONS:
            hint = suggestion(option, _OPTIONS, f"its options are {', '.join(_OPTIONS)}")
            raise ProviderError(f"tier {job.tier} has no option {option!r} for HTCondor: {hint}")
    submit = job.options.get("submit", {})
    if not isinstance(submit, Mapping):
        raise ProviderError(f"tier {job.tier}'s submit must be a table of submit keys and values, not {submit!r}")
    for key in submit:
        if not re.fullmatch(r"\+?[A-Za-z][\w.]*", str(key)):
            raise ProviderError(f"tier {job.tier}'s submit has a key {key!r} that HTCondor cannot have: correct it")
        if key.lower() in OWN_SUBMIT_KEYS:
            raise ProviderError(f"tier {job.tier}'s submit sets {key!r}, which ctxflow needs for itself: leave it out")
    return job.options


_EXECUTING, _EVICTED, _TERMINATED, _SHADOW_FAILED, _ABORTED = 1, 4, 5, 7, 9
_USER_REQUEST = 1  # Among the codes of why a job is held.
_HELD, _RELEASED, _DISCONNECTED, _RECONNECTED, _GAVE_UP = 12, 13, 22, 23, 24


def change_of(event: Mapping[str, Any]) -> JobChange | None:
    """Return the change that an event stands for, None if it stands for none (an image's size, a file transfer).

    A connection that HTCondor lost counts as an eviction, and as `running`, `resumed`, if it is found again.

    >>> change = change_of({"EventTypeNumber": 4, "Cluster": 12, "Proc": 0, "Reason": "Job vacated by schedd"})
    >>> change.job, change.state, change.reason
    ('12.0', 'evicted', 'Job vacated by schedd')
    >>> change_of({"EventTypeNumber": 1, "Cluster": 12, "Proc": 0, "SlotName": "slot1_2@node7.site"}).host
    'node7.site'
    """
    kind = event["EventTypeNumber"]
    reason = str(event.get("Reason", ""))
    told: dict[int, tuple[JobState, str]] = {
        _EXECUTING: ("running", ""),
        _RECONNECTED: ("running", "HTCondor found it again"),
        _EVICTED: ("evicted", reason),
        _SHADOW_FAILED: ("evicted", str(event.get("Message", "")).strip()),
        _DISCONNECTED: ("evicted", f"HTCondor lost its connection: {event.get('DisconnectReason', '')}".rstrip(": ")),
        _GAVE_UP: ("evicted", reason),
        _HELD: ("held", str(event.get("HoldReason", "it was put on hold"))),
        _RELEASED: ("queued", reason),
        _TERMINATED: ("ended", _how(event)),
        _ABORTED: ("ended", reason or "it was removed"),
    }
    if kind not in told:
        return None
    state, why = told[kind]
    host = _host(event) if state == "running" else _host_in(why) if state == "held" else None
    by_hand = kind == _HELD and event.get("HoldReasonCode") == _USER_REQUEST
    by_hand = by_hand or (kind == _ABORTED and _by_others(reason))
    job = f"{event['Cluster']}.{event['Proc']}"
    return JobChange(job, state, why, host, by_hand=by_hand, resumed=kind == _RECONNECTED)


def _host(event: Mapping[str, Any]) -> str | None:
    """Return the machine's name: it follows the slot's, or is part of an address."""
    for key in ("SlotName", "StartdName"):
        if "@" in str(event.get(key, "")):
            return str(event[key]).rpartition("@")[2]
    address = str(event.get("ExecuteHost", event.get("StartdAddr", "")))
    found = re.search(r"[?&]alias=([^&>]+)", address) or re.search(r"<\[?([^>?\]]+?)\]?(:\d+)?[>?]", address)
    return found.group(1) if found else None


_BY_USER = re.compile(r"\(by user ([^()\s]+)\)\s*$")


def _by_others(reason: str) -> bool:
    """Return whether the reason of a removal, which is none of ours, names another user."""
    found = None if reason.startswith("ctxflow ") else _BY_USER.search(reason)
    return found is not None and found[1].partition("@")[0] != getpass.getuser()


_PLACE = re.compile(r"(?:Error from|at execution point) [^\s@]+@([\w.-]*\w)")


def _host_in(reason: str) -> str | None:
    """Return the machine that the reason of a hold names.

    >>> _host_in("Transfer input files failure at execution point slot1_2@node7.site while receiving files")
    'node7.site'
    """
    found = _PLACE.search(reason)
    return found[1] if found else None


def _how(event: Mapping[str, Any]) -> str:
    if event.get("TerminatedNormally", True):
        return how_ended(int(event.get("ReturnValue") or 0))
    return how_ended(-int(event.get("TerminatedBySignal", 0)))


_NAMES = {2: "MAX_JOBS_SUBMITTED", 3: "MAX_JOBS_PER_OWNER", 4: "MAX_JOBS_PER_SUBMISSION"}
_LEFT = re.compile(r"expected next ProcId to be (\d+), but Schedd says -([234])\b")
_NONE = re.compile(r"\b(MAX_JOBS_\w+) exceeded")


def room_left(complaint: str) -> tuple[int, str] | None:
    """Return how many jobs the queue takes now, and the name of the limit; None if the complaint is another.

    >>> room_left("expected next ProcId to be 4, but Schedd says -3")
    (4, 'MAX_JOBS_PER_OWNER')
    >>> room_left("Failed to create new cluster.SCHEDD:22:MAX_JOBS_SUBMITTED exceeded. Current=2, Limit=2")
    (0, 'MAX_JOBS_SUBMITTED')
    >>> room_left("Failed to create new cluster")
    """
    if found := _LEFT.search(complaint):
        return int(found[1]), _NAMES[int(found[2])]
    return (0, found[1]) if (found := _NONE.search(complaint)) else None


def none_left(limit: str) -> str:
    """Return the message for a queue that takes no more jobs.

    >>> print(none_left("MAX_JOBS_PER_OWNER").partition(":")[0])
    HTCondor's queue takes no more jobs of this user now, by its limit MAX_JOBS_PER_OWNER
    """
    whose = "of this user" if limit == "MAX_JOBS_PER_OWNER" else "at all"
    begin = f"HTCondor's queue takes no more jobs {whose} now, by its limit {limit}"
    return f"{begin}: the run goes on with the workers that it has, and asks again"


def escaped(text: str) -> str:
    """Return text as it is written between the quotes of a ClassAd string."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def id_of(ad: Mapping[str, Any]) -> str:
    """Return a job's id, CLUSTER.PROC."""
    return f"{ad['ClusterId']}.{ad['ProcId']}"
