"""`ctxflow drain`: has a live run leave a host or a tier, and lets it use that again.

What does not live here: how the run hears of it (executors/drain_requests.py).
"""

from __future__ import annotations

from typing import Annotated

import typer

from ctxflow.batch.job_status import LIVE
from ctxflow.cli.top import Which, chosen
from ctxflow.errors import UsageError
from ctxflow.executors.drain_requests import ask, drained
from ctxflow.executors.worker_table import read_workers
from ctxflow.observe.progress import condition
from ctxflow.wording import counted


def drain(
    name: Annotated[str, typer.Argument(metavar="HOST|TIER", help="A host, as `ctxflow workers` lists it, or a tier.")],
    which: Which = None,
    undo: Annotated[bool, typer.Option("--undo", help="Let the run use it again.")] = False,
) -> None:
    """Have a live run leave a host or a tier: workers there end what they run, and leave.

    \b
    ctxflow drain host7.site                  the newest live run below this directory
    ctxflow drain preemptible results.jsonl   the batch that writes there
    ctxflow drain host7.site --undo           it may be used again

    No row is lost or counted as failed, and none is asked for there until --undo, or the run's end. A host is kept
    from by HTCondor and Slurm; other batch systems may start workers there, which get no work.

    \b
    Exit status
      0    the run is asked to, and hears of it within seconds      2    there is no such run, host or tier
    """
    _, status = chosen(which)
    if condition(status) not in LIVE or not status.get("run"):
        raise UsageError("that run does not go on: name one that `ctxflow status` says is running")
    run = str(status["run"])
    try:
        hosts, tiers = drained(run)
        there = {str(each["host"]) for each in read_workers(run) if each["ended"] is None}
        is_tier = name in status.get("tiers", {})
        found = name if is_tier else _host(name, there | set(hosts))
        chosen_ones = tiers if is_tier else hosts
        if undo and found not in chosen_ones:
            raise UsageError(f"{found} is not drained: nothing is to be undone")
        kept = [each for each in chosen_ones if each != found] if undo else [*chosen_ones, found]
        ask(run, hosts if is_tier else kept, kept if is_tier else tiers)
    except OSError as error:
        raise UsageError(f"the run in {run} cannot be asked: {error}; call it as the user whose run it is") from None
    if undo:
        print(f"{found} may be used again")
        return
    key = "tier" if is_tier else "host"
    many = sum(each["ended"] is None and each[key] == found for each in read_workers(run))
    print(f"{counted(many, 'worker')} of {key} {found} will leave; `ctxflow workers` shows them")


def _host(name: str, there: set[str]) -> str:
    """The host that is meant: by its name, or by what that begins with, up to a dot."""
    meant = [name] if name in there else sorted(host for host in there if host.partition(".")[0] == name)
    if len(meant) != 1:
        known = ", ".join(sorted(there)) or "none yet"
        raise UsageError(f"the run has no tier {name}, and no worker on such a host: its hosts are {known}")
    return meant[0]
