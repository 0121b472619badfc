"""`ctxflow factory` and `worker-command`: workers for live runs, acquired for all of them, or started by hand."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shlex
import signal
import sys
import threading
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from ctxflow.cli.screen import metrics_place, say
from ctxflow.errors import CtxflowError, UsageError, counted
from ctxflow.terminal import visible_console

if TYPE_CHECKING:
    from ctxflow.factory.run_files import PublishedRun
    from ctxflow.factory.service import Service
    from ctxflow.factory.tier_providers import Leftovers
    from ctxflow.sites import Site


_METRICS = "Serve metrics for Prometheus there; ADDRESS is 127.0.0.1 if left out."


def factory(
    site: Annotated[str, typer.Argument(metavar="SITE", help='The site file, with acquire = "factory".')],
    as_json: Annotated[bool, typer.Option("--json", help="Write each line as a JSON object.")] = False,
    metrics: Annotated[str | None, typer.Option(metavar="[ADDRESS:]PORT", help=_METRICS)] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be asked for, for each live run, and ask for nothing.")
    ] = False,
    clean: Annotated[
        bool, typer.Option("--clean", help="Find what runs that are over have left, list it, and remove it.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --clean: remove it without asking.")] = False,
) -> None:
    """Acquire workers for all live runs of yours whose site says acquire = "factory".

    It finds them on this machine as they begin, holds as many workers as they want, within the numbers of the site
    file over all runs together, and ends a run's jobs when the run ends. It writes a line for each decision.

    \b
    ctxflow factory campus.toml                   serve, until Ctrl-C
    ctxflow factory campus.toml --metrics 9464    the same, with metrics
    ctxflow factory campus.toml --dry-run         what would be submitted
    ctxflow factory campus.toml --clean           remove what was left behind
    kill -HUP PID                                 read the site file again

    SIGTERM or Ctrl-C ends it, and all that it has asked for; a second one ends it at once. Exit status: 0 after
    SIGTERM, 130 after Ctrl-C, 1 if it cannot serve; with --clean, 1 if something is left.
    """
    from ctxflow.sites import load_site

    if clean:
        raise typer.Exit(_clean(load_site(site), as_json, yes))
    if dry_run:
        _rehearse(load_site(site), as_json)
        return
    raise typer.Exit(_serve(site, as_json, metrics))


class DecisionLines(logging.Handler):
    """Writes decisions, and ctxflow's warnings, to stderr, a line each, from any thread."""

    def __init__(self, as_json: bool) -> None:
        super().__init__(logging.WARNING)
        self._as_json = as_json
        self._writing = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a warning."""
        self.say("", "", record.getMessage())

    def say(self, tier: str, run: str, sentence: str) -> None:
        """Write a decision."""
        now = datetime.now().astimezone()
        sentence = " ".join(sentence.split())
        if self._as_json:
            line = json.dumps({"time": now.isoformat("T", "milliseconds"), "tier": tier, "run": run, "says": sentence})
        else:
            about = ", ".join([tier] * bool(tier) + [f"run {run[:8]}"] * bool(run)) or "factory"
            line = f"{now:%H:%M:%S} {about}: {sentence}"
        with self._writing:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()


def _serve(path: str, as_json: bool, metrics: str | None) -> int:
    """Serve, and give the exit status."""
    from ctxflow.factory.run_files import only_factory
    from ctxflow.factory.service import Service, serve_metrics
    from ctxflow.sites import load_site

    place = metrics_place(metrics)
    path = os.path.abspath(path) if os.path.exists(path) else path  # Whatever the working directory becomes.
    lines = DecisionLines(as_json)
    logger = logging.getLogger("ctxflow")
    logger.addHandler(lines)
    logger.propagate = False
    summaries = 60.0 if sys.stderr.isatty() else None
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # One that comes meanwhile is for the service.
    try:
        service = Service(lambda: load_site(path), lines.say, summaries)
        ended_by = _obey_signals(service)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    with only_factory(service.site.name):
        if place is not None:
            port = serve_metrics(service, *place)
            lines.say("", "", f"metrics are at http://{place[0]}:{port}/metrics")
        service.run()
    return 130 if signal.SIGINT in ended_by else 0


def _obey_signals(service: Service) -> list[int]:
    """Have SIGHUP reload, the first SIGTERM or SIGINT end, the second at once; return those that came, as they come."""
    came: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if came:
            os._exit(128 + number)
        came.append(number)
        service.stop()

    signal.signal(signal.SIGHUP, lambda number, frame: service.reload())
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    return came


def _rehearse(site: Site, as_json: bool) -> None:
    from ctxflow.factory.run_files import live_runs
    from ctxflow.factory.tier_providers import rehearse

    told = rehearse(site, live_runs()[::-1])
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in told], indent=2))
        return
    nobody = "a run that wants all there may be (no live run has its workers from here)"
    for each in told:
        of = f"run {each.run}" if each.run else nobody
        print(f"# tier {each.tier}, {of}: {counted(each.count, 'worker')} at first")
        print(each.description)


def _clean(site: Site, as_json: bool, yes: bool) -> int:
    """List and remove what is left; the exit status."""
    from ctxflow.factory.tier_providers import find_leftovers, remove_leftovers

    screen = visible_console(stderr=True)
    with screen.status("Asking the batch systems ..."):
        found = find_leftovers(site)
    something = bool(found.jobs or found.files)
    if something and not as_json:
        _show(found)
    asked = something and not yes and not as_json and sys.stdin.isatty()
    wanted = something and (yes or (asked and typer.confirm("Remove all of it?", default=False, err=True)))
    troubles = list(found.troubles)
    if wanted:
        with screen.status("Removing ..."):
            troubles += remove_leftovers(found)
    removed = wanted and not troubles
    if as_json:
        jobs = [{**dataclasses.asdict(job), "provider": tier.provider} for tier, job in found.jobs]
        about = {"jobs": jobs, "files": found.files, "elsewhere": found.elsewhere}
        print(json.dumps({**about, "removed": removed, "troubles": troubles}, indent=2))
    else:
        _report(found, wanted, asked, troubles)
    return 0 if not troubles and (removed or not something) else 1


def _show(found: Leftovers) -> None:
    console = visible_console()
    if found.jobs:
        table = Table("job", "run", "tier's provider", "state", "host", box=None)
        for tier, job in found.jobs:
            table.add_row(job.job, job.run[:8], tier.provider, job.state, job.host or "")
        console.print(table)
    for path in found.files:
        console.print(path, markup=False, highlight=False, soft_wrap=True)


def _report(found: Leftovers, wanted: bool, asked: bool, troubles: list[str]) -> None:
    told = f"{counted(len(found.jobs), 'job')} and {counted(len(found.files), 'file')} of runs that are over"
    if not (found.jobs or found.files):
        print("Nothing is left of runs that are over.")
    elif wanted:
        print(f"Removed: {told}.")
    else:
        print(f"Left where they are: {told}." + ("" if asked else " Say --yes to remove them."))
    if found.elsewhere:
        print(f"Runs of other machines that share your home have {counted(found.elsewhere, 'job')}: clean up there.")
    for trouble in troubles:
        say(trouble)


def worker_command(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="The beginning of a run's id, or its directory; by default the one that is going on."
        ),
    ] = None,
    tier: Annotated[str | None, typer.Option(help="The tier that the worker is one of; by default the first.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that is known of the run as JSON.")] = False,
) -> None:
    """Print the line that starts a worker for a run by hand.

    It works on every machine that reaches this one and sees the files that it names. The worker joins those that
    the run has from its batch systems, and stays until the run ends or it gets Ctrl-C.

    \b
    ctxflow worker-command                  the run that is going on
    ssh gpu7 "$(ctxflow worker-command)"    a worker on gpu7, at once
    """
    from ctxflow.factory.run_files import live_runs

    found = _choose(live_runs(), run)
    name = tier or next(iter(found.commands))
    if name not in found.commands:
        raise UsageError(f"run {found.id} has no tier {name!r}: its tiers are {', '.join(found.commands)}")
    if as_json:
        print(json.dumps({**dataclasses.asdict(found), "tier": name, "command": found.commands[name]}))
        return
    sys.stderr.write(_explanation(found, name))
    print(shlex.join(found.commands[name]))


def _choose(runs: list[PublishedRun], wanted: str | None) -> PublishedRun:
    """Return the run that is meant, which has to be exactly one."""
    if wanted is None:
        fitting = runs
    else:
        place = Path(wanted).resolve()
        fitting = [r for r in runs if r.id.startswith(wanted) or Path(r.directory).resolve().is_relative_to(place)]
    if len(fitting) == 1:
        return fitting[0]
    if not runs:
        raise CtxflowError(
            "no run of yours with workers from elsewhere is going on on this machine: start one whose site says "
            'engine = "taskvine", and ask where its program runs'
        )
    told = "; ".join(f"{run.id} in {run.directory}" for run in fitting or runs)
    if fitting:
        raise UsageError(f"{len(fitting)} runs are going on: say which, by the beginning of its id: {told}")
    raise UsageError(f"no run {wanted!r} is going on; these are: {told}")


def _explanation(run: PublishedRun, tier: str) -> str:
    """Return what the machine needs on which the line is run."""
    lines = [
        f"Run this line where a worker of tier {tier} is to be. That machine must",
        f"  reach {run.address}, port {run.port}",
        f"  see {run.program}",
        f"  see {run.password_file}, which only you can read: keep it so, since it is the key to the run",
        f"  have vine_worker on its PATH, and {run.commands[tier][0]} with this very Python's minor version",
    ]
    if run.variables[tier]:
        lines.append(f"  have these variables set, as the site does for the tier: {', '.join(run.variables[tier])}")
    lines.append("Where it does not see the files, copy them there (mode 0600) and change their paths in the line.")
    return "\n".join(lines) + "\n"
