"""The command's frame: its verbs, its version, and how errors become one sentence and an exit status.

Exit statuses: 0 all went well, 1 it failed, 2 the command line is wrong, 3 some rows of a batch failed,
130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ctxflow.cli.batch import batch
from ctxflow.cli.demo import demo
from ctxflow.cli.doctor import doctor
from ctxflow.cli.env import env
from ctxflow.cli.factory import factory
from ctxflow.cli.jobs import cancel, jobs, logs
from ctxflow.cli.plan import plan
from ctxflow.cli.preempt import preempt
from ctxflow.cli.profile_scaling import profile_scaling
from ctxflow.cli.report import report
from ctxflow.cli.reproduce import reproduce
from ctxflow.cli.simulate import simulate
from ctxflow.cli.site import site
from ctxflow.cli.top import status, top
from ctxflow.cli.topo import topo
from ctxflow.cli.train import train
from ctxflow.cli.worker_command import worker_command
from ctxflow.errors import CtxflowError, UsageError
from ctxflow.version import __version__

app = typer.Typer(
    name="ctxflow",
    help="Throughput-oriented LLM inference on GPUs that nobody promised you.",
    epilog="New here? Run `ctxflow doctor`, then `ctxflow demo`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ctxflow {__version__}")
        raise typer.Exit


@app.callback()
def _frame(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command("doctor")(doctor)
app.command("demo")(demo)
app.command("batch")(batch)
app.command("jobs")(jobs)
app.command("logs")(logs)
app.command("cancel")(cancel)
app.command("top")(top)
app.command("status")(status)
app.command("plan")(plan)
app.command("report")(report)
app.command("factory")(factory)
app.command("worker-command")(worker_command)
app.command("topo")(topo)
app.command("preempt")(preempt)
app.command("simulate")(simulate)
app.command("profile-scaling")(profile_scaling)
app.command("reproduce")(reproduce)
app.command("train")(train)
app.add_typer(env)
app.add_typer(site)


def main() -> None:
    """Run the command."""
    try:
        app(standalone_mode=True)
    except (CtxflowError, ValueError, OSError) as error:
        print(f"ctxflow: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        print("ctxflow: interrupted", file=sys.stderr)
        sys.exit(130)
