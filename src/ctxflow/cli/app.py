"""The command's frame: its verbs, its version, and how errors become one sentence and an exit status.

Exit statuses: 0 all went well, 1 it failed, 2 refused before anything was started, where another command line fixes it,
3 some rows of a batch failed, 4 a limit of GPU-hours or cost is reached, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ctxflow.errors import CtxflowError, UsageError, one_line
from ctxflow.installing import __version__
from ctxflow.ownership import lead_nowhere
from ctxflow.terminal import guarded_streams, timed

VERBS = {
    "doctor": "Look at this machine: what is ready for which task, which devices and engines there are, "
    "and what to install.",
    "demo": "Find the best pair of model and prompt template for checking facts, while workers are evicted.",
    "batch": "Run a model, or your own function, over every row of a file.",
    "jobs": "List the batches that were detached: how they stand, and how they ended.",
    "logs": "Print what a detached batch says.",
    "cancel": "End a detached batch: its driver, and all its workers.",
    "top": "Follow a batch from another terminal, until it ends or you press Ctrl-C, which does nothing to the batch.",
    "status": "Say once how a batch stands.",
    "workers": "List the workers of a run: host, GPU, tier, job, age, calls done and failed, and the last error.",
    "drain": "Have a live run leave a host or a tier: workers there end what they run, and leave.",
    "clean": "Remove what runs that have ended left: their folders, with event logs, summaries and what workers said.",
    "cache": "Show what the hosts' cache of a site holds on this machine for you, and who uses it.",
    "plan": "Say what to run where: for a site and a job, or for a placement problem.",
    "report": "Say what happened in a run, in words, as data and in pictures.",
    "factory": 'Acquire workers for all live runs of yours whose site says acquire = "factory".',
    "worker-command": "Print the line that starts a worker for a run by hand.",
    "topo": "Draw a machine's topology: this machine's, or that of a file.",
    "preempt": "Decide what to preempt for a preemptor, in a cluster given as data (docs/preemption.md has the form).",
    "simulate": "Predict a run in virtual time, before GPU time is spent on it.",
    "profile-scaling": 'Find the levels of `scaling = "closed-loop"`, in simulation.',
    "league": "Rank the policies of a family on public workloads, against bounds.",
    "reproduce": "Run a paper's experiments and print its figures beside ours.",
    "env": "Pack the environment for workers that see neither it nor a shared filesystem.",
    "site": "Check a site file, and print all that it says.",
}
"""In the order of the help, each with the first sentence of its own."""

MODULES = {
    "machine_commands": ("doctor", "demo", "topo"),
    "batch_command": ("batch",),
    "detached_commands": ("jobs", "logs", "cancel"),
    "run_commands": ("top", "status", "workers", "drain"),
    "clean_command": ("clean",),
    "cache_command": ("cache",),
    "decision_commands": ("plan", "preempt"),
    "report_command": ("report",),
    "factory_commands": ("factory", "worker-command"),
    "simulate_command": ("simulate",),
    "profile_scaling": ("profile-scaling",),
    "league_command": ("league",),
    "experiment_commands": ("reproduce",),
    "env_command": ("env",),
    "site_command": ("site",),
}
"""The modules of ctxflow.cli, and the verbs that are in each; one is imported when a verb of it is called."""


def load_verb(verb: str) -> Any:
    """Return a verb as typer runs it, of its module, which is imported now."""
    name = verb.replace("-", "_")
    module = next(module for module, verbs in MODULES.items() if verb in verbs)
    found = getattr(importlib.import_module(f"ctxflow.cli.{module}"), name)
    if isinstance(found, typer.Typer):
        return typer.main.get_group(found)
    alone = typer.Typer(add_completion=False)
    alone.command(verb)(found)
    return typer.main.get_command(alone)


class _Verbs(TyperGroup):
    """The verbs: lines of a help text until one of them is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_verb(name) if name else None, rest


app = typer.Typer(
    name="ctxflow",
    cls=_Verbs,
    help="Throughput-oriented LLM inference on opportunistic GPUs.",
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


for _verb, _sentence in VERBS.items():
    app.command(_verb, help=_sentence)(lambda: None)


def main() -> None:
    """Run the command."""
    with _whatever_is_read(), guarded_streams():
        try:
            app(standalone_mode=True)
        except (CtxflowError, ValueError, OSError) as error:
            text = str(error)
            if isinstance(error, OSError) and error.strerror:
                text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
            if not isinstance(error, UsageError) and not hasattr(error, "lines"):  # Else each of its lines is one.
                text = one_line(text)
            refused = isinstance(error, UsageError) or getattr(error, "missing", False)
            if not _has_directory():
                text, refused = f"{text}; the current directory was removed: change to one that is there", True
            _say(text, refused)
            sys.exit(2 if refused else getattr(error, "exit_status", 1))
        except KeyboardInterrupt:
            _say("interrupted")
            sys.exit(130)


@contextlib.contextmanager
def _whatever_is_read() -> Iterator[None]:
    """Keep the exit status where nobody reads a command's errors: Python, unable to flush them, makes it 120."""
    try:
        yield
    finally:
        if sys.stderr is not None:
            try:
                sys.stderr.flush()
            except OSError:
                lead_nowhere(sys.stderr.fileno())


def _has_directory() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _say(text: str, refused: bool = False) -> None:
    """Print how a command ended: with the time of day where it may have gone on for hours."""
    line, lasted = f"ctxflow: {text}", not refused and sys.argv[1:2] in (["batch"], ["factory"])
    with contextlib.suppress(OSError):  # Nobody reads it.
        print(timed(line) if lasted else line, file=sys.stderr)
